"""A small model and its gradients for tests of ringcomm.torch.sparse."""

from __future__ import annotations

from typing import Any

import torch


def import_late() -> None:
    """An optimizer's first step imports torch._dynamo: for many seconds on a busy machine, which
    are not to count against the ranks' limit."""
    one = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([one])
    one.sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def model_of(seed: int, dtype: Any = torch.float32) -> Any:
    made = torch.Generator().manual_seed(seed)  # threads share the other one
    layers = [
        torch.nn.Linear(40, 60),
        torch.nn.Tanh(),
        torch.nn.Linear(60, 30),
        torch.nn.Tanh(),
        torch.nn.Linear(30, 3),
    ]
    model = torch.nn.Sequential(*layers)
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn(one.shape, generator=made) * 0.2)
    return model.to(dtype)


def loss_of(model: Any, rank: int, step: int) -> Any:
    made = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 40, generator=made).to(next(model.parameters()).dtype)
    return model(x).float().square().mean()


def weights(model: Any) -> Any:
    with torch.no_grad():
        return torch.cat([p.detach().float().reshape(-1).clone() for p in model.parameters()])
