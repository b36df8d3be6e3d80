"""Models and gradients for tests of ringcomm.torch.optim: set by hand, so that they are known."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ringcomm import Communicator
from ringcomm.torch.optim import SGD, WireOptimizer

Make = Callable[[Sequence[nn.Parameter], Communicator], WireOptimizer]
THRESHOLD = 4096


class Net(nn.Module):
    """Large matrices, of which two do not fill their blocks, a filter, and small tensors."""

    shapes: ClassVar[dict[str, tuple[int, ...]]] = {
        "embed": (100, 48),
        "norm": (48,),
        "filter": (16, 8, 3, 3),
        "small": (4, 4),
        "temperature": (),
        "empty": (0, 7),
        "frozen": (64, 64),
        "head": (48, 31),
    }

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in self.shapes.items():
            weight = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
            self.register_parameter(name, weight)
        self.frozen.requires_grad_(False)


def sgd(model: nn.Module, comm: Communicator, codec: str = "none", **settings: Any) -> SGD:
    """An optimizer of the model, with settings that suit its size."""
    settings = {"lr": 0.1, "threshold": THRESHOLD, **settings}
    return SGD(model.parameters(), comm=comm, compression=codec, **settings)  # type: ignore[arg-type]


def gradient_of(name: str, shape: torch.Size, rank: int, step: int) -> torch.Tensor:
    """Of one parameter, on one rank, in one step."""
    seed = 1000 * step + 10 * rank + sum(map(ord, name)) * 100_000
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def set_gradients(model: nn.Module, rank: int, step: int, scale: float = 1.0) -> None:
    """As a backward would."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = gradient_of(name, parameter.shape, rank, step) * scale
            parameter.grad = gradient.to(parameter.dtype)


def mean_gradients(model: nn.Module, ranks: int, step: int) -> None:
    """The mean of all ranks' gradients."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            every = [gradient_of(name, parameter.shape, rank, step) for rank in range(ranks)]
            parameter.grad = torch.stack(every).mean(0).to(parameter.dtype)


def flat(model: nn.Module) -> torch.Tensor:
    """All parameters, one after the other; a copy."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def steps_of(
    comm: Communicator, make: Make, steps: Sequence[int], model: nn.Module | None = None
) -> tuple[nn.Module, WireOptimizer]:
    """Makes steps with known gradients."""
    model = Net() if model is None else model
    optimizer = make(list(model.parameters()), comm)
    go_on(model, optimizer, comm, steps)
    return model, optimizer


def go_on(
    model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator, steps: Sequence[int]
) -> None:
    """More of them."""
    for step in steps:
        set_gradients(model, comm.rank, step)
        optimizer.step()


def alike(models: Sequence[nn.Module]) -> bool:
    """Whether all have the same bits."""
    return all(torch.equal(flat(models[0]), flat(model)) for model in models[1:])


def copies(model: nn.Module, ranks: int) -> list[nn.Module]:
    """One for each rank, made in one thread: torch's random numbers are the process's."""
    return [copy.deepcopy(model) for _ in range(ranks)]
