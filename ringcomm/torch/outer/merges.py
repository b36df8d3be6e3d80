"""Merges: what becomes of a rank's own weights when the new anchor is there.

A rank goes on while its delta travels. What it has trained since then is not in the anchor yet:

    Carry      local <- anchor + (local - local at the send)     keeps that progress exactly
    Lerp(a)    local <- (1 - a) anchor + a local                 a blend, as in Streaming DiLoCo
    Replace    local <- anchor                                   drops the progress

With a delay of 0 there is no progress, a merge is not asked, and local <- anchor.

Invariants: tensors of one shape; a merge writes to ``local`` and returns it.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ...errors import ConfigError, did_you_mean
from ..settings import require_number
from ..tiles import tiles


class Merge(Protocol):
    """One way to bring the anchor and what a rank has trained since together."""

    def __call__(
        self, local: torch.Tensor, at_send: torch.Tensor, anchor: torch.Tensor
    ) -> torch.Tensor:
        """The new local weights."""


class Carry:
    """Keeps the progress since the send."""

    def __call__(
        self, local: torch.Tensor, at_send: torch.Tensor, anchor: torch.Tensor
    ) -> torch.Tensor:
        """See the head of this file."""
        for own, then, base in tiles(local, at_send, anchor):
            own.sub_(then).add_(base)
        return local

    def __repr__(self) -> str:
        return "Carry()"


class Lerp:
    """Blends the local weights in.

    Args:
        alpha: their share, in [0, 1].

    Raises ConfigError for another one.
    """

    def __init__(self, alpha: float = 0.5) -> None:
        self.alpha = require_number("alpha", alpha, 0, 1)

    def __call__(
        self, local: torch.Tensor, at_send: torch.Tensor, anchor: torch.Tensor
    ) -> torch.Tensor:
        """See the head of this file."""
        for own, base in tiles(local, anchor):
            own.mul_(self.alpha).add_(base, alpha=1 - self.alpha)
        return local

    def __repr__(self) -> str:
        return f"Lerp(alpha={self.alpha:g})"


class Replace:
    """Drops the progress since the send."""

    def __call__(
        self, local: torch.Tensor, at_send: torch.Tensor, anchor: torch.Tensor
    ) -> torch.Tensor:
        """See the head of this file."""
        return local.copy_(anchor)

    def __repr__(self) -> str:
        return "Replace()"


_BY_NAME = {"carry": Carry, "lerp": Lerp, "replace": Replace}


def merge_of(merge: object) -> Merge:
    """The merge that OuterStep's ``merge`` names or is. Raises ConfigError for anything else."""
    if isinstance(merge, str) and merge in _BY_NAME:
        made: Merge = _BY_NAME[merge]()
        return made
    if isinstance(merge, type) or not callable(merge):
        raise ConfigError(
            f"merge={merge!r}: give one of {', '.join(_BY_NAME)}, or Lerp(alpha)"
            f"{did_you_mean(merge, _BY_NAME)}"
        )
    return merge
