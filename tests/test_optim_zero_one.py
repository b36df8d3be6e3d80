"""ZeroOneAdam against references written from the paper."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from onebit_reference import Blocks, ZeroOne, ZeroOneSettings
from optim_cases import (
    Given,
    assert_follows,
    flat,
    follow,
    give,
    gradient,
    parameters,
    start_values,
    train,
)
from ranks import run_ranks
from reference import Array

from ringcomm import Communicator, MismatchError
from ringcomm.torch.optim import ZeroOneAdam

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]

ODD = [(13, 7), (50,), (29, 3, 2)]
BLOCKS = [(32, 40)]
HYPER: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.05}
PACE: dict[str, Any] = {
    "var_freeze_step": 14,
    "var_update_scaler": 4,
    "local_step_scaler": 6,
    "local_step_clipper": 4,
}
SETTINGS = ZeroOneSettings(
    lr=0.01,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
    decay=0.05,
    var_freeze=14,
    var_updates=4,
    local_doubling=6,
    local_most=4,
)
STEPS = 36  # to intervals of 4


@pytest.mark.parametrize("n", [1, 3])
def test_each_step_is_that_of_its_formula(n: int) -> None:
    """On every rank: in B they have parameters of their own."""
    shapes, dead = BLOCKS, 5

    def reference(given: Given) -> Iterator[list[Array]]:
        zero_one = ZeroOne(given.start(), SETTINGS, n, lambda count: Blocks(count, n))
        for step in range(1, STEPS + 1):
            zero_one.step(given.gradients(step))
            yield [values for local in zero_one.local for values in local]

    expected = follow(reference, shapes, n, dead)
    outcomes = train(
        lambda params, comm: ZeroOneAdam(
            params, **HYPER, **PACE, dense="none", comm=comm, threshold=0
        ),
        shapes,
        n,
        STEPS,
        dead,
        seed=expected.seed,
    )
    steps = zip(*(seen for seen, _ in outcomes), strict=True)
    assert_follows([[values for local in step for values in local] for step in steps], expected)


def test_ranks_are_together_behind_each_exchange_and_say_so() -> None:
    """To the bit."""

    def body(comm: Communicator) -> list[tuple[bool, int, bytes]]:
        params = parameters(ODD)
        optimizer = ZeroOneAdam(params, **HYPER, **PACE, comm=comm, threshold=0)
        seen = []
        for step in range(1, STEPS + 1):
            before = optimizer.carried
            give(params, gradient(ODD, step, comm.rank))
            optimizer.step()
            every = b"".join(one.tobytes() for one in flat(params))
            seen.append((optimizer.is_together, optimizer.carried - before, every))
        return seen

    first, second = run_ranks(2, body)
    for step, (here, there) in enumerate(zip(first, second, strict=True), 1):
        assert here[0] == there[0]
        assert here[0] == (here[2] == there[2])
        assert here[0] == (here[1] > 0)
        assert here[0] or step > 14
    assert [step for step, one in enumerate(first, 1) if one[0] and step > 14] == [
        15,
        16,
        17,
        18,
        19,
        20,
        22,
        24,
        26,
        28,
        32,
        36,
    ]


def test_elements_without_a_variance_stay_where_they_are() -> None:
    outcomes = train(
        lambda params, comm: ZeroOneAdam(params, **PACE, eps=0.0, comm=comm, threshold=0),
        BLOCKS,
        3,
        STEPS,
        dead=40,
    )
    ours, start = outcomes[0][0][-1][0], start_values(BLOCKS)[0]
    assert np.isfinite(ours).all()
    assert np.abs(ours[:40] - start[:40]).max() == 0
    assert (ours[40:] != start[40:]).all()


def steps_in_b(
    comm: Communicator,
    dtype: torch.dtype,
    count: int,
    overlap: bool,
    shapes: list[tuple[int, ...]] = BLOCKS,
) -> Any:
    """Parameters and their optimizer, behind so many steps of B; exchanges are 4 steps apart."""
    params = [torch.nn.Parameter(one.detach().to(dtype)) for one in parameters(shapes)]
    pace = {**PACE, "var_freeze_step": 4, "local_step_scaler": 1}
    optimizer = ZeroOneAdam(params, **HYPER, **pace, comm=comm, threshold=0, overlap=overlap)

    def step() -> None:
        number = optimizer.steps + 1
        for one, values in zip(params, gradient(shapes, number, comm.rank), strict=True):
            one.grad = None
            one.backward(torch.from_numpy(values).view(one.shape).to(dtype))
        optimizer.step()

    while optimizer.steps < 4 + count:
        step()
    return params, optimizer, step


@pytest.mark.parametrize(
    ("behind", "dtype", "overlap"),
    [(8, torch.float32, True), (9, torch.bfloat16, True), (9, torch.float32, False)],
)
def test_weights_that_somebody_else_writes_are_the_new_anchor(
    behind: int, dtype: torch.dtype, overlap: bool
) -> None:
    """Where the ranks are together, and where they are not."""

    def body(comm: Communicator) -> list[Any]:
        params, optimizer, step = steps_in_b(comm, dtype, behind, overlap)
        assert optimizer.is_together == (behind == 8)
        with torch.no_grad():
            for one in params:
                one.fill_(8.0)
        step()
        while not optimizer.is_together:
            step()
        assert all(((one - 8.0).abs() < 0.5).all() for one in params)
        return [one.detach().clone() for one in params]

    first, second = run_ranks(2, body)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_one_ranks_weights_are_the_new_anchor_on_all() -> None:
    """Where the ranks' master copies have unlike digits behind them."""

    def body(comm: Communicator) -> torch.Tensor:
        params, optimizer, step = steps_in_b(comm, torch.bfloat16, 9, overlap=False)
        with torch.no_grad():
            for one in params:
                one.copy_(comm.broadcast(one.detach().clone()))
        step()
        while not optimizer.is_together:
            step()
        return optimizer.spans[0].master.clone()

    assert torch.equal(*run_ranks(2, body))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("given", [0, 1])
def test_what_has_moved_apart_meets_without_a_gradient(
    dtype: torch.dtype, overlap: bool, given: int
) -> None:
    """Of the first parameter, or of none, there is a gradient in the step with the exchange."""

    def body(comm: Communicator) -> list[Any]:
        params, optimizer, step = steps_in_b(comm, dtype, 11, overlap, [(32, 40), (16, 24)])
        assert not optimizer.is_together
        for one in params:
            one.grad = None
        for one in params[:given]:
            one.backward(torch.ones_like(one))
        optimizer.step()
        assert optimizer.is_together
        met = [one.detach().clone() for one in params]
        step()
        return met

    first, second = run_ranks(2, body)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("writes", ["one", "both"])
def test_ranks_that_write_different_weights_fail_at_the_step(writes: str) -> None:
    def body(comm: Communicator) -> None:
        params, _, step = steps_in_b(comm, torch.float32, 9, overlap=False)
        with torch.no_grad():
            if writes == "both":
                params[0].mul_(0.5)  # of weights that differ from rank to rank
            elif comm.rank == 1:
                params[0].zero_()
        with pytest.raises(MismatchError, match="written to parameter 0 outside of the optimizer"):
            step()

    run_ranks(2, body)


def test_intervals_below_one_are_refused() -> None:
    def body(comm: Communicator) -> None:
        for name, value in itertools.product(PACE, (0, "1")):
            with pytest.raises(ValueError, match=f"Invalid {name} value: {value}"):
                ZeroOneAdam(parameters([(4, 4)]), **{**PACE, name: value}, comm=comm)

    run_ranks(1, body)
