"""Tiles: pieces of tensors that fit a core's cache.

Several passes over large tensors fetch them from memory each time. Done tile by tile they fetch
each tile once.

Invariants: tiles begin at blocks of every codec, and so at multiples of what a vector instruction
takes: work element by element gives the bits that it would give of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_ELEMENTS = 1 << 17  # of a thread


def tile_elements() -> int:
    """Of a tile, for as many threads as torch uses."""
    return _ELEMENTS * torch.get_num_threads()


def tiles(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Those of tensors of one shape, flat; or the tensors as they are where that is of no use."""
    size = tile_elements()
    if tensors[0].numel() <= size or not all(_is_plain(tensor) for tensor in tensors):
        return iter([tensors])
    return zip(*(torch.split(tensor.view(-1), size) for tensor in tensors), strict=True)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()
