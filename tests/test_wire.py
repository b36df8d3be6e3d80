"""The golden bytes of tests/golden, read by docs/WIRE.md alone and compared with the handshake."""

from __future__ import annotations

import hashlib
import hmac
import re
import struct
from pathlib import Path

import pytest

from ringcomm.bootstrap import handshake
from ringcomm.bootstrap.handshake import Client, Server
from ringcomm.bootstrap.handshake_params import Key, Outcome, RefusedError, Role, Terms, job_hash
from ringcomm.bootstrap.secret import Secret

GOLDEN = Path(__file__).parent / "golden"
EPOCH = 0x11223344


def golden(name: str) -> bytes:
    text = (GOLDEN / f"{name}.hex").read_text(encoding="ascii")
    return bytes.fromhex(re.sub(r"#.*", "", text))


# ---- frames ----

HEADER = struct.Struct("<HBBIQQIIHHIIII")
FIELDS = (
    "magic",
    "version",
    "type",
    "epoch",
    "seq",
    "fingerprint",
    "chunk",
    "segment",
    "step",
    "flags",
    "length",
    "consumed",
    "payload_crc32c",
    "header_crc32c",
)


def fingerprint(
    collective: int, count: int, *, op: int = 0, dtype: int = 0, codec: int = 0, root: int = 0
) -> int:
    return collective | op << 4 | dtype << 8 | codec << 12 | root << 16 | count << 28


FRAMES = {
    "data": {
        "type": 1,
        "seq": 0x0102030405060708,
        "chunk": 2,
        "step": 2,
        "consumed": 0xFFFFFFF0,
        "fingerprint": fingerprint(0, 1030, op=1, dtype=2, codec=1),
        "payload": struct.pack("<6H", 0x3F80, 0xC000, 0x7F80, 1, 0x8000, 0x7FC0),
    },
    "send": {
        "type": 1,
        "seq": 7,
        "flags": 1,
        "consumed": 96,
        "fingerprint": fingerprint(9, 2, dtype=6),
        "payload": struct.pack("<2i", -2, 1_000_000),
    },
    "barrier": {
        "type": 1,
        "seq": 41,
        "chunk": 6,
        "consumed": 4096,
        "fingerprint": fingerprint(8, 0),
    },
    "call": {
        "type": 2,
        "seq": 41,
        "consumed": 8192,
        "fingerprint": fingerprint(3, 2**36 - 1, dtype=5, root=4095),
    },
    "heartbeat": {"type": 3, "seq": 42, "consumed": 8192},
    "goodbye": {"type": 4, "seq": 42, "consumed": 2**31},
    "abort": {
        "type": 5,
        "seq": 41,
        "payload": struct.pack("<Iiqi", 6, 3, 41, 1) + b"rank 3 is lost: the connection broke",
    },
}


def crc32c(data: bytes) -> int:
    """One bit at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_checksum_is_castagnolis() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("name", FRAMES)
def test_golden_frame(name: str) -> None:
    wire = golden(name)
    payload = FRAMES[name].get("payload", b"")
    expected = dict.fromkeys(FIELDS, 0) | {"magic": 0x4352, "version": 2, "epoch": EPOCH}
    expected |= {field: value for field, value in FRAMES[name].items() if field != "payload"}
    expected |= {"length": len(payload), "payload_crc32c": crc32c(payload)}
    expected |= {"header_crc32c": crc32c(wire[:48])}
    assert dict(zip(FIELDS, HEADER.unpack(wire[:52]), strict=True)) == expected
    assert wire[52:] == payload


def test_every_golden_file_is_listed() -> None:
    listed = (GOLDEN / "README.md").read_text(encoding="ascii")
    files = sorted(path.stem for path in GOLDEN.glob("*.hex"))
    assert files == sorted([*FRAMES, "handshake"])
    assert all(f"| {name}.hex |" in listed for name in files)


# ---- handshake ----

SECRET = bytes(range(32))
CLIENT_NONCE = bytes(range(0x40, 0x60))
SERVER_NONCE = bytes(range(0x80, 0xA0))
TERMS = Terms(
    Role.LANE,
    job_hash("golden"),
    world_size=4,
    client_rank=3,
    server_rank=1,
    rail=1,
    lane=2,
    epoch=7,
)


def messages() -> tuple[bytes, bytes, bytes, bytes]:
    wire = golden("handshake")
    assert len(wire) == 128 + 48 + 32 + 64
    return wire[:128], wire[128:176], wire[176:208], wire[208:]


def sign(*parts: bytes) -> bytes:
    key = hmac.digest(SECRET, b"ringcomm handshake 1", "sha256")
    return hmac.digest(key, b"".join(parts), "sha256")


def test_golden_handshake_is_what_the_document_says() -> None:
    hello, challenge, proof, verdict = messages()
    job = hashlib.sha256(b"ringcomm job golden").digest()
    key_id = hashlib.sha256(b"id" + SECRET).digest()[:4]
    assert hello == b"".join(
        [
            b"RCOMMhi\n",
            struct.pack("<HBBIIIHHI", 1, 2, 1, 4, 3, 1, 1, 2, 7),
            job,
            key_id,
            CLIENT_NONCE,
            bytes(28),
        ]
    )
    assert challenge == b"RCOMMch\n" + struct.pack("<HBB", 1, 0, 1) + key_id + SERVER_NONCE
    assert proof == sign(b"client", hello, challenge)
    assert verdict == bytes(32) + sign(b"server", hello, challenge, proof, bytes(32))


def test_golden_handshake_is_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    hello, challenge, proof, verdict = messages()
    nonces = [CLIENT_NONCE, SERVER_NONCE]
    monkeypatch.setattr(handshake.secrets, "token_bytes", lambda _size: nonces.pop(0))
    key = Key.derive(Secret(SECRET), TERMS.job)
    client, server = Client(key, TERMS), Server(key, TERMS)
    assert client.first() == hello
    assert server.feed(hello[:10]) == b""
    assert server.feed(hello[10:]) == challenge
    assert client.feed(challenge[:10]) == b""
    assert client.feed(challenge[10:]) == proof
    assert server.feed(proof) == verdict
    assert client.feed(verdict) == b""
    assert client.done
    assert server.done


def test_verdict_codes() -> None:
    """Code and value for each difference, as the document lists them."""
    key = Key.derive(Secret(SECRET), TERMS.job)
    cases = {
        1: ({"job": job_hash("other")}, 0),
        2: ({"role": Role.RENDEZVOUS}, Role.LANE),
        3: ({"world_size": 5}, 4),
        4: ({"server_rank": 2}, 1),
        5: ({"epoch": 8}, 7),
        254: ({"client_rank": 1}, 0),
    }
    for code, (change, value) in cases.items():
        claimed = Terms(**{**vars(TERMS), **change})
        assert struct.unpack("<B3xI24x", verdict_of(key, claimed)[:32]) == (code, value)


def verdict_of(key: Key, claimed: Terms) -> bytes:
    client, server = Client(key, claimed), Server(key, TERMS)
    server.feed(client.first()[:10])
    challenge = server.feed(client.first()[10:])
    client.feed(challenge[:10])
    verdict = server.feed(client.feed(challenge[10:]))
    assert not server.done
    with pytest.raises(RefusedError):
        client.feed(verdict)
    return verdict


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ((8, b"\x02\x00"), Outcome.OTHER_VERSION),
        ((64, b"????"), Outcome.AUTHENTICATION_FAILED),
        ((11, b"\x00"), Outcome.AUTHENTICATION_FAILED),
    ],
)
def test_refusals_before_proof(change: tuple[int, bytes], outcome: Outcome) -> None:
    at, new = change
    hello = bytearray(messages()[0])
    hello[at : at + len(new)] = new
    server = Server(Key.derive(Secret(SECRET), TERMS.job), TERMS)
    answer = server.feed(bytes(hello[:10])) or server.feed(bytes(hello[10:]))
    assert answer[:8] == b"RCOMMch\n"
    assert answer[10] == outcome
    assert server.refusal is not None
    assert server.refusal.outcome == outcome


@pytest.mark.parametrize("says", [Outcome.OTHER_USER, Outcome.OK])
def test_who_has_hung_up_is_heard_before_it_is_doubted(says: Outcome) -> None:
    """A refusal is in the challenge, behind which the server hangs up: then nobody can be vetted
    any more. Without a refusal no proof is sent."""
    key = Key.derive(Secret(SECRET), TERMS.job)
    gone = RefusedError("closed by the other end", outcome=Outcome.CLOSED)
    stranger = RefusedError("not ours", outcome=Outcome.OTHER_USER)
    client = Client(key, TERMS, lambda: gone)
    server = Server(key, TERMS, vet=lambda: stranger if says == Outcome.OTHER_USER else None)
    server.feed(client.first()[:10])
    challenge = server.feed(client.first()[10:])
    assert client.feed(challenge[:10]) == b""
    expected = "another user" if says == Outcome.OTHER_USER else "closed by the other end"
    with pytest.raises(RefusedError, match=expected):
        client.feed(challenge[10:])
