"""The model of convergence.py: a GPT over characters of 471,936 parameters.

Invariants: no dropout and no statistics over the batch, so a loss follows from weights and batch
alone; first weights depend on the seed alone.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, LAYERS, HEADS = 96, 4, 4


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, WIDTH))
        y: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return y


class CharGPT(nn.Module):
    """Codes int64 [n, context] to logits [n, context, symbols]."""

    def __init__(self, symbols: int, context: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.token = nn.Embedding(symbols, WIDTH)
            self.position = nn.Embedding(context, WIDTH)
            self.blocks = nn.Sequential(*(_Block() for _ in range(LAYERS)))
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, symbols, bias=False)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.token(codes) + self.position.weight
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    def hidden(self) -> list[nn.Parameter]:
        """The matrices of the blocks, which Muon is for."""
        return [weight for weight in self.blocks.parameters() if weight.dim() == 2]

    def others(self) -> list[nn.Parameter]:
        """Embeddings, the output layer, norms and biases."""
        matrices = {id(weight) for weight in self.hidden()}
        return [weight for weight in self.parameters() if id(weight) not in matrices]


def loss_of(model: nn.Module, codes: Tensor, following: Tensor) -> Tensor:
    """Mean nats of the characters that follow."""
    logits = model(codes)
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), following.reshape(-1))


@torch.no_grad()
def validate(model: nn.Module, windows: Tensor) -> float:
    """Mean nats over windows of context + 1 characters."""
    total = 0.0
    for part in windows.split(64):
        total += float(loss_of(model, part[:, :-1], part[:, 1:])) * len(part)
    return total / len(windows)


def digest_of(model: nn.Module) -> str:
    """Of all weights, bit by bit."""
    digest = hashlib.sha256()
    for weight in model.parameters():
        own = weight.detach().clone()  # numpy fixes the memory that it sees, which FSDP frees
        digest.update(own.numpy().tobytes())
    return digest.hexdigest()[:16]
