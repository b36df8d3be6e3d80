"""OneBitLamb against references written from the paper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from onebit_reference import Blocks, FrozenLamb, LambSettings
from optim_cases import (
    Given,
    assert_alike,
    assert_follows,
    follow,
    give,
    gradient,
    parameters,
    start_values,
    train,
)
from ranks import run_ranks
from reference import Array

from ringcomm import Communicator
from ringcomm.torch.optim import OneBitLamb

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]

ODD = [(13, 7), (50,), (29, 3, 2)]
HYPER: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.05}
SETTINGS = LambSettings(lr=0.01, b1=0.9, b2=0.95, eps=1e-8, decay=0.05)


@pytest.mark.parametrize("n", [1, 3])
def test_our_own_update_is_that_of_its_formula(n: int) -> None:
    """With renewals of the variance, and elements without one."""
    shapes, steps, freeze, dead = [(32, 40)], 20, 6, 5
    due = [7, 8, 9, 10, 12, 14, 16, 18]

    def reference(given: Given) -> Iterator[list[Array]]:
        lamb = FrozenLamb(given.start()[0], SETTINGS, freeze, Blocks(1280, n), n, due)
        for step in range(1, steps + 1):
            lamb.step([one[0] for one in given.gradients(step)])
            yield [lamb.p]

    expected = follow(reference, shapes, n, dead)
    outcomes = train(
        lambda params, comm: OneBitLamb(
            params, **HYPER, freeze=freeze, dense="none", comm=comm, threshold=0
        ),
        shapes,
        n,
        steps,
        dead,
        seed=expected.seed,
    )
    assert_alike(outcomes)
    assert_follows(outcomes[0][0], expected)


def test_no_step_is_longer_than_twice_that_of_lamb() -> None:
    """However much larger gradients are than those of which the variance was learned."""
    shapes, freeze, rate = [(32, 40)], 6, 0.01

    def body(comm: Communicator) -> list[float]:
        (values,) = parameters(shapes)
        optimizer = OneBitLamb(
            [values], lr=rate, freeze=freeze, dense="none", comm=comm, threshold=0
        )
        lengths = []
        for step in range(1, 12):
            before = values.detach().clone()
            louder = 100 if step > freeze else 1
            give([values], [louder * one for one in gradient(shapes, step, comm.rank)])
            optimizer.step()
            moved = (values.detach() - before).norm() / before.norm()
            lengths.append(float(moved) / rate)
        return lengths

    for lengths in run_ranks(2, body):
        assert lengths[freeze - 1] == pytest.approx(1, rel=1e-3)
        assert max(lengths) == pytest.approx(2, rel=1e-3)


def test_a_tensor_without_any_gradient() -> None:
    """Its momentum has no size, which others are divided by; all stay finite."""
    shapes = [(16, 16), (4, 4)]
    outcomes = train(
        lambda params, comm: OneBitLamb(params, freeze=3, comm=comm, eps=1e-6, threshold=0),
        shapes,
        2,
        8,
        dead=16,
    )
    assert all(np.isfinite(one).all() for one in outcomes[0][0][-1])
    assert outcomes[0][0][-1][1].tobytes() == start_values(shapes)[1].tobytes()
