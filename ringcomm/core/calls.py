"""Checks the arguments of a collective, turns them into the core's call, and names the user's call
in its errors.

Invariant: arguments that cannot work are refused here, before anything is submitted or sent.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Literal, TypeGuard

import numpy as np

from ..codecs import Codec, parse
from ..errors import ConfigError, MismatchError, RingcommError, TensorError, did_you_mean
from .native import ffi, lib, text
from .residuals import Residuals
from .views import DTYPES, full_name

Op = Literal["sum", "avg", "min", "max", "prod"]

#: Name -> number in the C header (rc_op).
OPS: dict[str, int] = {"sum": 0, "avg": 1, "min": 2, "max": 3, "prod": 4}

#: Type of ``feedback=``; False: none, even where the codec needs one.
Feedback = Residuals | Literal[False] | None

ANY_SOURCE = int(lib.RC_ANY_SOURCE)
_CALL = ffi.typeof("rc_call *")
_MESSAGES = lib.RC_SEND, lib.RC_RECV

#: Names of the operations in other libraries.
_OTHER_NAMES = {
    "add": "sum",
    "plus": "sum",
    "mean": "avg",
    "average": "avg",
    "minimum": "min",
    "maximum": "max",
    "amin": "min",
    "amax": "max",
    "product": "prod",
    "mul": "prod",
    "multiply": "prod",
}

_NUMBERS = (int, float, np.integer, np.floating)

_COLLECTIVES = {
    lib.RC_ALLREDUCE: "allreduce",
    lib.RC_REDUCE_SCATTER: "reduce_scatter",
    lib.RC_ALLGATHER: "allgather",
    lib.RC_BROADCAST: "broadcast",
    lib.RC_REDUCE: "reduce",
    lib.RC_GATHER: "gather",
    lib.RC_SCATTER: "scatter",
    lib.RC_ALLTOALL: "alltoall",
    lib.RC_BARRIER: "barrier",
    lib.RC_SEND: "send",
    lib.RC_RECV: "recv",
}


def is_integer(value: object) -> TypeGuard[int]:
    """True for an integer of Python or numpy that is no bool."""
    kind = type(value)
    return kind is int or (isinstance(value, (int, np.integer)) and kind is not bool)


def is_number(value: object) -> bool:
    """True for a real number of Python or numpy that is neither NaN nor a bool."""
    return isinstance(value, _NUMBERS) and value == value and type(value) is not bool


FIRST_INNER_TAG = 2**31
"""First tag of sends and receives that make up a collective; users' tags are below."""


def is_message(collective: int, tag: int) -> bool:
    """True if a call is a send or receive of the user's."""
    return collective in _MESSAGES and tag < FIRST_INNER_TAG


def check_tag(tag: object) -> int:
    """Returns a caller's tag of a send or receive. Raises ConfigError."""
    if not is_integer(tag) or not 0 <= tag < FIRST_INNER_TAG:
        raise ConfigError(f"tag={tag!r}: give an integer from 0 to 2^31 - 1")
    return int(tag)


def require_compressible(compression: str | None, dtype: str) -> None:
    """Raises TensorError for a tensor that the codec does not take."""
    if compression not in (None, "none") and dtype not in ("f32", "f64"):
        raise TensorError(
            f"compression={compression!r} takes float32 and float64 tensors, not "
            f"{full_name(dtype)}; leave it out"
        )


def require_feedback(codec: Codec, feedback: object) -> None:
    """Raises ConfigError if feedback has a wrong type, or is None where the codec needs one."""
    if feedback is not None and feedback is not False and not isinstance(feedback, Residuals):
        hint = "or False"
        if type(feedback).__name__ == "FeedbackStore":
            hint = 'which the store has by the name of the tensor, as store["layer1.weight"]'
        elif isinstance(feedback, type):
            hint = f"{feedback.__name__}(), made once and kept from call to call"
        raise ConfigError(f"feedback={feedback!r}: give a ringcomm.ErrorFeedback, {hint}")
    if feedback is None and codec.needs_feedback:
        raise ConfigError(
            f"compression={codec.name!r} rounds so much away that it needs "
            "feedback=ringcomm.ErrorFeedback(), one for each tensor and kept from call to call, or "
            "feedback=False to go without"
        )


# ---- the user's call ----

_naming = threading.local()
_named: weakref.WeakSet[RingcommError] = weakref.WeakSet()  # an error may be raised repeatedly


@contextlib.contextmanager
def naming(call: str, for_others: str | None = None) -> Iterator[None]:
    """Adds the name of the user's call to errors of the collectives within it: "allgather(u8[32])"
    then reads as part of "gather_state_dict() of HookState". Nested uses on a thread do nothing,
    as the outermost call is the user's.

    Args:
        for_others: name for other ranks, shown if calls differ: one of rc_caller_name in the C
            core. None: the one with which the call's name begins.
    """
    if named() is not None:
        yield
        return
    _naming.call = for_others or call
    try:
        yield
    except RingcommError as error:
        if error.seq is not None and error not in _named:  # an error of a collective
            alike = " (all ranks must take part)" if isinstance(error, MismatchError) else ""
            error.args = (f"{call}{alike}: {error}",)
            _named.add(error)
        raise
    finally:
        _naming.call = None


def named() -> str | None:
    """Returns the name, for other ranks, of the call that this thread is in; None outside of
    ``naming``."""
    return getattr(_naming, "call", None)


def number_of_caller() -> int:
    """Returns rc_call.caller for the call that this thread is in by ``naming``; 0 for none."""
    within = named()
    return _number_of(within) if within else 0


@functools.lru_cache
def _number_of(call: str) -> int:
    """Returns the number of the first caller that begins the name, or that of "another"."""
    number = 2
    while (name := lib.rc_caller_name(number)) and not call.startswith(text(name)):
        number += 1
    return number if name else 1


def milliseconds(seconds: object) -> int:
    """Returns a timeout as the core takes it. Raises ConfigError."""
    if not is_number(seconds) or not 0 < seconds <= 4_000_000:  # type: ignore[operator]
        raise ConfigError(f"timeout={seconds!r}: give seconds above 0, at most 4 million")
    return max(1, int(seconds * 1000))  # type: ignore[operator]


def _unknown_op(op: object) -> ConfigError:
    """Makes the error for an unknown op; suggests a name, also for MPI.SUM, torch's ReduceOp.SUM
    or numpy.add."""
    own = getattr(op, "name", None) or getattr(op, "__name__", None)
    word = re.split(r"[._]", str(own if isinstance(own, str) else op).lower())[-1]
    word = re.sub(r"\W.*", "", word)
    hint = did_you_mean(_OTHER_NAMES.get(word, word), OPS)
    return ConfigError(f"op={op!r} is unknown; give one of {', '.join(OPS)}{hint}")


def require_rank(collective: int, root: object, world_size: int) -> int | None:
    """Returns the root of a call, or the other rank of a send or receive; None for a receive from
    any source. Raises ConfigError."""
    if is_integer(root) and 0 <= root < world_size:
        return int(root)
    if collective == lib.RC_RECV and root is None and world_size > 1:
        return None
    of = {lib.RC_SEND: "dst", lib.RC_RECV: "src"}.get(collective, "root")
    wanted = f"give {of}= a rank from 0 to {world_size - 1}"
    if collective == lib.RC_RECV and world_size > 1:
        wanted += ", or None for any"
    if isinstance(root, str) and root in OPS:
        wanted += f", and op={root!r} by its name"
    raise ConfigError(f"rank {root!r} is not in a world of {world_size}: {wanted}")


class Prepared:
    """Common part of all calls of one kind and dtype, checked once.

    Attributes:
        call: the rc_call, without count and memory; it waits, and has the default timeout.
        codec: its Codec.
    """

    __slots__ = ("_collective", "_dtype", "_residual_op", "call", "codec")

    def __init__(
        self,
        collective: int,
        dtype: str | None,
        op: str,
        compression: str | None,
        root: int | None,
        world_size: int,
        timeout: float,
    ) -> None:
        """Raises ConfigError, TensorError. dtype: of the tensors, None where there are none."""
        if not isinstance(op, str) or op not in OPS:
            raise _unknown_op(op)
        self.codec = codec = parse(compression)
        if codec.quantises and collective != lib.RC_ALLGATHER and op not in ("sum", "avg"):
            raise ConfigError(
                f"op={op!r} does not go with compression={codec.name!r}, which takes sum "
                "and avg; use bf16, fp16 or none"
            )
        root = require_rank(collective, root, world_size)
        if dtype is not None:
            require_compressible(compression, dtype)
        self.call = ffi.new(
            _CALL,
            {
                "size": ffi.sizeof("rc_call"),
                "collective": collective,
                "op": OPS[op],
                "dtype": 0 if dtype is None else DTYPES[dtype],
                "codec": codec.number,
                "root": ANY_SOURCE if root is None else root,
                "timeout_ms": milliseconds(timeout),
                "waits": 1,
            },
        )
        self._collective, self._dtype = _COLLECTIVES[collective], dtype
        self._residual_op = "gather" if collective == lib.RC_ALLGATHER else op

    def name(self, count: int) -> str:
        """Returns the name, for messages, of a call of count elements."""
        tensor = "" if self._dtype is None else f"{self._dtype}[{count}]"
        return f"{self._collective}({tensor})"

    def copy(
        self, count: int, src: Any, dst: Any, feedback: object = None, timeout: float | None = None
    ) -> Any:
        """Makes an rc_call of its own for a call of count elements at these addresses. Raises
        ConfigError for a feedback that calls of this kind do not take, or a wrong timeout."""
        self.require_feedback(feedback)
        call = ffi.new(_CALL, self.call[0])
        call.count, call.src, call.dst = count, src, dst
        if timeout is not None:
            call.timeout_ms = milliseconds(timeout)
        call.caller = number_of_caller()
        return call

    def require_feedback(self, feedback: object) -> None:
        """Raises ConfigError for a feedback that calls of this kind do not take."""
        require_feedback(self.codec, feedback)
        if isinstance(feedback, Residuals) and self._residual_op not in ("gather", "sum", "avg"):
            raise ConfigError(
                f"op={self._residual_op!r} does not go with feedback, which takes sum and avg"
            )

    def lend(self, feedback: object, call: Any, name: str, count: int) -> None:
        """Gives a call of this name the residuals of its tensor of count elements, if there are
        any. Raises as ``Residuals.require_fit``."""
        if isinstance(feedback, Residuals) and self._dtype is not None:
            call.feedback = feedback.require_fit(name, self._dtype, count, self._residual_op)
