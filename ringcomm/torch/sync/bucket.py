"""Buckets: tensors laid end to end in flat memory, so that they travel by one collective; passes
over such memory.

    flat | weight .......... p p | bias .. p p | weight ............ p |      align = 256

Several passes over a large tensor fetch it from memory each time; tile by tile, they fetch each
tile once.

Invariants: a bucket's tensors are on one device. Each begins at a multiple of ``align`` elements,
so that no two share a codec's block. What the padding behind a tensor holds has no meaning. Tiles
begin at blocks of every codec, and so at multiples of a vector instruction's width: element-wise
operations give the same bits as on the whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import torch

_TILE_ELEMENTS = 1 << 17  # per thread; so many fit a core's cache


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
            lacking = one.stop - one.end
            if lacking and one.end > one.start:
                last = flat[max(one.start, one.end - lacking) : one.end]
                flat[one.end : one.stop] = last.repeat(-(-lacking // len(last)))[:lacking]


# ---- passes over large tensors ----


def tile_elements() -> int:
    """Returns the number of elements of a tile, for as many threads as torch uses."""
    return _TILE_ELEMENTS * torch.get_num_threads()


def tiles(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields the flat tiles of tensors of one shape; or the tensors whole, if they are small, on a
    GPU or not contiguous."""
    size = tile_elements()
    in_tiles = all(one.device.type == "cpu" and one.is_contiguous() for one in tensors)
    if tensors[0].numel() <= size or not in_tiles:
        return iter([tensors])
    return zip(*(torch.split(tensor.view(-1), size) for tensor in tensors), strict=True)


def all_finite(values: torch.Tensor) -> bool:
    """Returns whether no element of a real tensor is NaN or infinite. One pass without a temporary,
    40 times as fast on a CPU as ``isfinite().all()``."""
    return values.numel() == 0 or bool(torch.stack(values.detach().aminmax()).isfinite().all())
