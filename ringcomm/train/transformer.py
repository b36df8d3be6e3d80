"""The transformers, a small GPT over bytes and a ViT, and the pre-norm block that they share.

block   x = x + attention(norm(x));  x = x + mlp(norm(x))
GPT     bytes -> embedding -> + position -> causal blocks -> norm -> logits of the next byte
ViT     image -> patches -> linear -> + position -> blocks -> norm -> mean over patches -> linear
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import ConfigError


class Block(nn.Module):
    """Transformer block from tokens [n, T, width] to tokens of the same shape."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return cast(Tensor, x + self.mlp(self.mlp_norm(x)))


class Attention(nn.Module):
    """Multi-head self-attention; causal: a token sees itself and earlier tokens."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        qkv = self.qkv(x).reshape(n, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return cast(Tensor, self.out(mixed.transpose(1, 2).reshape(n, tokens, width)))


class GPT(nn.Module):
    """GPT (Radford et al. 2019) from bytes int64 [n, T], T <= context, to logits
    [n, T, vocabulary]; its output layer is tied to the token embedding."""

    def __init__(
        self,
        context: int,
        vocabulary: int,
        *,
        width: int,
        layers: int,
        heads: int,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        init_weights(self, layers)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(places)
        x = self.norm(self.blocks(x))
        return functional.linear(x, self.token.weight)


class ViT(nn.Module):
    """Vision transformer (Dosovitskiy et al. 2020) from images float [n, C, H, W] to logits
    [n, classes]; H and W are multiples of ``patch_size``. Mean pooling replaces a class token."""

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
        return cast(Tensor, self.head(self.norm(x).mean(dim=1)))


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


def init_weights(model: nn.Module, layers: int) -> None:
    """Draw normal weights of deviation 0.02, smaller where a residual branch ends, as in GPT-2."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            ends_branch = name.endswith(("attention.out", "mlp.2"))
            nn.init.normal_(module.weight, std=0.02 / (2 * layers) ** 0.5 if ends_branch else 0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
