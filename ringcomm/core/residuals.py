"""Residuals: rounding errors that lossy collectives have not delivered yet, on one rank.

A codec of few bits rounds away a good part of its input. Error feedback keeps that part and
adds it to the same tensor's next call, so that over many calls nothing is lost: the sum of
all results is the sum of all exact ones, less the residuals at the end.

    worker    residual of this rank's contributions: float32, one for each element
    owner     residual of the part of the results that this rank makes for all (none where
              there are two ranks): float32

The numbers are in units of the tensor (owner: of the result), so they change with a loss scale.

Invariants: the core owns the memory (rc_feedback), which is host memory, and changes it only when a
collective has succeeded everywhere with finite values. One work at a time uses it; meanwhile
nothing here reads or changes it.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, NoReturn

import numpy as np

from ..errors import ConfigError, RingcommError, TensorError
from .native import OK, ffi, lib
from .views import full_name

Floats = np.ndarray[Any, np.dtype[np.float32]]


class Residuals:
    """Residuals of one tensor on this rank; ``ringcomm.ErrorFeedback`` is the public class.

    Args:
        count: elements of the tensor (of a reduce-scatter: of its input); None: as many as the
            first call has.

    Attributes:
        name: its name in messages.

    Raises ConfigError for a count that is no positive integer or 0.
    """

    def __init__(self, count: int | None = None) -> None:
        self.name = "feedback"
        self._handle: Any = ffi.NULL
        self._count: int | None = None
        self._op: str | None = None
        self._loss_scale = 1.0
        self._work: Any = lambda: None  # a weak reference to the last work that used it
        if count is not None:
            self._allocate(count)

    def __del__(self, free: Any = lib.rc_feedback_free) -> None:  # globals may be gone at exit
        free(self.__dict__.get("_handle", ffi.NULL))

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be copied or pickled; use state_dict()")

    def __repr__(self) -> str:
        size = "of any size" if self._count is None else f"of {self._count} elements"
        return f"<ringcomm.{type(self).__name__} {size}>"

    # ---- contents ----

    @property
    def count(self) -> int | None:
        """Number of elements of the tensor; None before the first call."""
        return self._count

    @property
    def worker(self) -> Floats:
        """Copy of the residual of this rank's contributions: float32[count]."""
        self.require_idle()
        if self._count is None:
            return np.zeros(0, np.float32)
        return _copy(lib.rc_feedback_worker(self._handle), self._count)

    @property
    def owner(self) -> Floats:
        """Copy of the residual of the results that this rank makes: float32, for the elements
        from ``owner_start`` on; empty if there is none."""
        return self.owner_part()[1]

    @property
    def owner_start(self) -> int:
        """Index of the first element that ``owner`` stands for."""
        return self.owner_part()[0]

    def owner_part(self) -> tuple[int, Floats]:
        """Returns ``owner_start`` and ``owner``, by one copy."""
        self.require_idle()
        start, count = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        if self._count is None:
            return 0, np.zeros(0, np.float32)
        memory = lib.rc_feedback_owner(self._handle, start, count)
        return int(start[0]), _copy(memory, int(count[0]))

    # ---- units ----

    @property
    def loss_scale(self) -> float:
        """Factor that the gradients contain. Setting another one rescales the residuals to the
        units of the next call. Raises ConfigError unless it is positive and finite."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        require_scale("loss_scale", scale)
        if scale != self._loss_scale:
            self.rescale(float(scale) / self._loss_scale)
            self._loss_scale = float(scale)

    def rescale(self, factor: float) -> None:
        """Multiplies the residuals by a positive, finite factor: for a tensor that changes its
        units, as by a loss scale, or to forget a part of them. (0 forgets all.)

        Raises ConfigError for another factor, or one that makes residuals infinite, or while a
        collective uses it. Nothing is changed then.
        """
        require_scale("factor", factor, least=0.0)
        self.require_idle()
        if self._count is not None and lib.rc_feedback_rescale(self._handle, float(factor)) != OK:
            raise ConfigError(f"{self.name} times {factor:g} is infinite in float32")

    def undo(self) -> None:
        """Restores the residuals from before the last call that used them, for callers that drop
        its result. Does nothing if that call made them zero or did not change them, or after a
        load or a rescale. Raises ConfigError while a collective uses it."""
        self.require_idle()
        if self._count is not None:
            lib.rc_feedback_undo(self._handle)

    # ---- called by collectives ----

    def require_idle(self) -> None:
        """Raises ConfigError while a collective in flight uses it."""
        if self._handle and lib.rc_feedback_busy(self._handle):
            work = self._work()
            which = "a collective" if work is None else f"{work.name} #{work.seq}"
            raise ConfigError(
                f"{self.name} is in use by {which}, which is still in flight; wait "
                "for it first, or give each tensor its own"
            )

    def require_size(self, count: int) -> None:
        """Sets the number of elements if there is none yet. Raises ConfigError if it is another
        one."""
        if self._count is None:
            self._allocate(count)
        self._check_size(count)

    def _check_size(self, count: int) -> None:
        if self._count not in (None, count):
            raise ConfigError(
                f"{self.name} is of {self._count} elements, and the tensor has "
                f"{count}; each tensor needs its own"
            )

    def require_fit(self, call: str, dtype: str, count: int, op: str) -> Any:
        """Returns the core's handle for a call of count elements. Raises as ``check_fit``."""
        self.check_fit(call, dtype, count, op)
        self.require_size(count)
        self._op = op
        return self._handle

    def check_fit(self, call: str, dtype: str, count: int, op: str) -> None:
        """Checks that a call of count elements can use it; changes nothing.

        Args:
            call: the name of the call, for messages.
            op: "sum" or "avg"; "gather" of an all-gather, whose residuals belong to this rank's
                tensor alone.

        Raises:
            TensorError: a dtype without feedback.
            ConfigError: it is in use, of another size, or has residuals of another op.
        """
        if dtype not in ("f32", "f64"):
            raise TensorError(
                f"{call}: feedback takes float32 and float64 tensors, not {full_name(dtype)}"
            )
        self.require_idle()
        self._check_size(count)
        if self._op not in (None, op) and (self.worker.any() or self.owner.any()):
            raise ConfigError(
                f"{call}: what is left in {self.name} was made by {self._op}, and "
                f"has other units than that of {op}"
            )

    def hold(self, work: Any) -> None:
        """Notes the work that uses it from now on, and that keeps it alive."""
        self._work = weakref.ref(work)

    def load(self, worker: Floats, owner: Floats, start: int) -> None:
        """Replaces the residuals: worker for all elements, or empty for zeros; owner for those from
        start on. Raises ConfigError for another number of elements."""
        self.require_idle()
        if self._count is None:
            if not len(worker):
                return  # the next call sets the number
            self._allocate(len(worker))
        if len(worker) not in (0, self._count):
            raise ConfigError(
                f"the state is of {len(worker)} elements, and {self.name} is of {self._count}"
            )
        worker, owner = (np.ascontiguousarray(part, np.float32) for part in (worker, owner))
        result = lib.rc_feedback_load(
            self._handle,
            ffi.from_buffer("float[]", worker) if len(worker) else ffi.NULL,
            ffi.from_buffer("float[]", owner),
            start,
            len(owner),
        )
        if result != OK:
            raise RingcommError(f"{self.name}: the core does not take the residuals")

    def _allocate(self, count: object) -> None:
        whole = isinstance(count, (int, np.integer)) and not isinstance(count, bool)
        if not whole or not 0 <= int(count) < 2**36:  # type: ignore[call-overload]
            raise ConfigError(f"count={count!r}: give the number of the tensor's elements")
        out = ffi.new("rc_feedback **")
        if lib.rc_feedback_create(out, count) != OK:
            raise RingcommError(f"no memory for the residuals of {count} elements")
        self._handle, self._count = out[0], int(count)  # type: ignore[call-overload]


def require_scale(name: str, value: Any, least: float | None = None) -> None:
    """Raises ConfigError unless value is a finite number above 0, or at least ``least``."""
    number = isinstance(value, (int, float, np.integer, np.floating)) and value is not True
    if not number or not math.isfinite(value) or not (value > 0 or value == least):
        raise ConfigError(f"{name}={value!r}: give a finite number above 0")


def _copy(memory: Any, count: int) -> Floats:
    if not count:
        return np.zeros(0, np.float32)
    copy: Floats = np.frombuffer(ffi.buffer(memory, 4 * count), np.float32).copy()
    return copy
