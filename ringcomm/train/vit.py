"""Vision transformer (Dosovitskiy et al. 2020), with mean pooling in place of a class token.

image -> patches -> linear -> + position -> blocks -> norm -> mean over patches -> linear
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .transformer import Block, init_weights


class ViT(nn.Module):
    """ViT from images float [n, C, H, W] to logits [n, classes]; H and W multiples of ``patch``."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        *,
        width: int,
        layers: int,
        heads: int,
    ) -> None:
        super().__init__()
        channels, height, breadth = shape
        patch = patch_size(height, breadth)
        patches = (height // patch) * (breadth // patch)
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.position = nn.Parameter(torch.randn(1, patches, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        init_weights(self, layers)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = self.blocks(x + self.position)
        logits: Tensor = self.head(self.norm(x).mean(dim=1))
        return logits


def patch_size(height: int, breadth: int) -> int:
    """Return the side of a patch: 16 for photographs, 4 for thumbnails, 2 for tiny scans.

    Raises ConfigError if the image is no whole number of patches.
    """
    side = min(height, breadth)
    patch = 16 if side >= 96 else 4 if side >= 16 else 2
    if height % patch or breadth % patch:
        raise ConfigError(
            f"images of {height} x {breadth} cannot be cut into patches of {patch}; make both "
            f"sides multiples of {patch}"
        )
    return patch
