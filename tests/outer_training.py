"""What the tests of OuterStep train: a small network on batches that follow from rank and step."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable

import torch
from torch import nn

_seeding = threading.Lock()  # ranks are threads, and torch has one generator


def net(seed: int = 0, sizes: tuple[int, ...] = (5, 7, 3)) -> nn.Module:
    with _seeding:
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise(sizes):
            layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def batch(rank: int, step: int, width: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, width, generator=generator)


def backward(model: nn.Module, x: torch.Tensor) -> None:
    (model(x) ** 2).sum().backward()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Iterable[int]
) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, batch(rank, step))
        optimizer.step()


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
