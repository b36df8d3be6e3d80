"""Dispatch: the ways of a call into the core, and the works in flight on a communicator's handle.

    shortcut    the commonest calls on host memory: an all-reduce or a broadcast of a dense tensor,
                in place, and a barrier
    long way    all others: Dispatcher.run_collective
    pipe        calls on a GPU's tensors, which the long way hands to the pipe

The long way makes a View and a Work for each call and checks all arguments, which takes longer
than a small message takes over the wire: 15 us against 3. By the shortcut the call is prepared once
for each dtype and kind of call, the memory is found directly, the core submits and waits in one
call, and a Work is made only if that takes long or is interrupted.

The shortcut holds no lock of the communicator while a call waits. Instead the call registers in
``_calls_in_core`` before it reads the handle, and close() clears the handle, waits until no other
thread is registered, then frees it.

Invariants: the shortcut leaves all other calls, and calls that the core refuses, to the long way
with nothing submitted, so that the long way alone words the errors. A call that the core still has
when an exception leaves is held by a Work of the communicator.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from itertools import islice
from threading import get_ident
from typing import Any

import numpy as np

from ._native import OK, acquire_engine, error_class, ffi, lib, text
from .bootstrap.mesh import Mesh
from .buffers import View
from .calls import Feedback, is_integer, is_message, make_call
from .config import Config
from .devices import DeviceView, common_device, view
from .errors import ConfigError, NotInitializedError, RingcommError, TensorError
from .pipe import DeviceWork, Pipe
from .residuals import Residuals
from .timeline import Timeline
from .work import SLICE_MS, Work

_log = logging.getLogger("ringcomm")
_UNWAITED = 64  # works in flight, some maybe finished, from which on all are checked
_OLDEST = 2  # works checked with each call: more than it adds

_VOID = ffi.typeof("void *")
_cast, _from_buffer, _buffer = ffi.cast, ffi.from_buffer, ffi.buffer
_CALL = ffi.typeof("rc_call *")
_SLOT = ffi.typeof("rc_work **")
_ALLREDUCE, _BROADCAST, _BARRIER = lib.RC_ALLREDUCE, lib.RC_BROADCAST, lib.RC_BARRIER

Kind = tuple[int, str, str | None, int]
"""Kind of a call: collective, op, compression, root."""
Plain = tuple[Any, Any, int, Any]
"""Memory of a tensor: dtype object, pointer, count of elements, and the object that keeps it."""

_NO_MEMORY: Plain = (None, ffi.NULL, 0, None)


def plain_memory(obj: Any) -> Plain | None:
    """Finds the memory of the commonest tensors: of numpy's or torch's own class, dense, on the
    CPU, and writable.

    Returns:
        Its dtype object (of any dtype), a pointer to its memory, its count of elements, and the
        object that keeps that memory valid: for torch the storage, as ``tensor.data = other``
        gives the tensor another one. None for any other object.
    """
    kind = type(obj)
    if kind is np.ndarray:
        if not obj.flags.carray:
            return None
        try:
            address = _from_buffer(obj)  # it keeps the array alive
        except (TypeError, ValueError, BufferError):  # a dtype that the buffer protocol lacks
            return None
        return obj.dtype, address, obj.size, address
    torch: Any = sys.modules.get("torch")
    if kind is not getattr(torch, "Tensor", None):  # missing while torch is being imported
        return None
    strided = obj.is_cpu and obj.layout is torch.strided and not obj.is_nested
    if not strided or not obj.is_contiguous() or obj.is_neg():
        return None
    if obj.requires_grad and torch.is_grad_enabled():  # the long way checks autograd
        return None
    return obj.dtype, _cast(_VOID, obj.data_ptr()), obj.numel(), obj.untyped_storage()


class Memory:
    """The whole memory of a plain tensor, held for a Work.

    Args:
        keep: object that plain_memory returned last: a storage of torch, or a buffer of cffi.
    """

    __slots__ = ("_base", "_keep")

    def __init__(self, keep: Any) -> None:
        self._keep = keep
        self._base = self._start()

    def _start(self) -> int:
        keep = self._keep
        return int(keep.data_ptr() if hasattr(keep, "data_ptr") else _cast("uintptr_t", keep))

    def finish(self) -> None:
        """Raises ValueError if the storage was moved while the core wrote to its old memory."""
        if self._start() != self._base:
            raise ValueError("its storage was resized in flight")

    def overlaps(self, start: int, stop: int) -> bool:
        """True if any of it lies from address start to stop."""
        keep = self._keep
        nbytes = keep.nbytes() if hasattr(keep, "nbytes") else len(_buffer(keep))
        return start < self._base + nbytes and self._base < stop


class Shortcut:
    """Short way of one communicator."""

    def __init__(self, comm: Dispatcher) -> None:
        self._comm = comm
        # By dtype and kind: an rc_call, and its name with "{}" for the count of elements.
        self._templates: dict[tuple[Any, Kind], tuple[Any, str]] = {}
        self._slots: list[Any] = []  # unused slots, all NULL

    def allreduce(self, tensor: Any, op: str, compression: str | None) -> bool:
        """All-reduces the tensor in place.

        Returns:
            True once it is done. False for any other case and for a refused call: nothing was
            submitted then, and the long way raises the error.

        Raises:
            TensorError, ConfigError: as the long way does.
            RingcommError: the collective failed; the class tells how.
        """
        return self._run(tensor, plain_memory(tensor), (_ALLREDUCE, op, compression, 0))

    def broadcast(self, tensor: Any, root: int) -> bool:
        """Broadcasts root's tensor, writable on all ranks; otherwise like allreduce()."""
        if type(root) is not int:  # True and 1.0 are equal to 1
            return False
        return self._run(tensor, plain_memory(tensor), (_BROADCAST, "sum", None, root))

    def barrier(self) -> bool:
        """Waits for all ranks; otherwise like allreduce()."""
        return self._run(None, _NO_MEMORY, (_BARRIER, "sum", None, 0))

    def _run(self, tensor: Any, memory: Plain | None, kind: Kind) -> bool:
        comm = self._comm
        if memory is None or comm.engine.forked or comm.is_timed:
            return False
        dtype, address, count, keep = memory
        try:
            known = self._templates.get((dtype, kind))
        except TypeError:  # an op or compression that is not hashable, and so no name
            return False
        call = (known or self._make_template(tensor, dtype, kind))[0]
        if comm._pipe is not None:
            comm._pipe.drain()
        try:
            slot = self._slots.pop()
        except IndexError:
            slot = ffi.new(_SLOT)
        try:
            # Registered before the handle is read, as close() waits for registered calls. No signal
            # handler, which may close, runs between the reading and C.
            comm._calls_in_core[slot] = get_ident(), keep
            handle = comm._handle
            if handle is None:
                return False
            result = lib.rc_run(handle, call, count, address, SLICE_MS, slot)
        finally:  # after an interrupt, too, the core still uses the tensor
            work = self._make_work(slot, tensor, memory, kind) if slot[0] else None
            comm._calls_in_core.pop(slot, None)
        if work is not None:
            work.wait()
            return True
        if result == OK:
            self._slots.append(slot)
        return bool(result == OK)

    def submit(self, tensor: Any, op: str, compression: str | None) -> Work | None:
        """Submits an all-reduce of a torch tensor without waiting.

        Returns:
            The Work; None for any other case and for a refused call, as in ``allreduce``.
        """
        comm = self._comm
        memory = plain_memory(tensor)
        if memory is None or comm.engine.forked or comm.is_timed:
            return None
        dtype, address, count, keep = memory
        kind = (_ALLREDUCE, op, compression, 0)
        template, name = self._templates.get((dtype, kind)) or self._make_template(
            tensor, dtype, kind
        )
        call = ffi.new(_CALL, template[0])
        call.count = count
        call.src = call.dst = address
        call.waits = 0
        work = Work(comm, name.format(count), (Memory(keep),), tensor)
        if comm._pipe is not None:
            comm._pipe.drain()
        with comm._lock:
            handle = comm._handle
            try:  # held before the core has it: an interrupt must not free borrowed memory
                comm._in_flight[id(work)] = work
                if handle is not None:
                    lib.rc_submit(handle, call, work.slot, ffi.NULL)
            finally:
                if not work.slot[0]:
                    comm._in_flight.pop(id(work), None)
        if not work.slot[0]:
            return None
        if len(comm._in_flight) > 1:
            comm._reap_finished_works()
        return work

    def _make_template(self, tensor: Any, dtype: Any, kind: Kind) -> tuple[Any, str]:
        collective, op, compression, root = kind
        comm, src = self._comm, None if tensor is None else view(tensor, writable=True)
        count = src.count if src else 0
        call, name = make_call(
            collective,
            src,
            src,
            count,
            op,
            compression,
            root,
            comm.world_size,
            comm.config.timeout,
            False,
            False,
        )
        call.caller = 0  # later calls by this template are part of other calls, or of none
        made = self._templates[dtype, kind] = call, name.replace(f"[{count}]", "[{}]")
        return made

    def _make_work(self, slot: Any, tensor: Any, memory: Plain, kind: Kind) -> Work:
        dtype, _, count, keep = memory
        name = self._templates[dtype, kind][1].format(count)
        held = () if keep is None else (Memory(keep),)
        work = Work(self._comm, name, held, tensor, slot)
        self._comm._in_flight[id(work)] = work
        return work


class Dispatcher:
    """Base of Communicator: submits calls, and holds their works until they are over.

    Attributes:
        engine: the process's engine for the kernel set of the settings.
        is_timed: True if a timeline notes each work; then no call takes the shortcut.
    """

    def __init__(self, mesh: Mesh, config: Config) -> None:
        """Makes the base of a communicator that has no handle yet."""
        self.rank = mesh.rank
        self.world_size = mesh.world_size
        self.hosts = mesh.hosts
        self.rails = mesh.rails
        self.config = config
        self.engine = acquire_engine(config.kernel_set)
        self.shortcut = Shortcut(self)
        self.is_timed = bool(config.timeline)
        # Held while the handle is in use, so that close() in another thread cannot free it then. A
        # signal handler may close within such a call.
        self._lock = threading.RLock()
        # Calls by the shortcut, which use the handle without the lock: thread and held memory.
        self._calls_in_core: dict[Any, tuple[int, Any]] = {}
        self._in_flight: dict[int, Work] = {}
        self._reap_all_at = _UNWAITED
        self._timeline: Timeline | None = None
        self._handle: Any = None
        self._pipe: Pipe | None = None  # made with the first GPU tensor
        self._has_logged_failure = False

    @property
    def is_inherited(self) -> bool:
        """True in a forked child of the process that made it, where it does not work."""
        return self.engine.forked

    def require_own_process(self) -> None:
        """Raises NotInitializedError in a forked child of the process that made it."""
        self.engine.require_own_process()

    def _require_open(self) -> None:
        self.require_own_process()
        if self._handle is None:
            raise NotInitializedError("the communicator is closed")

    def host_of(self, rank: int | None) -> str | None:
        """Returns the host name of a rank; None for no rank."""
        return self.hosts[rank] if is_integer(rank) and 0 <= rank < len(self.hosts) else None

    # ---- calls ----

    def run_collective(
        self,
        collective: int,
        src: View | None,
        dst: View | None,
        count: int,
        *,
        op: str = "sum",
        compression: str | None = None,
        feedback: Feedback = None,
        root: int | None = 0,
        tag: int = 0,
        async_op: bool = False,
        timeout: float | None = None,
        result: Any = None,
        on_done: Callable[[Work], None] | None = None,
    ) -> Any:
        """Runs a collective, whose memory was found, by the long way.

        Args:
            collective: its number in the C header (rc_collective).
            src, dst: memory that it reads and writes, each where it has one.
            count: elements of the call, as the core counts them.
            result: object to return where there is no dst.

        The others are those of ``Collectives.allreduce``, and so are the errors. Returns the
        result, or with async_op the Work.
        """
        self._require_open()
        seconds = self.config.timeout if timeout is None else timeout
        views = tuple({id(v): v for v in (src, dst) if v is not None}.values())
        where = common_device(views)
        call, name = make_call(
            collective,
            src,
            dst,
            count,
            op,
            compression,
            root,
            self.world_size,
            seconds,
            async_op,
            on_done is not None,
            feedback,
        )
        call.tag = tag
        result = dst.owner if dst is not None else result
        if where is not None and where.count:
            return self._submit_device_call(
                call, name, views, result, where, feedback, async_op, on_done
            )
        error = ffi.new("rc_error *")
        work = Work(self, name, views, result, feedback=feedback)
        work.is_message = is_message(collective, tag)
        if isinstance(feedback, Residuals):
            feedback.hold(work)
        if self._pipe is not None:
            self._pipe.drain()
        with self._lock:
            self._require_open()
            try:  # held before the core has it: an interrupt must not free borrowed memory
                self._in_flight[id(work)] = work
                if on_done is not None:
                    work.notify(on_done)
                code = lib.rc_submit(self._handle, call, work.slot, error)
            finally:
                if not work.slot[0]:  # refused, or interrupted on the way
                    self._in_flight.pop(id(work), None)
                    self.engine.unwatch(work.slot)
            if code != OK:
                kind = error_class(code)
                if code == lib.RC_INVALID_STATE and call.feedback:  # taken by another thread
                    kind = ConfigError
                raise kind(f"{name}: {text(error.message)}")
        if self._timeline is not None:
            self._timeline.submitted(work)
        if len(self._in_flight) > 1:
            self._reap_finished_works()
        return work if async_op else work.wait()

    def _pipe_to(self, where: DeviceView) -> Pipe:
        """Returns the pipe to the tensor's GPU, made with the first GPU tensor. Raises TensorError
        for another GPU."""
        with self._lock:
            self._require_open()
            if self._pipe is None:
                self._pipe = Pipe(self._handle, where.device)
            if self._pipe.device != where.device:
                raise TensorError(
                    f"the tensor is on GPU {where.device}, and this communicator works for GPU "
                    f"{self._pipe.device}; make one for each GPU, with Communicator.split"
                )
            return self._pipe

    def _submit_device_call(
        self,
        call: Any,
        name: str,
        views: tuple[View, ...],
        result: Any,
        where: DeviceView,
        feedback: Feedback,
        async_op: bool,
        on_done: Callable[[Work], None] | None,
    ) -> Any:
        pipe = self._pipe_to(where)
        work = DeviceWork(self, name, views, result, where, on_done, feedback)
        work.is_message = is_message(call.collective, call.tag)
        call.notify = 0
        try:  # held before the core has it, as above
            self._in_flight[id(work)] = work
            code, error = pipe.submit(work, call)
        finally:
            if not work.slot[0]:
                self._in_flight.pop(id(work), None)
        if code != OK:
            kind = TensorError if code == lib.RC_INVALID_ARGUMENT else error_class(code)
            raise kind(f"{name}: {text(error.message)}")
        if isinstance(feedback, Residuals):
            feedback.hold(work)
        if self._timeline is not None:
            self._timeline.submitted(work)
        return work if async_op else work.wait()

    # ---- works in flight ----

    def works_in_flight(self) -> list[Work]:
        """Returns the works whose end was not seen yet, in the order of their calls."""
        return list(self._in_flight.values())

    def is_idle(self) -> bool:
        """True if no call is in the core and all works are over."""
        return not self._calls_in_core and all(work.done() for work in self.works_in_flight())

    def user_of(self, start: int, stop: int) -> str:
        """Names the call in flight that uses memory from address start to stop; "" if none does."""
        for work in self.works_in_flight():
            if work.uses(start, stop):
                return f"{work.name} #{work.seq}"
        for _, keep in list(self._calls_in_core.values()):
            if keep is not None and Memory(keep).overlaps(start, stop):
                return "a collective of another thread"
        return ""

    def note_over(self, work: Work, error: RingcommError | None) -> None:
        """Notes that a work was first seen to be over: logs its error, ends it in the timeline."""
        self._in_flight.pop(id(work), None)
        if error is not None and not self._has_logged_failure:
            self._has_logged_failure = True
            _log.info("%s: %s", type(error).__name__, error)
        if self._timeline is not None:
            self._timeline.finished(work)

    def _reap_finished_works(self) -> None:
        """Releases finished works that nobody has waited for, and so their tensors: with each
        call the oldest, which are mostly over first, and now and then all."""
        in_flight = self._in_flight
        try:
            oldest = list(islice(in_flight.values(), _OLDEST))
        except RuntimeError:  # another thread's call changed it, and checks itself
            return
        for work in oldest:
            if not work.done():
                break
        if len(in_flight) > self._reap_all_at:
            for work in self.works_in_flight():
                work.done()
            self._reap_all_at = 2 * len(in_flight) + _UNWAITED
