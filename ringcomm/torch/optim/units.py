"""Units of a preconditioned momentum on the wire: q of OneBitAdam.

    q = min(R, 5 r),  r = sqrt(v) + eps,  R the root of the mean r^2 of a block of the codec

R is cached, as v is fixed between renewals: a float32 for every block.

Invariants: q follows from v and eps, and is the same on all ranks to the bit, as a block's elements
are summed in one order. Small spans have q = r: their codec has no blocks.
"""

from __future__ import annotations

import dataclasses

import torch

from ...codecs import BLOCK
from .arithmetic import root, root_of
from .span import Span, Tile

_BOUND = 5.0  # most noise that an element gets from its block, in units of its own update


@dataclasses.dataclass(frozen=True)
class _Typical:
    """R of each block, and the v and eps that it was computed from."""

    square: torch.Tensor
    version: int
    eps: float
    blocks: torch.Tensor

    def is_of(self, square: torch.Tensor, eps: float) -> bool:
        """Returns whether v and eps are unchanged."""
        return self.square is square and self.version == square._version and self.eps == eps


class Units:
    """Computes q of the elements of spans."""

    def __init__(self) -> None:
        self._typical: dict[str, _Typical] = {}  # by span

    def of(self, tile: Tile) -> torch.Tensor:
        """Returns q of each element; the caller may overwrite it."""
        root = root_of(tile)
        if tile.span.is_small:
            return root
        typical = self._typical_of(tile.span)[tile.start // BLOCK : tile.stop // BLOCK]
        return torch.minimum(typical, root.mul_(_BOUND).view(-1, BLOCK)).view(-1)

    def _typical_of(self, span: Span) -> torch.Tensor:
        square, eps = span.state["exp_avg_sq"], span.group["eps"]
        known = self._typical.get(span.name)
        if known is None or not known.is_of(square, eps):
            blocks = torch.cat([_typical(tile) for tile in span.tiles()])
            known = self._typical[span.name] = _Typical(square, square._version, eps, blocks)
        return known.blocks


def _typical(tile: Tile) -> torch.Tensor:
    """Returns R, of shape [blocks, 1]."""
    scale = root_of(tile)
    squares = scale.mul_(scale).view(-1, BLOCK)
    while squares.shape[1] > 1:
        half = squares.shape[1] // 2
        squares = squares[:, :half] + squares[:, half:]
    return root(squares.div_(BLOCK))
