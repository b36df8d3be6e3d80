"""Tiles: pieces of tensors that fit a core's cache.

Several passes over large tensors fetch them from memory each time. Tile by tile, they fetch each
tile once.

Invariants: tiles begin at blocks of every codec, and so at multiples of a vector instruction's
width: element-wise operations give the same bits as on the whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_ELEMENTS = 1 << 17  # per thread


def tile_elements() -> int:
    """Returns the number of elements of a tile, for as many threads as torch uses."""
    return _ELEMENTS * torch.get_num_threads()


def tiles(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields the flat tiles of tensors of one shape; or the tensors whole, if they are small, on a
    GPU or not contiguous."""
    size = tile_elements()
    if tensors[0].numel() <= size or not all(_is_plain(tensor) for tensor in tensors):
        return iter([tensors])
    return zip(*(torch.split(tensor.view(-1), size) for tensor in tensors), strict=True)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()
