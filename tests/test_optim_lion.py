"""Lion with its momentum on the wire: Lion where nothing is rounded, and at 1 bit in the end."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from optim_steps import THRESHOLD, Net, alike, gradient_of, set_gradients, steps_of
from ranks import run_ranks
from torch import nn

from ringcomm import Communicator
from ringcomm.torch.optim import Lion

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]


def reference(
    ranks: int, steps: int, lr: float, decay: float, betas: tuple[float, ...]
) -> dict[str, torch.Tensor]:
    """Lion of the mean gradient, written from the paper's formula."""
    weights = {n: p.detach().clone() for n, p in Net().named_parameters() if p.requires_grad}
    moments = {n: torch.zeros_like(w) for n, w in weights.items()}
    for step in range(steps):
        for name, weight in weights.items():
            shares = [gradient_of(name, weight.shape, rank, step) for rank in range(ranks)]
            g, m = torch.stack(shares).mean(0), moments[name]
            weight -= lr * ((betas[0] * m + (1 - betas[0]) * g).sign() + decay * weight)
            moments[name] = betas[1] * m + (1 - betas[1]) * g
    return weights


@pytest.mark.parametrize("ranks", [1, 3])
def test_it_is_lion(ranks: int) -> None:
    settings: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95)}

    def body(comm: Communicator) -> Net:
        def make(params: Any, comm: Communicator) -> Lion:
            return Lion(params, comm=comm, compression="none", threshold=THRESHOLD, **settings)

        return steps_of(comm, make, range(5))[0]  # type: ignore[return-value]

    models = run_ranks(ranks, body)
    assert alike(models)
    for name, weight in reference(ranks, 5, 0.01, 0.1, (0.9, 0.95)).items():
        got = models[0].get_parameter(name).detach()
        far = (got - weight).abs() > 1e-5
        # An element whose combination all but vanishes may have either sign.
        assert far.sum() <= 1e-3 * far.numel(), name


def test_a_momentum_at_one_bit_arrives_in_time() -> None:
    """Of gradients that do not change, all ranks' momentum is what that of their mean would be, but
    for the last few steps'."""
    steps, betas = 60, (0.9, 0.99)

    def body(comm: Communicator) -> torch.Tensor:
        model = Net()
        optimizer = Lion(model.parameters(), 1e-3, betas, comm=comm, threshold=THRESHOLD)
        for _ in range(steps):
            set_gradients(model, comm.rank, 0)
            optimizer.step()
        return optimizer.state[model.embed]["exp_avg"].clone()

    got = run_ranks(3, body)
    assert all(torch.equal(got[0], one) for one in got)
    shares = [gradient_of("embed", torch.Size((100, 48)), rank, 0) for rank in range(3)]
    exact = torch.stack(shares).mean(0) * (1 - betas[1] ** steps)
    assert (got[0] - exact).square().mean().sqrt() <= 0.3 * exact.square().mean().sqrt()


def test_a_momentum_needs_the_slower_beta_second(nothing_left: None) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=r"betas\[1\] >= betas\[0\]"):
            Lion([nn.Parameter(torch.zeros(4))], betas=(0.95, 0.9), comm=comm)

    run_ranks(1, body)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_has_no_gradient_in_any_element_does_not_drift(ranks: int) -> None:
    """As a row of an embedding that is never seen; beside others that are."""

    def body(comm: Communicator) -> torch.Tensor:
        weight = nn.Parameter(torch.zeros(64, 64))
        optimizer = Lion([weight], 1.0, comm=comm, threshold=0)
        for step in range(20):
            weight.grad = gradient_of("weight", weight.shape, comm.rank, step)
            weight.grad[:32] = 0.0
            weight.grad[40:, ::2] = 0.0
            optimizer.step()
        return weight.detach()

    weight = run_ranks(ranks, body)[0]
    assert weight[:32].abs().max() <= 3.0
    assert weight[40:, ::2].abs().max() <= 3.0
    assert weight[32:40].abs().max() > 3.0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
        ({"betas": (0.9, -0.1)}, "Invalid beta parameter at index 1: -0.1"),
        ({"betas": (0.9,)}, r"Invalid betas, give two numbers: \(0.9,\)"),
        ({"weight_decay": -1}, "Invalid weight_decay value: -1"),
        ({"outcome": "vote"}, r"Lion\(\): outcome= has been removed"),
        ({"compression": "int3"}, "compression='int3'"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], text: str) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=text):
            Lion(Net().parameters(), comm=comm, **settings)

    run_ranks(1, body)


def test_codecs_other_than_one_bit_keep_signs_of_zero() -> None:
    def body(comm: Communicator) -> torch.Tensor:
        weight = nn.Parameter(torch.zeros(64, 64))
        optimizer = Lion([weight], 1.0, comm=comm, compression="int4", threshold=0)
        for step in range(5):
            weight.grad = gradient_of("weight", weight.shape, comm.rank, step)
            weight.grad[:32] = 0.0
            optimizer.step()
        return weight.detach()

    weight = run_ranks(2, body)[0]
    assert not weight[:32].any()
    assert weight[32:].any()
