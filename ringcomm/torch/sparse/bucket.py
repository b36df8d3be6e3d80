"""Buckets: parameters with one exchange, and their gradient, weights and states in host memory.

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

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...core.chunks import Entries, Floats, put
from ...sparse import SparseExchange
from ..optim.span import IndexedParameter, Mark, Place, places_of

BLOCK = 16
BUCKET_BYTES = 25 << 20
_SHOWN = (torch.float32, torch.bfloat16)

States = dict[str, np.ndarray[Any, Any]]


def in_lines(count: int, dtype: type[Any] = np.float32) -> np.ndarray[Any, Any]:
    """Makes zeros of four bytes each that begin at a cache line, so that each block is one line."""
    room = np.zeros(count + BLOCK, dtype)
    skipped = -room.ctypes.data % (BLOCK * room.itemsize) // room.itemsize
    return room[skipped : skipped + count]


class Bucket:
    """Some parameters of a group, of one dtype and device.

    Attributes:
        name: equal on all ranks, and in checkpoints.
        places: the parameters and their places.
        group: the number of the parameter group.
        count: elements, with the padding of parameters to whole blocks.
        gradient: this rank's, flat.
        master: the weights.
        exchange: the exchange of its gradient; set by the optimizer.
        states: the optimizer's states by name; set by the optimizer.
    """

    exchange: SparseExchange
    states: States

    def __init__(self, held: Sequence[IndexedParameter]) -> None:
        self.name = f"bucket.{held[0].index}"
        self.places = places_of(held, BLOCK)
        self.group = held[0].group
        self.count = self.places[-1].stop
        first = held[0].parameter
        self._aliased = first.device.type == "cpu" and first.dtype in _SHOWN
        self.gradient = torch.zeros(self.count)
        self.master: Floats = in_lines(self.count)
        seen = first.dtype if self._aliased else torch.float32
        self._shown = torch.zeros(self.count, dtype=seen)
        self._marks: list[Mark] = [()] * len(self.places)
        self.follow()

    def gather(self) -> bool:
        """Copies the parameters' gradients to the flat one. Returns False if there are none. Raises
        TensorError unless they are dense."""
        for place in self.places:
            part, gradient = place.view(self.gradient), place.gradient()
            if gradient is None:
                part.zero_()
            else:
                part.copy_(gradient)
        return any(place.parameter.grad is not None for place in self.places)

    def is_current(self) -> bool:
        """Returns whether no other code has written to the parameters. Raises ConfigError if one
        has another size, dtype or device than before."""
        return [place.mark() for place in self.places] == self._marks

    def follow(self) -> None:
        """Copies parameters that other code has written to, and makes them views again if they have
        other memory. Raises ConfigError as ``is_current``."""
        master = torch.from_numpy(self.master)
        for number, place in enumerate(self.places):
            if place.mark() != self._marks[number]:
                value, shown = place.parameter.detach().clone(), place.view(self._shown)
                place.view(master).copy_(value)
                shown.copy_(value)
                self._alias(place)
        self._remember()

    def _alias(self, place: Place) -> None:
        """Makes a parameter a view of ``shown`` again if other code has given it other memory."""
        shown = place.view(self._shown)
        if self._aliased and not _is_same_memory(place.parameter, shown):
            place.parameter.data = shown

    def show(self, entries: Entries, kernel_set: str) -> None:
        """Copies the changed weights, which are in ``entries``, to the model."""
        put(entries, kernel_set, self._shown)
        for place in self.places:
            if not self._aliased:
                place.parameter.detach().copy_(place.view(self._shown))
            else:
                torch.autograd.graph.increment_version(place.parameter)
        self._remember()

    def load(self, master: torch.Tensor) -> None:
        """Takes a master copy, and copies it to the model."""
        self.master[:] = master.numpy()
        self._shown.copy_(master)
        for place in self.places:
            self._alias(place)
            place.parameter.detach().copy_(place.view(self._shown))
        self._remember()

    def _remember(self) -> None:
        self._marks = [place.mark() for place in self.places]


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def lay_out(
    parameters: Sequence[IndexedParameter], bucket_bytes: int = BUCKET_BYTES
) -> list[Bucket]:
    """Returns buckets in the order in which they travel: those of the last parameters first, as
    backward computes these gradients first."""
    filling: dict[tuple[Any, ...], list[IndexedParameter]] = {}
    full: list[list[IndexedParameter]] = []
    for one in reversed(parameters):
        key = (one.group, one.parameter.dtype, one.parameter.device)
        held = filling.setdefault(key, [])
        held.append(one)
        if sum(each.parameter.numel() for each in held) * 4 >= bucket_bytes:
            full.append(filling.pop(key))
    full += filling.values()
    full.sort(key=lambda held: -held[0].index)
    return [Bucket(held) for held in full]
