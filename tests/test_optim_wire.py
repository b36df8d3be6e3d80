"""What all optimizers of ringcomm.torch.optim have in common: steps that are left out, clipping,
accumulation, gradients that are missing, 16-bit models."""

from __future__ import annotations

import importlib.util
import warnings
from functools import partial
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from optim_steps import THRESHOLD, Net, alike, flat, go_on, mean_gradients, set_gradients, sgd
from ranks import World, run_ranks
from torch import nn

from ringcomm import Communicator, ConfigError
from ringcomm.torch.optim import (
    SGD,
    Lion,
    OneBitAdam,
    OneBitLamb,
    ZeroOneAdam,
)
from ringcomm.torch.sync.agreement import agree

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]


# ---- steps that are left out ----


@pytest.mark.filterwarnings("ignore:a gradient is not finite")
@pytest.mark.parametrize(("codec", "bad"), [("none", float("nan")), ("onebit", float("inf"))])
def test_a_bad_gradient_of_one_rank_leaves_the_step_out_on_all(codec: str, bad: float) -> None:
    """As if that step had not been: in parameters, momenta and residuals."""

    def body(comm: Communicator) -> tuple[Net, Net, int, int]:
        models = Net(), Net()
        disturbed, other = (sgd(model, comm, codec) for model in models)
        for step in range(4):
            if step == 2:
                set_gradients(models[0], comm.rank, 99)
                if comm.rank == 1:
                    models[0].filter.grad[3, 2, 1, 0] = bad  # type: ignore[index]
                disturbed.step()
            go_on(models[0], disturbed, comm, [step])
            go_on(models[1], other, comm, [step])
        return (*models, disturbed.skipped, disturbed.steps)

    got = run_ranks(3, body)
    for disturbed, other, skipped, steps in got:
        assert (skipped, steps) == (1, 4)
        assert alike([disturbed, other, got[0][0]])


def test_a_mean_that_overflows_leaves_out_its_span() -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        optimizer = sgd(model, comm, "fp16")
        go_on(model, optimizer, comm, range(1))  # whose first step is sent at bf16
        set_gradients(model, 0, 1)
        model.head.grad.fill_(1e6)  # type: ignore[union-attr]
        before = flat(model)
        optimizer.step()
        changed = flat(model) != before
        assert changed.any()
        assert not changed.all()
        assert (optimizer.steps, optimizer.skipped) == (2, 1)

    with pytest.warns(UserWarning, match="not finite: its span is left out of the step"):
        run_ranks(2, body)


def test_a_step_without_any_gradient_is_none() -> None:
    """It changes nothing, and does not count in the bias of the moments."""

    def body(comm: Communicator, empty: int) -> torch.Tensor:
        model = Net()
        optimizer = OneBitAdam(model.parameters(), comm=comm, threshold=THRESHOLD)
        for step in range(3):
            for _ in range(empty):
                optimizer.zero_grad()
                optimizer.step()
            set_gradients(model, comm.rank, step)
            optimizer.step()
        assert optimizer.steps == 3
        return flat(model)

    found = [run_ranks(2, lambda comm, empty=empty: body(comm, empty))[0] for empty in (0, 2)]
    assert torch.equal(*found)


@pytest.mark.parametrize("ranks", [2, 91, 500, 1000])
def test_large_worlds_agree(ranks: int) -> None:
    """Though the squares of sums have more than 53 bits."""

    class World:
        world_size = ranks

        def allreduce(self, message: torch.Tensor, op: str) -> torch.Tensor:
            return message.mul_(ranks)

    for step in range(300):
        about = {"steps": step}
        same: Any = World()
        verdict = agree(same, [None], loss_scale=1.0, found_inf=False, max_norm=None, alike=about)
        assert verdict.finite


def test_a_bad_gradient_is_told_once() -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        optimizer = sgd(model, comm)
        set_gradients(model, 0, 0)
        model.head.grad.fill_(torch.inf)  # type: ignore[union-attr]
        with pytest.warns(UserWarning, match="not finite: the step is left out on all ranks"):
            optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
        assert optimizer.skipped == 2

    run_ranks(1, body)


def test_means_that_are_not_finite_change_nothing() -> None:
    """Each rank's gradient is finite here, and too large for fp16."""

    def body(comm: Communicator) -> tuple[Net, int]:
        model = Net()
        optimizer = sgd(model, comm, "fp16")
        set_gradients(model, comm.rank, 0)
        model.head.grad[0, 0] = 1e6  # type: ignore[index]
        optimizer.step()
        return model, optimizer.skipped

    with pytest.warns(UserWarning, match="not finite") as told:
        got = run_ranks(2, body)
    assert {one.filename for one in told} == {__file__}
    for model, skipped in got:
        assert skipped == 1
        assert torch.equal(model.head, Net().head)
        assert not torch.equal(model.norm, Net().norm)


@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaler_skips_on_all_ranks_alike(unscales: bool) -> None:
    """The gradients are those without a scaler, whatever each rank's scale."""

    def body(comm: Communicator) -> tuple[Net, Net, list[float], int]:
        models = Net(), Net()
        scaled, plain = (sgd(model, comm, "onebit") for model in models)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        scales = []
        for step in range(6):
            set_gradients(models[0], comm.rank, step, scaler.get_scale())
            scaler.scale(torch.zeros(()))
            if step == 3 and comm.rank == 1:
                models[0].norm.grad[0] = torch.inf  # type: ignore[index]
            if unscales:
                scaler.unscale_(scaled)
                torch.nn.utils.clip_grad_norm_(models[0].parameters(), 1e9)
            scaler.step(scaled)
            scaler.update()
            scales.append(scaler.get_scale())
            if step != 3:
                go_on(models[1], plain, comm, [step])
        return (*models, scales, scaled.skipped)

    got = run_ranks(2, body)
    for scaled, plain, _, skipped in got:
        assert skipped == 1
        assert alike([scaled, plain, got[0][0]])
    assert got[0][2] != got[1][2]  # one of them alone has seen it


# ---- clipping ----


def test_max_norm_bounds_the_norm_of_the_mean() -> None:
    ranks = 3

    def body(comm: Communicator) -> tuple[Net, Net]:
        clipped, scaled = Net(), Net()
        optimizer = sgd(clipped, comm, max_norm=0.5, momentum=0.0)
        by_hand = sgd(scaled, comm, momentum=0.0)
        for step in range(3):
            squares = []
            for rank in range(ranks):
                set_gradients(scaled, rank, step)
                every = [p.grad.reshape(-1) for p in scaled.parameters() if p.grad is not None]
                squares.append(torch.cat(every).double().square().sum().item())
            norm = (sum(squares) / ranks) ** 0.5
            set_gradients(scaled, comm.rank, step, 0.5 / (norm + 1e-6))
            by_hand.step()
            set_gradients(clipped, comm.rank, step)
            optimizer.step()
        return clipped, scaled

    models = run_ranks(ranks, body)
    assert alike([clipped for clipped, _ in models])
    for clipped, scaled in models:
        assert torch.allclose(flat(clipped), flat(scaled), atol=1e-6)
        moved = (flat(clipped) - flat(Net())).norm() / 0.1
        assert 0 < moved <= 3 * 0.5 + 1e-4


def test_users_may_clip_each_ranks_gradient() -> None:
    def body(comm: Communicator) -> Net:
        model = Net()
        optimizer = sgd(model, comm, momentum=0.0)
        set_gradients(model, comm.rank, 0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return model

    models = run_ranks(2, body)
    assert alike(models)
    assert (flat(models[0]) - flat(Net())).norm() <= 0.1 * 0.5 + 1e-5


# ---- what a step is made of ----


def test_accumulated_gradients_travel_once() -> None:
    def body(comm: Communicator) -> tuple[Net, Net, int, int]:
        models, sent = (Net(), Net()), []
        for model, parts in zip(models, (1, 4), strict=True):
            optimizer = sgd(model, comm)
            for step in range(2):
                optimizer.zero_grad(set_to_none=step == 0)
                for _ in range(parts):
                    with optimizer.no_sync():
                        sum((p * p).sum() for p in model.parameters()).div(parts).backward()  # type: ignore[union-attr]
                optimizer.step()
            sent.append(optimizer.carried)
        return (*models, *sent)

    for once, parted, sent_once, sent_parted in run_ranks(2, body):
        assert sent_once == sent_parted > 0
        assert torch.allclose(flat(once), flat(parted), atol=1e-6)


def test_a_closure_is_called_with_gradients_on() -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        optimizer = sgd(model, comm)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model.head**2).sum()
            loss.backward()
            return loss

        before = float((model.head.detach() ** 2).sum())
        assert float(optimizer.step(closure).detach()) == pytest.approx(before)
        assert float((model.head.detach() ** 2).sum()) < before

    run_ranks(2, body)


def test_a_gradient_that_some_ranks_lack_is_zero_there() -> None:
    def body(comm: Communicator) -> Net:
        model = Net()
        optimizer = sgd(model, comm, momentum=0.0)
        set_gradients(model, comm.rank, 0)
        if comm.rank == 0:
            model.head.grad = model.norm.grad = None
        optimizer.step()
        return model

    got, expected = run_ranks(2, body), Net()
    mean_gradients(expected, 2, 0)
    other = Net()
    set_gradients(other, 1, 0)
    assert alike(got)
    for name, parameter in expected.named_parameters():
        gradient = parameter.grad
        if name in ("head", "norm"):
            gradient = other.get_parameter(name).grad / 2  # type: ignore[operator]
        after = parameter.detach() - (0 if gradient is None else 0.1 * gradient)
        assert torch.allclose(got[0].get_parameter(name), after, atol=1e-6), name


@pytest.mark.parametrize("codec", ["none", "onebit"])
def test_what_nobody_has_a_gradient_of_stays(codec: str) -> None:
    """Not even its weight decays, nor is it sent alone."""

    def body(comm: Communicator) -> Net:
        model = Net()
        optimizer = sgd(model, comm, codec, weight_decay=0.1)
        for step in range(3):
            set_gradients(model, comm.rank, step)
            if step:
                model.head.grad = model.temperature.grad = None
            go_before = model.head.detach().clone(), model.temperature.detach().clone()
            optimizer.step()
            assert torch.equal(model.head, go_before[0]) == (step > 0)
            assert torch.equal(model.temperature, go_before[1]) == (step > 0)
        return model

    assert alike(run_ranks(2, body))


def test_a_parameter_that_is_trained_later_is_laid_out_then() -> None:
    def body(comm: Communicator) -> Net:
        model = Net()
        optimizer = sgd(model, comm, "onebit")
        go_on(model, optimizer, comm, range(2))
        assert torch.equal(model.frozen, Net().frozen)
        assert model.frozen not in optimizer.state
        model.frozen.requires_grad_(True)
        extra = nn.Parameter(torch.full((80, 80), float(comm.rank)))
        optimizer.add_param_group({"params": [extra], "lr": 0.0})
        extra.grad = torch.ones_like(extra)
        go_on(model, optimizer, comm, range(2, 4))
        assert not extra.any()  # rank 0's
        return model

    models = run_ranks(2, body)
    assert alike(models)
    assert not torch.equal(models[0].frozen, Net().frozen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_follow_a_master_copy(dtype: torch.dtype) -> None:
    """Steps far below their precision add up."""

    def body(comm: Communicator) -> tuple[Net, Net]:
        half, full = Net(dtype), Net(dtype).float()
        for model in (half, full):
            optimizer = sgd(model, comm, lr=1e-4, momentum=0.0)
            for _ in range(50):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
        assert optimizer.steps == 50
        return half, full

    for half, full in run_ranks(2, body):
        assert not torch.equal(half.head, Net(dtype).head)
        assert torch.equal(flat(half), flat(full).to(dtype))


def test_a_16_bit_model_may_be_loaded_between_steps() -> None:
    def body(comm: Communicator) -> None:
        model = Net(torch.bfloat16)
        optimizer = sgd(model, comm, lr=0.0)
        go_on(model, optimizer, comm, range(2))
        with torch.no_grad():
            model.head.fill_(3.0)
        go_on(model, optimizer, comm, range(2, 3))
        assert torch.equal(model.head, torch.full_like(model.head, 3.0))

    run_ranks(2, body)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_model_of_another_dtype_than_the_optimizers_is_refused(overlap: bool) -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(16, 16)
        optimizer = sgd(model, comm, overlap=overlap)
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        model.bfloat16()
        optimizer.zero_grad()
        model(torch.ones(2, 16, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()

    with pytest.raises(ConfigError, match=r"make the optimizer after model\.to\(\)"):
        run_ranks(2, body)


def test_a_16_bit_model_whose_data_is_assigned_is_followed() -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(16, 16).bfloat16()
        optimizer = sgd(model, comm)
        for value in (8.0, 16.0):
            for one in model.parameters():
                one.data = torch.full_like(one, value)
                one.grad = torch.ones_like(one)
            optimizer.step()
            assert all((one > value - 1).all() for one in model.parameters())

    run_ranks(2, body)


def test_float64_stays_float64() -> None:
    def body(comm: Communicator) -> Net:
        model = Net(torch.float64)
        optimizer = sgd(model, comm)
        go_on(model, optimizer, comm, range(3))
        assert optimizer.state[model.head]["momentum_buffer"].dtype == torch.float64
        return model

    expected = Net(torch.float64)
    optimizer = torch.optim.SGD(expected.parameters(), 0.1, 0.9)
    for step in range(3):
        mean_gradients(expected, 2, step)
        for parameter in expected.parameters():
            assert parameter.grad is None or parameter.grad.dtype == torch.float64
        optimizer.step()
    models = run_ranks(2, body)
    assert alike(models)
    assert torch.allclose(flat(models[0]), flat(expected), atol=1e-6)


def test_one_span_for_what_is_small_and_blocks_for_the_rest() -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        optimizer = sgd(model, comm)
        set_gradients(model, 0, 0)
        optimizer.step()
        large, small = optimizer.spans
        names = {id(p): name for name, p in model.named_parameters()}
        assert [names[id(place.tensor)] for place in large.slices] == ["head", "filter", "embed"]
        assert all(place.start % 256 == 0 for place in large.slices)
        assert {names[id(place.tensor)] for place in small.slices} == {
            "norm",
            "small",
            "temperature",
        }
        assert small.count == 48 + 16 + 1

    run_ranks(1, body)


@pytest.mark.parametrize("kind", [OneBitLamb, partial(ZeroOneAdam, var_freeze_step=2)])
@pytest.mark.parametrize("name", ["compression", "dense"])
def test_a_codec_that_is_used_later_is_refused_at_once(kind: Any, name: str) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ConfigError, match=f"{name}='onebits' is unknown"):
            kind(Net().parameters(), comm=comm, **{name: "onebits"})

    run_ranks(1, body)


@pytest.mark.parametrize("warmup_steps", [0, 100])
def test_a_codec_that_has_nothing_to_do_is_told(warmup_steps: int) -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(20, 20)
        optimizer = SGD(model.parameters(), 0.1, warmup_steps=warmup_steps, comm=comm)
        for _ in range(2):
            model(torch.ones(20)).sum().backward()
            optimizer.step()

    with pytest.warns(UserWarning, match=r"travel at bf16. Give a lower threshold") as told:
        run_ranks(1, body)
    assert len(told) == 1


def test_what_does_not_fill_a_block_travels_as_well_as_the_rest() -> None:
    """Ten elements of a block of their own: equal gradients arrive whole, at once."""

    def body(comm: Communicator) -> None:
        weights = [nn.Parameter(torch.zeros(size)) for size in ((2, 133), (3, 2), (5, 100))]
        optimizer = SGD(weights, 1.0, 0.0, comm=comm, threshold=0)
        for weight, value in zip(weights, (1.0, 4.0, 0.25), strict=True):
            weight.grad = torch.full_like(weight, value)
        optimizer.step()
        for weight, value in zip(weights, (1.0, 4.0, 0.25), strict=True):
            assert torch.equal(weight, torch.full_like(weight, -value))

    run_ranks(3, body)


def test_many_spans_go_one_behind_the_other() -> None:
    def body(comm: Communicator, span_bytes: int, parts: int) -> Net:
        model = Net()
        optimizer = Lion(model.parameters(), 1e-2, comm=comm, threshold=0, span_bytes=span_bytes)
        go_on(model, optimizer, comm, range(3))
        assert len(optimizer.spans) == parts
        return model

    with World(2) as world:
        assert alike(world.run(partial(body, span_bytes=10_000, parts=3)))
        assert alike(world.run(partial(body, span_bytes=1, parts=5)))
