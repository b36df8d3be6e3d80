"""Collectives of GPU tensors: Pipe, which owns an rc_pipe, and DeviceWork, the Work of a flight.

A communicator has one pipe, made with the first GPU tensor, for that tensor's GPU. A thread of
Python takes from it the flights that are over (the collective ended) and that have landed (the
copies to the GPU ended, too).

Invariants: a flight's tensors are kept until no copy can touch them, even if the Work is dropped.
When ``wait`` returns, the caller's stream waits for the result, and the copies to the GPU may
still be under way; when ``done`` is True, they are over.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

from ..errors import RingcommError, TensorError
from . import cuda
from .callback_threads import CallbackThreads
from .native import AGAIN, OK, address_of, check, ffi, inherited, lib, text
from .views import DeviceView, PackedView, streams_of
from .work import SLICE_MS, Held, Owner, Work, functions_of

CALLBACK_THREAD = "ringcomm-gpu"
ARENA_BYTES = 256 << 20
_log = logging.getLogger("ringcomm")
_logged_gpus: set[int] = set()  # GPUs whose lack of kernels was logged


class DeviceWork(Work):
    """A collective of GPU tensors in flight. Differs from a Work in the time at which it is over:

    ``wait`` returns once the copy of the result to the GPU has begun, and makes the current stream
    wait for it (without a known stream it returns after the copy). ``done`` is True, and a callback
    of ``on_done`` is called, after the copy: every stream and the host may use the result then.

    Attributes:
        where: tells the GPU, and the stream, of its tensors.
    """

    _core = functions_of("flight")

    def __init__(
        self,
        comm: Owner,
        name: str,
        held: Sequence[Held],
        result: Any,
        where: DeviceView,
        on_done: Callable[[Work], None] | None,
        feedback: object,
    ) -> None:
        super().__init__(comm, name, held, result, ffi.new("rc_flight **"), feedback)
        self.where = where
        self._on_done = on_done

    def wait(self, timeout: float | None = None, stream: Any = None) -> Any:
        """Waits as Work.wait. ``stream``: is made to wait for the result; None: the current one."""
        with contextlib.nullcontext() if stream is None else cuda.stream(stream):
            return super().wait(timeout)

    def done(self) -> bool:
        """True once the result is on the GPU, or the collective has failed. Never waits."""
        if self._comm.engine.forked:
            raise inherited()
        if not self.slot[0] or lib.rc_flight_landed(self.slot[0], 0) == AGAIN:
            return False
        self._finish(self._poll(0))
        return True

    def exception(self) -> RingcommError | None:
        """Returns the failure as Work.exception, even before the tensors are released."""
        result = self._poll(0)
        if self._error is None and result not in (OK, AGAIN):
            return self._make_error(result)
        return super().exception()

    def call_back(self, callback: Callable[[Work], None], elsewhere: bool = False) -> None:
        """Calls back with this Work once ``wait`` would return at once: from the pipe's thread, so
        ``elsewhere`` is not read, or on this thread if earlier callbacks have run."""
        with self._lock:
            have_run = self._callbacks == ()
            if not have_run:
                self._callbacks = (*(self._callbacks or ()), callback)
        if have_run:
            callback(self)
        else:
            self._core.notify(self.slot[0])

    def landed(self) -> None:
        """Releases the tensors and runs the callback of on_done: the result is on the GPU. Called
        by the pipe's thread, as ``run_callbacks`` is."""
        self.run_callbacks()  # callbacks that were registered after run_callbacks() was called
        self._finish(self._poll(0))
        callback, self._on_done = self._on_done, None
        if callback is not None:
            callback(self)

    def _return_or_raise(self, result: int) -> Any:
        """Raises the error of a flight that is over, or makes the streams wait for its result."""
        if result != OK:
            raise self._make_error(result) if self._error is None else self._error
        streams = streams_of(self.held)
        if cuda.NO_STREAM in streams or not streams:
            while (result := int(lib.rc_flight_landed(self.slot[0], SLICE_MS))) == AGAIN:
                pass
            if result != OK:
                raise self._make_error(result)
        else:
            error = ffi.new("rc_error *")
            for stream in streams:
                code = lib.rc_flight_order(self.slot[0], stream, error)
                if code != OK:
                    check(code, f"{self.name} #{self.seq}: ", error)
        return self._result


class Pipe:
    """Pipe of a communicator to one GPU.

    Args:
        comm_handle: the communicator's rc_comm.

    Attributes:
        device: the GPU's number.
    """

    def __init__(self, comm_handle: Any, device: int) -> None:
        *better, last = _images()
        self.device = device
        self._handle = _make_pipe(comm_handle, device, better[0] if better else last)
        if better and text(lib.rc_pipe_without_kernels(self._handle)):
            lib.rc_pipe_stop(self._handle)
            lib.rc_pipe_free(self._handle)
            self._handle = _make_pipe(comm_handle, device, last)
        reason = text(lib.rc_pipe_without_kernels(self._handle))
        if reason and device not in _logged_gpus:
            _logged_gpus.add(device)
            _log.warning("the CPU compresses the tensors of GPU %d: %s", device, reason)
        self._free = weakref.finalize(self, lib.rc_pipe_free, self._handle)
        self._free.atexit = False
        self._works: dict[int, DeviceWork] = {}
        self._registered = threading.RLock()  # an RLock, for signal handlers (see work.py)
        # rc_pipe_stop ends a ``take``.
        self._callback_threads = CallbackThreads(CALLBACK_THREAD, self.take, lambda: None)

    def submit(self, work: DeviceWork, call: Any) -> tuple[int, Any]:
        """Submits the work's call.

        Returns:
            The rc_result and the rc_error; the work is under way if the former is OK.

        Raises TensorError for tensors that follow several streams.
        """
        stream = _one_stream(work)
        if not self._callback_threads.are_started:
            self._callback_threads.start()
        error, slot = ffi.new("rc_error *"), work.slot
        pieces = work.where.pieces if isinstance(work.where, PackedView) else []
        parts = ffi.new("rc_piece[]", [(p.address, at, p.nbytes) for at, p in pieces])
        with self._registered:
            try:
                code = lib.rc_pipe_submit(
                    self._handle, call, parts, len(parts), stream, slot, error
                )
            finally:
                if slot[0]:
                    self._works[address_of(slot[0])] = work
        return code, error

    def drain(self) -> None:
        """Waits until all flights so far have reached the core, so that the next call submitted to
        the core comes after them on all ranks."""
        while lib.rc_pipe_drain(self._handle, SLICE_MS) == AGAIN:
            pass

    @property
    def stream(self) -> int:
        """Handle of the stream that copies results to the GPU: work behind it runs after the copies
        of all flights that are over."""
        return int(lib.rc_pipe_stream(self._handle))

    def stop(self) -> None:
        """Ends all flights. Call it after rc_comm_close and before rc_comm_free."""
        lib.rc_pipe_stop(self._handle)
        self._callback_threads.stop(lambda: None)

    def take(self, timeout_ms: int) -> Callable[[], None] | None:
        """Waits for the next flight that is over or has landed; returns the method to call."""
        out, landed = ffi.new("rc_flight **"), ffi.new("int *")
        if lib.rc_pipe_take(self._handle, timeout_ms, out, landed) != OK:
            return None
        with self._registered:
            number = address_of(out[0])
            work = self._works.pop(number) if landed[0] else self._works[number]
        lib.rc_flight_free(out[0])
        return work.landed if landed[0] else work.run_callbacks


def _one_stream(work: DeviceWork) -> int:
    """Returns the stream that the work's call follows. Raises TensorError if there are several."""
    streams = [stream for stream in streams_of(work.held) if stream != cuda.NO_STREAM]
    if len(streams) > 1:
        raise TensorError(
            f"{work.name}: the call's tensors follow streams {', '.join(map(hex, streams))}; let "
            "one wait for the others, and call within `with ringcomm.cuda.stream(...)` of that"
        )
    return streams[0] if streams else cuda.NO_STREAM


def _make_pipe(comm_handle: Any, device: int, kernels: bytes) -> Any:
    out, error = ffi.new("rc_pipe **"), ffi.new("rc_error *")
    code = lib.rc_pipe_create(out, comm_handle, cuda.library(), device, kernels, ARENA_BYTES, error)
    check(code, f"GPU {device}: ", error)
    return out[0]


def _images() -> list[bytes]:
    """Returns the kernels that pack tensors on the GPU: machine code, if the build had an nvcc and
    the usual driver is used, which may still be too old for it or have another GPU; and last PTX,
    which any driver compiles."""
    folder = resources.files("ringcomm")
    ptx = folder.joinpath("kernels.ptx").read_bytes()
    # As setup.py names it, by a digest of the PTX.
    code = folder.joinpath(f"kernels-{hashlib.sha256(ptx).hexdigest()[:16]}.fatbin")
    own = cuda.library() == cuda.LIBRARY.encode() and code.is_file()
    return [code.read_bytes(), ptx] if own else [ptx]
