"""Every exception of ringcomm: one family, each also a builtin type that users already catch. Also
``warn_caller``.

Invariants: an error names the event, the culprit (rank, host, rail, lane), the collective (seq) and
the time, and gives the remedy. Errors survive pickling, so they cross process pools whole.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable
from typing import Any


class RingcommError(RuntimeError):
    """Base of all errors of ringcomm.

    Attributes that do not apply are None:
        rank: the rank that caused the error.
        host: that rank's host name.
        rail: index of the network port.
        lane: index of the connection on its link.
        seq: number of the collective on its communicator.
        elapsed: seconds from the collective's submission to the failure.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str | None = None,
        rail: int | None = None,
        lane: int | None = None,
        seq: int | None = None,
        elapsed: float | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.rail = rail
        self.lane = lane
        self.seq = seq
        self.elapsed = elapsed

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), str(self)), dict(self.__dict__))


def _rebuild(cls: type[RingcommError], message: str) -> RingcommError:
    new = OSError.__new__ if issubclass(cls, OSError) else RuntimeError.__new__
    error: RingcommError = new(cls)
    RingcommError.__init__(error, message)  # a subclass's own may take other arguments
    return error


class ConfigError(RingcommError, ValueError):
    """A setting, argument or environment variable has a value that cannot work."""


class TensorError(RingcommError, TypeError):
    """A tensor of a kind, dtype, device, layout or size that the call cannot take."""


class NotInitializedError(RingcommError):
    """ringcomm.init was not called, or the communicator is closed."""


class BootstrapError(RingcommError, ConnectionError):
    """The ranks could not all be joined; the message holds a row for each rank and address."""


class AuthenticationError(BootstrapError):
    """A peer does not hold the job's secret, or belongs to another job."""


class MismatchError(RingcommError):
    """Ranks called different collectives, or the same one with different arguments."""


class PeerLostError(RingcommError, ConnectionError):
    """A peer died, left or stopped answering; or the last port between two ranks failed: then rail
    and lane name it, and rank is one of the two, the one at fault if that is known."""


class CommTimeoutError(RingcommError, TimeoutError):
    """A deadline passed before the collective or the wait was over."""


class AbortedError(RingcommError):
    """The communicator was aborted, here or by another rank."""


class DeviceError(RingcommError):
    """A GPU or its driver failed, or there is none that can be used; the message has the reason."""


class ProtocolError(RingcommError):
    """A peer sent bytes that no correct peer sends, or frames arrived damaged time and again."""


def did_you_mean(given: object, known: Iterable[str], prefix: str = "") -> str:
    """Returns ": did you mean X?" with the known name nearest to the given one, after ``prefix``;
    "" if none is near."""
    near = difflib.get_close_matches(str(given), list(known), 1)
    return f": did you mean {prefix}{near[0]}?" if near else ""


def warn_caller(text: str) -> None:
    """Issues a warning at the line outside of ringcomm and torch that led here."""
    level, frame = 2, sys._getframe(1)
    inside = ("ringcomm", "torch", "contextlib")  # the last calls what ``naming`` decorates
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] in inside:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
