"""Work: one submitted collective in flight.

A Work is the one record of what the core borrows for a call: the memory of its tensors, and the
residuals of its feedback. Its communicator holds it from before the core has the call until the
core is done with it, whatever becomes of the caller's Work, tensors and result.

Invariants: what keeps memory valid is given when a Work is made, and let go of in ``_finish``
alone. Its result is complete after the first wait, done or exception that sees it finished. Waiting
stays interruptible: the C wait is cut into slices.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from . import callers
from ._native import AGAIN, OK, error_class, ffi, lib, text
from .calls import is_number
from .errors import CommTimeoutError, ConfigError, RingcommError, TensorError

if TYPE_CHECKING:
    from .communicator import Communicator

SLICE_MS = 100


class Held(Protocol):
    """What keeps memory valid that the core borrows: a View, or the shortcut's Memory."""

    @property
    def finish(self) -> Callable[[], None] | None:
        """To be called once the core is done. Raises where the result is not in the tensor."""

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether any of the memory lies from address start to stop."""


@dataclasses.dataclass(frozen=True)
class WorkStats:
    """What this rank has done for one collective. Moments are those of time.monotonic_ns().

    Attributes:
        submitted_ns: the call.
        started_ns: its first frame left or came, or it entered shared memory; 0: neither.
        finished_ns: it was over; of a GPU's tensors before the copies back. 0 while in flight, as
            is all that follows.
        sent_bytes: payload sent over links, after compression and without frame headers.
        shared_bytes: put into the memory that ranks of one host share.
        rail_bytes: sent by each rail, in rail order, with frame headers. The eighth stands for all
            further ones.
    """

    submitted_ns: int = 0
    started_ns: int = 0
    finished_ns: int = 0
    sent_bytes: int = 0
    shared_bytes: int = 0
    rail_bytes: tuple[int, ...] = ()


class Work:
    """A collective in flight, as returned by calls with ``async_op=True``. Until it is over its
    tensors must be neither written, read for the result, nor resized: not a tensor's storage
    either (``untyped_storage().resize_()``, as FSDP does), since the core goes on using the memory.
    Resizing such a storage from Python raises TensorError.

    A Work may be dropped, and its tensors with it: their memory is held until the collective is
    over, and let go of by one of the next calls on its communicator, or when that is closed.

    Attributes:
        name: the call, for messages: ``allreduce(f32[1024])``.
        trace_id: its number in a timeline; 0: none yet.
        is_message: whether it is a send or receive of the caller's.
    """

    trace_id = 0
    is_message = False
    _slot: Any = (ffi.NULL,)
    #: None: nobody asked; empty: all that asked were told.
    _callbacks: tuple[Callable[[Work], None], ...] | None = None

    def __init__(
        self,
        comm: Communicator,
        name: str,
        held: Sequence[Held],
        result: Any,
        slot: Any = None,
        feedback: object = None,
    ) -> None:
        self.name = name
        # Where rc_submit puts the handle: NULL before, and for good if it was never reached.
        self._slot = ffi.new("rc_work **") if slot is None else slot
        self._comm = comm
        self._held = held
        self._feedback = feedback
        self._result = result
        self._error: RingcommError | None = None
        self._finished = False
        self._lock = threading.Lock()

    def __del__(self, free: Any = lib.rc_work_free) -> None:  # globals may be gone at exit
        free(self._slot[0])

    def uses(self, start: int, stop: int) -> bool:
        """Whether the core may still read or write memory from address start to stop."""
        return not self.done() and any(held.overlaps(start, stop) for held in self._held)

    def forget_result(self) -> None:
        """Drops the caller's tensor, for whose content nobody asks any more."""
        self._result = None

    def wait(self, timeout: float | None = None) -> Any:
        """Waits until the collective is over and returns its result.

        Args:
            timeout: seconds to wait; None: until it completes or its own deadline passes.

        Raises:
            ConfigError: ``timeout`` is no number.
            CommTimeoutError: still in flight after ``timeout``; the collective goes on and may be
                waited for again.
            RingcommError: the collective failed; the class says how.
        """
        self._comm.require_own_process()
        if timeout is not None and not is_number(timeout):
            raise ConfigError(f"timeout={timeout!r}: give seconds, or None")
        deadline = None if timeout is None else time.monotonic() + timeout
        if callers.are_running and callers.is_caller() and self._poll(0) == AGAIN:
            callers.step_aside()
        while True:
            left = SLICE_MS
            if deadline is not None:
                left = int(max(0.0, min(left, (deadline - time.monotonic()) * 1000)))
            result = self._poll(left)
            if result != AGAIN:
                return self._settle(result)
            if deadline is not None and time.monotonic() >= deadline:
                raise CommTimeoutError(
                    f"{self.name} #{self.seq} is still in flight after {timeout:g} s; it goes on",
                    seq=self.seq,
                    elapsed=timeout,
                )

    def done(self) -> bool:
        """True once the collective is over, well or not. Never waits."""
        self._comm.require_own_process()
        result = self._poll(0)
        if result == AGAIN:
            return False
        if not self._finished:
            self._finish(result)
        return True

    def exception(self) -> RingcommError | None:
        """The failure, or None if there is none (yet). Never waits."""
        return self._error if self.done() else None

    def call_back(self, callback: Callable[[Work], None], elsewhere: bool = False) -> None:
        """Calls back with this Work once it is over, from a thread that makes such calls (of its
        communicator's ``on_done``; callers.py says in which order), or at once where it is, unless
        it has to be elsewhere."""
        if not elsewhere and self.done():
            callback(self)
            return
        with self._lock:
            first, told = self._callbacks is None, self._callbacks == ()
            if not told:
                self._callbacks = (*(self._callbacks or ()), callback)
        if told:
            callback(self)
        elif first:
            self._comm._engine.watch(self._slot, self._tell)
            if lib.rc_work_notify(self._slot[0]) != OK:
                self._comm._engine.unwatch(self._slot)

    def _tell(self) -> None:
        self.done()
        with self._lock:
            callbacks, self._callbacks = self._callbacks or (), ()
        for callback in callbacks:
            callback(self)

    @property
    def holds_feedback(self) -> bool:
        """Whether the core is still going to have its feedback, beside what it has."""
        return False

    @property
    def root(self) -> int:
        """The root of a rooted collective, or the other rank of a send or receive: of one from any
        source the sender, -1 until that is known."""
        return int(lib.rc_work_root(self._slot[0]))

    @property
    def seq(self) -> int:
        """Its number on its communicator, equal on all ranks; of a send or receive, that between
        its two ranks among those of its tag."""
        return int(lib.rc_work_seq(self._slot[0]))

    @property
    def elapsed(self) -> float:
        """Seconds from submission to completion; 0.0 while in flight."""
        return float(lib.rc_work_elapsed(self._slot[0]))

    def stats(self) -> WorkStats:
        """What it has moved, and when. Complete once it is over."""
        told = ffi.new("rc_work_stats *")
        if self._slot[0]:
            self._fetch_stats(told)
        rails = len(self._comm.rails)
        return WorkStats(
            told.submitted_ns,
            told.started_ns,
            told.finished_ns,
            told.sent_bytes,
            told.shared_bytes,
            tuple(told.rail_bytes)[:rails],
        )

    def _poll(self, timeout_ms: int) -> int:
        handle = self._slot[0]
        return int(lib.rc_work_wait(handle, timeout_ms)) if handle else AGAIN

    def _settle(self, result: int) -> Any:
        if not self._finished:
            self._finish(result)
        if self._error is not None:
            raise self._error
        return self._result

    def _finish(self, result: int) -> None:
        """Once: scatters results back, lets go of the tensors, makes the exception."""
        with self._lock:
            if self._finished:
                return
            if result == OK:
                self._error = self._scatter_back()
            else:
                self._error = self._make_error(result)
            let_go = self._held, self._feedback  # behind the lock, as finalizers may ask this Work
            self._held, self._feedback = (), None
            self._finished = True
        del let_go
        self._comm.note_over(self)

    def _scatter_back(self) -> RingcommError | None:
        try:
            for held in self._held:
                if held.finish is not None:
                    held.finish()
        except Exception as error:  # the tensor was changed in flight
            return TensorError(
                f"{self.name} #{self.seq}: the result is complete, and cannot be "
                f"written to the tensor: {error}",
                seq=self.seq,
            )
        return None

    def _make_error(self, result: int) -> RingcommError:
        error = ffi.new("rc_error *")
        self._fetch_error(error)
        rank = None if error.rank < 0 else int(error.rank)
        host = self._comm.host_of(rank)
        place = f"rank {self._comm.rank} ({self._comm.host_of(self._comm.rank)})"
        culprit = f" [rank {rank} is on {host}]" if host and rank != self._comm.rank else ""
        return error_class(result)(
            f"{self.name} #{self.seq} failed on {place} after {error.elapsed_s:.2f} s: "
            f"{text(error.message)}{culprit}",
            rank=rank,
            host=host,
            rail=None if error.rail < 0 else int(error.rail),
            lane=None if error.lane < 0 else int(error.lane),
            seq=self.seq,
            elapsed=float(error.elapsed_s),
        )

    def _fetch_error(self, error: Any) -> None:
        lib.rc_work_error(self._slot[0], error)

    def _fetch_stats(self, stats: Any) -> None:
        lib.rc_work_stats_get(self._slot[0], stats)

    def __repr__(self) -> str:
        state = "in flight" if not self.done() else "failed" if self._error else "done"
        return f"<ringcomm.Work {self.name} #{self.seq} {state}>"
