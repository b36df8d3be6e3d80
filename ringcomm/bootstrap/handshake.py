"""Mutual HMAC-SHA256 challenge-response: authenticates each connection before the core gets it.

    client                                  server
      HELLO     128 bytes  ------------------>    the client's rank, the rank it wants, its nonce
                <------------------  CHALLENGE     48 bytes   its nonce
      PROOF      32 bytes  ------------------>    HMAC(key, "client" | HELLO | CHALLENGE)
                <------------------  VERDICT       64 bytes   yes or no, and
                                                  HMAC(key, "server" | all of the above)

Both ends prove that they hold the key and mean the same connection: the transcript binds magic,
version, job, world size, the ranks of both ends, role, rail, lane, epoch, security level and both
nonces. The role words keep a proof from being reflected, the nonces from being replayed. Without
a secret (loopback, or insecure) the key is derived from the job, so that a process of another job
is still refused.

Client and Server are machines without I/O: exactly ``want`` bytes in, bytes to send out. A Talk
drives one over a non-blocking socket.

Invariants: a server reads at most 160 bytes from anyone and sends nothing to a stranger whose
first bytes are not ours; without a secret neither end believes a process of another user (vet);
nothing in HELLO is believed before its PROOF is good, and then only what equals the server's own
terms; every failure is a RefusedError.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from collections.abc import Callable

from .handshake_params import (
    Key,
    Outcome,
    RefusedError,
    Role,
    Terms,
    closed,
    duplicate,
    key_differs,
    other_user,
    term_differs,
    unexpected,
    version_differs,
)

VERSION = 1

_HELLO_MAGIC = b"RCOMMhi\n"
_CHALLENGE_MAGIC = b"RCOMMch\n"
_HELLO = struct.Struct("<8sHBBIIIHHI32s4s32s28x")
_CHALLENGE = struct.Struct("<8sHBB4s32s")
_VERDICT = struct.Struct("<B3xI24x32s")
_PREFIX_BYTES = 10  # magic and version, equally long in every version of the protocol
_NONCE_BYTES = 32
_PROOF_BYTES = 32

# Terms in the order in which a difference is reported; the verdict's code is the position + 1.
_COMPARED = ("job", "role", "world_size", "server_rank", "epoch")
_NO_PROOF_CODE = 253
_UNEXPECTED_CODE = 254
_DUPLICATE_CODE = 255

Admit = Callable[[Terms], RefusedError | None]
"""Judges a client's proven terms: None, or the error to end with (unexpected() or duplicate())."""
Vet = Callable[[], RefusedError | None]
"""Returns why the process at the other end is refused, whatever it proves; or None."""


class Client:
    """The connecting side: send first(), then feed() the received bytes, ``want`` at a time.

    Args:
        key: our key.
        terms: the connection that we want.
        vet: called once the other end has sent its first bytes.
    """

    def __init__(self, key: Key, terms: Terms, vet: Vet | None = None) -> None:
        self._key = key
        self._terms = terms
        self._vet = vet
        self._hello = _HELLO.pack(
            _HELLO_MAGIC,
            VERSION,
            terms.role,
            key.level,
            terms.world_size,
            terms.client_rank,
            terms.server_rank,
            terms.rail,
            terms.lane,
            terms.epoch,
            terms.job,
            key.id,
            secrets.token_bytes(_NONCE_BYTES),
        )
        self._challenge = b""
        self._proof = b""
        self._doubt: RefusedError | None = None  # vet's answer for an end that has hung up
        self.want = _PREFIX_BYTES
        self.done = False

    def first(self) -> bytes:
        """Returns the HELLO to send at once."""
        return self._hello

    def feed(self, data: bytes) -> bytes:
        """Takes exactly ``want`` bytes; returns the bytes to send. Raises RefusedError."""
        if self._proof:
            self._check_verdict(data)
            self.want = 0
            self.done = True
            return b""
        self._challenge += data
        if len(self._challenge) == _PREFIX_BYTES:
            self._check_prefix()
            self.want = _CHALLENGE.size - _PREFIX_BYTES
            return b""
        self._check_challenge()
        self._proof = self._key.sign(b"client", self._hello, self._challenge)
        self.want = _VERDICT.size
        return self._proof

    def _check_prefix(self) -> None:
        magic, version = self._challenge[:8], int.from_bytes(self._challenge[8:], "little")
        if magic != _CHALLENGE_MAGIC:
            raise RefusedError("something else than ringcomm answers", outcome=Outcome.STRANGER)
        if version != VERSION:
            raise version_differs(version, VERSION)
        self._doubt = self._vet() if self._vet is not None else None
        # An end that has hung up since may have sent its reason, which comes first.
        if self._doubt is not None and self._doubt.outcome != Outcome.CLOSED:
            raise self._doubt

    def _check_challenge(self) -> None:
        _magic, _version, outcome, level, key_id, _nonce = _CHALLENGE.unpack(self._challenge)
        if (key_id, level) != (self._key.id, self._key.level):
            raise key_differs(self._key, level, key_id)
        if outcome == Outcome.OTHER_USER:
            raise other_user("the other end says that it belongs to another user")
        if outcome != Outcome.OK:
            raise RefusedError("refused before proof", outcome=Outcome.AUTHENTICATION_FAILED)
        if self._doubt is not None:
            raise self._doubt

    def _check_verdict(self, data: bytes) -> None:
        code, value, mac = _VERDICT.unpack(data)
        if code == _NO_PROOF_CODE and not any(mac):
            raise RefusedError(
                f"the other end says that our proof of {self._key.name} is wrong",
                outcome=Outcome.AUTHENTICATION_FAILED,
            )
        expected = self._key.sign(
            b"server", self._hello, self._challenge, self._proof, data[:-_PROOF_BYTES]
        )
        if not hmac.compare_digest(mac, expected):
            raise RefusedError(
                f"the other end does not hold our key ({self._key.name})",
                outcome=Outcome.AUTHENTICATION_FAILED,
            )
        if code == _DUPLICATE_CODE:
            raise duplicate(self._terms)
        if 1 <= code <= len(_COMPARED):
            field = _COMPARED[code - 1]
            raise term_differs(field, getattr(self._terms, field), value)
        if code:
            raise unexpected(self._terms)


class Server:
    """The accepting side: feed() the received bytes, ``want`` at a time, and send the answers.

    Args:
        key: our key.
        terms: the terms to accept; the client chooses client_rank, rail and lane.
        admit: called with the client's proven terms.
        vet: called once the client has sent its HELLO.

    After the last feed() ``done`` is True, or ``refusal`` is the reason.
    """

    def __init__(
        self,
        key: Key,
        terms: Terms,
        admit: Admit | None = None,
        vet: Vet | None = None,
    ) -> None:
        self._vet = vet
        self._key = key
        self._terms = terms
        self._admit = admit
        self._hello = b""
        self._challenge = b""
        self.want = _PREFIX_BYTES
        self.done = False
        self.refusal: RefusedError | None = None
        self.claimed: Terms | None = None
        """Terms that the client claims; proven only when done, or if refusal.proven."""

    @property
    def greeted(self) -> bool:
        """True once the client has sent a complete, well-formed HELLO."""
        return bool(self._challenge)

    def feed(self, data: bytes) -> bytes:
        """Takes exactly ``want`` bytes; returns the bytes to send.

        Raises RefusedError where the connection is to be closed without an answer.
        """
        if not self._hello:
            return self._take_prefix(data)
        if not self._challenge:
            return self._take_hello(data)
        return self._take_proof(data)

    def _take_prefix(self, data: bytes) -> bytes:
        magic, version = data[:8], int.from_bytes(data[8:], "little")
        if magic != _HELLO_MAGIC:
            raise RefusedError("not ringcomm", outcome=Outcome.STRANGER)
        if version != VERSION:
            return self._refuse_early(version_differs(version, VERSION))
        self._hello = data
        self.want = _HELLO.size - _PREFIX_BYTES
        return b""

    def _take_hello(self, data: bytes) -> bytes:
        self._hello += data
        (
            _magic,
            _version,
            role,
            level,
            world_size,
            client_rank,
            server_rank,
            rail,
            lane,
            epoch,
            job,
            key_id,
            _nonce,
        ) = _HELLO.unpack(self._hello)
        self.claimed = Terms(role, job, world_size, client_rank, server_rank, rail, lane, epoch)
        if (key_id, level) != (self._key.id, self._key.level):
            return self._refuse_early(key_differs(self._key, level, key_id))
        stranger = self._vet() if self._vet is not None else None
        if stranger is not None and stranger.outcome == Outcome.OTHER_USER:
            return self._refuse_early(stranger)
        if stranger is not None:  # the client has gone, or its user cannot be found out now
            raise stranger
        self._challenge = self._make_challenge(Outcome.OK)
        self.want = _PROOF_BYTES
        return self._challenge

    def _take_proof(self, proof: bytes) -> bytes:
        expected = self._key.sign(b"client", self._hello, self._challenge)
        if not hmac.compare_digest(proof, expected):
            self.want = 0
            self.refusal = RefusedError(
                f"no valid proof of {self._key.name}", outcome=Outcome.AUTHENTICATION_FAILED
            )
            return _VERDICT.pack(_NO_PROOF_CODE, 0, bytes(_PROOF_BYTES))
        assert self.claimed is not None
        code, value = self._judge(self.claimed)
        verdict = _VERDICT.pack(code, value, b"")[:-_PROOF_BYTES]
        self.want = 0
        self.done = code == 0
        return verdict + self._key.sign(b"server", self._hello, self._challenge, proof, verdict)

    def _judge(self, claimed: Terms) -> tuple[int, int]:
        """Returns the verdict's code and value; sets refusal if the code is not 0."""
        for position, field in enumerate(_COMPARED, start=1):
            ours, theirs = getattr(self._terms, field), getattr(claimed, field)
            if ours != theirs:
                self.refusal = term_differs(field, ours, theirs)
                return position, 0 if field == "job" else ours
        if claimed.client_rank >= claimed.world_size:
            self.refusal = unexpected(claimed)
        elif claimed.client_rank == claimed.server_rank:
            met_itself = duplicate if claimed.role == Role.RENDEZVOUS else unexpected
            self.refusal = met_itself(claimed)
        elif self._admit is not None:
            self.refusal = self._admit(claimed)
        if self.refusal is None:
            return 0, 0
        is_duplicate = self.refusal.outcome == Outcome.DUPLICATE
        return (_DUPLICATE_CODE if is_duplicate else _UNEXPECTED_CODE), 0

    def _make_challenge(self, outcome: Outcome) -> bytes:
        return _CHALLENGE.pack(
            _CHALLENGE_MAGIC,
            VERSION,
            outcome,
            self._key.level,
            self._key.id,
            secrets.token_bytes(_NONCE_BYTES),
        )

    def _refuse_early(self, refusal: RefusedError) -> bytes:
        self.want = 0
        self.refusal = refusal
        return self._make_challenge(refusal.outcome)


class Talk:
    """A machine on a connected, non-blocking socket, which stays the caller's."""

    def __init__(self, sock: socket.socket, machine: Client | Server) -> None:
        self._sock = sock
        self._machine = machine
        self._data = b""

    def send(self, data: bytes) -> None:
        """Sends bytes of the machine. Raises RefusedError if the connection has ended."""
        try:
            complete = self._sock.send(data) == len(data)
        except OSError:
            complete = False
        if not complete:  # the buffer was empty, so the other end is gone
            raise closed()

    def go_on(self) -> None:
        """Feeds the machine the bytes that have arrived, and sends its answers. Raises
        RefusedError: the machine's own, or ``closed()`` if the connection has ended."""
        try:
            while self._machine.want:
                part = self._sock.recv(self._machine.want - len(self._data))
                if not part:
                    raise closed()
                self._data += part
                if len(self._data) == self._machine.want:
                    data, self._data = self._data, b""
                    answer = self._machine.feed(data)
                    if answer:
                        self.send(answer)
        except BlockingIOError:
            return
        except RefusedError:  # it is an OSError, too
            raise
        except OSError:
            raise closed() from None
