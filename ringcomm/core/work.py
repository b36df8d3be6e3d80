"""Work: one submitted collective in flight.

A Work is the one record of all that the core borrows for a call: the memory of its tensors, and the
residuals of its feedback. Its communicator holds it from before the core has the call until the
core is done with it, even if the caller drops the Work, the tensors and the result. Of a call that
is run now ``Dispatcher._calls_in_core`` has the memory, until it returns or gets a Work.

Invariants: the objects that keep memory valid are given when a Work is made, and released in
``_finish`` alone. Its result is complete after the first wait, done or exception that sees it
finished. Waiting stays interruptible: the C wait is cut into slices.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

from ..bootstrap.mesh import RailInfo
from ..errors import CommTimeoutError, ConfigError, RingcommError, TensorError
from . import callback_threads
from .calls import is_number
from .native import AGAIN, OK, Engine, address_of, error_class, ffi, inherited, lib, text
from .views import View

SLICE_MS = 100


class Memory:
    """Whole memory of a plain tensor, held for a Work.

    Args:
        keep: what a function of PLAIN returned last: a storage of torch, or a buffer of cffi.
    """

    __slots__ = ("_base", "_keep")

    def __init__(self, keep: Any) -> None:
        self._keep = keep
        self._base = self._start()

    def _start(self) -> int:
        keep = self._keep
        return int(keep.data_ptr()) if hasattr(keep, "data_ptr") else address_of(keep)

    def finish(self) -> None:
        """Raises ValueError if the storage was moved while the core wrote to its old memory."""
        if self._start() != self._base:
            raise ValueError("its storage was resized in flight")

    def overlaps(self, start: int, stop: int) -> bool:
        """True if any of it lies from address start to stop."""
        keep = self._keep
        nbytes = keep.nbytes() if hasattr(keep, "nbytes") else len(ffi.buffer(keep))
        return start < self._base + nbytes and self._base < stop


Held = View | Memory
"""Holder of memory that the core borrows; ``finish`` is called once the core is done, and raises if
the result is not in the tensor."""


def functions_of(kind: str) -> Any:
    """Returns the functions that the core has alike for an rc_work and an rc_flight."""
    names = ("elapsed", "error", "free", "notify", "root", "seq", "stats_get", "wait")
    return SimpleNamespace(**{name: getattr(lib, f"rc_{kind}_{name}") for name in names})


class Owner(Protocol):
    """Communicator of a Work, as far as works use it."""

    engine: Engine
    rank: int
    rails: list[RailInfo]

    def host_of(self, rank: int | None) -> str | None:
        """Returns the host name of a rank; None for no rank."""

    def note_over(self, work: Work, error: RingcommError | None) -> None:
        """Notes that a work was first seen to be over, with its error."""


def write_back(held: Sequence[Held], name: str, seq: int | None = None) -> TensorError | None:
    """Finishes with the memory of a collective that has succeeded: results that lie in copies go to
    their tensors. Returns the error if the caller has changed a tensor in flight."""
    try:
        for one in held:
            if one.finish is not None:
                one.finish()
    except Exception as error:
        about = name if seq is None else f"{name} #{seq}"
        return TensorError(
            f"{about}: the result is complete, and cannot be written to the tensor: {error}",
            seq=seq,
        )
    return None


def lock_to_end(lock: Any, is_over: Callable[[], bool]) -> bool:
    """Acquires the RLock of the thread that ends a work, unless the work is over; returns whether
    it did. The lock may then still be held: by a call within which a signal handler has ended the
    work, and closes its communicator, which waits for this thread."""
    while not lock.acquire(timeout=SLICE_MS / 1000):
        if is_over():
            return False
    return True


@dataclasses.dataclass(frozen=True)
class WorkStats:
    """Counters of this rank's part in one collective. Times are those of time.monotonic_ns().

    Attributes:
        submitted_ns: time of the call.
        started_ns: time when its first frame was sent or received, or it entered shared memory;
            0: neither.
        finished_ns: time when it was over; with GPU tensors before the copies back. 0 while in
            flight, as are the following ones.
        sent_bytes: payload sent over links, after compression and without frame headers.
        shared_bytes: bytes put into the memory that ranks of one host share.
        rail_bytes: bytes sent by each rail, in rail order, with frame headers. The eighth stands
            for all further ones.
        in_memory: whether it went through the memory that ranks of one host share; among hosts it
            went over links, too.
    """

    submitted_ns: int = 0
    started_ns: int = 0
    finished_ns: int = 0
    sent_bytes: int = 0
    shared_bytes: int = 0
    rail_bytes: tuple[int, ...] = ()
    in_memory: bool = False


class Work:
    """A collective in flight, as returned by calls with ``async_op=True``. Until it is over its
    tensors must be neither written, read for the result, nor resized: not a tensor's storage
    either (``untyped_storage().resize_()``, as FSDP does), since the core still uses the memory.
    Resizing such a storage from Python raises TensorError.

    A Work may be dropped, and its tensors with it: their memory is held until the collective is
    over, and released by one of the next calls on its communicator, or when that is closed.

    Attributes:
        name: the call, for messages: ``allreduce(f32[1024])``.
        is_message: True for a send or receive of the user's.
        slot: holds the core's handle, NULL until the core has the call.
        held: holders of its memory, until it is over.
    """

    is_message = False
    slot: Any = (ffi.NULL,)
    _core = functions_of("work")
    #: Callbacks to run at the end; None: none was registered, empty: all have run.
    _callbacks: tuple[Callable[[Work], None], ...] | None = None

    def __init__(
        self,
        comm: Owner,
        name: str,
        held: Sequence[Held],
        result: Any,
        slot: Any = None,
        feedback: object = None,
    ) -> None:
        self.name = name
        self.slot = ffi.new("rc_work **") if slot is None else slot
        self._comm = comm
        self.held = held
        self._feedback = feedback
        self._result = result
        self._error: RingcommError | None = None
        self._finished = False
        # RLocks, as a signal handler may call this Work while its thread holds one of them.
        self._lock = threading.RLock()  # guards _callbacks
        self._ending = threading.RLock()

    def __del__(self) -> None:  # reads no global, which may be gone at exit
        self._core.free(self.slot[0])

    def uses(self, start: int, stop: int) -> bool:
        """True while the core may read or write memory from address start to stop."""
        return not self.done() and any(held.overlaps(start, stop) for held in self.held)

    def forget_result(self) -> None:
        """Drops the caller's tensor, whose content is not needed any more."""
        self._result = None

    def wait(self, timeout: float | None = None) -> Any:
        """Waits until the collective is over and returns its result.

        Args:
            timeout: seconds to wait; None: until it completes or its own deadline passes.

        Raises:
            ConfigError: ``timeout`` is no number.
            CommTimeoutError: still in flight after ``timeout``; the collective continues, and
                wait() may be called again.
            RingcommError: the collective failed; the class tells how.
        """
        if timeout is not None and not is_number(timeout):
            raise ConfigError(f"timeout={timeout!r}: give seconds, or None")
        deadline = None if timeout is None else time.monotonic() + timeout
        if callback_threads.are_running and self._poll(0) == AGAIN:
            callback_threads.about_to_block()
        while True:
            left = SLICE_MS
            if deadline is not None:
                left = int(max(0.0, min(left, (deadline - time.monotonic()) * 1000)))
            result = self._poll(left)
            if result != AGAIN:
                return self._return_or_raise(result)
            if deadline is not None and time.monotonic() >= deadline:
                raise CommTimeoutError(
                    f"{self.name} #{self.seq} is still in flight after {timeout:g} s; it goes on",
                    seq=self.seq,
                    elapsed=timeout,
                )

    def done(self) -> bool:
        """True once the collective is over, well or not. Never waits."""
        result = self._poll(0)
        if result == AGAIN:
            return False
        if not self._finished:
            self._finish(result)
        return True

    def exception(self) -> RingcommError | None:
        """Returns the failure, or None if there is none (yet). Never waits."""
        return self._error if self.done() else None

    def call_back(self, callback: Callable[[Work], None], elsewhere: bool = False) -> None:
        """Calls back with this Work once it is over, from a thread of callback_threads.py, which
        documents the order. Calls back at once on this thread if the Work is over already, unless
        ``elsewhere`` is True, and in any case if earlier callbacks have run."""
        if not elsewhere and self.done():
            callback(self)
            return
        with self._lock:
            first, have_run = self._callbacks is None, self._callbacks == ()
            if first:  # raises if no thread can start; the next callback tries again
                self._comm.engine.watch(self.slot, self._end)
            if not have_run:
                self._callbacks = (*(self._callbacks or ()), callback)
        if have_run:
            callback(self)
        elif first and self._core.notify(self.slot[0]) != OK:
            self._comm.engine.unwatch(self.slot)

    def notify(self, callback: Callable[[Work], None]) -> None:
        """Registers the callback of a call that is about to be submitted with notify."""
        self._comm.engine.watch(self.slot, self._end)
        self._callbacks = (callback,)

    def _end(self) -> None:
        self.done()
        self.run_callbacks()

    def run_callbacks(self) -> None:
        """Runs the callbacks of call_back(): the collective is over."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks or (), ()
        for callback in callbacks:
            callback(self)

    @property
    def root(self) -> int:
        """Root of a rooted collective, or the other rank of a send or receive: of a receive from
        any source the sender, -1 until it is known."""
        return int(self._core.root(self.slot[0])) if self.slot[0] else -1

    @property
    def seq(self) -> int:
        """Number of the collective on its communicator, equal on all ranks; of a send or receive,
        its number between its two ranks among those of its tag; 0 until the core has the call."""
        return int(self._core.seq(self.slot[0])) if self.slot[0] else 0

    @property
    def elapsed(self) -> float:
        """Seconds from submission to completion; 0.0 while in flight."""
        return float(self._core.elapsed(self.slot[0])) if self.slot[0] else 0.0

    def stats(self) -> WorkStats:
        """Returns the counters of this work, complete once it is over."""
        stats = ffi.new("rc_work_stats *")
        if self.slot[0]:
            self._core.stats_get(self.slot[0], stats)
        return WorkStats(
            stats.submitted_ns,
            stats.started_ns,
            stats.finished_ns,
            stats.sent_bytes,
            stats.shared_bytes,
            tuple(stats.rail_bytes)[: len(self._comm.rails)],
            bool(stats.in_memory),
        )

    def _poll(self, timeout_ms: int) -> int:
        """Waits so long for the end; returns its rc_result, or AGAIN. Raises NotInitializedError in
        a forked child."""
        if self._comm.engine.forked:
            raise inherited()
        handle = self.slot[0]
        return int(self._core.wait(handle, timeout_ms)) if handle else AGAIN

    def _return_or_raise(self, result: int) -> Any:
        if not self._finished:
            self._finish(result)
        if self._error is not None:
            raise self._error
        return self._result

    def _finish(self, result: int) -> None:
        """Scatters results back, releases the tensors and makes the exception, once; a signal
        handler that asks meanwhile does it all."""
        if not lock_to_end(self._ending, lambda: self._finished):
            return
        try:
            if self._finished:
                return
            if result == OK:
                error: RingcommError | None = write_back(self.held, self.name, self.seq)
            else:
                error = self._make_error(result)
            if self._finished:  # a signal handler has asked
                return
            self._error = error
            released = self.held, self._feedback  # freed unlocked: finalizers may ask this Work
            self.held, self._feedback = (), None
            self._finished = True
        finally:
            self._ending.release()
        del released
        self._comm.note_over(self, self._error)

    def _make_error(self, result: int) -> RingcommError:
        error = ffi.new("rc_error *")
        self._core.error(self.slot[0], error)
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

    def __repr__(self) -> str:
        state = "in flight" if not self.done() else "failed" if self._error else "done"
        return f"<ringcomm.Work {self.name} #{self.seq} {state}>"


def when_all_over(works: Sequence[Work], then: Callable[[], None], elsewhere: bool = False) -> None:
    """Calls ``then`` with the last callback of some works; at once, if there are none.
    ``elsewhere``: as of ``Work.call_back``."""
    left = len(works)
    counting = threading.Lock()

    def one_over(_: Work) -> None:
        nonlocal left
        with counting:
            left -= 1
            last = left == 0
        if last:
            then()

    for work in works:
        work.call_back(one_over, elsewhere)
    if not works:
        then()
