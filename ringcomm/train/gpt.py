"""A small GPT (Radford et al. 2019) over bytes, its output layer tied to the token embedding.

bytes -> embedding -> + position -> causal blocks -> norm -> logits of the next byte
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .transformer import Block, init_weights


class GPT(nn.Module):
    """GPT from bytes int64 [n, T], T <= context, to logits [n, T, vocabulary]."""

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
