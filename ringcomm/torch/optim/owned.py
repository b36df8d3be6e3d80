"""Owned: matrices of which each has an owner, the one rank that keeps its state.

    flat | a .......|b ..|   | c .........|d ..| | e ......|f ...|  |      a row for each rank

Invariants: who owns a matrix follows from the sizes alone, so it is the same on all ranks. A row
holds whole matrices, each at a block of the codec, and is as long as the longest needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...codecs import BLOCK, Codec
from ...communicator import Communicator
from ...feedback import ErrorFeedback, FeedbackStore
from ..sync.bucket import Bucket, master_dtype
from . import saved
from .span import IndexedParameter, ParameterBucket, places_of


class Owned(ParameterBucket):
    """Matrices of a parameter group in flat memory, with the momentum of this rank's.

    Args:
        held: the matrices, of one dtype and device.
        codec: of the gradients. One that needs no feedback sends a state's residuals along, and
            int8 and fp8 keep them from then on.
        store: keeps the residuals, of all rows.

    Attributes:
        name: of the residuals in the store.
        own: this rank's row.
        momentum: this rank's momentum, a flat tensor of a row.
    """

    def __init__(
        self,
        held: Sequence[IndexedParameter],
        comm: Communicator,
        codec: Codec,
        store: FeedbackStore,
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
        self.name, self._store = f"gradient/{held[0].index}", store
        if codec.needs_feedback or self.name in store:
            store[self.name].require_size(self.count)

    @property
    def feedback(self) -> ErrorFeedback | None:
        """The residuals, if any are kept."""
        if self.name not in self._store:
            return None
        return self._store[self.name]

    def gathered(self, residuals: Mapping[str, Any]) -> dict[int, dict[str, torch.Tensor]]:
        """Returns momentum and residual of each matrix, for a world of any size, given what the
        store has gathered. A collective."""
        flat = {"momentum_buffer": self._comm.allgather(self.momentum).view(-1)}
        if self.name in residuals:
            flat["residual"] = residuals[self.name]["worker"]
        return {
            place.index: {name: place.of(tensor).clone() for name, tensor in flat.items()}
            for place in self.slices
        }

    def load(self, kept: Mapping[int, Mapping[str, Any]]) -> None:
        """Takes momentum and residuals that ``gathered`` returned; of a rank's own state, which has
        these in the store, the momentum of its matrices. Raises ConfigError for a state of other
        matrices."""
        for place in self.own.slices:
            place.of(self.momentum).copy_(saved.value_of(kept, place, "momentum_buffer"))
        having = [place for place in self.slices if "residual" in kept.get(place.index, {})]
        if not having:
            return
        worker = torch.zeros(self.count, dtype=torch.float32, device="cpu")
        for place in having:
            place.of(worker).copy_(saved.value_of(kept, place, "residual"))
        state = {
            "format": 1,
            "op": "avg",
            "loss_scale": 1.0,
            "worker": worker,
            "owner": torch.zeros_like(worker),
        }
        self._store[self.name].load_state_dict(state, self._comm)


def shared_out(parameters: Sequence[IndexedParameter], ranks: int) -> list[list[IndexedParameter]]:
    """Returns each rank's share of parameters, of about as many elements each: the largest ones go
    first, each to the rank that has least."""
    shares, loads = [list[IndexedParameter]() for _ in range(ranks)], [0] * ranks
    for one in sorted(parameters, key=lambda one: -one.parameter.numel()):
        least = loads.index(min(loads))
        shares[least].append(one)
        loads[least] += one.parameter.numel()
    return shares
