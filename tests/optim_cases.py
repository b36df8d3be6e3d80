"""Gradients, parameters and steps for the tests of ringcomm.torch.optim against references."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from onebit_reference import UnclearError
from ranks import run_ranks
from reference import Array

from ringcomm import Communicator

Shapes = Sequence[tuple[int, ...]]


def start_values(shapes: Shapes) -> list[Array]:
    """Of the parameters, flat."""
    rng = np.random.default_rng(1)
    return [rng.standard_normal(int(np.prod(s))).astype(np.float32) for s in shapes]


def gradient(shapes: Shapes, step: int, rank: int, dead: int = 0, seed: int = 0) -> list[Array]:
    """A common part and a rank's own, in sizes from 1e-3 to 1, flat; the first few are 0."""
    found = []
    for index, shape in enumerate(shapes):
        count = int(np.prod(shape))
        fixed = np.random.default_rng((2, index))
        size = 10.0 ** fixed.uniform(-3, 0, count)
        own = np.random.default_rng((3 + seed, index, step, rank))
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


Track = Sequence[Sequence[Array]]
"""Parameters after every step."""


def train(
    make: Callable[[Any, Communicator], torch.optim.Optimizer],
    shapes: Shapes,
    ranks: int,
    steps: int,
    dead: int = 0,
    after: Callable[[Any], Any] = lambda optimizer: None,
    seed: int = 0,
) -> list[tuple[Track, Any]]:
    """Of each rank: the parameters after every step, and what ``after`` says of the optimizer."""

    def body(comm: Communicator) -> tuple[Track, Any]:
        params = parameters(shapes)
        optimizer, seen = make(params, comm), []
        for step in range(1, steps + 1):
            give(params, gradient(shapes, step, comm.rank, dead, seed))
            optimizer.step()
            seen.append(flat(params))
        return seen, after(optimizer)

    return run_ranks(ranks, body)


# ---- beside a reference ----


@dataclasses.dataclass(frozen=True)
class Given:
    """What a reference starts from, and is given at each step, in its dtype."""

    shapes: Shapes
    ranks: int
    dead: int
    seed: int
    dtype: type

    def start(self) -> list[Array]:
        return [one.astype(self.dtype) for one in start_values(self.shapes)]

    def gradients(self, step: int) -> list[list[Array]]:
        """Of [rank][parameter]."""
        every = [
            gradient(self.shapes, step, rank, self.dead, self.seed) for rank in range(self.ranks)
        ]
        return [[one.astype(self.dtype) for one in own] for own in every]


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a reference makes of the gradients of that seed, in float32 and in float64."""

    seed: int
    single: Track
    double: Track


def follow(
    reference: Callable[[Given], Iterator[Sequence[Array]]],
    shapes: Shapes,
    ranks: int,
    dead: int = 0,
) -> Expected:
    """What a reference makes of the first seed with which no code hangs on a rounding: who rounds
    otherwise sends the same codes, and is off by roundings alone."""
    for seed in range(30):
        double, single = (
            Given(shapes, ranks, dead, seed, dtype) for dtype in (np.float64, np.float32)
        )
        try:
            return Expected(seed, double=list(reference(double)), single=list(reference(single)))
        except UnclearError:
            continue
    raise AssertionError("with each seed a code hangs on a rounding")


SLACK = 8.0
"""How much further from float64 another order of operations and other constants of float32 may be
than the reference's own: three bits. A constant that is wrong by 1e-4 shows ten times over."""


def assert_follows(ours: Track, expected: Expected) -> None:
    """No element of ours is further from float64 than float32's roundings explain."""
    single = distance(expected.single, expected.double)
    assert single < 1e-4, "the reference's own roundings would hide a wrong formula"
    assert distance(ours, expected.double) <= SLACK * single


def distance(some: Track, others: Track) -> float:
    """The largest of all steps and elements."""
    return max(
        float(np.abs(a - b).max())
        for one, other in zip(some, others, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def assert_alike(outcomes: Sequence[tuple[list[list[Array]], Any]]) -> None:
    """All ranks have the same parameters, to the bit."""
    for seen, _ in outcomes[1:]:
        for here, there in zip(outcomes[0][0], seen, strict=True):
            for a, b in zip(here, there, strict=True):
                assert a.tobytes() == b.tobytes()
