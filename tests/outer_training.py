"""What the tests of OuterStep train: a small network on batches that follow from rank and step."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable

import torch
from torch import nn

from ringcomm.torch import OuterStep

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


# ---- what is learnt: a small network from a noisy one ----

LESSONS = 48  # steps


def lesson(seed: int, rank: int, step: int, count: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100_000 * seed + 1000 * rank + step)
    x = torch.randn(count, 6, generator=generator)
    y = torch.tanh(x[:, :1] - x[:, 1:2]) + 0.5 * x[:, 2:3]
    return x, y + 0.1 * torch.randn(count, 1, generator=generator)


def pupil(seed: int) -> nn.Module:
    return net(seed, sizes=(6, 16, 1))


def learn(
    outer: OuterStep,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    seed: int,
    rank: int,
    before_step: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """The loss of the anchor, over samples that nobody trains on, after each round."""
    x, y = lesson(999, 0, 0, count=512)
    curve: list[float] = []
    with outer:
        while outer.iteration < LESSONS:
            before_step(outer.iteration)
            optimizer.zero_grad()
            mine, wanted = lesson(seed, rank, outer.iteration)
            ((model(mine) - wanted) ** 2).mean().backward()
            optimizer.step()
            if outer.rounds > len(curve):
                with outer.anchor(), torch.no_grad():
                    curve.append(float(((model(x) - y) ** 2).mean()))
    with torch.no_grad():
        curve.append(float(((model(x) - y) ** 2).mean()))
    return curve
