"""OuterStep over real communicators: what it computes, against formulas written out here."""

from __future__ import annotations

import importlib.util
import types
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from outer_training import backward, batch, net, train, weights
from ranks import run_ranks
from torch import nn

from ringcomm import Communicator
from ringcomm.torch import OuterStep
from ringcomm.torch.outer import Nesterov
from ringcomm.torch.sync import account

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]


def test_mean_of_every_step_is_ddps_average_of_sgd() -> None:
    def rank(comm: Communicator) -> torch.Tensor:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        with OuterStep(model, optimizer, every=1, outer="mean", compression=None, comm=comm):
            train(model, optimizer, comm.rank, range(6))
        return weights(model)

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(6):
        optimizer.zero_grad()
        for r in range(3):
            backward(model, batch(r, step))
        for p in model.parameters():
            assert p.grad is not None
            p.grad /= 3
        optimizer.step()
    found = run_ranks(3, rank)
    for one in found:
        torch.testing.assert_close(one, weights(model), rtol=1e-5, atol=1e-6)
        assert torch.equal(one, found[0])


@pytest.mark.parametrize(("n", "momentum"), [(1, 0.9), (3, 0.5)])
def test_nesterov_is_torchs_sgd_of_the_pseudo_gradient(n: int, momentum: float) -> None:
    every, steps = 4, 12

    def rank(comm: Communicator) -> torch.Tensor:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        rule = Nesterov(0.7, momentum)
        with OuterStep(model, optimizer, every=every, outer=rule, compression=None, comm=comm):
            train(model, optimizer, comm.rank, range(steps))
        return weights(model)

    models = [net() for _ in range(n)]
    inner = [torch.optim.AdamW(m.parameters(), 0.01) for m in models]
    anchor = nn.Parameter(weights(models[0]).clone())
    outer = torch.optim.SGD([anchor], 0.7, momentum=momentum, nesterov=True)
    for first in range(0, steps, every):
        for r in range(n):
            train(models[r], inner[r], r, range(first, first + every))
        anchor.grad = sum(anchor.detach() - weights(m) for m in models) / n  # type: ignore[assignment]
        outer.step()
        for m in models:
            nn.utils.vector_to_parameters(anchor.detach().clone(), m.parameters())
    for one in run_ranks(n, rank):
        torch.testing.assert_close(one, anchor.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("codec", "n"), [("int4", 3), ("int8", 2), ("bf16", 2), (None, 3)])
def test_all_ranks_end_with_the_same_bits(codec: str | None, n: int) -> None:
    def rank(comm: Communicator) -> tuple[torch.Tensor, Any]:
        model = net(seed=comm.rank)  # they begin from rank 0's
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        with OuterStep(model, optimizer, every=3, compression=codec, comm=comm) as outer:
            train(model, optimizer, comm.rank, range(11))
        return weights(model), outer.report()

    found = run_ranks(n, rank)
    for one, told in found:
        assert torch.equal(one, found[0][0])
        assert told.iterations == 11
        assert told.rounds == 4  # the last one by the flush
        assert told.sent_bytes > 0


def test_int4_with_feedback_stays_near_the_exact_mean() -> None:
    def run(codec: str | None, feedback: bool | None) -> torch.Tensor:
        def rank(comm: Communicator) -> torch.Tensor:
            model = net(sizes=(5, 64, 3))
            optimizer = torch.optim.SGD(model.parameters(), 0.001)
            with OuterStep(
                model,
                optimizer,
                every=2,
                outer="mean",
                compression=codec,
                feedback=feedback,
                comm=comm,
            ):
                train(model, optimizer, comm.rank, range(20))
            return weights(model)

        found: torch.Tensor = run_ranks(2, rank)[0]
        return found

    exact = run(None, None)
    moved = (exact - weights(net(sizes=(5, 64, 3)))).norm()
    assert (run("int4", None) - exact).norm() < 0.05 * moved
    assert (run("int8", None) - exact).norm() < 0.05 * moved


def test_fine_tuned_apart_and_averaged_once() -> None:
    def rank(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        with OuterStep(model, optimizer, every=None, compression=None, comm=comm) as outer:
            train(model, optimizer, comm.rank, range(5 + comm.rank))  # unequally long
            apart = weights(model)
            works = outer.rounds
        return weights(model), apart, works, outer.rounds

    found = run_ranks(3, rank)
    mean = sum(apart for _, apart, _, _ in found) / 3
    for one, _, before, after in found:
        torch.testing.assert_close(one, mean, rtol=1e-5, atol=1e-6)
        assert torch.equal(one, found[0][0])
        assert (before, after) == (0, 1)


def test_any_inner_optimizer_and_several() -> None:
    muon = getattr(torch.optim, "Muon", None)

    def rank(comm: Communicator) -> torch.Tensor:
        model = net()
        matrices = [p for p in model.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if p.dim() != 2]
        first: torch.optim.Optimizer = torch.optim.SGD(matrices, 0.01)
        if muon is not None:
            first = muon(matrices, 0.01)
        optimizers = [first, torch.optim.Adam(rest, 0.01)]
        with OuterStep(model, optimizers, every=2, comm=comm) as outer:
            for step in range(5):
                backward(model, batch(comm.rank, step))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            assert outer.iteration == 5
        return weights(model)

    first, second = run_ranks(2, rank)
    assert torch.equal(first, second)


def test_evaluation_on_the_anchor() -> None:
    def rank(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        with OuterStep(model, optimizer, every=3, compression=None, comm=comm) as outer:
            train(model, optimizer, comm.rank, range(3))
            after_round = weights(model)
            train(model, optimizer, comm.rank, range(3, 5))
            local = weights(model)
            with outer.anchor():
                anchor = weights(model)
                with pytest.raises(RuntimeError, match="within outer"):
                    optimizer.step()
            assert torch.equal(weights(model), local)
            assert torch.equal(anchor, after_round)
            assert not torch.equal(anchor, local)
            with pytest.raises(ZeroDivisionError), outer.anchor():
                raise ZeroDivisionError
            assert torch.equal(weights(model), local)
        return anchor, local

    (a, first), (b, second) = run_ranks(2, rank)
    assert torch.equal(a, b)
    assert not torch.equal(first, second)


def test_weights_loaded_between_making_and_attaching_are_rank_0s() -> None:
    def rank(comm: Communicator) -> list[torch.Tensor]:
        model = net(seed=comm.rank)
        outer = OuterStep(model, None, every=2, comm=comm)
        model.load_state_dict(net(seed=7 + comm.rank).state_dict())
        with outer:
            with outer.anchor():
                anchor = weights(model)
            return [weights(model), anchor, weights(net(seed=7))]

    for start, anchor, loaded in run_ranks(2, rank):
        assert torch.equal(start, loaded)
        assert torch.equal(anchor, loaded)


def test_frozen_parameters_are_left_and_unused_ones_kept() -> None:
    def rank(comm: Communicator) -> float:
        model = net()
        frozen = model[0]  # type: ignore[index]
        frozen.requires_grad_(False)
        model.add_module("unused", nn.Identity())
        # no random numbers: they would be taken from the other rank's net()
        model.unused.register_parameter("weight", nn.Parameter(torch.ones(3, 3)))  # type: ignore[union-attr]
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        before = frozen.weight.clone()
        with OuterStep(model, optimizer, every=2, compression=None, comm=comm):
            start = model.unused.weight.clone()  # type: ignore[union-attr,operator]
            train(model, optimizer, comm.rank, range(4))
        assert torch.equal(frozen.weight, before)
        assert torch.equal(model.unused.weight, start)  # type: ignore[union-attr,arg-type]
        return float(weights(model).sum())

    run_ranks(2, rank)


def test_what_lies_between_two_attachments_is_not_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(account, "time", types.SimpleNamespace(perf_counter=lambda: now))

    def rank(comm: Communicator) -> float:
        nonlocal now
        outer = OuterStep(net(), None, every=4, comm=comm)
        for training_s in (1.0, 2.0):
            outer.attach()
            now += training_s
            outer.tick()
            outer.detach()
            now += 100.0
        return outer.report().training_s

    assert run_ranks(1, rank) == [3.0]


class Clamped(torch.optim.SGD):
    """A subclass whose step calls that of its base, so that torch runs the hooks of both."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-10, 10)
        return loss


@pytest.mark.parametrize("raises", [False, True], ids=["goes well", "raises once"])
def test_a_step_of_a_subclass_is_one_iteration(raises: bool) -> None:
    torch.optim.SGD(net().parameters(), 0.1)  # from now on torch hooks the base's step, too

    def rank(comm: Communicator) -> tuple[int, int]:
        model = net()
        optimizer = Clamped(model.parameters(), 0.01)
        with OuterStep(model, optimizer, every=2, comm=comm) as outer:
            if raises:
                with pytest.raises(ZeroDivisionError):
                    optimizer.step(lambda: 1 / 0)
            train(model, optimizer, comm.rank, range(4))
            return outer.iteration, outer.rounds

    assert run_ranks(2, rank) == [(4, 2)] * 2
