"""Owned: matrices of which each has an owner, the one rank that keeps its state.

    flat | a .......|b ..|   | c .........|d ..| | e ......|f ...|  |      a row for each rank

Invariants: who owns a matrix follows from the sizes alone, so it is the same on all ranks. A row
holds whole matrices, each at a block of the codec, and is as long as the longest needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...codecs import BLOCK
from ...communicator import Communicator
from ...errors import warn_caller
from ...feedback import ErrorFeedback
from ..sync.bucket import Bucket, master_dtype
from . import saved
from .span import IndexedParameter, ParameterBucket, places_of


class Owned(ParameterBucket):
    """Matrices of a parameter group in flat memory, with the momentum of this rank's.

    Args:
        held: the matrices, of one dtype and device.
        keeps: whether the gradients' codec needs feedback.

    Attributes:
        own: this rank's row.
        momentum: this rank's momentum, a flat tensor of a row.
        feedback: residuals of the gradients, of all rows, if they are kept.
    """

    def __init__(
        self, held: Sequence[IndexedParameter], comm: Communicator, *, keeps: bool
    ) -> None:
        rows = [places_of(share, BLOCK) for share in shared_out(held, comm.world_size)]
        length = max(row[-1].stop for row in rows if row)
        slices = [place.moved(at * length) for at, row in enumerate(rows) for place in row]
        first = held[0].parameter
        super().__init__(held, slices, master_dtype(first.dtype), first.device)
        self._comm, self.count = comm, comm.world_size * length
        self.own = Bucket(rows[comm.rank], self.dtype, self.device)
        self.own.count = length
        self.momentum = self.own.zeros()
        self.feedback = ErrorFeedback(self.count) if keeps else None

    def gathered(self) -> dict[int, dict[str, torch.Tensor]]:
        """Returns momentum and residual of each matrix, for a world of any size. A collective."""
        flat = {"momentum_buffer": self._comm.allgather(self.momentum).view(-1)}
        if self.feedback is not None:
            flat["residual"] = self.feedback.gather_state_dict(self._comm)["worker"]
        return {
            place.index: {name: place.of(tensor).clone() for name, tensor in flat.items()}
            for place in self.slices
        }

    def load(
        self, kept: Mapping[int, Mapping[str, Any]], feedback: Mapping[str, Any] | None
    ) -> None:
        """Takes what ``gathered`` returned; or, with this rank's own residuals, the momentum of its
        matrices. Raises ConfigError for a state of other matrices."""
        for place in self.own.slices:
            place.of(self.momentum).copy_(saved.value_of(kept, place, "momentum_buffer"))
        if self.feedback is None:
            if feedback or any("residual" in one for one in kept.values()):
                warn_caller("the state has residuals, which this Muon's gradients= does not keep")
            return
        if feedback is None:
            zeros = [torch.zeros(self.count, dtype=torch.float32, device="cpu") for _ in range(2)]
            for place in self.slices:
                if "residual" in kept.get(place.index, {}):
                    place.of(zeros[0]).copy_(saved.value_of(kept, place, "residual"))
            feedback = {
                "format": 1,
                "op": "avg",
                "loss_scale": 1.0,
                "worker": zeros[0],
                "owner": zeros[1],
            }
        self.feedback.load_state_dict(feedback, self._comm)


def shared_out(parameters: Sequence[IndexedParameter], ranks: int) -> list[list[IndexedParameter]]:
    """Returns each rank's share of parameters, of about as many elements each: the largest ones go
    first, each to the rank that has least."""
    shares, loads = [list[IndexedParameter]() for _ in range(ranks)], [0] * ranks
    for one in sorted(parameters, key=lambda one: -one.parameter.numel()):
        least = loads.index(min(loads))
        shares[least].append(one)
        loads[least] += one.parameter.numel()
    return shares
