"""Dispatch: how a call gets into the core, and the works in flight on a communicator's handle.

    prepared    once for each kind and dtype: what its calls have in common, checked
    run now     a call that waits, on host memory: one call of the core submits it and waits for it
    submit      any other call, which has a Work from the start
    pipe        calls on a GPU's tensors, submitted by the pipe

A call that is run now has no Work unless it takes long, is interrupted or fails: to make one and to
check all arguments takes longer than a small message takes over the wire, 15 us against 3. For the
same reason ``run_in_place`` finds the memory of the commonest tensors without a View.

No lock of the communicator is held while a call waits. Instead the call registers in
``_calls_in_core`` before it reads the handle, and close() clears the handle, waits until no other
thread is registered, then frees it.

Invariants: if the core refuses to run a call now, nothing was submitted; the call is then submitted
with a Work, and only that way makes the error's text. A call that the core still has when an
exception leaves is held by a Work of the communicator.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from itertools import islice
from threading import get_ident
from typing import Any

from ..bootstrap.keeper import LaneKeeper
from ..bootstrap.mesh import Mesh
from ..config import Config
from ..errors import ConfigError, NotInitializedError, RingcommError, TensorError
from . import callback_threads
from .calls import (
    Feedback,
    Prepared,
    is_integer,
    is_message,
    require_rank,
)
from .counters import count_works
from .faces import view
from .native import (
    AGAIN,
    OK,
    acquire_engine,
    error_class,
    ffi,
    inherited,
    lib,
    release_engine,
    text,
)
from .pipe import DeviceWork, Pipe
from .residuals import Residuals
from .timeline import Timeline
from .views import PLAIN, DeviceView, Plain, View, common_device
from .work import SLICE_MS, Held, Memory, Work, write_back

_log = logging.getLogger("ringcomm")
_UNWAITED = 64  # works in flight, some maybe finished, from which on all are checked
_LOOK_S = 1e-4
_OLDEST = 2  # works checked with each call: more than it adds

_VOID = ffi.typeof("void *")
_cast = ffi.cast
_SLOT = ffi.typeof("rc_work **")
_BARRIER = lib.RC_BARRIER

_NO_MEMORY: Plain = (None, ffi.NULL, 0, None)


def plain_memory(obj: Any) -> Plain | None:
    """Finds the memory of a plain tensor; None for any other object."""
    find = PLAIN.get(type(obj))
    return None if find is None else find(obj)


def _held(kept: Any) -> tuple[Held, ...]:
    """Returns the holders of the memory of a call: Views, or what keeps a plain tensor's memory."""
    if kept is None:
        return ()
    return kept if type(kept) is tuple else (Memory(kept),)


class Dispatcher:
    """Base of Communicator: submits calls, and holds their works until they are over.

    Attributes:
        engine: the process's engine for the kernel set of the settings.
    """

    def __init__(self, mesh: Mesh, config: Config) -> None:
        """Makes the base of a communicator that has no handle yet."""
        self.rank = mesh.rank
        self.world_size = mesh.world_size
        self.hosts = mesh.hosts
        self.rails = mesh.rails
        self.config = config
        self.engine = acquire_engine(config.kernel_set)
        self.kernel_set = self.engine.kernel_set
        # Held while the handle is in use, so that close() in another thread cannot free it then. A
        # signal handler may close within such a call.
        self._lock = threading.RLock()
        # By dtype, collective, op, compression and root; the dtype as its library has it, or named.
        self._prepared: dict[tuple[Any, int, str, str | None, int | None], Prepared] = {}
        self._slots: list[Any] = []  # unused slots, all NULL
        # Calls that use the handle without the lock: thread and held memory.
        self._calls_in_core: dict[Any, tuple[int, Any]] = {}
        self._in_flight: dict[int, Work] = {}
        self._reap_all_at = _UNWAITED
        self._timeline: Timeline | None = None  # notes each work; then every call has one
        self._handle: Any = None
        self._pipe: Pipe | None = None  # made with the first GPU tensor
        self._keeper: LaneKeeper | None = None  # where lost lanes are made anew
        self._has_logged_failure = False

    @property
    def is_inherited(self) -> bool:
        """True in a forked child of the process that made it, where it does not work."""
        return self.engine.forked

    @property
    def is_closed(self) -> bool:
        """True once it has been closed, here or before a fork."""
        return self._handle is None

    def _require_open(self) -> None:
        if self.engine.forked:
            raise inherited()
        if self._handle is None:
            raise NotInitializedError("the communicator is closed")

    def host_of(self, rank: int | None) -> str | None:
        """Returns the host name of a rank; None for no rank."""
        return self.hosts[rank] if is_integer(rank) and 0 <= rank < len(self.hosts) else None

    # ---- calls ----

    def run_in_place(
        self,
        tensor: Any,
        collective: int,
        op: str = "sum",
        compression: str | None = None,
        root: int = 0,
    ) -> bool:
        """Runs a collective that reads and writes one tensor, or a barrier, and waits for it.

        Returns:
            True once it is done. False if this way is not for the call: a tensor that is not plain,
            a codec that needs feedback, a timeline, a closed or inherited communicator, or a call
            that the core refuses. Nothing was submitted then; run_collective takes it or raises.

        Raises:
            TensorError, ConfigError: as run_collective does.
            RingcommError: the collective failed; the class tells how.
        """
        if collective == _BARRIER:
            memory: Plain | None = _NO_MEMORY
        else:  # what plain_memory does, without its call
            find = PLAIN.get(type(tensor))
            memory = None if find is None else find(tensor)
        if memory is None or type(root) is not int or self.engine.forked or self._timeline:
            return False  # a root of True or 1.0 would find the key of root 1
        dtype, address, count, keep = memory
        try:  # what _prepare does first, without its call
            prepared = self._prepared[dtype, collective, op, compression, root]
        except (KeyError, TypeError):
            prepared = self._prepare(tensor, dtype, collective, op, compression, root)
        if prepared.codec.needs_feedback:
            return False
        return self._run_now(prepared, prepared.call, count, address, address, keep, tensor)

    def submit_in_place(
        self,
        tensor: Any,
        collective: int,
        op: str,
        compression: str | None,
        root: int = 0,
        *,
        feedback: Feedback = None,
        timeout: float | None = None,
    ) -> Work | None:
        """Submits a collective that reads and writes a plain tensor; returns None for any other
        tensor. Raises as run_collective does."""
        memory = plain_memory(tensor)
        if memory is None:
            return None
        self._require_open()
        dtype, address, count, keep = memory
        prepared = self._prepare(tensor, dtype, collective, op, compression, root)
        call = prepared.copy(count, address, address, feedback, timeout)
        call.waits, name = 0, prepared.name(count)
        prepared.lend(feedback, call, name, count)
        return self._submit(call, name, (Memory(keep),), tensor, feedback)

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
        """Runs a collective whose memory was found.

        Args:
            collective: its number in the C header (rc_collective).
            src, dst: memory that it reads and writes, each where it has one.
            count: elements of the call, as the core counts them.
            result: object to return where there is no dst.

        The others are those of ``Collectives.allreduce``, and so are the errors. Returns the
        result, or with async_op the Work.
        """
        self._require_open()
        if src is not None and dst is not None and src.dtype != dst.dtype:
            raise TensorError(f"the tensors are of {src.dtype} and {dst.dtype}: give one dtype")
        views = tuple({id(v): v for v in (src, dst) if v is not None}.values())
        where = common_device(views)
        if type(root) is not int:
            root = require_rank(collective, root, self.world_size)
        dtype = views[0].dtype if views else None
        prepared = self._prepare(None, dtype, collective, op, compression, root)
        result = dst.owner if dst is not None else result
        source, target = (ffi.NULL if v is None else _cast(_VOID, v.address) for v in (src, dst))
        call = prepared.copy(count, source, target, feedback, timeout)
        call.tag = tag
        plain = where is None and not isinstance(feedback, Residuals) and on_done is None
        # On a callback thread a Work tells, before it waits, that another thread has to take over.
        has_work = async_op or self._timeline or callback_threads.on_callback_thread()
        runs_now = plain and not has_work
        if runs_now and self._run_now(prepared, call, count, source, target, views, result):
            return result
        call.waits, call.notify = not async_op, on_done is not None and where is None
        name = prepared.name(count)
        if src is not None:
            prepared.lend(feedback, call, name, src.count)
        work = self._submit(call, name, views, result, feedback, on_done, where)
        return work if async_op else work.wait()

    def _prepare(
        self,
        tensor: Any,
        dtype: Any,
        collective: int,
        op: str,
        compression: str | None,
        root: int | None,
    ) -> Prepared:
        """Returns what calls of this kind and dtype have in common. ``dtype``: by name, or that of
        the tensor, as its library has it."""
        key = dtype, collective, op, compression, root
        try:
            return self._prepared[key]
        except (KeyError, TypeError):  # the latter for an op or compression that is no name
            name = dtype if tensor is None else view(tensor, writable=True).dtype
            made = Prepared(
                collective, name, op, compression, root, self.world_size, self.config.timeout
            )
            return self._prepared.setdefault(key, made)

    def _run_now(
        self,
        prepared: Prepared,
        call: Any,
        count: int,
        src: Any,
        dst: Any,
        kept: Any,
        result: Any,
    ) -> bool:
        """Submits a call on host memory and waits for it; returns False if the core refuses it, or
        the communicator is closed. ``kept``: as of _held."""
        if self._pipe is not None:
            self._pipe.drain()
        try:
            slot = self._slots.pop()
        except IndexError:
            slot = ffi.new(_SLOT)
        work = None
        try:
            # Registered before the handle is read, as close() waits for registered calls. No signal
            # handler, which may close, runs between the reading and C.
            self._calls_in_core[slot] = get_ident(), kept
            handle = self._handle
            if handle is None:
                return False
            code = lib.rc_run(handle, call, count, src, dst, SLICE_MS, slot)
        finally:  # after an interrupt, too, the core still uses the memory
            if slot[0]:
                work = Work(self, prepared.name(count), _held(kept), result, slot)
                self._in_flight[id(work)] = work
                work.is_message = is_message(call.collective, call.tag)
            self._calls_in_core.pop(slot, None)
        if work is not None:
            work.wait()
            return True
        if code != OK:
            return False
        self._slots.append(slot)
        if type(kept) is tuple and (error := write_back(kept, prepared.name(count))) is not None:
            raise error
        return True

    def _submit(
        self,
        call: Any,
        name: str,
        held: tuple[Held, ...],
        result: Any,
        feedback: Feedback = None,
        on_done: Callable[[Work], None] | None = None,
        where: DeviceView | None = None,
    ) -> Work:
        """Submits a call. ``where``: tells the GPU that its memory lies on; None: the host."""
        if where is None:
            work = Work(self, name, held, result, feedback=feedback)
        else:
            work = DeviceWork(self, name, held, result, where, on_done, feedback)
        work.is_message = is_message(call.collective, call.tag)
        if isinstance(feedback, Residuals):
            feedback.hold(work)
        if isinstance(work, DeviceWork):
            submit = functools.partial(self._pipe_to(work.where).submit, work, call)
            code, error = self._hand_over(work, submit)
        else:
            code, error = self._submit_on_host(work, call, on_done)
        if code != OK:
            kind = error_class(code)
            if code == lib.RC_INVALID_STATE and call.feedback:  # taken by another thread
                kind = ConfigError
            elif code == lib.RC_INVALID_ARGUMENT and where is not None:
                kind = TensorError
            raise kind(f"{name}: {text(error.message)}")
        if self._timeline is not None:
            self._timeline.submitted(work)
        if where is None and len(self._in_flight) > 1:
            self._reap_finished_works()
        return work

    def _submit_on_host(
        self, work: Work, call: Any, on_done: Callable[[Work], None] | None
    ) -> tuple[int, Any]:
        """Submits a work's call on host memory; returns the rc_result and the rc_error."""
        error = ffi.new("rc_error *")
        if self._pipe is not None:
            self._pipe.drain()

        def submit() -> tuple[int, Any]:
            if on_done is not None:
                work.notify(on_done)
            return lib.rc_submit(self._handle, call, work.slot, error), error

        with self._lock:
            self._require_open()
            return self._hand_over(work, submit)

    def _hand_over(self, work: Work, submit: Callable[[], tuple[int, Any]]) -> tuple[int, Any]:
        """Gives a work to the core. Notes it in _in_flight just before: an interrupt between the
        two must not free borrowed memory. Takes it out again if the core did not get it."""
        try:
            self._in_flight[id(work)] = work
            return submit()
        finally:
            if not work.slot[0]:  # refused, or interrupted on the way
                self._in_flight.pop(id(work), None)
                self.engine.unwatch(work.slot)

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

    # ---- works in flight ----

    def works_in_flight(self) -> list[Work]:
        """Returns the works that the core has and whose end was not seen yet, in the order of
        their calls."""
        return [work for work in list(self._in_flight.values()) if work.slot[0]]

    def is_idle(self) -> bool:
        """True if no call is in the core and all works are over."""
        works = list(self._in_flight.values())
        return not self._calls_in_core and all(work.done() for work in works)

    def user_of(self, start: int, stop: int) -> str:
        """Names the call in flight that uses memory from address start to stop; "" if none does."""
        for work in list(self._in_flight.values()):
            if work.uses(start, stop):
                return f"{work.name} #{work.seq}"
        for _, kept in list(self._calls_in_core.values()):
            if any(held.overlaps(start, stop) for held in _held(kept)):
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

    # ---- the handle's end ----

    def completed(self) -> int:
        """Returns the number of completed works; 0 if the communicator is closed."""
        with self._lock:
            return 0 if self._handle is None or self.is_inherited else count_works(self._handle)

    def failure(self) -> RingcommError | None:
        """Returns the error that every later call will raise, e.g. a lost peer; None while the
        communicator works."""
        error = ffi.new("rc_error *")
        with self._lock:
            self._require_open()
            lib.rc_comm_error(self._handle, error)
        if error.code == OK:
            return None
        rank = None if error.rank < 0 else int(error.rank)
        return error_class(error.code)(text(error.message), rank=rank, host=self.host_of(rank))

    def abort(self, reason: str = "abort() was called") -> None:
        """Fails all present and later collectives, here and on every other rank, at once."""
        self._require_open()
        with self._lock:
            self._require_open()
            lib.rc_comm_abort(self._handle, str(reason).encode("utf-8", "replace")[:300])

    def _take_handle(self) -> Any:
        """Takes the handle from all later calls; None where there is none, or in a forked child."""
        if self.engine.forked:
            return None
        with self._lock:
            handle, self._handle = self._handle, None
        return handle

    def _leave_and_free(self, handle: Any, within: float) -> None:
        """Says goodbye to the other ranks within these seconds, ends all works, and frees the
        handle."""
        if self._keeper is not None and self._keeper.is_own_thread:  # in the midst of its call
            threading.Thread(target=self._leave_and_free, args=(handle, within)).start()
            return
        deadline = time.monotonic() + within
        left_ms = max(1.0, 1000 * within)
        try:  # in slices, so that signal handlers run between them
            while lib.rc_comm_leave(handle, int(min(left_ms, SLICE_MS))) == AGAIN and left_ms > 0:
                left_ms = max(0.0, (deadline - time.monotonic()) * 1000)
        finally:
            lib.rc_comm_close(handle, 0)
            if self._pipe is not None:
                self._pipe.stop()
            for work in self.works_in_flight():
                work.done()
            while {thread for thread, _ in list(self._calls_in_core.values())} - {get_ident()}:
                time.sleep(_LOOK_S)  # until their calls return; their works are over
            try:
                if self._keeper is not None:
                    self._keeper.close()
            finally:
                lib.rc_comm_free(handle)
                release_engine(self.config.kernel_set)
                if self._timeline is not None:
                    self._timeline.close()

    def _free_handle(self) -> None:
        """Frees a handle that nobody has used."""
        handle = self._take_handle()
        if handle is not None:
            if self._keeper is not None:
                self._keeper.close()
            lib.rc_comm_free(handle)
