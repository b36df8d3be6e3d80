"""Communicator: a group of ranks joined by lanes, and the collectives on it.

Invariants: arguments are checked (calls.py) before anything reaches the core, so a call that raises
ConfigError or TensorError has submitted nothing and the communicator stays usable. All ranks call
the same collectives in the same order. A failed collective fails the communicator: every later call
raises the first error. At the interpreter's end open communicators are closed: without a goodbye
the last bytes sent could be lost.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable
from itertools import islice
from types import TracebackType
from typing import Any

import numpy as np

from . import _native, storages
from ._native import AGAIN, OK, error_class, ffi, lib, text
from .bootstrap.join import Joined, join, regroup
from .buffers import View
from .calls import Feedback, is_integer, is_message, make_call
from .collectives import Collectives
from .config import Config, names_arguments
from .counters import Stats, count_works, read_counters
from .devices import DeviceView, common_device
from .errors import ConfigError, NotInitializedError, RingcommError, TensorError, naming
from .opening import open_handle
from .pipe import DeviceWork, Pipe
from .residuals import Residuals
from .shortcut import Memory, Shortcut
from .summary import summary_of
from .timeline import Timeline
from .work import SLICE_MS, Work

_log = logging.getLogger("ringcomm")
_CLOSE_MS = 1000
_ABORT_MS = 100
_LOOK_S = 1e-4
_UNWAITED = 64  # works in flight, some maybe finished, from which on all are checked
_OLDEST = 2  # works checked with each call: more than it adds


class Communicator(Collectives):
    """A group of ranks. Made by ``ringcomm.init`` (the default one), ``Communicator.create`` or
    ``split``. Usable from any thread; also a context manager, which closes it, and on an exception
    aborts it on all ranks.

    All collectives take numpy arrays, torch CPU tensors and objects with the buffer protocol,
    ``__array_interface__`` or DLPack, of float16, bfloat16, float32, float64, int8, uint8, int32 or
    int64 and of any shape and strides. They also take tensors on a GPU, of torch, CuPy or with
    ``__cuda_array_interface__`` or DLPack, which must be contiguous: a call follows the current
    stream (by DLPack alone the default one), or that of ``cuda.stream``, which then waits for the
    result (DeviceWork). A communicator's GPU tensors are all on one GPU; a call's tensors are all
    there or all on the host, and follow one stream.

    Count and dtype are the same on all ranks. ``out``, where given, has the result's count and
    dtype; results made here are of the tensor's library. ``async_op``, ``timeout``, and the errors
    raised are those of ``allreduce``.

    Attributes:
        rank, world_size: this rank's number and the number of ranks.
        hosts: host name of every rank.
        rails: this rank's network ports in rail order (``.interface``, ``.address``).
        config: its settings.
        algorithms: chooser of all-reduce algorithms: the name that config.algorithm
            gives, else "model", with the speed of the links that it assumes, if that is known.
    """

    def __init__(self, joined: Joined, group_codec: str | None = None) -> None:
        """Opens a communicator on joined lanes, which it takes over.

        group_codec: codec of all-reduces of its torch process group, for the log.
        """
        if not isinstance(joined, Joined):
            raise ConfigError(
                "a Communicator is made by ringcomm.init(), Communicator.create() or split()"
            )
        mesh, config = joined.mesh, joined.config
        self.rank = mesh.rank
        self.world_size = mesh.world_size
        self.hosts = mesh.hosts
        self.rails = mesh.rails
        self.config = config
        self.algorithms: str = config.algorithm
        if config.algorithm == "auto":
            speed = f" of {mesh.link_mbit} Mbit/s links" if mesh.link_mbit else ""
            self.algorithms = f"model{speed}"
        self._joined = joined
        self._splits = 0
        # Held while the handle is in use, so that close() in another thread cannot free it then. A
        # signal handler may close within such a call.
        self._lock = threading.RLock()
        # Calls that use the handle without the lock: thread and held memory (shortcut.py).
        self._inside: dict[Any, tuple[int, Any]] = {}
        self._in_flight: dict[int, Work] = {}
        self._collect_at = _UNWAITED
        self._timeline: Timeline | None = None
        self.is_timed = bool(config.timeline)  # then no collective takes the shortcut
        self._shortcut = Shortcut(self)
        self._handle: Any = None
        self._pipe: Pipe | None = None  # made with the first GPU tensor
        self._began = time.monotonic()
        self._has_told_failure = False
        try:
            self._engine = _native.acquire_engine(config.kernel_set)
        except BaseException:
            mesh.close()
            raise
        told = self._told_at_start(joined, group_codec)
        try:
            self._timeline = self._open_timeline()
            self._handle = open_handle(mesh, config, joined.epoch, self._engine.handle)
        except BaseException:
            mesh.close()
            _native.release_engine(config.kernel_set)
            if self._timeline is not None:
                self._timeline.close()
            raise
        _alive.add(self)
        if told:
            _log.info("%s", told)

    @classmethod
    @names_arguments
    def create(
        cls,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        init_method: str | None = None,
        config: Config | None = None,
        timeout: float | None = None,
        mpi: Any = None,
        store: Any = None,
    ) -> Communicator:
        """Joins the ranks of a job; the arguments are those of ``ringcomm.init``."""
        settings = Config() if config is None else config
        if not isinstance(settings, Config):
            raise ConfigError(f"config={config!r}: give a ringcomm.Config, as Config(lanes=2)")
        if not isinstance(init_method, (str, type(None))):
            raise ConfigError(f'init_method={init_method!r}: give "tcp://host:port"')
        rank, world_size = _plain(rank), _plain(world_size)
        return cls(join(settings, rank, world_size, init_method, timeout, mpi, store))

    # ---- life cycle and state ----

    @naming("split() of Communicator")
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Makes a communicator of the ranks that give the same color.

        Args:
            color: ranks of one color belong together; None takes part in none.
            key: the new ranks are ordered by key, then by rank.

        Returns:
            The new communicator with lanes of its own, or None for color None. All ranks must
            call it.

        Raises:
            ConfigError: color or key is no integer of 64 bits; nothing was sent.
            BootstrapError: the new lanes could not be made. Else as allreduce.
        """
        self._require_open()
        for name, value in (("color", 0 if color is None else color), ("key", key)):
            whole = is_integer(value) or isinstance(value, (bool, np.bool_))  # e.g. color=rank < 2
            if not whole or not -(2**63) <= int(value) < 2**63:
                raise ConfigError(f"{name}={value!r}: give an integer of 64 bits")
        self._splits += 1
        members = _members(self, color, key)
        joined = regroup(self._joined, members, self._gather_bytes, self._splits, self._has_failed)
        return None if joined is None else Communicator(joined)

    def stats(self) -> Stats:
        """Counters since the communicator was opened.

        Returns:
            works (completed), payload_bytes (sent, after compression), wire_bytes (sent over
            links, with headers), shared_bytes (of the payload, put into the memory that ranks of
            one host share), engine_cpu_s (CPU seconds of the engine's threads) and waiting_s (that
            threads have spent waiting for collectives), both of all communicators of this process;
            threads (that carry the traffic: 1 or 2); lanes: a list of peer, rail, lane, sent_bytes,
            received_bytes, sent_frames, received_frames, rate (bytes per second as measured, 0.0 if
            not), retransmits (of TCP segments), rtt_s (TCP's smoothed round trip) and share (of
            this rank's sent bytes);
            rails: the sums over the lanes of each, as rail, interface, sent_bytes, received_bytes,
            retransmits, share.
        """
        self._require_open()
        with self._lock:
            self._require_open()
            return read_counters(self._handle, self.rails)

    def completed(self) -> int:
        """Returns the number of completed works; 0 if the communicator is closed."""
        with self._lock:
            return 0 if self._handle is None or self.is_inherited else count_works(self._handle)

    def works_in_flight(self) -> list[Work]:
        """Returns the works whose end was not seen yet, in the order of their calls."""
        return list(self._in_flight.values())

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
        message = text(error.message)
        return error_class(error.code)(message, rank=rank, host=self.host_of(rank))

    @property
    def kernel_set(self) -> str:
        """Instruction set of the kernels."""
        return self._engine.kernel_set

    def host_of(self, rank: int | None) -> str | None:
        """Returns the host name of a rank; None for no rank."""
        return self.hosts[rank] if is_integer(rank) and 0 <= rank < len(self.hosts) else None

    @property
    def is_inherited(self) -> bool:
        """True in a forked child of the process that made it, where it does not work."""
        return self._engine.forked

    def require_own_process(self) -> None:
        """Raises NotInitializedError in a forked child of the process that made it."""
        self._engine.require_own_process()

    def abort(self, reason: str = "abort() was called") -> None:
        """Fails all present and later collectives, here and on every other rank, at once."""
        self._require_open()
        with self._lock:
            self._require_open()
            lib.rc_comm_abort(self._handle, str(reason).encode("utf-8", "replace")[:300])

    def close(self, within: float = _CLOSE_MS / 1000) -> None:
        """Leaves the group: says goodbye and closes the lanes, within about a second, or the given
        seconds. Collectives still in flight fail, here and on the other ranks. Closing twice, or in
        a forked child, is harmless."""
        self._close(max(1, int(1000 * within)))

    def _close(self, patience_ms: int) -> None:
        if self._engine.forked:
            return
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is None:
            return
        _alive.discard(self)
        self._tell_end(handle)
        try:
            self._leave(handle, patience_ms)
        finally:
            lib.rc_comm_close(handle, 0)
            if self._pipe is not None:
                self._pipe.stop()
            for work in self.works_in_flight():
                work.done()
            while {thread for thread, _ in self._inside.values()} - {threading.get_ident()}:
                time.sleep(_LOOK_S)  # until their calls return; their works are over
            lib.rc_comm_free(handle)
            _native.release_engine(self.config.kernel_set)
            if self._timeline is not None:
                self._timeline.close()

    @staticmethod
    def _leave(handle: Any, patience_ms: int) -> None:
        """Says goodbye to the other ranks, in slices, so that signal handlers run between them."""
        deadline = time.monotonic() + patience_ms / 1000
        left = float(patience_ms)
        while lib.rc_comm_leave(handle, int(min(left, SLICE_MS))) == AGAIN and left > 0:
            left = max(0.0, (deadline - time.monotonic()) * 1000)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and self._handle is not None and not self.is_inherited:
            self.abort(f"{kind.__name__}: {error}")
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._handle is None else f"rank {self.rank} of {self.world_size}"
        return f"<ringcomm.Communicator {state}>"

    def set_timeout(self, seconds: float) -> None:
        """Sets the ``config.timeout`` of all later collectives."""
        self.config = self.config.replaced(timeout=seconds)
        self._shortcut = Shortcut(self)

    # ---- called by its works ----

    def note_over(self, work: Work) -> None:
        """Notes that a work was first seen to be over: logs its error, ends it in the timeline."""
        self._in_flight.pop(id(work), None)
        if work._error is not None and not self._has_told_failure:
            self._has_told_failure = True
            _log.info("%s: %s", type(work._error).__name__, work._error)
        if self._timeline is not None:
            self._timeline.finished(work)

    # ---- helpers ----

    def _open_timeline(self) -> Timeline | None:
        if not self.config.timeline:
            return None
        return Timeline(
            self.config.timeline,
            self.rank,
            self.hosts[self.rank],
            f"communicator of {self.world_size}, epoch {self._joined.epoch}",
            [rail.interface for rail in self.rails],
        )

    def _require_open(self) -> None:
        self.require_own_process()
        if self._handle is None:
            raise NotInitializedError("the communicator is closed")

    def _run(
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
            return self._fly(call, name, views, result, where, feedback, async_op, on_done)
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
                    self._call_back(work, on_done)
                code = lib.rc_submit(self._handle, call, work._slot, error)
            finally:
                if not work._slot[0]:  # refused, or interrupted on the way
                    self._in_flight.pop(id(work), None)
                    self._engine.unwatch(work._slot)
            if code != OK:
                kind = error_class(code)
                if code == lib.RC_INVALID_STATE and call.feedback:  # taken by another thread
                    kind = ConfigError
                raise kind(f"{name}: {text(error.message)}")
        if self._timeline is not None:
            self._timeline.submitted(work)
        if len(self._in_flight) > 1:
            self._collect()
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

    def _fly(
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
            if not work._slot[0]:
                self._in_flight.pop(id(work), None)
        if code != OK:
            kind = TensorError if code == lib.RC_INVALID_ARGUMENT else error_class(code)
            raise kind(f"{name}: {text(error.message)}")
        if isinstance(feedback, Residuals):
            feedback.hold(work)
        if self._timeline is not None:
            self._timeline.submitted(work)
        return work if async_op else work.wait()

    def _call_back(self, work: Work, callback: Callable[[Work], None]) -> None:
        work._callbacks = (callback,)
        self._engine.watch(work._slot, work._tell)

    def _gather_bytes(self, part: bytes, seconds: float) -> bytes:
        """Gathers equal-sized parts of all ranks and concatenates them in order of rank."""
        mine = np.frombuffer(part, dtype=np.uint8)
        return bytes(self.allgather(mine, timeout=seconds).tobytes())

    def _has_failed(self) -> bool:
        return self.failure() is not None

    def _collect(self) -> None:
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
        if len(in_flight) > self._collect_at:
            for work in self.works_in_flight():
                work.done()
            self._collect_at = 2 * len(in_flight) + _UNWAITED

    # ---- logging ----

    def _told_at_start(self, joined: Joined, group_codec: str | None) -> str:
        """Returns rank 0's lines for the log: a summary for the first communicator of a process,
        one line for a later one."""
        if self.rank or not _log.isEnabledFor(logging.INFO):
            return ""
        if joined.epoch or _alive:
            return f"another communicator, {joined.job}: {self.world_size} ranks"
        return summary_of(joined, self.algorithms, self.kernel_set, group_codec)

    def _tell_end(self, handle: Any) -> None:
        level = logging.DEBUG if self.rank else logging.INFO
        if _log.isEnabledFor(level):
            counted = read_counters(handle, self.rails)
            _log.log(
                level,
                "rank %d of %d closes after %.1f s: %d works, %d bytes sent over links, %d "
                "put into shared memory",
                self.rank,
                self.world_size,
                time.monotonic() - self._began,
                counted["works"],
                counted["wire_bytes"],
                counted["shared_bytes"],
            )


_alive: set[Communicator] = set()


@atexit.register
def _close_all() -> None:
    """Closes all communicators within the time that one may take. If works are in flight, or an
    exception such as Ctrl-C left a call, only the failure remains to be sent, and a peer that does
    not listen is not waited for."""
    deadline = time.monotonic() + _CLOSE_MS / 1000
    for comm in [comm for comm in _alive if not comm.is_inherited]:
        left = int((deadline - time.monotonic()) * 1000)
        if comm._inside or not all(work.done() for work in comm.works_in_flight()):
            left = min(left, _ABORT_MS)
        comm._close(max(1, left))


def _user_of(start: int, stop: int) -> str:
    """Names the collective in flight that uses memory from start to stop; "" if none. Serves as
    storages.user_of."""
    for comm in [comm for comm in list(_alive) if not comm.is_inherited]:
        for work in comm.works_in_flight():
            if work.uses(start, stop):
                return f"{work.name} #{work.seq}"
        for _, keep in list(comm._inside.values()):
            if keep is not None and Memory(keep).overlaps(start, stop):
                return "a collective of another thread"
    return ""


storages.user_of = _user_of


def works_of_process() -> int:
    """Number of collectives that the open communicators of this process have completed."""
    return sum(comm.completed() for comm in list(_alive))


def _plain(number: int | None) -> int | None:
    """Converts numpy's integers to Python's."""
    return int(number) if isinstance(number, np.integer) else number


def _members(comm: Communicator, color: int | None, key: int) -> list[int]:
    """Returns the ranks of this rank's color in the order of their keys; empty for color None."""
    mine = np.array([color is not None, color or 0, key], dtype=np.int64)
    rows = comm.allgather(mine)
    same = [r for r in range(comm.world_size) if rows[r][0] and rows[r][1] == mine[1]]
    return sorted(same, key=lambda r: (int(rows[r][2]), r)) if mine[0] else []


__all__ = ["Communicator", "RingcommError", "Work"]
