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
from ...feedback import ErrorFeedback
from ..sync.bucket import Bucket
from .span import IndexedParameter, Place, places_of

Kept = Mapping[int, Mapping[str, torch.Tensor]]


class Owned(Bucket[Place]):
    """Matrices of a parameter group in flat memory, with the momentum of this rank's.

    Args:
        keeps: whether the gradients' codec needs feedback.

    Attributes:
        group: the number of the parameter group.
        indices: numbers of the parameters, as given.
        own: places of this rank's matrices in its row.
        momentum: this rank's row of it.
        feedback: residuals of the gradients, if they are kept.
    """

    def __init__(
        self, held: Sequence[IndexedParameter], comm: Communicator, *, keeps: bool
    ) -> None:
        self.group, self.indices = held[0].group, [one.index for one in held]
        rows = [places_of(share, BLOCK) for share in shared_out(held, comm.world_size)]
        length = max(row[-1].stop for row in rows if row)
        slices = [place.moved(at * length) for at, row in enumerate(rows) for place in row]
        super().__init__(slices, torch.float32, held[0].parameter.device)
        self._comm = comm
        self.own, self.count = rows[comm.rank], comm.world_size * length
        self.momentum = torch.zeros(length, device=self.device)
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

    def load(self, kept: Kept, feedback: Mapping[str, Any] | None) -> None:
        """Takes what ``gathered`` returned; or, with this rank's own residuals, the momentum of its
        matrices."""
        for place in self.own:
            place.of(self.momentum).copy_(kept[place.index]["momentum_buffer"])
        if self.feedback is not None and feedback is not None:
            self.feedback.load_state_dict(feedback, self._comm)
        elif self.feedback is not None:
            worker = torch.zeros(self.count)
            for place in self.slices:
                place.of(worker).copy_(kept[place.index]["residual"])
            self.feedback.load(worker.numpy(), worker.numpy()[:0], 0)


def shared_out(parameters: Sequence[IndexedParameter], ranks: int) -> list[list[IndexedParameter]]:
    """Returns each rank's share of parameters, of about as many elements each: the largest ones go
    first, each to the rank that has least."""
    shares, loads = [list[IndexedParameter]() for _ in range(ranks)], [0] * ranks
    for one in sorted(parameters, key=lambda one: -one.parameter.numel()):
        least = loads.index(min(loads))
        shares[least].append(one)
        loads[least] += one.parameter.numel()
    return shares
