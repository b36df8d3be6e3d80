"""Host buckets: parameters with one exchange; gradient, weights and states in host memory.

    gradient | weight ..............|bias ..|weight ..........   float32, of this rank
    master   | ....................................              float32, changed by the optimizer
    shown    | ....................................              the model's weights

Every parameter begins at a block of 16 elements, a cache line. float32 and bfloat16 parameters in
host memory are views of ``shown``; others are copied from it.

Invariants: ``master`` and the optimizer's states begin at a cache line, and are numpy's, which asks
for huge pages: a step of scattered lines takes three times as long without them. If other code
writes to a parameter, for example to load a checkpoint, or assigns its ``.data``, its mark shows
that before the next step (Place.mark).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from ...core.chunks import Entries, Floats, put
from ...sparse import SparseExchange
from ..optim.span import IndexedParameter, ParameterBucket, Place, places_of

BLOCK = 16
BUCKET_BYTES = 25 << 20
_SHOWN = (torch.float32, torch.bfloat16)

States = dict[str, np.ndarray[Any, Any]]


def in_lines(count: int, dtype: type[Any] = np.float32) -> np.ndarray[Any, Any]:
    """Makes zeros of four bytes each that begin at a cache line, so that each block is one line."""
    room = np.zeros(count + BLOCK, dtype)
    skipped = -room.ctypes.data % (BLOCK * room.itemsize) // room.itemsize
    return room[skipped : skipped + count]


class HostBucket(ParameterBucket):
    """Some parameters of a group, of one dtype and device; flat tensors are in host memory.

    Args:
        held: the parameters.
        states: makes the optimizer's states, given the numbers of elements and of blocks.

    Attributes:
        name: equal on all ranks, and in checkpoints.
        gradient: this rank's, flat.
        master: the weights.
        exchange: the exchange of its gradient; set by the optimizer.
        states: the optimizer's states by name.
        taken: completes when the gradient has been read and may be overwritten; None: none is sent.
    """

    exchange: SparseExchange
    taken: Future[None] | None = None

    def __init__(
        self, held: Sequence[IndexedParameter], states: Callable[[int, int], States]
    ) -> None:
        self.name = f"bucket.{held[0].index}"
        super().__init__(held, places_of(held, BLOCK), torch.float32, torch.device("cpu"))
        first = held[0].parameter
        self._aliased = first.device.type == "cpu" and first.dtype in _SHOWN
        self.gradient = self.zeros()
        self.master: Floats = in_lines(self.count)
        self.states = states(self.count, -(-self.count // BLOCK))
        seen = first.dtype if self._aliased else torch.float32
        self._shown = torch.zeros(self.count, dtype=seen, device="cpu")
        self.follow(self.written())

    def follow(self, written: Sequence[Place]) -> None:
        """Copies parameters that other code has written to, and makes them views again if they have
        other memory."""
        master = torch.from_numpy(self.master)
        for place in written:
            value, shown = place.tensor.detach().clone(), place.of(self._shown)
            place.follow(master)
            shown.copy_(value)
            self._alias(place)
        self.note()

    def _alias(self, place: Place) -> None:
        """Makes a parameter a view of ``shown`` again if other code has given it other memory."""
        tensor, shown = place.tensor, place.of(self._shown)
        is_there = tensor.data_ptr() == shown.data_ptr() and tensor.stride() == shown.stride()
        if self._aliased and not is_there:
            tensor.data = shown

    def show(self, entries: Entries, kernel_set: str) -> None:
        """Copies the changed weights, which are in ``entries``, to the model."""
        put(entries, kernel_set, self._shown)
        if not self._aliased:
            self.scatter(self._shown)
        else:
            for place in self.slices:
                torch.autograd.graph.increment_version(place.tensor)
        self.note()

    def load(self, master: torch.Tensor) -> None:
        """Takes a master copy, and copies it to the model."""
        self.master[:] = master.numpy()
        self._shown.copy_(master)
        for place in self.slices:
            self._alias(place)
        self.scatter(self._shown)
        self.note()
