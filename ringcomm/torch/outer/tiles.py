"""Tensors cut into pieces that fit a core's cache.

Several passes over large tensors fetch them from memory each time. Done piece by piece they fetch
each piece once.

Invariants: pieces begin at multiples of what a vector instruction takes, so that work element by
element gives the bits that it would give of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_ELEMENTS = 1 << 17  # of a thread


def tiles(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Pieces of tensors of one shape, flat; or the tensors as they are where that is of no use."""
    size = _ELEMENTS * torch.get_num_threads()
    if tensors[0].numel() <= size or not all(_is_plain(tensor) for tensor in tensors):
        return iter([tensors])
    return zip(*(torch.split(tensor.view(-1), size) for tensor in tensors), strict=True)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()
