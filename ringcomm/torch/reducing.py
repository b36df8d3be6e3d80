"""The collectives of a process group that reduce.

The core's ops run in the core. For the rare bitwise ops all ranks' tensors are gathered, and each
rank reduces them. Sparse tensors, whose indices differ from rank to rank, are handled alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..core.calls import naming
from ..core.native import lib
from ..core.views import View
from ..errors import TensorError
from .ops import Reduction, as_reduced, core_op, reduction
from .submit import Call, Submitter, moving_call, one, root_of
from .tensors import apart, copy, memory_of, packed, require_alike
from .works import RingWork, together


def _op_of(opts: Any) -> Any:
    return getattr(opts, "reduceOp", dist.ReduceOp.SUM)


class Reducing(Submitter):
    """All-reduce, reduce and reduce-scatter, each in all of torch's forms."""

    def allreduce(self, tensors: Any, opts: Any = None) -> RingWork:
        """Reduces one tensor over all ranks, in place; a sparse one by gathering all."""
        tensor = one(tensors, "all_reduce")
        op = _op_of(opts)
        known = core_op(getattr(op, "op", op), tensor.dtype)
        if known is not None:
            compression = self._compression(known, tensor)
            work = self._in_place(lib.RC_ALLREDUCE, tensor, opts, known, compression)
            if work is not None:
                return work
        if tensor.layout == torch.sparse_coo:
            return self._allreduce_sparse(tensor, op)
        call, after = self._call(lib.RC_ALLREDUCE, op, tensor, tensor)
        return self._start("all_reduce", [call], [tensor], opts, after)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> RingWork:
        """Reduces several tensors over all ranks, in place."""
        calls = []
        for tensor in tensors:
            how = reduction(_op_of(opts), tensor)
            if how.join is not None:
                raise TensorError("all_reduce_coalesced: BAND, BOR and BXOR go by all_reduce")
            calls.append(self._reduced(lib.RC_ALLREDUCE, how, tensor, tensor))
        return self._start("all_reduce", calls, list(tensors), opts)

    def reduce(self, tensors: Any, opts: Any = None) -> RingWork:
        """Reduces to the root, in place; elsewhere the tensor is only read."""
        tensor = one(tensors, "reduce")
        root = root_of(opts)
        result = tensor if self.comm.rank == root else None
        call, after = self._call(lib.RC_REDUCE, _op_of(opts), tensor, result, root)
        return self._start("reduce", [call], [tensor], opts, after)

    def reduce_scatter_single(self, output: Any, source: Any, opts: Any = None) -> RingWork:
        """Reduces a tensor world_size times as large as the output; each rank gets its part."""
        n = self.comm.world_size
        if source.numel() != n * output.numel() or source.dtype != output.dtype:
            raise ValueError(
                f"reduce_scatter: the input is {source.dtype}{list(source.shape)}, and must be "
                f"{n} times the output, {output.dtype}{list(output.shape)}"
            )
        call, after = self._call(lib.RC_REDUCE_SCATTER, _op_of(opts), source, output)
        return self._start("reduce_scatter", [call], [output], opts, after)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> RingWork:
        """Reduces a list of world_size tensors; each rank gets its own of them."""
        output = one(outputs, "reduce_scatter")
        parts = inputs[0] if isinstance(inputs[0], (list, tuple)) else inputs
        self._require_world(parts, "reduce_scatter")
        if len({part.numel() for part in parts}) > 1:
            return self._scattered_unevenly(output, parts, opts)
        require_alike(parts, output, "reduce_scatter")
        return Reducing.reduce_scatter_single(self, output, packed(parts), opts)

    def _scattered_unevenly(self, output: torch.Tensor, parts: Any, opts: Any) -> RingWork:
        """Reduces each of some parts of different sizes to its rank."""
        rank, calls = self.comm.rank, []
        require_alike([parts[rank]], output, "reduce_scatter")
        in_place = parts[rank].data_ptr() == output.data_ptr()
        parts = [
            part if root == rank and in_place else apart([part], [output])[0]
            for root, part in enumerate(parts)
        ]
        how = reduction(_op_of(opts), output)
        if how.join is not None:
            raise TensorError("reduce_scatter: BAND, BOR and BXOR take parts of one size")
        for root, part in enumerate(parts):
            here = output if root == rank else None
            calls.append(self._reduced(lib.RC_REDUCE, how, part, here, root))
        return self._start("reduce_scatter", calls, [output], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> RingWork:
        """Reduces several tensors, each world_size times as large as its output."""
        pairs = zip(outputs, inputs, strict=True)
        return together([Reducing.reduce_scatter_single(self, o, i, opts) for o, i in pairs])

    def _call(
        self, collective: int, op: Any, src: torch.Tensor, dst: torch.Tensor | None, root: int = 0
    ) -> tuple[Call, Callable[[], None] | None]:
        """Returns the call of a reduction, and a function that writes its result to ``dst``, or
        None. For an op that the core lacks, the call gathers all ranks' tensors, and the function
        reduces them here."""
        how = reduction(op, src)
        join_two = how.join
        if join_two is None:
            return self._reduced(collective, how, src, dst, root), None
        rows = src.new_empty((self.comm.world_size, *src.shape), requires_grad=False)
        call = moving_call(lib.RC_ALLGATHER, src, rows)
        if dst is None:
            return call, None
        target = dst.detach()

        def join() -> None:
            result = functools.reduce(join_two, rows.unbind(0))
            if collective == lib.RC_REDUCE_SCATTER:
                result = result.reshape(self.comm.world_size, -1)[self.comm.rank]
            copy(target, result)

        return call, join

    def _reduced(
        self,
        collective: int,
        how: Reduction,
        src: torch.Tensor,
        dst: torch.Tensor | None,
        root: int = 0,
    ) -> Call:
        if how.factor is not None:
            # A factor that is a tensor may promote.
            src = (src.detach() * how.factor).detach().to(src.dtype)
        source = memory_of(as_reduced(src), writable=src is dst)
        target: View | None = source
        if dst is not src:
            target = None if dst is None else memory_of(as_reduced(dst), writable=True, reads=False)
        return Call(
            collective,
            source,
            target,
            (source if target is None else target).count,
            how.op,
            root,
            compression=self._compression(how.op, src) if collective == lib.RC_ALLREDUCE else None,
        )

    def _compression(self, op: str, tensor: torch.Tensor) -> str | None:
        """Returns the group's codec if it may compress this reduction."""
        is_lossy = op in ("sum", "avg") and tensor.dtype in (torch.float32, torch.float64)
        return self._options.compression if is_lossy else None

    @naming("all_reduce() of a sparse tensor")
    def _allreduce_sparse(self, tensor: torch.Tensor, op: Any) -> RingWork:
        """Gathers indices and values of all ranks, padded to the longest, and sums them."""
        if getattr(op, "op", op) != dist.ReduceOp.SUM:
            raise TensorError("sparse tensors can be all-reduced by SUM only")
        own = tensor.detach().coalesce()
        counts = self.comm.allgather(torch.tensor([own._nnz()], device="cpu"))
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
            device=own.device,
        ).coalesce()
        with torch.no_grad():
            tensor.copy_(total)
        return RingWork.finished([tensor])
