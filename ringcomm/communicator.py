"""Communicator: a group of ranks joined by lanes, and the collectives on it.

Invariants: arguments are checked (calls.py) before anything reaches the core, so a call that raises
ConfigError or TensorError has submitted nothing and the communicator goes on. All ranks call the
same collectives in the same order. A failed collective fails the communicator: every later call
raises the first error. What is open when the interpreter ends is closed then: without a goodbye
the last bytes sent could be lost.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal

import numpy as np

from . import _native, deepspeed
from ._native import OK, error_class, ffi, lib, text
from .bootstrap.join import Joined, join, regroup
from .bootstrap.tuned import Row
from .buffers import View, view
from .calls import Feedback, check_tag, is_integer, make_call
from .config import Config
from .counters import read_counters
from .errors import ConfigError, NotInitializedError, RingcommError, TensorError
from .fusion import allreduce_many
from .opening import check, open_handle
from .residuals import Residuals
from .shortcut import Shortcut
from .work import Work

_CLOSE_MS = 1000
_ABORT_MS = 100
_UNWAITED = 64  # works that may lie about finished before the communicator lets go of them


class Communicator:
    """A group of ranks. Made by ``ringcomm.init`` (the default one), ``Communicator.create`` or
    ``split``. Usable from any thread; also a context manager, which closes it, and on an exception
    aborts it on all ranks.

    All collectives take numpy arrays, torch CPU tensors and objects with the buffer protocol,
    ``__array_interface__`` or DLPack, of float16, bfloat16, float32, float64, int8, uint8, int32 or
    int64 and of any shape and strides. Count and dtype are the same on all ranks. ``out``, where
    given, has the result's count and dtype; results made here are of the tensor's library.
    ``async_op``, ``timeout``, and the errors raised are those of ``allreduce``.

    Attributes:
        rank, world_size: this rank's number and the number of ranks.
        hosts: host name of every rank.
        rails: this rank's network ports in rail order (``.interface``, ``.address``).
        config: its settings.
        algorithms: what chooses the algorithm of an all-reduce: the name that config.algorithm
            gives, else "table PATH" (the tuned table, rank 0's file) or "model".
    """

    def __init__(self, joined: Joined) -> None:
        mesh, config = joined.mesh, joined.config
        self.rank = mesh.rank
        self.world_size = mesh.world_size
        self.hosts = mesh.hosts
        self.rails = mesh.rails
        self.config = config
        self.algorithms = config.algorithm
        if config.algorithm == "auto":
            self.algorithms = f"table {mesh.table.path}" if mesh.table else "model"
        self._joined = joined
        self._splits = 0
        # Held while the handle is in use, so that close() in another thread cannot free it then. A
        # signal handler may close within such a call.
        self._lock = threading.RLock()
        self._in_flight: dict[int, Work] = {}
        self._collect_at = _UNWAITED
        self._shortcut = Shortcut(self)
        self._handle: Any = None
        try:
            self._engine = _native.acquire_engine(config.kernel_set)
        except BaseException:
            mesh.close()
            raise
        try:
            self._handle = open_handle(mesh, config, joined.epoch, self._engine.handle)
        except BaseException:
            mesh.close()
            _native.release_engine(config.kernel_set)
            raise
        _alive.add(self)

    @classmethod
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
        settings = Config.from_env() if config is None else config
        return cls(join(settings, rank, world_size, init_method, timeout, mpi, store))

    # ---- collectives ----

    def allreduce(
        self,
        tensor: Any,
        op: str = "sum",
        *,
        compression: str | None = None,
        feedback: Feedback = None,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
        on_done: Callable[[Work], None] | None = None,
    ) -> Any:
        """Reduces a tensor over all ranks; every rank gets the same bits.

        Args:
            tensor: any shape and supported dtype, the same on all ranks. Overwritten with the
                result unless ``out`` is given.
            op: sum, avg, min, max or prod. avg is the sum times 1/world_size; integers are
                divided and truncated towards zero. 16-bit floats are summed in float32 and rounded
                at each hop.
            compression: how the elements of a float32 or float64 tensor travel. None: as they are.
                "bf16", "fp16": 16 bits, and every hop rounds to nearest even. "int8", "fp8", "int4"
                and "onebit": 8.06, 8.06, 4.25 and 1.06 bits, for sum and avg, rounded twice (where
                there are two ranks, once); a value that is not finite makes the whole result NaN.
                "onebit-deepspeed": DeepSpeed's formula to the bit; for avg, not for async_op.
            feedback: an ErrorFeedback, one for each tensor and kept from call to call: what is
                rounded away is sent with the next call. "int4" and both "onebit" need one, or False
                to go without. It is left as it was if the result is not finite.
            out: where to put the result: same size and dtype as ``tensor``.
            async_op: return a Work at once.
            timeout: seconds until the collective fails; default ``config.timeout``.
            on_done: of the method alone, with async_op: called with the Work once it is over, from
                the one thread that makes all such calls: it must not wait for other works. What it
                raises is logged.

        Returns:
            The tensor that holds the result, or the Work.

        Raises:
            TensorError, ConfigError: an argument cannot work; nothing was sent.
            NotInitializedError: the communicator is closed, or a forked child's parent's.
            MismatchError, PeerLostError, CommTimeoutError, AbortedError: it failed.
        """
        in_place = out is None and timeout is None and not async_op and on_done is None
        if in_place and feedback is None and self._shortcut.allreduce(tensor, op, compression):
            return tensor
        src = view(tensor, writable=out is None)
        dst = src if out is None else self._out(out, src, src.count)
        return self._run(
            lib.RC_ALLREDUCE, src, dst, src.count, op=op, compression=compression,
            feedback=feedback, async_op=async_op, timeout=timeout, on_done=on_done,
        )  # fmt: skip

    def allreduce_many(
        self,
        tensors: Iterable[Any],
        op: str = "sum",
        *,
        compression: str | None = None,
        feedback: Sequence[Residuals] | Literal[False] | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Reduces several tensors in place, the small ones (below 256 KiB) of a dtype together.

        For many small tensors that is many times faster than one call for each. The order of a sum
        may differ from that of ``allreduce`` of one tensor; it is the same on all ranks.

        Args:
            tensors: the same number, dtypes and counts in the same order on all ranks.
            feedback: as many ErrorFeedbacks as tensors, which then travel by themselves; or False.

        Returns:
            The tensors as a list; with ``async_op`` an object with ``wait``, ``done`` and
            ``exception``, as a Work has them. The other arguments, and the errors raised, are those
            of ``allreduce``.
        """
        return allreduce_many(self, tensors, op, compression, feedback, async_op, timeout)

    def broadcast(
        self, tensor: Any, root: int = 0, *, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Copies root's tensor into every rank's ``tensor``, in place, and returns that (or the
        Work). On root it is only read."""
        dst = view(tensor, writable=self.rank != root)
        return self._run(lib.RC_BROADCAST, dst, dst, dst.count, root=root, async_op=async_op,
                         timeout=timeout)  # fmt: skip

    def reduce(
        self,
        tensor: Any,
        root: int = 0,
        op: str = "sum",
        *,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Reduces to root by ``op`` as allreduce does, in place there unless ``out`` is given;
        elsewhere the tensor is only read, and returned as it is."""
        here = self.rank == root
        src = view(tensor, writable=here and out is None)
        dst = None
        if here:
            dst = src if out is None else self._out(out, src, src.count)
        return self._run(lib.RC_REDUCE, src, dst, src.count, op=op, root=root, async_op=async_op,
                         timeout=timeout, result=None if here else tensor)  # fmt: skip

    def allgather(
        self,
        tensor: Any,
        *,
        compression: str | None = None,
        feedback: Feedback = None,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Returns all ranks' tensors, which are only read, stacked in order of rank: shape
        (world_size, *tensor.shape). With ``compression`` every rank, the sender too, has what
        travelled; ``feedback``, of the tensor's size, adds what that lacked to the next."""
        src = view(tensor, writable=False)
        dst = self._result(out, src, (self.world_size, *src.shape))
        return self._run(
            lib.RC_ALLGATHER, src, dst, src.count, compression=compression, feedback=feedback,
            async_op=async_op, timeout=timeout,
        )  # fmt: skip

    def gather(
        self,
        tensor: Any,
        root: int = 0,
        *,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """As allgather, but on root alone; None on the other ranks."""
        src = view(tensor, writable=False)
        here = self.rank == root
        dst = self._result(out, src, (self.world_size, *src.shape)) if here else None
        return self._run(lib.RC_GATHER, src, dst, src.count, root=root, async_op=async_op,
                         timeout=timeout)  # fmt: skip

    def scatter(
        self,
        tensor: Any,
        root: int = 0,
        *,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Gives rank i the i-th of root's rows.

        Args:
            tensor: on root: shape (world_size, *s). Elsewhere: None with ``out`` given, or a
                tensor of root's shape and dtype, of which only these two are used.
            out: receives shape s; made where it is not given.

        Returns:
            Shape s, on root too.
        """
        if tensor is None:
            if self.rank == root or out is None:
                raise TensorError("scatter: give root's tensor, and on the other ranks out=")
            dst = view(out, writable=True)
            return self._run(lib.RC_SCATTER, None, dst, dst.count, root=root, async_op=async_op,
                             timeout=timeout)  # fmt: skip
        src = view(tensor, writable=False)
        rows = self._rows("scatter", src, exactly_one=True)
        dst = self._result(out, src, rows[1:])
        return self._run(lib.RC_SCATTER, src if self.rank == root else None, dst, dst.count,
                         root=root, async_op=async_op, timeout=timeout)  # fmt: skip

    def reduce_scatter(
        self,
        tensor: Any,
        op: str = "sum",
        *,
        compression: str | None = None,
        feedback: Feedback = None,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Reduces over all ranks and gives rank i the i-th of world_size equal parts.

        Args:
            tensor: its first dimension is a multiple of world_size. Only read.
            op, compression, feedback: as for allreduce; the feedback is of the tensor's size. The
                result is not rounded again. A value that is not finite makes NaN of the part that
                it belongs to and of that of the rank which had it; the other ranks do not know.

        Returns:
            Shape (tensor.shape[0] / world_size, *tensor.shape[1:]).
        """
        src = view(tensor, writable=False)
        rows = self._rows("reduce_scatter", src)
        dst = self._result(out, src, rows)
        return self._run(
            lib.RC_REDUCE_SCATTER, src, dst, dst.count, op=op, compression=compression,
            feedback=feedback, async_op=async_op, timeout=timeout,
        )  # fmt: skip

    def alltoall(
        self, tensor: Any, *, out: Any = None, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Sends the i-th of world_size equal parts to rank i; returns the parts received, in order
        of rank, in the shape of ``tensor``, whose first dimension is a multiple of world_size."""
        src = view(tensor, writable=False)
        self._rows("alltoall", src)
        dst = self._result(out, src, src.shape)
        return self._run(lib.RC_ALLTOALL, src, dst, src.count // self.world_size,
                         async_op=async_op, timeout=timeout)  # fmt: skip

    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Returns None, or the Work is over, when every rank has called it."""
        return self._run(lib.RC_BARRIER, None, None, 0, async_op=async_op, timeout=timeout)

    def send(
        self, tensor: Any, dst: int, *, tag: int = 0, async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Sends a tensor to another rank, dst, where a ``recv`` of the same tag (0 to 2^31 - 1)
        takes it; sends of a tag to one rank keep their order. Returns the tensor (or the Work)
        when it may be changed, which can be before it is received."""
        src = view(tensor, writable=False)
        return self._run(lib.RC_SEND, src, None, src.count, root=dst, tag=check_tag(tag),
                         async_op=async_op, timeout=timeout, result=tensor)  # fmt: skip

    def recv(
        self, tensor: Any, src: int | None, *, tag: int = 0, async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """Receives into ``tensor``, of the count and dtype that another rank, src, sends with this
        tag; returns it (or the Work). With src None it is the next send of the tag by any rank,
        which the Work's ``root`` tells."""
        dst = view(tensor, writable=True)
        return self._run(lib.RC_RECV, None, dst, dst.count, root=src, tag=check_tag(tag),
                         async_op=async_op, timeout=timeout)  # fmt: skip

    # ---- the rest of its life ----

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
            if not is_integer(value) or not -(2**63) <= value < 2**63:
                raise ConfigError(f"{name}={value!r}: give an integer of 64 bits")
        self._splits += 1
        members = _members(self, color, key)
        joined = regroup(self._joined, members, self._gather_bytes, self._splits)
        return None if joined is None else Communicator(joined)

    def stats(self) -> dict[str, Any]:
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

    @property
    def kernel_set(self) -> str:
        """The instruction set of its kernels."""
        return self._engine.kernel_set

    def host_of(self, rank: int | None) -> str | None:
        """Host name of a rank; None for no rank."""
        return self.hosts[rank] if rank is not None and 0 <= rank < len(self.hosts) else None

    @property
    def is_inherited(self) -> bool:
        """True in a forked child of the process that made it, where it is of no use."""
        return self._engine.forked

    def require_own_process(self) -> None:
        """Raises NotInitializedError in a forked child of the process that made it."""
        self._engine.require_own_process()

    def abort(self, reason: str = "abort() was called") -> None:
        """Fails all collectives in flight and to come, here and on every other rank, at once."""
        self._require_open()
        with self._lock:
            self._require_open()
            lib.rc_comm_abort(self._handle, str(reason).encode("utf-8", "replace")[:300])

    def close(self) -> None:
        """Leaves the group: says goodbye and closes the lanes, within about a second. Collectives
        still in flight fail, here and on the other ranks. Closing twice, or in a forked child, is
        harmless."""
        self._close(_CLOSE_MS)

    def _close(self, patience_ms: int) -> None:
        if self._engine.forked:
            return
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is None:
            return
        _alive.discard(self)
        lib.rc_comm_close(handle, patience_ms)
        for work in list(self._in_flight.values()):
            work.done()
        lib.rc_comm_free(handle)
        _native.release_engine(self.config.kernel_set)

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

    # ---- helpers ----

    def _follow(self, rows: Sequence[Row]) -> None:
        """For tools.tune: other rows from now on, the same on all ranks between the same two
        collectives, while none is in flight."""
        with self._lock:
            self._require_open()
            check(_native.tune(self._handle, rows), "tune")

    def _require_open(self) -> None:
        self.require_own_process()
        if self._handle is None:
            raise NotInitializedError("the communicator is closed")

    def _rows(self, name: str, src: View, exactly_one: bool = False) -> tuple[int, ...]:
        """Shape of one of world_size equal parts along the first dimension."""
        n = self.world_size
        if not src.shape or src.shape[0] % n or (exactly_one and src.shape[0] != n):
            wanted = f"be {n}" if exactly_one else f"divide by {n}"
            raise TensorError(f"{name}: the first dimension must {wanted} (the world size), and "
                              f"the tensor's shape is {src.shape}")  # fmt: skip
        return (src.shape[0] // n, *src.shape[1:])

    def _out(self, out: Any, src: View, count: int) -> View:
        dst = view(out, writable=True)
        if dst.count != count or dst.dtype != src.dtype:
            raise TensorError(f"out is {dst.dtype}[{dst.count}], the result is "
                              f"{src.dtype}[{count}]")  # fmt: skip
        return dst

    def _result(self, out: Any, src: View, shape: tuple[int, ...]) -> View:
        made = src.new(shape) if out is None else out
        count = 1
        for size in shape:
            count *= size
        return self._out(made, src, count)

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
        call, name = make_call(
            collective, src, dst, count, op, compression, root, self.world_size, seconds, async_op,
            on_done is not None, feedback,
        )  # fmt: skip
        if call.codec == lib.RC_CODEC_ONEBIT_DEEPSPEED:
            assert src is not None
            assert dst is not None
            return deepspeed.allreduce(self, name, src, dst, feedback, seconds)
        call.tag = tag
        error = ffi.new("rc_error *")
        views = tuple({id(v): v for v in (src, dst) if v is not None}.values())
        work = Work(self, name, views, dst.owner if dst is not None else result)
        if isinstance(feedback, Residuals):
            feedback.hold(work)
            work.borrow(feedback)
        with self._lock:
            self._require_open()
            try:  # held before the core has it: an interrupt must not lose what it has borrowed
                self._in_flight[id(work)] = work
                if on_done is not None:
                    self._call_back(work, on_done)
                code = lib.rc_submit(self._handle, call, work._slot, error)
            finally:
                if not work._slot[0]:  # refused, or interrupted on the way
                    self._forget(work)
                    self._engine.unwatch(work._slot)
            if code != OK:
                kind = error_class(code)
                if code == lib.RC_INVALID_STATE and call.feedback:  # taken by another thread
                    kind = ConfigError
                raise kind(f"{name}: {text(error.message)}")
        if len(self._in_flight) > self._collect_at:
            self._collect()
        return work if async_op else work.wait()

    def _call_back(self, work: Work, callback: Callable[[Work], None]) -> None:
        work._callbacks = (callback,)
        self._engine.watch(work._slot, work._tell)

    def _gather_bytes(self, part: bytes, seconds: float) -> bytes:
        """Equal-sized parts of all ranks, joined in order of rank."""
        mine = np.frombuffer(part, dtype=np.uint8)
        return bytes(self.allgather(mine, timeout=seconds).tobytes())

    def _collect(self) -> None:
        """Lets go of finished works that nobody has waited for, and so of their tensors."""
        for work in list(self._in_flight.values()):
            work.done()
        self._collect_at = 2 * len(self._in_flight) + _UNWAITED

    def _forget(self, work: Work) -> None:
        self._in_flight.pop(id(work), None)


_alive: set[Communicator] = set()


@atexit.register
def _close_all() -> None:
    """Says all goodbyes within the time that one may take. Where works are in flight, as after
    Ctrl-C, only their failure is left to tell: a peer that does not listen is not waited for."""
    deadline = time.monotonic() + _CLOSE_MS / 1000
    for comm in [comm for comm in _alive if not comm.is_inherited]:
        left = int((deadline - time.monotonic()) * 1000)
        if not all(work.done() for work in list(comm._in_flight.values())):
            left = min(left, _ABORT_MS)
        comm._close(max(1, left))


def _members(comm: Communicator, color: int | None, key: int) -> list[int]:
    """The ranks of this rank's color in the order of their keys; empty for color None."""
    mine = np.array([color is not None, color or 0, key], dtype=np.int64)
    rows = comm.allgather(mine)
    same = [r for r in range(comm.world_size) if rows[r][0] and rows[r][1] == mine[1]]
    return sorted(same, key=lambda r: (int(rows[r][2]), r)) if mine[0] else []


__all__ = ["Communicator", "RingcommError", "Work"]
