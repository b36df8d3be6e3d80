"""The handshake: who gets in, and what each end learns about a no."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import socket
import threading
import time
from collections.abc import Callable
from random import Random

import pytest
from bringup_world import run
from patience import PROMPT

from ringcomm.bootstrap import handshake
from ringcomm.bootstrap.handshake import Client, Server
from ringcomm.bootstrap.handshake_params import (
    Key,
    Outcome,
    RefusedError,
    Role,
    Terms,
    duplicate,
    job_hash,
    unexpected,
)
from ringcomm.bootstrap.secret import Secret

pytestmark = pytest.mark.usefixtures("no_leaked_fds")

JOB = job_hash("job 1")
TERMS = Terms(Role.LANE, JOB, world_size=4, client_rank=2, server_rank=1, rail=1, lane=3, epoch=7)
KEY = Key.derive(Secret(b"k" * 32), JOB)
OTHER_KEY = Key.derive(Secret(b"q" * 32), JOB)
OPEN_KEY = Key.derive(None, JOB)

Ends = tuple[RefusedError | None, RefusedError | None]


def shake(client: Client, server: Server, patience: float = 30.0) -> Ends:
    """Runs both over a socket pair; what each end raised."""
    ends = socket.socketpair()
    raised: list[RefusedError | None] = [None, None]

    def drive(index: int, machine: Client | Server) -> None:
        try:
            run(ends[index], machine, time.monotonic() + patience)
        except RefusedError as refusal:
            raised[index] = refusal
        ends[index].close()

    thread = threading.Thread(target=drive, args=(0, client))
    thread.start()
    drive(1, server)
    thread.join()
    return raised[0], raised[1]


def outcomes(ends: Ends) -> tuple[Outcome, Outcome]:
    first, second = (end.outcome if end else Outcome.OK for end in ends)
    return first, second


@pytest.mark.parametrize("key", [KEY, OPEN_KEY])
def test_both_ends_agree(key: Key) -> None:
    client, server = Client(key, TERMS), Server(key, TERMS)
    assert shake(client, server) == (None, None)
    assert client.done
    assert server.done
    assert server.claimed == TERMS


def test_other_key() -> None:
    client, server = shake(Client(KEY, TERMS), Server(OTHER_KEY, TERMS))
    for end, here, there in ((client, KEY, OTHER_KEY), (server, OTHER_KEY, KEY)):
        assert end is not None
        assert end.outcome == Outcome.AUTHENTICATION_FAILED
        assert f"key id {here.id.hex()} here" in str(end)
        assert f"key id {there.id.hex()} there" in str(end)


def test_secret_at_one_end_only() -> None:
    client, server = shake(Client(OPEN_KEY, TERMS), Server(KEY, TERMS))
    assert outcomes((client, server)) == (Outcome.AUTHENTICATION_FAILED,) * 2
    assert "no secret here" in str(client)
    assert "no secret there" in str(server)


def test_same_key_id_without_the_key() -> None:
    forged = dataclasses.replace(OTHER_KEY, id=KEY.id)
    client, server = shake(Client(forged, TERMS), Server(KEY, TERMS))
    assert outcomes((client, server)) == (Outcome.AUTHENTICATION_FAILED,) * 2


def test_server_without_the_key() -> None:
    forged = dataclasses.replace(OTHER_KEY, id=KEY.id)

    class Gullible(Server):
        def _take_proof(self, proof: bytes) -> bytes:
            self.want, self.done = 0, True
            verdict = handshake._VERDICT.pack(0, 0, b"")[:32]
            return verdict + forged.sign(b"server", self._hello, self._challenge, proof, verdict)

    client, _ = shake(Client(KEY, TERMS), Gullible(forged, TERMS))
    assert client is not None
    assert client.outcome == Outcome.AUTHENTICATION_FAILED


@pytest.mark.parametrize(
    ("change", "outcome", "says"),
    [
        ({"job": job_hash("job 2")}, Outcome.OTHER_JOB, "another job"),
        ({"world_size": 5}, Outcome.UNEXPECTED_PEER, "world_size is 5 there and 4 here"),
        ({"server_rank": 0}, Outcome.UNEXPECTED_PEER, "rank at this address is 0 there and 1"),
        ({"epoch": 8}, Outcome.UNEXPECTED_PEER, "epoch is 8 there and 7"),
        ({"role": Role.RENDEZVOUS}, Outcome.UNEXPECTED_PEER, "kind of connection"),
    ],
)
def test_other_terms(change: dict[str, int], outcome: Outcome, says: str) -> None:
    theirs = dataclasses.replace(TERMS, **change)
    client, server = shake(Client(KEY, TERMS), Server(KEY, theirs))
    assert outcomes((client, server)) == (outcome, outcome)
    assert says in str(client)
    assert client is not None
    assert client.proven


def test_other_job_without_a_secret() -> None:
    other = job_hash("job 2")
    theirs = dataclasses.replace(TERMS, job=other)
    ends = shake(Client(OPEN_KEY, TERMS), Server(Key.derive(None, other), theirs))
    assert outcomes(ends) == (Outcome.OTHER_JOB, Outcome.OTHER_JOB)


@pytest.mark.parametrize("client_rank", [1, 4, 2**32 - 1])
def test_ranks_that_cannot_be(client_rank: int) -> None:
    ends = shake(
        Client(KEY, dataclasses.replace(TERMS, client_rank=client_rank)), Server(KEY, TERMS)
    )
    assert outcomes(ends) == (Outcome.UNEXPECTED_PEER, Outcome.UNEXPECTED_PEER)


@pytest.mark.parametrize(
    ("admit", "outcome"),
    [(unexpected, Outcome.UNEXPECTED_PEER), (duplicate, Outcome.DUPLICATE)],
)
def test_not_admitted(admit: Callable[[Terms], RefusedError], outcome: Outcome) -> None:
    server = Server(KEY, TERMS, admit)
    assert outcomes(shake(Client(KEY, TERMS), server)) == (outcome, outcome)
    assert not server.done


def test_admit_sees_only_proven_claims() -> None:
    asked: list[Terms] = []
    forged = dataclasses.replace(OTHER_KEY, id=KEY.id)
    shake(Client(forged, TERMS), Server(KEY, TERMS, lambda terms: asked.append(terms)))
    assert asked == []


def test_other_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "VERSION", 2)
    client = Client(KEY, TERMS)
    monkeypatch.undo()
    ends = shake(client, Server(KEY, TERMS))
    assert ends[1] is not None
    assert ends[1].outcome == Outcome.OTHER_VERSION
    assert "version 2 there, 1 here" in str(ends[1])


def test_server_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    client, server = Client(KEY, TERMS), Server(KEY, TERMS)
    server.feed(client.first()[:10])
    monkeypatch.setattr(handshake, "VERSION", 2)
    challenge = server.feed(client.first()[10:])
    monkeypatch.undo()
    with pytest.raises(RefusedError, match="version 2 there") as raised:
        client.feed(challenge[: client.want])
    assert raised.value.outcome == Outcome.OTHER_VERSION


def test_replay() -> None:
    """A recorded good handshake opens nothing: the server's nonce is new each time."""
    client, server = Client(KEY, TERMS), Server(KEY, TERMS)
    hello = client.first()
    server.feed(hello[:10])
    challenge = server.feed(hello[10:])
    client.feed(challenge[:10])
    proof = client.feed(challenge[10:])
    server.feed(proof)
    assert server.done

    again = Server(KEY, TERMS)
    again.feed(hello[:10])
    assert again.feed(hello[10:]) != challenge
    assert again.feed(proof)[0] == 253
    assert again.refusal is not None
    assert again.refusal.outcome == Outcome.AUTHENTICATION_FAILED
    assert not again.done


def test_reflection() -> None:
    """A client's own messages sent back to it, or to a server at its side, prove nothing."""
    client = Client(KEY, TERMS)
    with pytest.raises(RefusedError) as raised:
        client.feed(client.first()[: client.want])
    assert raised.value.outcome == Outcome.STRANGER

    client, server = Client(KEY, TERMS), Server(KEY, TERMS)
    server.feed(client.first()[:10])
    challenge = server.feed(client.first()[10:])
    client.feed(challenge[:10])
    proof = client.feed(challenge[10:])
    with pytest.raises(RefusedError) as raised:
        client.feed((b"\0" * 32 + proof)[: client.want])
    assert raised.value.outcome == Outcome.AUTHENTICATION_FAILED


def test_any_flipped_byte_is_refused() -> None:
    """Of every message, in both directions."""
    sizes = {"hello": 128, "challenge": 48, "proof": 32, "verdict": 64}
    for message, size in sizes.items():
        for position in range(size):
            client, server = Client(KEY, TERMS), Server(KEY, TERMS)

            def flip(name: str, data: bytes, at: int = position, of: str = message) -> bytes:
                if name != of:
                    return data
                return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

            try:
                hello = flip("hello", client.first())
                challenge = server.feed(hello[:10]) or server.feed(hello[10:])
                challenge = flip("challenge", challenge)
                client.feed(challenge[:10])
                proof = flip("proof", client.feed(challenge[10:]))
                client.feed(flip("verdict", server.feed(proof)))
            except RefusedError:
                continue
            pytest.fail(f"byte {position} of {message} does not matter")


def test_noise() -> None:
    """Whatever comes, the only exception is RefusedError, and nobody gets in."""
    random = Random(1)
    magics = [b"", b"RCOMMhi\n\1\0", b"RCOMMch\n\1\0"]
    for number in range(3000):
        machine: Client | Server = Server(KEY, TERMS) if number % 2 else Client(KEY, TERMS)
        noise = random.choice(magics) + random.randbytes(300)
        with contextlib.suppress(RefusedError):
            while machine.want:
                data, noise = noise[: machine.want], noise[machine.want :]
                machine.feed(data)
        assert not machine.done


@pytest.mark.parametrize("size", [0, 5, 10, 100, 128, 140])
def test_truncated(size: int) -> None:
    client_end, server_end = socket.socketpair()
    with client_end, server_end:
        client_end.sendall((Client(KEY, TERMS).first() + b"\0" * 32)[:size])
        client_end.shutdown(socket.SHUT_WR)
        with pytest.raises(RefusedError) as raised:
            run(server_end, Server(KEY, TERMS), time.monotonic() + 30)
    assert raised.value.outcome == Outcome.CLOSED


def test_slow_loris() -> None:
    """A byte now and then does not keep a server beyond its deadline."""
    client_end, server_end = socket.socketpair()
    stop = threading.Event()

    def drip() -> None:
        for byte in Client(KEY, TERMS).first():
            if stop.wait(0.15):  # which lasts for much longer than PROMPT
                return
            client_end.send(bytes([byte]))

    thread = threading.Thread(target=drip)
    thread.start()
    began = time.monotonic()
    with pytest.raises(RefusedError) as raised:
        run(server_end, Server(KEY, TERMS), began + 0.3)
    assert 0.25 < time.monotonic() - began < 0.3 + PROMPT
    assert raised.value.outcome == Outcome.TIMEOUT
    stop.set()
    thread.join()
    client_end.close()
    server_end.close()


@pytest.mark.parametrize(
    "banner", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 200]
)
def test_something_else_answers(banner: bytes) -> None:
    client_end, server_end = socket.socketpair()
    with client_end, server_end:
        server_end.sendall(banner)
        with pytest.raises(RefusedError) as raised:
            run(client_end, Client(KEY, TERMS), time.monotonic() + 30)
    assert raised.value.outcome == Outcome.STRANGER


def test_server_says_nothing_to_strangers() -> None:
    for greeting in (b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03", b"\0" * 10):
        with pytest.raises(RefusedError) as raised:
            Server(KEY, TERMS).feed(greeting[:10])
        assert raised.value.outcome == Outcome.STRANGER


def test_keys_show_nothing() -> None:
    assert KEY.mac_key.hex() not in repr(KEY)
    assert str(KEY.mac_key) not in repr(KEY)
    assert KEY.mac_key != OTHER_KEY.mac_key
    assert OPEN_KEY.mac_key != Key.derive(None, job_hash("job 2")).mac_key


def test_refusals_survive_pickling() -> None:
    copy = pickle.loads(pickle.dumps(duplicate(TERMS)))
    assert (copy.outcome, copy.proven) == (Outcome.DUPLICATE, True)
    assert "lane 3 of rail 1" in str(copy)
