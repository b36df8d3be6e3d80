"""Backend "ringcomm" of torch.distributed: a process group whose collectives are ringcomm's.

torch calls one method per collective, with lists of tensors and an options object, and gets a Work.
Each method here says which calls of the core that is (a Call), and what is left to do when they are
over; ``_start`` does the rest alike for all: it submits them, and waits where torch will.

Invariants: arguments are checked before anything is submitted. Every method of torch's interface
exists under both of its names, where releases differ. The group closes its communicator when torch
shuts it down, or when it is no longer referenced.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._native import lib
from ..buffers import View, view
from ..communicator import Communicator
from ..errors import CommTimeoutError, RingcommError, TensorError
from . import profiling
from .options import Options
from .reductions import Reduction, as_reduced, reduction, takes_compression
from .tensors import joined, moved, packed, require_alike, unpack
from .works import RingWork, seconds_of, together

_Base: Any = dist.ProcessGroup
_PIECES = 1 << 31  # the tag of what belongs to collectives; users' are below
Tensors = list[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the core: what Communicator._run takes."""

    collective: int
    src: View | None
    dst: View | None
    count: int
    op: str = "sum"
    root: int = 0
    tag: int = 0
    compression: str | None = None


def _one(tensors: Any, what: str) -> torch.Tensor:
    """torch passes lists, which had one tensor per device once."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if not isinstance(tensors, (list, tuple)) or len(tensors) != 1:
        raise ValueError(f"{what}: ringcomm takes one tensor, not {len(tensors)}")
    if not isinstance(tensors[0], torch.Tensor):
        raise TypeError(f"{what}: {type(tensors[0]).__name__} is not a tensor")
    return tensors[0]


class RingcommGroup(_Base):  # type: ignore[misc]
    """A process group, as ``dist.init_process_group("ringcomm")`` and ``new_group`` make it.

    Attributes:
        comm: its ringcomm.Communicator, for what torch has no name for (``stats()``, ``rails``).
        options: its Options.
    """

    supports_splitting = True

    def __init__(self, store: Any, comm: Communicator, options: Options, regroup: Any) -> None:
        super().__init__(comm.rank, comm.world_size)
        self.comm = comm
        self.options = options
        self._store = store
        self._regroup = regroup
        self._name = self._desc = ""
        self._coalescing: list[RingWork] | None = None

    # ---- submission ----

    def _start(
        self,
        name: str,
        calls: Sequence[Call],
        tensors: Tensors,
        opts: Any = None,
        after: Callable[[], None] | None = None,
    ) -> RingWork:
        """Submits the calls of one collective; waits for them if torch is going to."""
        if profiling.is_on():
            return profiling.recorded(name, lambda: self._submit(calls, tensors, opts, after))
        return self._submit(calls, tensors, opts, after)

    def _submit(
        self, calls: Sequence[Call], tensors: Tensors, opts: Any, after: Callable[[], None] | None
    ) -> RingWork:
        at_once = not getattr(opts, "asyncOp", True) and self._coalescing is None
        timeout = seconds_of(getattr(opts, "timeout", None))
        alone = at_once and len(calls) == 1
        parts = [
            self.comm._run(
                call.collective, call.src, call.dst, call.count, op=call.op, root=call.root,
                tag=call.tag, compression=call.compression, async_op=not alone, timeout=timeout,
            )
            for call in calls
        ]  # fmt: skip
        work = RingWork(() if alone else parts, tensors, after)
        if at_once:
            work.wait()
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _reduced(
        self, collective: int, how: Reduction, src: torch.Tensor, dst: torch.Tensor | None,
        count: int, root: int = 0,
    ) -> Call:  # fmt: skip
        if how.factor is not None:
            src = src.detach() * how.factor
        compresses = collective == lib.RC_ALLREDUCE and takes_compression(how.op, src)
        source = view(as_reduced(src), writable=src is dst)
        target = source
        if dst is None:
            target = None  # type: ignore[assignment]
        elif dst is not src:
            target = view(as_reduced(dst), writable=True)
        per = 2 if src.is_complex() else 1
        return Call(
            collective, source, target, count * per, how.op, root,
            compression=self.options.compression if compresses else None,
        )  # fmt: skip

    def _gathered(self, tensor: torch.Tensor) -> tuple[Call, torch.Tensor]:
        """A call that brings every rank's tensor here, and where."""
        rows = tensor.new_empty((self.comm.world_size, *tensor.shape), requires_grad=False)
        src, dst = moved(tensor, writable=False), moved(rows, writable=True)
        return Call(lib.RC_ALLGATHER, src, dst, src.count), rows

    # ---- reductions ----

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> RingWork:
        """Of one dense tensor, in place; of a sparse one by gathering all."""
        tensor = _one(tensors, "all_reduce")
        op = getattr(opts, "reduceOp", opts)
        op = dist.ReduceOp.SUM if op is None else op
        if tensor.layout == torch.sparse_coo:
            return self._allreduce_sparse(tensor, op)
        how = reduction(op, tensor)
        if how.join is not None:
            call, rows = self._gathered(tensor)
            return self._start(
                "all_reduce", [call], [tensor], opts, lambda: _copy(tensor, how.joined(rows))
            )
        call = self._reduced(lib.RC_ALLREDUCE, how, tensor, tensor, tensor.numel())
        return self._start("all_reduce", [call], [tensor], opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> RingWork:
        """Of several tensors, in place."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        flat = joined(tensors) if tensors else None
        if flat is not None:
            return self.allreduce([flat], opts)
        calls = []
        for tensor in tensors:
            how = reduction(op, tensor)
            if how.join is not None:
                raise TensorError("all_reduce_coalesced: BAND, BOR and BXOR go by all_reduce")
            calls.append(
                self._reduced(lib.RC_ALLREDUCE, how, tensor, tensor, tensor.numel())
            )
        return self._start("all_reduce", calls, list(tensors), opts)

    def reduce(self, tensors: Any, opts: Any = None, *rest: Any) -> RingWork:
        """In place on the root; elsewhere the tensor is only read."""
        tensor = _one(tensors, "reduce")
        root = int(getattr(opts, "rootRank", opts if isinstance(opts, int) else 0))
        here = self.comm.rank == root
        how = reduction(getattr(opts, "reduceOp", rest[0] if rest else dist.ReduceOp.SUM), tensor)
        if how.join is not None:
            call, rows = self._gathered(tensor)
            after = (lambda: _copy(tensor, how.joined(rows))) if here else None
            return self._start("reduce", [call], [tensor], opts, after)
        call = self._reduced(
            lib.RC_REDUCE, how, tensor, tensor if here else None, tensor.numel(), root
        )
        return self._start("reduce", [call], [tensor], opts)

    def _scattered(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> RingWork:
        """Reduce-scatter of a tensor that holds all ranks' parts."""
        n, rank = self.comm.world_size, self.comm.rank
        if source.numel() != n * output.numel() or source.dtype != output.dtype:
            raise ValueError(
                f"reduce_scatter: the input is {source.dtype}{list(source.shape)}, and must be "
                f"{n} times the output, {output.dtype}{list(output.shape)}"
            )
        how = reduction(getattr(opts, "reduceOp", dist.ReduceOp.SUM), source)
        if how.join is not None:
            call, rows = self._gathered(source)

            def pick() -> None:
                _copy(output, how.joined(rows).reshape(n, -1)[rank])

            return self._start("reduce_scatter", [call], [output], opts, pick)
        call = self._reduced(lib.RC_REDUCE_SCATTER, how, source, output, output.numel())
        return self._start("reduce_scatter", [call], [output], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> RingWork:
        """Of a list of world_size tensors like the output."""
        output = _one(outputs, "reduce_scatter")
        parts = inputs[0] if isinstance(inputs[0], (list, tuple)) else inputs
        self._require_world(parts, "reduce_scatter")
        require_alike(parts, output, "reduce_scatter")
        return self._scattered(output, packed(parts), opts)

    def reduce_scatter_single(self, output: Any, source: Any, opts: Any = None) -> RingWork:
        """Of one tensor, world_size times as large as the output."""
        return self._scattered(output, source, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> RingWork:
        """Several of these."""
        return together([self._scattered(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    # ---- copies ----

    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> RingWork:
        """From the root, in place."""
        tensor = _one(tensors, "broadcast")
        root = int(getattr(opts, "rootRank", opts if isinstance(opts, int) else 0))
        dst = moved(tensor, writable=self.comm.rank != root)
        return self._start(
            "broadcast", [Call(lib.RC_BROADCAST, dst, dst, dst.count, root=root)], [tensor], opts
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> RingWork:
        """Into a list of world_size tensors like the input."""
        source = _one(inputs, "all_gather")
        rows = outputs[0] if isinstance(outputs[0], (list, tuple)) else outputs
        self._require_world(rows, "all_gather")
        require_alike(rows, source, "all_gather")
        return self._collect("all_gather", lib.RC_ALLGATHER, list(rows), source, opts)

    def _collect(
        self, name: str, collective: int, rows: Tensors, source: torch.Tensor, opts: Any,
        root: int = 0,
    ) -> RingWork:  # fmt: skip
        """Gathers into rows, directly where they lie one after the other."""
        src = moved(source, writable=False)
        flat = joined(rows)
        target = source.new_empty(len(rows) * source.numel()) if flat is None else flat
        call = Call(collective, src, moved(target, writable=True), src.count, root=root)
        after = None if flat is not None else lambda: unpack(target, rows)
        return self._start(name, [call], rows, opts, after)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RingWork:
        """Several of these; outputs[rank][i] is what rank has as inputs[i]."""
        self._require_world(outputs, "all_gather_coalesced")
        columns = [list(column) for column in zip(*outputs, strict=True)]
        works = [self.allgather([o], [i], opts) for o, i in zip(columns, inputs, strict=True)]
        return together(works)

    def all_gather_single(self, output: Any, source: Any, opts: Any = None) -> RingWork:
        """Into one tensor, world_size times as large as the input."""
        if output.numel() != self.comm.world_size * source.numel() or output.dtype != source.dtype:
            raise ValueError(
                f"all_gather_into_tensor: the output is {output.dtype}{list(output.shape)}, and "
                f"must be {self.comm.world_size} times {source.dtype}{list(source.shape)}"
            )
        src = moved(source, writable=False)
        call = Call(lib.RC_ALLGATHER, src, moved(output, writable=True), src.count)
        return self._start("all_gather", [call], [output], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RingWork:
        """Several of these."""
        works = [
            self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)
        ]
        return together(works)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> RingWork:
        """Into a list of world_size tensors on the root; elsewhere outputs are empty."""
        source = _one(inputs, "gather")
        root = int(getattr(opts, "rootRank", opts if isinstance(opts, int) else 0))
        if self.comm.rank != root:
            src = moved(source, writable=False)
            return self._start(
                "gather", [Call(lib.RC_GATHER, src, None, src.count, root=root)], [], opts
            )
        rows = outputs[0] if outputs and isinstance(outputs[0], (list, tuple)) else outputs
        self._require_world(rows, "gather")
        require_alike(rows, source, "gather")
        return self._collect("gather", lib.RC_GATHER, list(rows), source, opts, root)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> RingWork:
        """From a list of world_size tensors on the root; elsewhere inputs are empty."""
        output = _one(outputs, "scatter")
        root = int(getattr(opts, "rootRank", opts if isinstance(opts, int) else 0))
        dst = moved(output, writable=True)
        src = None
        if self.comm.rank == root:
            parts = inputs[0] if inputs and isinstance(inputs[0], (list, tuple)) else inputs
            self._require_world(parts, "scatter")
            require_alike(parts, output, "scatter")
            src = moved(packed(parts), writable=False)
        return self._start(
            "scatter", [Call(lib.RC_SCATTER, src, dst, dst.count, root=root)], [output], opts
        )

    # ---- all to all ----

    def all_to_all_single(
        self, output: Any, source: Any, output_splits: Any = (), input_splits: Any = (),
        opts: Any = None,
    ) -> RingWork:  # fmt: skip
        """In equal parts where no rank gives sizes; else in rows of these sizes."""
        n = self.comm.world_size
        if output.dtype != source.dtype:
            raise ValueError("all_to_all: the output and the input differ in dtype")
        if not output_splits and not input_splits:
            if source.dim() == 0 or source.shape[0] % n or output.numel() != source.numel():
                raise ValueError(
                    "all_to_all_single: without split sizes the first dimension must divide by the "
                    f"group's size, {n}, and the output be as large as the input"
                )
            if output.data_ptr() == source.data_ptr():
                source = source.clone()
            src = moved(source, writable=False)
            call = Call(lib.RC_ALLTOALL, src, moved(output, writable=True), src.count // n)
            return self._start("all_to_all", [call], [output], opts)
        sources = _split(source, input_splits, n, "input")
        target = output if output.is_contiguous() else torch.empty_like(
            output, memory_format=torch.contiguous_format
        )
        calls = self._pieces(_split(target, output_splits, n, "output"), sources)
        after = None if target is output else lambda: _copy(output, target)
        return self._start("all_to_all", calls, [output], opts, after)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> RingWork:
        """Lists of world_size tensors, of any sizes."""
        self._require_world(outputs, "all_to_all")
        self._require_world(inputs, "all_to_all")
        return self._start("all_to_all", self._pieces(outputs, inputs), list(outputs), opts)

    def _pieces(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[Call]:
        """A send and a receive for every other rank, first those next to this one; the piece that
        stays is copied now."""
        n, rank = self.comm.world_size, self.comm.rank
        calls = []
        for distance in range(1, n):
            to, source = (rank + distance) % n, (rank - distance) % n
            src, dst = moved(inputs[to], writable=False), moved(outputs[source], writable=True)
            calls.append(Call(lib.RC_SEND, src, None, src.count, root=to, tag=_PIECES))
            calls.append(Call(lib.RC_RECV, None, dst, dst.count, root=source, tag=_PIECES))
        if outputs[rank].numel() != inputs[rank].numel():
            raise ValueError("all_to_all: the piece that stays here has two sizes")
        _copy(outputs[rank], inputs[rank])
        return calls

    # ---- sends and receives ----

    def send(self, tensors: Any, dst: int, tag: int = 0) -> RingWork:
        """To a rank of this group, for a receive of the same tag."""
        src = moved(_one(tensors, "send"), writable=False)
        call = Call(lib.RC_SEND, src, None, src.count, root=self._peer(dst), tag=_tag(tag))
        return self._start("send", [call], list(tensors))

    def recv(self, tensors: Any, src: int, tag: int = 0) -> RingWork:
        """What a rank of this group sends with this tag."""
        dst = moved(_one(tensors, "recv"), writable=True)
        call = Call(lib.RC_RECV, None, dst, dst.count, root=self._peer(src), tag=_tag(tag))
        return self._start("recv", [call], list(tensors))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> RingWork:
        """The next that any rank sends with this tag; the Work knows which."""
        dst = moved(_one(tensors, "recv"), writable=True)
        call = Call(lib.RC_RECV, None, dst, dst.count, root=lib.RC_ANY_SOURCE, tag=_tag(tag))
        return self._start("recvAnySource", [call], list(tensors))

    def _peer(self, rank: int) -> int:
        if rank == self.comm.rank:
            raise ValueError("ringcomm: a rank cannot send to or receive from itself")
        if not 0 <= rank < self.comm.world_size:
            raise ValueError(f"rank {rank} is not in a group of {self.comm.world_size}")
        return rank

    def _start_coalescing(self, _device: Any) -> None:
        self._coalescing = []

    def _end_coalescing(self, _device: Any) -> RingWork:
        works, self._coalescing = self._coalescing or [], None
        return together(works)

    # ---- barriers ----

    def barrier(self, opts: Any = None, timeout: Any = None) -> RingWork:
        """Over when every rank has called it."""
        return self._start("barrier", [Call(lib.RC_BARRIER, None, None, 0)], [], opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names the ranks that have not called it: on rank 0 all of them,
        whether wait_all_ranks is given or not. (``dist.monitored_barrier`` is for gloo only: call
        this method of the group.)"""
        rank, seconds = self.comm.rank, timeout.total_seconds() if timeout is not None else None
        if seconds is not None and seconds <= 0:
            raise CommTimeoutError(f"Rank {rank} timed out in monitoredBarrier: no time was given")
        try:
            self.comm.barrier(timeout=seconds)
        except RingcommError as error:
            text = (
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while "
                "waiting for send/recv from rank 0"
            )
            missing = re.search(r"rank ([\d, ]+) has not called", str(error))
            if rank == 0 and missing:
                ranks = "Ranks" if "," in missing[1] else "Rank"
                text = f"{ranks} {missing[1]} failed to pass monitoredBarrier"
            raise type(error)(f"{text}: {error}", rank=error.rank, host=error.host) from error

    # ---- names, and the end ----

    def getBackendName(self) -> str:  # noqa: N802 (torch's)
        """ "ringcomm"."""
        return "ringcomm"

    name = getBackendName

    def getGroupName(self) -> str:  # noqa: N802
        """As torch gave it."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Called by torch."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """As torch gave it."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Called by torch."""
        self._desc = desc

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    def rank(self) -> int:
        """This rank's number in the group."""
        return self.comm.rank

    def size(self) -> int:
        """The number of ranks."""
        return self.comm.world_size

    getRank = rank  # noqa: N815
    getSize = size  # noqa: N815

    def get_group_store(self) -> Any:
        """The store that the group was made with."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        cuda = [torch.device("cuda")] if torch.cuda.is_available() else []
        return [torch.device("cpu"), *cuda]

    def _get_backend(self, _device: Any) -> RingcommGroup:
        return self

    def _set_sequence_number_for_group(self) -> None:
        """The core numbers its collectives from 0."""

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: Any = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        **_: Any,
    ) -> RingcommGroup | None:
        """A group of these ranks of this one; None on ranks that are not among them."""
        if self.comm.rank not in new_ranks:
            return None
        name = group_name or f"{self._name}/{','.join(map(str, new_ranks))}"
        group: RingcommGroup = self._regroup(self, list(new_ranks), timeout, opts, name)
        group.setGroupName(name)
        group.setGroupDesc(group_desc or "undefined")
        return group

    def shutdown(self) -> None:
        """Leaves the group; collectives in flight fail. Called by destroy_process_group."""
        self.comm.close()

    _shutdown = shutdown

    def abort(self) -> None:
        """Fails all collectives here and on the other ranks, and leaves."""
        try:
            self.comm.abort("abort() of its process group was called")
        except RingcommError:
            pass  # closed before
        self.comm.close()

    def __del__(self) -> None:
        comm = getattr(self, "comm", None)
        if comm is not None:
            comm.close()

    # ---- helpers ----

    def _require_world(self, tensors: Any, what: str) -> None:
        if len(tensors) != self.comm.world_size:
            raise ValueError(
                f"{what}: give a list of {self.comm.world_size} tensors, one for each rank of the "
                f"group, not {len(tensors)}"
            )

    def _allreduce_sparse(self, tensor: torch.Tensor, op: Any) -> RingWork:
        """Indices and values of all ranks are gathered, padded to the longest, and added up."""
        if getattr(op, "op", op) != dist.ReduceOp.RedOpType.SUM:
            raise TensorError("sparse tensors can be all-reduced by SUM only")
        own = tensor.detach().coalesce()
        counts = self.comm.allgather(torch.tensor([own._nnz()]))
        most = int(counts.max())
        indices = own.indices().new_zeros((own.sparse_dim(), most))
        indices[:, : own._nnz()] = own.indices()
        values = own.values().new_zeros((most, *own.values().shape[1:]))
        values[: own._nnz()] = own.values()
        all_indices, all_values = self.comm.allgather(indices), self.comm.allgather(values)
        used = [int(count) for count in counts.flatten()]
        total = torch.sparse_coo_tensor(
            torch.cat([all_indices[r][:, :k] for r, k in enumerate(used)], dim=1),
            torch.cat([all_values[r][:k] for r, k in enumerate(used)]),
            own.shape,
        ).coalesce()
        with torch.no_grad():
            tensor.copy_(total)
        return RingWork((), [tensor])

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.detach().copy_(source.detach().reshape(target.shape))


def _tag(tag: int) -> int:
    if not 0 <= tag < _PIECES:
        raise ValueError(f"tag {tag}: give one from 0 to 2^31 - 1")
    return tag


def _split(tensor: torch.Tensor, sizes: Any, n: int, what: str) -> Tensors:
    """The rows that go to, or come from, each rank."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not sizes:
        if rows % n:
            raise ValueError(f"all_to_all_single: the {what}'s {rows} rows do not divide by {n}")
        sizes = [rows // n] * n
    if len(sizes) != n or sum(sizes) != rows or min(sizes) < 0:
        raise ValueError(
            f"all_to_all_single: the {what}'s split sizes are {list(sizes)}; they must be {n}, and "
            f"add up to its {rows} rows"
        )
    return list(tensor.split(list(sizes)))


__all__ = ["RingcommGroup"]
