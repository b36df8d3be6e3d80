"""Every exception of ringcomm: one family, each also a builtin type that users already catch. And
what words them: ``naming`` for the collectives within a call, ``warn_caller`` for warnings.

Invariants: an error names what happened, who is held responsible (rank, host, rail, lane), during
which collective (seq) and after how long, and says what to do. Errors survive pickling, so they
cross process pools whole.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any


class RingcommError(RuntimeError):
    """Base of all errors of ringcomm.

    Attributes that do not apply are None:
        rank: the rank held responsible.
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
        return (_rebuild, (type(self), str(self), dict(self.__dict__)))


def _rebuild(cls: type[RingcommError], message: str, fields: dict[str, Any]) -> RingcommError:
    return cls(message, **fields)


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
    """A peer died, left or stopped answering; or a network port between two ranks failed: then rail
    and lane say which, and rank is one of the two, or that whose port is known to be at fault."""


class CommTimeoutError(RingcommError, TimeoutError):
    """A deadline passed before the collective or the wait was over."""


class AbortedError(RingcommError):
    """The communicator was aborted, here or by another rank."""


class DeviceError(RingcommError):
    """A GPU or its driver failed, or there is none that can be used; the message has the reason."""


class ProtocolError(RingcommError):
    """A peer sent bytes that no correct peer sends, or a frame arrived damaged."""


def did_you_mean(given: object, known: Iterable[str], prefix: str = "") -> str:
    """ ": did you mean X?" with the known name, after ``prefix``, that is nearest to the one given;
    empty where none is near."""
    near = difflib.get_close_matches(str(given), list(known), 1)
    return f": did you mean {prefix}{near[0]}?" if near else ""


_naming = threading.local()
_named: weakref.WeakSet[RingcommError] = weakref.WeakSet()  # one may be raised again and again


@contextlib.contextmanager
def naming(call: str, told: str | None = None) -> Iterator[None]:
    """Names the call that collectives are part of in the errors with which they fail: who reads
    "allgather(u8[32])" knows then that it was "gather_state_dict() of HookState". Within another
    one of this thread it does nothing, as the outermost call is the user's.

    Args:
        told: what other ranks are told that it is, if calls differ: one of rc_caller_name in the C
            core. None: that of which the call's name begins with it.
    """
    if named() is not None:
        yield
        return
    _naming.call = told or call
    try:
        yield
    except RingcommError as error:
        if error.seq is not None and error not in _named:  # a collective's
            alike = " (all ranks must take part)" if isinstance(error, MismatchError) else ""
            error.args = (f"{call}{alike}: {error}",)
            _named.add(error)
        raise
    finally:
        _naming.call = None


def named() -> str | None:
    """What other ranks are told of the call that this thread is in; None: of the user's own."""
    call: str | None = getattr(_naming, "call", None)
    return call


def warn_caller(text: str) -> None:
    """Warns of the line outside of ringcomm and torch that has led here."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame.f_globals["__name__"]):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def _is_inside(module: str) -> bool:
    """contextlib calls what a context decorates, as ``naming`` does."""
    return module.partition(".")[0] in ("ringcomm", "torch", "contextlib")
