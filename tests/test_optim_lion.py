"""Lion with the signs on the wire: equal to Lion where nothing is rounded, votes that are counted
right, ties, signs of zero, and momenta that are synchronised."""

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
    ranks: int, steps: int, lr: float, decay: float, outcome: str, sync: int,
    betas: tuple[float, ...],
) -> dict[str, torch.Tensor]:
    """Written from the paper's formulas."""
    beta1, beta2 = betas
    if outcome == "momentum":
        return _plain(ranks, steps, lr, decay, betas)
    vote = outcome == "vote"
    weights = {n: p.detach().clone() for n, p in Net().named_parameters() if p.requires_grad}
    moments = {n: [torch.zeros_like(w) for _ in range(ranks)] for n, w in weights.items()}
    for step in range(steps):
        for name, weight in weights.items():
            signs = []
            for rank in range(ranks):
                g, m = gradient_of(name, weight.shape, rank, step), moments[name][rank]
                signs.append((beta1 * m + (1 - beta1) * g).sign())
                moments[name][rank] = beta2 * m + (1 - beta2) * g
            moved = sum(signs).sign() if vote else sum(signs) / ranks  # type: ignore[union-attr]
            weight -= lr * (moved + decay * weight)
            if sync and (step + 1) % sync == 0:
                mean = sum(moments[name]) / ranks  # type: ignore[assignment]
                moments[name] = [mean.clone() for _ in range(ranks)]  # type: ignore[attr-defined]
    return weights


def _plain(
    ranks: int, steps: int, lr: float, decay: float, betas: tuple[float, ...]
) -> dict[str, torch.Tensor]:
    """Lion itself, of the mean gradient."""
    weights = {n: p.detach().clone() for n, p in Net().named_parameters() if p.requires_grad}
    moments = {n: torch.zeros_like(w) for n, w in weights.items()}
    for step in range(steps):
        for name, weight in weights.items():
            shares = [gradient_of(name, weight.shape, rank, step) for rank in range(ranks)]
            g, m = torch.stack(shares).mean(0), moments[name]
            weight -= lr * ((betas[0] * m + (1 - betas[0]) * g).sign() + decay * weight)
            moments[name] = betas[1] * m + (1 - betas[1]) * g
    return weights


@pytest.mark.parametrize(
    ("codec", "outcome", "ranks", "sync"),
    [
        ("none", "momentum", 1, 0), ("none", "momentum", 3, 0),
        ("none", "average", 1, 0), ("none", "average", 3, 0), ("none", "vote", 3, 2),
        ("bf16", "average", 4, 3), ("onebit", "vote", 3, 0), ("onebit", "vote", 2, 0),
        ("onebit", "vote", 3, 2), ("onebit", "average", 2, 0), ("onebit", "average", 1, 0),
    ],
)  # fmt: skip
def test_it_is_lion(codec: str, outcome: str, ranks: int, sync: int) -> None:
    """Votes, and the mean of two ranks, are exact at 1 bit."""
    settings: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95)}

    def body(comm: Communicator) -> Net:
        def make(params: Any, comm: Communicator) -> Lion:
            return Lion(
                params, comm=comm, compression=codec, outcome=outcome, momentum_sync=sync,  # type: ignore[arg-type]
                sync_compression="none", threshold=THRESHOLD, **settings,
            )  # fmt: skip

        return steps_of(comm, make, range(5))[0]  # type: ignore[return-value]

    models = run_ranks(ranks, body)
    assert alike(models)
    expected = reference(ranks, 5, 0.01, 0.1, outcome, sync, (0.9, 0.95))
    for name, weight in expected.items():
        got = models[0].get_parameter(name).detach()
        far = (got - weight).abs() > 1e-5
        # An element whose combination all but vanishes may have either sign.
        assert far.sum() <= 1e-3 * far.numel(), name


def test_means_at_one_bit_deliver_all_in_time() -> None:
    """Gradients that do not change: the sum over the steps is that of the exact means."""
    steps, lr = 60, 0.01

    def body(comm: Communicator) -> Net:
        model = Net()
        optimizer = Lion(
            model.parameters(), lr, comm=comm, outcome="average", threshold=THRESHOLD
        )
        for _ in range(steps):
            set_gradients(model, comm.rank, 0)
            optimizer.step()
        return model

    got = run_ranks(3, body)
    assert alike(got)
    signs = [gradient_of("embed", torch.Size((100, 48)), rank, 0).sign() for rank in range(3)]
    exact = Net().embed.detach() - lr * steps * torch.stack(signs).mean(0)
    assert (got[0].embed - exact).abs().max() <= 3 * lr


def test_ties_favour_neither_side() -> None:
    """Two ranks of four against two, all the time: as often this way as that. The other half of
    each block is agreed on."""

    def body(comm: Communicator) -> torch.Tensor:
        weight = nn.Parameter(torch.zeros(64, 64))
        optimizer = Lion([weight], 1.0, comm=comm, outcome="vote", threshold=0)
        for _ in range(8):
            weight.grad = torch.full_like(weight, 1.0 if comm.rank < 2 else -1.0)
            weight.grad[:, 32:] = 1.0
            optimizer.step()
        return weight.detach()

    for weight in run_ranks(4, body):
        assert not weight[:, :32].any()
        assert (weight[:, 32:] == -8.0).all()


def test_a_momentum_at_one_bit_arrives_in_time() -> None:
    """Of gradients that do not change, all ranks' momentum is what that of their mean would be, but
    for the last few steps'."""
    steps, betas = 60, (0.9, 0.99)

    def body(comm: Communicator) -> torch.Tensor:
        model = Net()
        optimizer = Lion(
            model.parameters(), 1e-3, betas, comm=comm, outcome="momentum", threshold=THRESHOLD
        )
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
            Lion([nn.Parameter(torch.zeros(4))], betas=(0.95, 0.9), outcome="momentum", comm=comm)

    run_ranks(1, body)


@pytest.mark.parametrize("outcome", ["momentum", "average", "vote"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_has_no_gradient_in_any_element_does_not_drift(outcome: str, ranks: int) -> None:
    """As a row of an embedding that is never seen; beside others that are."""

    def body(comm: Communicator) -> torch.Tensor:
        weight = nn.Parameter(torch.zeros(64, 64))
        optimizer = Lion([weight], 1.0, comm=comm, outcome=outcome, threshold=0)
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


def test_momenta_are_synchronised_every_so_many_steps() -> None:
    def body(comm: Communicator) -> list[torch.Tensor]:
        model, kept = Net(), []
        optimizer = Lion(
            model.parameters(), 1e-3, comm=comm, outcome="average", momentum_sync=3,
            threshold=THRESHOLD,
        )  # fmt: skip
        for step in range(6):
            set_gradients(model, comm.rank, step)
            optimizer.step()
            kept.append(optimizer.state[model.head]["exp_avg"].clone())
        return kept

    one, other = run_ranks(2, body)
    assert [torch.equal(a, b) for a, b in zip(one, other, strict=True)] == [
        False, False, True, False, False, True,
    ]  # fmt: skip


@pytest.mark.parametrize("outcome", ["momentum", "average", "vote"])
def test_a_bit_per_parameter(outcome: str) -> None:
    """Without the steps that synchronise, at most a 28th of fp32's bytes."""

    def body(comm: Communicator) -> tuple[int, int]:
        sent = []
        for codec in ("none", "onebit"):
            weight = nn.Parameter(torch.zeros(1024, 1024))
            optimizer = Lion(
                [weight], comm=comm, compression=codec, outcome=outcome, momentum_sync=0  # type: ignore[arg-type]
            )  # fmt: skip
            before = comm.stats()["wire_bytes"]
            for step in range(2):
                weight.grad = gradient_of("weight", weight.shape, comm.rank, step)
                optimizer.step()
            sent.append(comm.stats()["wire_bytes"] - before)
        return sent[0], sent[1]

    for plain, bits in run_ranks(4, body):
        assert 28 * bits <= plain


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
        ({"betas": (0.9, -0.1)}, "Invalid beta parameter at index 1: -0.1"),
        ({"betas": (0.9,)}, r"Invalid betas, give two numbers: \(0.9,\)"),
        ({"momentum_sync": "2"}, "Invalid momentum_sync: 2"),
        ({"weight_decay": -1}, "Invalid weight_decay value: -1"),
        ({"outcome": "median"}, "Invalid outcome, give one of .*median"),
        ({"momentum_sync": -1}, "Invalid momentum_sync: -1"),
        ({"sync_compression": "int3"}, "sync_compression='int3'"),
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
