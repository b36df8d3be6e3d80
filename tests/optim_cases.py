"""Gradients, parameters and steps for the tests of ringcomm.torch.optim against references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from ranks import run_ranks
from reference import Array

from ringcomm import Communicator

Shapes = Sequence[tuple[int, ...]]


def start_values(shapes: Shapes) -> list[Array]:
    """Of the parameters, flat."""
    rng = np.random.default_rng(1)
    return [rng.standard_normal(int(np.prod(s))).astype(np.float32) for s in shapes]


def gradient(shapes: Shapes, step: int, rank: int, dead: int = 0) -> list[Array]:
    """A common part and a rank's own, in sizes from 1e-3 to 1, flat; the first few are 0."""
    found = []
    for index, shape in enumerate(shapes):
        count = int(np.prod(shape))
        fixed = np.random.default_rng((2, index))
        size = 10.0 ** fixed.uniform(-3, 0, count)
        own = np.random.default_rng((3, index, step, rank))
        values = size * (0.5 * fixed.standard_normal(count) + own.standard_normal(count))
        values[:dead] = 0.0
        found.append(values.astype(np.float32))
    return found


def gradients(shapes: Shapes, step: int, ranks: int, dead: int = 0) -> list[list[Array]]:
    """Of [rank][parameter]."""
    return [gradient(shapes, step, rank, dead) for rank in range(ranks)]


def parameters(shapes: Shapes) -> list[torch.nn.Parameter]:
    """With the start values."""
    return [
        torch.nn.Parameter(torch.from_numpy(values.copy()).view(shape))
        for values, shape in zip(start_values(shapes), shapes, strict=True)
    ]


def give(params: Sequence[torch.nn.Parameter], grads: Sequence[Array]) -> None:
    """Gradients as a backward leaves them."""
    for parameter, values in zip(params, grads, strict=True):
        parameter.grad = torch.from_numpy(values.copy()).view(parameter.shape)


def flat(params: Sequence[torch.Tensor]) -> list[Array]:
    """The values."""
    return [one.detach().numpy().reshape(-1).copy() for one in params]


def train(
    make: Callable[[Any, Communicator], torch.optim.Optimizer], shapes: Shapes, ranks: int,
    steps: int, dead: int = 0, after: Callable[[Any], Any] = lambda optimizer: None,
) -> list[tuple[list[list[Array]], Any]]:  # fmt: skip
    """Of each rank: the parameters after every step, and what ``after`` says of the optimizer."""

    def body(comm: Communicator) -> tuple[list[list[Array]], Any]:
        params = parameters(shapes)
        optimizer, seen = make(params, comm), []
        for step in range(1, steps + 1):
            give(params, gradient(shapes, step, comm.rank, dead))
            optimizer.step()
            seen.append(flat(params))
        return seen, after(optimizer)

    return run_ranks(ranks, body)


def assert_alike(outcomes: Sequence[tuple[list[list[Array]], Any]]) -> None:
    """All ranks have the same parameters, to the bit."""
    for seen, _ in outcomes[1:]:
        for here, there in zip(outcomes[0][0], seen, strict=True):
            for a, b in zip(here, there, strict=True):
                assert a.tobytes() == b.tobytes()


def assert_close(ours: Sequence[Array], expected: Sequence[Array], most: float) -> None:
    """No element is further off than that."""
    for a, b in zip(ours, expected, strict=True):
        assert np.abs(a - b).max() <= most, np.abs(a - b).max()
