"""The Work that torch gets for each collective: one or several of ringcomm's, and their result.

Most callers only wait, so a Future is made when it is asked for, and only then does ringcomm's
callback thread hear of the collective.

Invariants: ``after``, the work on this rank that follows the transfers, runs once, in the first
thread that sees their end: a waiting thread, or the callback thread. (A signal handler that asks
within it runs it again, whole.) A Future is completed after it. On a GPU ``after`` is queued on the
current stream, and each stream that waits follows it: the host does not wait for copies.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..core import callback_threads, cuda, pipe
from ..core.faces.torch import torch_stream
from ..core.work import Work, lock_to_end, when_all_over
from .streams import future_on

_TorchWork: Any = getattr(dist, "Work", None) or getattr(dist, "_Work")  # noqa: B009
# torch's C++ may hold a Work without its Python object, and waits for ever once that is gone: any
# Work before 2.7; since then a Work that Python code passed to C++, as DDP.join does with that of
# an all-reduce of one element, whose result it reads later. So the latest Works are kept here,
# since 2.7 only those dropped before any thread waited for them. Larger tensors are released.
_KEEPS_ALL = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 7)
_kept: collections.deque[RingWork] = collections.deque(maxlen=4096 if _KEEPS_ALL else 256)
_FEW = 16
_NEVER = datetime.timedelta(0)  # torch's "no timeout given", as all values below it


def seconds_of(timeout: Any) -> float | None:
    """Returns torch's timeout in seconds, from a millisecond to a million; None if none was
    given."""
    if timeout is None or timeout <= _NEVER:
        return None
    return float(min(max(timeout.total_seconds(), 0.001), 1e6))


class RingWork(_TorchWork):  # type: ignore[misc]
    """A collective as torch sees it.

    Args:
        parts: the works that it consists of; none: it is over.
        tensors: its result.
        after: runs on this rank when all parts are over.
        used: tensors on a GPU that ``after`` reads.

    Attributes:
        is_settled: whether nothing is left to do: no part is in flight, and ``after`` has run.
    """

    _dropped_well = True  # until __init__ has run

    def __init__(
        self,
        parts: Sequence[Work],
        tensors: list[torch.Tensor],
        after: Callable[[], None] | None = None,
        used: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        self._parts = parts
        self._tensors = tensors
        self._after = after
        self._used = used
        self._ready: list[tuple[torch.device, Any]] = []  # events behind ``after``
        self.is_settled = not parts and after is None
        # The result is copied to a GPU: each stream that waits must follow the copy.
        self._orders = any(isinstance(part, pipe.DeviceWork) for part in parts)
        self._error: BaseException | None = None
        self._future: Any = None
        self._recorded = False
        # A signal handler may call within a call.
        self._lock = threading.RLock()  # guards _future
        self._ending = threading.RLock()
        # Set when a thread has waited, or need not.
        self._dropped_well = _KEEPS_ALL or self.is_settled
        if _KEEPS_ALL:
            _kept.append(self)

    def __del__(self, keep: Any = _kept) -> None:  # globals may be gone at exit
        if self._dropped_well:
            return
        self._dropped_well = True
        self._forget_tensors()
        keep.append(self)

    def _forget_tensors(self) -> None:
        """Releases a result that can no longer be read, unless it is a few numbers."""
        if sum(tensor.numel() for tensor in self._tensors) <= _FEW:
            return
        self._tensors = []
        for part in self._parts:
            part.forget_result()

    @classmethod
    def finished(cls, tensors: list[torch.Tensor]) -> RingWork:
        """Makes a Work that is over and has succeeded."""
        return cls((), tensors)

    def wait(self, timeout: datetime.timedelta = _NEVER) -> bool:
        """Waits for the result. Raises the ringcomm error if the collective failed, and
        CommTimeoutError (a RuntimeError) if it is still in flight after the timeout."""
        if not self.is_settled or self._orders:
            seconds = seconds_of(timeout)
            deadline = None if seconds is None else time.monotonic() + seconds
            for part in self._parts:
                part.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            self._settle()
        self._follow_after()
        if self._recorded and not callback_threads.on_callback_thread():
            with contextlib.suppress(RuntimeError):  # the error is raised below
                self._future.wait()  # ends the profiler's range
        if self._error is not None:
            raise self._error
        self._dropped_well = True
        if _KEEPS_ALL and self._future is None:
            self._forget_tensors()
        return True

    def synchronize(self) -> None:
        """Waits for the result, without a timeout."""
        self.wait()

    def is_completed(self) -> bool:
        """Returns whether it is over, failed or not. Never waits."""
        if not self.is_settled and all(part.done() for part in self._parts):
            self._settle()
        return self.is_settled and all(event.query() for _, event in self._ready)

    def is_success(self) -> bool:
        """Returns whether it is over and has succeeded."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Returns the failure, or None if there is none so far."""
        return self._error if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        """Returns the tensors that hold the result."""
        return self._tensors

    def source_rank(self) -> int:
        """Returns the rank that a finished receive came from."""
        return self._parts[0].root if self._parts else -1

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Returns a Future of the tensors, which fails with the error's text."""
        with self._lock:
            if self._future is not None:
                return self._future
            over = future_on(_devices(self._tensors))
            future = over.then(self._outcome)
            halves = [t for t in self._tensors if t.is_cpu and t.dtype == torch.float16]
            if halves and len(halves) == len(self._tensors):
                future = _for_cpp()(future, halves)
            self._future = future
        self._dropped_well = True
        if not self.is_completed():
            callback_threads.about_to_block()  # a callback that asks for this may wait for it
        self._when_over(lambda: over.set_result(None))
        return self._future

    getFuture = get_future  # noqa: N815 (torch's)

    def record(self, change: Callable[[Any], Any]) -> None:
        """Replaces the Future by the profiler's, which ends a range, in another thread than this:
        so the profiler takes the range for asynchronous."""
        over = future_on(_devices(self._tensors))
        self._future = change(over.then(self._outcome))
        self._recorded = True
        self._when_over(lambda: over.set_result(None), elsewhere=bool(self._parts))

    def deliver(self, delivered: Callable[[RingWork], None]) -> None:
        """Runs ``after`` when all parts are over, even if this Work is dropped, and then calls
        ``delivered`` with it."""

        def over() -> None:
            self._settle()
            delivered(self)

        self._when_over(over)

    def _when_over(self, then: Callable[[], None], elsewhere: bool = False) -> None:
        """Calls ``then`` when all parts are over: at once, if they are, unless ``elsewhere`` asks
        for another thread."""
        if not elsewhere and (self.is_completed() or self.is_settled):
            then()
        else:
            when_all_over(self._parts, then, elsewhere)

    def _outcome(self, _: Any) -> list[torch.Tensor]:
        self._settle()
        if self._error is not None:
            raise self._error
        with cuda.current_stream():  # the stream of the Future's callbacks
            self._order()
            self._follow_after()
        return self._tensors

    def _order(self) -> None:
        """Makes the current stream follow the results of the parts, which are over."""
        if self._orders:
            for part in self._parts:
                part.wait()

    def _follow_after(self) -> None:
        """Makes the current stream, and one chosen by ``cuda.stream``, follow ``after``, which has
        been queued."""
        chosen = cuda.chosen_stream()
        for device, event in self._ready:
            torch.cuda.current_stream(device).wait_event(event)
            if chosen is not None:
                torch_stream(torch, chosen, device).wait_event(event)

    def _finish(self, after: Callable[[], None]) -> None:
        """Runs ``after`` on torch's current stream."""
        with cuda.current_stream():
            self._order()
        streams = {device: torch.cuda.current_stream(device) for device in _devices(self._tensors)}
        for tensor in (*self._used, *self._tensors):  # perhaps allocated on another stream
            if tensor.device in streams:
                tensor.record_stream(streams[tensor.device])
        after()
        for device, stream in streams.items():
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
            self._ready.append((device, event))

    def _settle(self) -> None:
        """Runs ``after``, once, when all parts are over, and keeps the error; a signal handler that
        asks meanwhile does it all."""
        if not lock_to_end(self._ending, lambda: self.is_settled):
            return
        try:
            if self.is_settled:
                return
            error: BaseException | None = next(
                (e for part in self._parts if (e := part.exception())), None
            )
            if error is None and self._after is not None:
                try:
                    self._finish(self._after)
                except Exception as failure:  # the tensor was changed in flight
                    error = failure
            if self.is_settled:  # a signal handler has asked
                return
            self._error = error
            # Dropped outside the lock: this may free the group, whose __del__ calls this Work.
            released = self._after, self._used
            self._after, self._used = None, ()
            self.is_settled = True
        finally:
            self._ending.release()
        del released


@functools.cache
def _for_cpp() -> Any:
    """Compiles a function that turns a Future completed by Python into one whose list of tensors
    torch's C++ can read, as DDP's built-in hook FP16_COMPRESS does. C++ sees the first one's value
    as an opaque Python object."""
    return torch.jit.CompilationUnit("""
def when_over(over: Future[List[Tensor]], tensors: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(over)
    return tensors

def for_cpp(over: Future[List[Tensor]], tensors: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(when_over, over, tensors)
""").for_cpp


def _devices(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Returns the GPUs of these tensors."""
    return sorted({t.device for t in tensors if t.device.type == "cuda"}, key=str)


def together(works: Sequence[RingWork]) -> RingWork:
    """Joins several works to one."""
    return RingWork(
        [part for work in works for part in work._parts],
        [tensor for work in works for tensor in work.result()],
        functools.partial(wait_for_all, works),
    )


def wait_for_all(works: Sequence[RingWork]) -> None:
    """Waits for several works, each until its own timeout."""
    for work in works:
        work.wait()
