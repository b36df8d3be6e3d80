"""Data of a handshake: the key, the terms of the connection, and its possible failures.

Invariants: a Key shows its id, never its bytes; the text of a RefusedError says only what the other
end has either proven or shown to everyone.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import hmac
from typing import Any

from ..errors import AuthenticationError
from .secret import Secret, key_id


class Role(enum.IntEnum):
    """Purpose of the connection."""

    RENDEZVOUS = 1
    LANE = 2
    MEMBERSHIP = 3
    LANE_ANEW = 4


class Level(enum.IntEnum):
    """Security of the connection."""

    OPEN = 0
    AUTHENTICATED = 1


class Outcome(enum.IntEnum):
    """Result of a handshake."""

    OK = 0
    AUTHENTICATION_FAILED = 1
    OTHER_JOB = 2
    OTHER_VERSION = 3
    UNEXPECTED_PEER = 4
    DUPLICATE = 5
    STRANGER = 6
    CLOSED = 7
    TIMEOUT = 8
    OTHER_USER = 9

    @property
    def text(self) -> str:
        """Name of the outcome in lower case, for a table."""
        return self.name.lower().replace("_", " ")


class RefusedError(AuthenticationError):
    """The handshake failed.

    Attributes:
        outcome: reason of the failure.
        proven: True if the refusing end has proven that it holds the key.
    """

    def __init__(
        self, message: str, *, outcome: Outcome, proven: bool = False, **fields: Any
    ) -> None:
        super().__init__(message, **fields)
        self.outcome = outcome
        self.proven = proven


@dataclasses.dataclass(frozen=True)
class Key:
    """Key that both ends prove to hold."""

    mac_key: bytes = dataclasses.field(repr=False)
    id: bytes
    level: Level
    same_user: bool = False
    """True for a key that anybody can make: the other end must be a process of this user."""

    @classmethod
    def derive(cls, secret: Secret | None, job: bytes, insecure: bool = False) -> Key:
        """Derives the key from the job's secret or, without one, from the job itself."""
        if secret is None:
            material = hashlib.sha256(b"ringcomm open " + job).digest()
            return cls(material, key_id(material), Level.OPEN, same_user=not insecure)
        mac_key = hmac.new(secret.material(), b"ringcomm handshake 1", hashlib.sha256).digest()
        return cls(mac_key, secret.key_id, Level.AUTHENTICATED)

    def sign(self, *parts: bytes) -> bytes:
        """Returns the HMAC-SHA256 over the parts, whose lengths are fixed by their order."""
        return hmac.new(self.mac_key, b"".join(parts), hashlib.sha256).digest()

    @property
    def name(self) -> str:
        """Name of the key for messages: its id, or "no secret"."""
        return "no secret" if self.level == Level.OPEN else f"key id {self.id.hex()}"


@dataclasses.dataclass(frozen=True)
class Terms:
    """Description of a connection, which both ends must agree on."""

    role: int
    """Role of the connection; any byte in terms that a client claims."""
    job: bytes
    """Hash of the job's name, 32 bytes; see job_hash()."""
    world_size: int
    client_rank: int
    server_rank: int
    rail: int = 0
    lane: int = 0
    epoch: int = 0


def job_hash(job: str) -> bytes:
    """Returns the 32 bytes that stand for a job in the handshake."""
    return hashlib.sha256(b"ringcomm job " + job.encode()).digest()


def key_differs(ours: Key, level: int, theirs: bytes) -> RefusedError:
    """Makes the error for an end with another key id or security level."""
    if level == ours.level == Level.OPEN:
        return RefusedError("it belongs to another job", outcome=Outcome.OTHER_JOB)
    if theirs == ours.id:
        text = f"security level {level} there, {int(ours.level)} here"
    else:
        there = "no secret" if level == Level.OPEN else f"key id {theirs.hex()}"
        text = f"{there} there, {ours.name} here"
    return RefusedError(text, outcome=Outcome.AUTHENTICATION_FAILED)


def version_differs(there: int, here: int) -> RefusedError:
    """Makes the error for an end with another version of the protocol."""
    return RefusedError(
        f"protocol version {there} there, {here} here: install the same ringcomm on both",
        outcome=Outcome.OTHER_VERSION,
    )


_WORDS = {
    "role": "the kind of connection",
    "world_size": "world_size",
    "server_rank": "the rank at this address",
    "epoch": "the epoch",
}


def term_differs(field: str, ours: object, theirs: object) -> RefusedError:
    """Makes the error for an end that proved the key but wants another connection."""
    if field == "job":
        return RefusedError("it belongs to another job", outcome=Outcome.OTHER_JOB, proven=True)
    text = f"{_WORDS[field]} is {theirs} there and {ours} here"
    return RefusedError(text, outcome=Outcome.UNEXPECTED_PEER, proven=True)


def unexpected(terms: Terms) -> RefusedError:
    """Makes the error for a rank, rail or lane that is not expected here."""
    return RefusedError(
        f"rank {terms.client_rank}, rail {terms.rail}, lane {terms.lane} is not expected there",
        outcome=Outcome.UNEXPECTED_PEER,
        proven=True,
    )


def closed() -> RefusedError:
    """Makes the error for an end that has closed the connection."""
    return RefusedError("closed by the other end", outcome=Outcome.CLOSED)


def other_user(why: str) -> RefusedError:
    """Makes the error for a process that, without a secret, is not known to be this user's."""
    return RefusedError(
        f"{why}, and this job has no secret: start all ranks as one user, or give them a secret "
        "(python -m ringcomm keygen FILE; RINGCOMM_SECRET_FILE)",
        outcome=Outcome.OTHER_USER,
    )


def duplicate(terms: Terms) -> RefusedError:
    """Makes the error for a connection that exists already."""
    if terms.role != Role.LANE:
        text = f"another process of this job is already rank {terms.client_rank}"
    else:
        text = f"rank {terms.client_rank} has lane {terms.lane} of rail {terms.rail} already"
    return RefusedError(text, outcome=Outcome.DUPLICATE, proven=True)
