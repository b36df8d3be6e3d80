"""Buckets: tensors laid end to end in flat memory, so that they travel by one collective.

    flat | weight .......... p p | bias .. p p | weight ............ p |      align = 256

Invariants: a bucket's tensors are on one device. Each begins at a multiple of ``align`` elements,
so that no two share a codec's block. What the padding behind a tensor holds has no meaning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import torch

from ..tensors import repeat_last


@dataclasses.dataclass(frozen=True, eq=False)
class Slice:
    """Elements start to end of a flat tensor, which belong to ``tensor``, and padding to stop."""

    tensor: torch.Tensor
    start: int
    end: int
    stop: int

    def elements(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the tensor's elements in a flat tensor."""
        return flat[self.start : self.end]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the tensor's part of a flat tensor, in its shape."""
        return self.elements(flat).view(self.tensor.shape)


S = TypeVar("S", bound=Slice)


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the state of a parameter of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def laid_out(tensors: Iterable[torch.Tensor], align: int) -> Iterator[tuple[int, int, int]]:
    """Yields start, end and stop of each tensor's slice."""
    start = 0
    for tensor in tensors:
        end = start + tensor.numel()
        stop = end + -end % align
        yield start, end, stop
        start = stop


class Bucket(Generic[S]):
    """Tensors laid end to end.

    Attributes:
        slices: one for each tensor, in order.
        count: elements of a flat tensor.
        dtype, device: of its flat tensors.
    """

    def __init__(self, slices: Sequence[S], dtype: torch.dtype, device: torch.device) -> None:
        self.slices = tuple(slices)
        self.count = self.slices[-1].stop if slices else 0
        self.dtype, self.device = dtype, device

    def empty(self) -> torch.Tensor:
        """Makes a flat tensor of undefined values."""
        return torch.empty(self.count, dtype=self.dtype, device=self.device)

    def zeros(self) -> torch.Tensor:
        """Makes a flat tensor of zeros."""
        return torch.zeros(self.count, dtype=self.dtype, device=self.device)

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns the part of each tensor in a flat one, in its shape."""
        return [one.of(flat) for one in self.slices]

    def gather(self, values: Iterable[torch.Tensor | None], flat: torch.Tensor) -> None:
        """Copies a value for each tensor to a flat one; None: zeros. Zeroes the padding."""
        self.clear_padding(flat)
        for part, value in zip(self.parts(flat), values, strict=True):
            if value is None:
                part.zero_()
            else:
                part.copy_(value)

    def scatter(self, flat: torch.Tensor) -> None:
        """Copies a flat tensor to the tensors."""
        for one in self.slices:
            one.tensor.detach().copy_(one.of(flat))

    def clear_padding(self, flat: torch.Tensor) -> None:
        """Zeroes the padding of a flat tensor."""
        for one in self.slices:
            if one.end < one.stop:
                flat[one.end : one.stop] = 0

    def fill_padding(self, flat: torch.Tensor) -> None:
        """Repeats each tensor's last elements in the padding behind it: a codec that scales a block
        by a mean then sees similar values."""
        for one in self.slices:
            repeat_last(flat, one.start, one.end, one.stop)
