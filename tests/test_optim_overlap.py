"""Exchanges that begin in backward: the same as those of the step, and what is refused then."""

from __future__ import annotations

import importlib.util
import threading
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from optim_steps import alike, copies, flat
from ranks import World, run_ranks
from torch import nn

from ringcomm import Communicator, ConfigError, MismatchError, PeerLostError
from ringcomm.torch.optim import SGD, OneBitAdam
from ringcomm.torch.sync.pending import Pending

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 8))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    loss: torch.Tensor = model(torch.randn(16, 32, generator=generator)).square().mean()
    return loss


def made(model: nn.Module, comm: Communicator, codec: str = "onebit", **settings: Any) -> SGD:
    """A span for each large parameter."""
    parts = {"threshold": 0, "span_bytes": 1}
    return SGD(model.parameters(), 0.1, compression=codec, comm=comm, **parts, **settings)  # type: ignore[arg-type]


def went(optimizer: SGD) -> int:
    """Spans that have begun."""
    assert optimizer._overlap is not None
    return len(optimizer._overlap._begun)


@pytest.mark.parametrize("codec", ["none", "int4", "onebit"])
def test_it_is_the_same_to_the_bit(codec: str) -> None:
    def body(comm: Communicator) -> tuple[nn.Module, nn.Module]:
        pair = models[comm.rank], others[comm.rank]
        for model, overlap in zip(pair, (False, True), strict=True):
            optimizer = made(model, comm, codec, overlap=overlap)
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, comm.rank, step).backward()
                if overlap:
                    assert went(optimizer) == 4  # three matrices, and what is small
                optimizer.step()
        return pair

    models, others = copies(net(), 3), copies(net(), 3)
    assert alike([model for pair in run_ranks(3, body) for model in pair])


def test_accumulation_begins_with_the_last_backward() -> None:
    def body(comm: Communicator) -> tuple[nn.Module, nn.Module]:
        pair = models[comm.rank], others[comm.rank]
        for model, overlap in zip(pair, (False, True), strict=True):
            optimizer = made(model, comm, overlap=overlap)
            for step in range(3):
                optimizer.zero_grad()
                with optimizer.no_sync():
                    loss_of(model, comm.rank, step).backward()
                    assert not overlap or went(optimizer) == 0
                loss_of(model, comm.rank, step + 50).backward()
                optimizer.step()
        return pair

    models, others = copies(net(), 2), copies(net(), 2)
    assert alike([model for pair in run_ranks(2, body) for model in pair])


def test_a_second_backward_is_refused() -> None:
    def body(comm: Communicator) -> None:
        model = models[comm.rank]
        optimizer = made(model, comm, overlap=True)
        loss_of(model, comm.rank, 0).backward()
        assert went(optimizer) == 4
        with pytest.raises(ConfigError, match=r"under optimizer.no_sync\(\)"):
            loss_of(model, comm.rank, 1).backward()

    models = copies(net(), 2)
    run_ranks(2, body)


@pytest.mark.parametrize("why", ["other rates", "other size"])
def test_a_step_that_is_not_made_leaves_the_residuals(why: str) -> None:
    """Though its exchanges were over."""

    def body(comm: Communicator) -> None:
        model = models[comm.rank]
        optimizer = made(model, comm, "int4", overlap=True)
        loss_of(model, comm.rank, 0).backward()
        optimizer.step()
        before = optimizer.feedback.state_dict(comm)["tensors"]
        optimizer.zero_grad()
        loss_of(model, comm.rank, 1).backward()
        if why == "other rates":
            optimizer.param_groups[0]["lr"] = 0.1 + comm.rank
            told: Any = pytest.raises(MismatchError, match=r"\['lr'\] is 0.1 on rank 0")
        else:
            model.double()
            told = pytest.raises(ConfigError, match="when the optimizer began to use it")
        with told:
            optimizer.step()
        after = optimizer.feedback.state_dict(comm)["tensors"]
        for name, kept in before.items():
            assert kept["worker"].any()
            assert torch.equal(kept["worker"], after[name]["worker"])

    models = copies(net(), 2)
    run_ranks(2, body)


@pytest.mark.parametrize("how", ["clip", "unscale", "scaler"])
def test_gradients_that_change_behind_backward_are_noticed(how: str) -> None:
    """The next step, with gradients that do not, is made."""

    def body(comm: Communicator) -> nn.Module:
        model = models[comm.rank]
        optimizer = made(model, comm, overlap=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=how != "clip")
        scaler.scale(loss_of(model, comm.rank, 0)).backward()
        if how == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        elif how == "unscale":
            scaler.unscale_(optimizer)
        with pytest.raises(ConfigError, match="overlap=False"):
            scaler.step(optimizer)
        for left in ("grad_scale", "found_inf"):  # as torch leaves them where a step raises
            optimizer.__dict__.pop(left, None)
        optimizer.zero_grad()
        loss_of(model, comm.rank, 1).backward()
        optimizer.step()
        return model

    models = copies(net(), 2)
    got = run_ranks(2, body)
    assert alike(got)
    assert not torch.equal(flat(got[0]), flat(net()))


@pytest.mark.parametrize("unlike", [False, True])
def test_a_backward_that_no_step_follows_is_dropped(unlike: bool) -> None:
    """By zero_grad, residuals included; where a rank had not begun what others had, too."""

    def body(comm: Communicator) -> tuple[nn.Module, nn.Module]:
        pair = models[comm.rank], others[comm.rank]
        for model, wasted in zip(pair, (False, True), strict=True):
            optimizer = made(model, comm, overlap=True)
            for step in range(3):
                if wasted and step == 1 and unlike and comm.rank == 1:
                    model[0](torch.ones(1, 32)).square().sum().backward()
                    assert went(optimizer) == 0
                elif wasted and step == 1:
                    loss_of(model, comm.rank, 77).backward()
                optimizer.zero_grad()
                loss_of(model, comm.rank, step).backward()
                optimizer.step()
        return pair

    models, others = copies(net(), 2), copies(net(), 2)
    assert alike([model for pair in run_ranks(2, body) for model in pair])


@pytest.mark.parametrize("span_bytes", [1 << 20, 1], ids=["one span", "spans"])
def test_an_exchange_that_fails_keeps_none_beside_it(
    span_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a backward is dropped: what the momentum has left is as before, though the variance,
    which a span sends with it, has not come."""
    wait, dropped = Pending.wait, threading.Event()

    def variances_fail(one: Pending) -> torch.Tensor:
        mean = wait(one)
        if dropped.is_set() and one.changed is None:
            raise PeerLostError("rank 1 is lost")
        return mean

    monkeypatch.setattr(Pending, "wait", variances_fail)

    def body(comm: Communicator) -> None:
        model = models[comm.rank]
        parts = {"threshold": 0, "span_bytes": span_bytes}
        optimizer = OneBitAdam(model.parameters(), 0.1, freeze=1, comm=comm, overlap=True, **parts)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, comm.rank, step).backward()
            optimizer.step()
        optimizer.zero_grad()
        before = optimizer.feedback.state_dict(comm)["tensors"]
        loss_of(model, comm.rank, 2).backward()
        comm.barrier()
        dropped.set()
        with pytest.raises(PeerLostError, match="rank 1 is lost"):
            optimizer.zero_grad()
        after = optimizer.feedback.state_dict(comm)["tensors"]
        assert before
        for name, kept in before.items():
            assert kept["worker"].any()
            assert torch.equal(kept["worker"], after[name]["worker"])

    models = copies(net(), 2)
    run_ranks(2, body)


@pytest.mark.filterwarnings("ignore:a gradient is not finite")
def test_a_bad_gradient_leaves_the_step_out_on_all_ranks() -> None:
    def body(comm: Communicator) -> tuple[nn.Module, nn.Module]:
        pair = models[comm.rank], others[comm.rank]
        for model, disturbed in zip(pair, (False, True), strict=True):
            optimizer = made(model, comm, overlap=True)
            for step in range(4):
                bad = disturbed and step == 2
                if bad:
                    optimizer.zero_grad()
                    loss = loss_of(model, comm.rank, 33)
                    (loss * torch.inf if comm.rank == 0 else loss).backward()
                    optimizer.step()
                optimizer.zero_grad()
                loss_of(model, comm.rank, step).backward()
                optimizer.step()
            assert optimizer.skipped == int(disturbed)
        return pair

    models, others = copies(net(), 2), copies(net(), 2)
    assert alike([model for pair in run_ranks(2, body) for model in pair])


def test_a_parameter_that_is_thawed_between_backward_and_step() -> None:
    """What has begun is dropped, and begins again with the new layout."""

    def body(comm: Communicator) -> tuple[nn.Module, nn.Module]:
        pair = models[comm.rank], others[comm.rank]
        for model, overlap in zip(pair, (False, True), strict=True):
            model[0].weight.requires_grad_(False)
            optimizer = made(model, comm, overlap=overlap)
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, comm.rank, step).backward()
                if step == 1:
                    model[0].weight.requires_grad_(True)
                optimizer.step()
        return pair

    models, others = copies(net(), 2), copies(net(), 2)
    got = run_ranks(2, body)
    assert alike([model for pair in got for model in pair])
    assert not torch.equal(got[0][0][0].weight, net()[0].weight)  # type: ignore[index]


def test_a_branch_that_one_rank_does_not_use() -> None:
    """Its span begins at that rank's step; in the same order as elsewhere."""

    def body(comm: Communicator) -> nn.Module:
        model = models[comm.rank]
        optimizer = made(model, comm, overlap=True)
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(model, comm.rank, step)
            if (step + comm.rank) % 2:
                loss = loss + model[3].weight.square().sum()
            else:
                loss = model[0](torch.ones(1, 32)).square().sum()
            loss.backward()
            optimizer.step()
        return model

    models = copies(net(), 2)
    with World(2) as world:
        assert alike(world.run(body))
