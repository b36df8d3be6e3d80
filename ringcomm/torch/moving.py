"""The collectives of a process group that move elements and change none.

Lists of tensors that are contiguous in memory, as the parts of a larger one are, are used in place;
others are copied. An exchange of unequal pieces is a send and a receive for each pair of ranks,
with a tag that users cannot give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..core.calls import FIRST_INNER_TAG
from ..core.native import lib
from .submit import Call, Submitter, Tensors, moving_call, one, root_of
from .tensors import KNOWN, apart, copy, joined, moved, packed, require_alike, unpack
from .works import RingWork, together

_BY_PIECES = "all_to_all by lists or split sizes"


class Moving(Submitter):
    """Broadcast, all-gather, gather, scatter and all-to-all, each in all of torch's forms."""

    def broadcast(self, tensors: Any, opts: Any = None) -> RingWork:
        """Broadcasts the root's tensor, in place."""
        tensor = one(tensors, "broadcast")
        root = root_of(opts)
        if tensor.dtype in KNOWN:
            work = self._in_place(lib.RC_BROADCAST, tensor, opts, root=root)
            if work is not None:
                return work
        here = self.comm.rank == root
        dst = moved(tensor, writable=not here, reads=here)
        return self._start(
            "broadcast", [Call(lib.RC_BROADCAST, dst, dst, dst.count, root=root)], [tensor], opts
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> RingWork:
        """Gathers into a list of world_size tensors like the input."""
        name = "all_gather"
        return self._collect(name, lib.RC_ALLGATHER, outputs, one(inputs, name), opts)

    def _collect(
        self,
        name: str,
        collective: int,
        outputs: Any,
        source: torch.Tensor,
        opts: Any,
        root: int = 0,
    ) -> RingWork:
        """Gathers into a list, or the only list of a list, in place if its tensors are contiguous
        in memory."""
        rows = self._of_all_ranks(outputs, source, name)
        flat = joined(rows)
        target = source.new_empty(len(rows) * source.numel()) if flat is None else flat
        call = moving_call(collective, source, target, root)
        targets = [row.detach() for row in rows]
        after = None if flat is not None else lambda: unpack(target, targets)
        return self._start(name, [call], rows, opts, after)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RingWork:
        """Gathers several tensors; outputs[rank][i] gets that rank's inputs[i]."""
        self._require_world(outputs, "all_gather_coalesced")
        columns = [list(column) for column in zip(*outputs, strict=True)]
        pairs = zip(columns, inputs, strict=True)
        return together([Moving.allgather(self, [o], [i], opts) for o, i in pairs])

    def all_gather_single(self, output: Any, source: Any, opts: Any = None) -> RingWork:
        """Gathers into one tensor, world_size times as large as the input."""
        self._require_whole("all_gather_into_tensor", output, source)
        call = moving_call(lib.RC_ALLGATHER, source, output)
        return self._start("all_gather", [call], [output], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RingWork:
        """Gathers several tensors, each into one world_size times as large."""
        pairs = zip(outputs, inputs, strict=True)
        return together([Moving.all_gather_single(self, o, i, opts) for o, i in pairs])

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> RingWork:
        """Gathers into a list of world_size tensors on the root; elsewhere outputs are empty."""
        source, root = one(inputs, "gather"), root_of(opts)
        if self.comm.rank == root:
            return self._collect("gather", lib.RC_GATHER, outputs, source, opts, root)
        return self._start("gather", [moving_call(lib.RC_GATHER, source, None, root)], [], opts)

    def gather_single(self, output: Any, source: Any, opts: Any = None) -> RingWork:
        """Gathers into one tensor on the root, world_size times as large as the input; elsewhere
        the output is not used."""
        root = root_of(opts)
        is_root = self.comm.rank == root
        if is_root:
            self._require_whole("gather_single", output, source)
        call = moving_call(lib.RC_GATHER, source, output if is_root else None, root)
        return self._start("gather", [call], [output], opts)

    def _require_whole(self, name: str, output: torch.Tensor, source: torch.Tensor) -> None:
        if output.numel() != self.comm.world_size * source.numel() or output.dtype != source.dtype:
            raise ValueError(
                f"{name}: the output is {output.dtype}{list(output.shape)}, and must be "
                f"{self.comm.world_size} times {source.dtype}{list(source.shape)}"
            )

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> RingWork:
        """Scatters a list of world_size tensors of the root; elsewhere inputs are empty."""
        output, root = one(outputs, "scatter"), root_of(opts)
        is_root = self.comm.rank == root
        source = packed(self._of_all_ranks(inputs, output, "scatter")) if is_root else None
        call = moving_call(lib.RC_SCATTER, source, output, root)
        return self._start("scatter", [call], [output], opts)

    def _of_all_ranks(self, given: Any, like: torch.Tensor, name: str) -> Tensors:
        """Returns the tensors of a list, or of the only list in it. Raises ValueError unless there
        is one for each rank, of the dtype and number of elements of another."""
        parts = given[0] if given and isinstance(given[0], (list, tuple)) else given
        self._require_world(parts, name)
        require_alike(parts, like, name)
        return list(parts)

    def all_to_all_single(
        self,
        output: Any,
        source: Any,
        output_splits: Any = (),
        input_splits: Any = (),
        opts: Any = None,
    ) -> RingWork:
        """Exchanges equal parts if no rank gives sizes; else all ranks give them, for the rows of
        each rank: a call with sizes on some ranks and without on others times out."""
        n = self.comm.world_size
        if output.dtype != source.dtype:
            raise ValueError("all_to_all: the output and the input differ in dtype")
        if not output_splits and not input_splits:
            if source.dim() == 0 or source.shape[0] % n or output.numel() != source.numel():
                raise ValueError(
                    "all_to_all_single: without split sizes the first dimension must divide by the "
                    f"group's size, {n}, and the output be as large as the input"
                )
            src = moved(*apart([source], [output]), writable=False)
            call = Call(
                lib.RC_ALLTOALL, src, moved(output, writable=True, reads=False), src.count // n
            )
            return self._start("all_to_all", [call], [output], opts)
        sources = _split(source, input_splits, n, "input")
        target = (
            output
            if output.is_contiguous()
            else torch.empty_like(output, memory_format=torch.contiguous_format)
        )
        calls = self._pieces(_split(target, output_splits, n, "output"), sources)
        strided = output.detach()
        after = None if target is output else lambda: copy(strided, target)
        return self._start(_BY_PIECES, calls, [output], opts, after)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> RingWork:
        """Exchanges lists of world_size tensors, of any sizes."""
        self._require_world(outputs, "all_to_all")
        self._require_world(inputs, "all_to_all")
        return self._start(_BY_PIECES, self._pieces(outputs, inputs), list(outputs), opts)

    def _pieces(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> list[Call]:
        """Makes a send and a receive for every other rank, nearest first, and copies this rank's
        own piece."""
        n, rank = self.comm.world_size, self.comm.rank
        inputs, calls = apart(inputs, outputs), []
        for distance in range(1, n):
            to, source = (rank + distance) % n, (rank - distance) % n
            calls.append(moving_call(lib.RC_SEND, inputs[to], None, to, FIRST_INNER_TAG))
            calls.append(moving_call(lib.RC_RECV, None, outputs[source], source, FIRST_INNER_TAG))
        if outputs[rank].numel() != inputs[rank].numel():
            raise ValueError("all_to_all: the piece that stays here has two sizes")
        copy(outputs[rank], inputs[rank])
        return calls


def _split(tensor: torch.Tensor, sizes: Any, n: int, what: str) -> Tensors:
    """Splits a tensor into the rows to or from each rank."""
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
    return list(torch.split(tensor, list(sizes)))
