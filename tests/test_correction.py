"""The correction of one step of staleness: at which weights backward is done, what a trial leaves
alone, and what becomes of it over checkpoints. (With DDP: test_stale_ranks.py.)"""

from __future__ import annotations

import copy
import gc
import importlib.util
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch._dynamo  # which an optimizer imports when it is first made: here, for all ranks
from ddp_buckets import reduce
from ranks import run_ranks
from torch import nn

from ringcomm import Communicator, ConfigError
from ringcomm.torch import HookState, Stale1
from ringcomm.torch.buckets import GradientSlice
from ringcomm.torch.correction import Correction

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]


class Watched(nn.Module):
    """Tells which weights it is used with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))
        self.seen: list[torch.Tensor] = []

    def forward(self) -> torch.Tensor:
        self.seen.append(self.weight.detach().clone())
        return self.weight.square().sum() / 2


Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda weights: torch.optim.AdamW(weights, 0.1, foreach=False),
    "foreach": lambda weights: torch.optim.AdamW(weights, 0.1, foreach=True),
    "fused": lambda weights: torch.optim.AdamW(weights, 0.1, fused=True),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["muon"] = lambda weights: torch.optim.Muon(weights, 0.1)


def corrected(model: Watched) -> Correction:
    correction = Correction()
    correction.attach(model)
    return correction


def note(correction: Correction, model: Watched, sent: float, handed: float) -> None:
    """What the hook does in a backward: ``sent`` travels, ``handed`` is handed out."""
    sends, mean = (torch.full((6,), value) for value in (sent, handed))
    correction.note([GradientSlice(model.weight, 0, 6, 6)], sends, mean)
    correction.end_backward()
    model.weight.grad = mean.view(3, 2).clone()


@pytest.mark.parametrize("clipped", [1.0, 0.25])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_backward_is_done_where_the_optimizer_would_go(name: str, clipped: float) -> None:
    """By this rank's gradient, clipped as the mean is; and the optimizer's own way is its own."""
    model, alone = Watched(), Watched()
    correction = corrected(model)
    optimizer, other = (OPTIMIZERS[name](one.parameters()) for one in (model, alone))
    gradients = (1.0, 3.0, -2.0, 5.0)
    for step, (sent, handed) in enumerate(zip(gradients, (2.0, 4.0, 8.0, 16.0), strict=True)):
        note(correction, model, sent, handed)
        assert model.weight.grad is not None
        model.weight.grad.mul_(clipped)
        optimizer.step()
        alone.weight.grad = torch.full((3, 2), handed * clipped)
        other.step()
        assert torch.equal(model.weight, alone.weight), step
        ahead, trial = copy.deepcopy((alone, other))
        ahead.weight.grad = torch.full((3, 2), sent * clipped)
        trial.step()
        model()
        torch.testing.assert_close(model.seen[-1], ahead.weight.detach())
        assert not torch.equal(model.seen[-1], alone.weight)


def test_nothing_is_tried_where_no_mean_tells() -> None:
    """None has come, or the gradient or the mean is not finite."""
    model = Watched()
    correction = corrected(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    inf = float("inf")
    for sent, mean, tried in (
        (3.0, 0.0, 0.0),
        (3.0, 4.0, 3.0),
        (inf, 2.0, 0.0),
        (0.0, 2.0, 0.0),
        (3.0, inf, 0.0),
    ):
        note(correction, model, sent, mean)
        optimizer.step()
        own = float(model.weight.detach()[0, 0])
        model()
        assert float(model.seen[-1][0, 0]) == own - tried


def test_only_training_is_ahead() -> None:
    model = Watched()
    correction = corrected(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    note(correction, model, 3.0, 4.0)
    optimizer.step()
    model()
    assert float(model.state_dict()["weight"][0, 0]) == -3.0
    model()
    note(correction, model, 3.0, 1.0)
    optimizer.step()
    model()
    model.eval()()
    model.train()
    with torch.no_grad():
        model()
    assert [float(seen[0, 0]) for seen in model.seen] == [-6.0, -3.0, -7.0, -4.0, -4.0]


def test_nowhere_to_go_ahead_to() -> None:
    """Before a mean has told of its scale, by a step that is dropped or not finite, behind a
    flush, with other weights, and under an optimizer that cannot be tried."""
    model = Watched()
    correction = corrected(model)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)

    def seen() -> float:
        model()
        return float(model.seen[-1][0, 0])

    note(correction, model, 3.0, 0.0)
    optimizer.step()
    assert seen() == 1.0
    note(correction, model, 3.0, 4.0)
    optimizer.step()
    assert seen() == -6.0
    note(correction, model, 3.0, 4.0)  # and no step
    assert seen() == -3.0
    for lost in (float("inf"), float("nan")):
        note(correction, model, lost, 0.0)
        correction.note(
            [GradientSlice(model.weight, 0, 6, 6)], torch.tensor([1.0, lost] * 3), torch.zeros(6)
        )
        optimizer.step()
        assert seen() == -3.0
    note(correction, model, 3.0, 0.0)
    correction.clear()
    optimizer.step()
    assert seen() == -3.0
    note(correction, model, 3.0, 4.0)
    optimizer.step()
    model.load_state_dict({"weight": torch.full((3, 2), 9.0)})
    assert seen() == 9.0
    optimizer = torch.optim.LBFGS(model.parameters())
    note(correction, model, 3.0, 4.0)
    optimizer.step(lambda: 0.0)
    assert seen() == float(model.weight[0, 0].detach())


def test_a_backward_that_the_hook_does_not_see() -> None:
    """The step that follows is made at the model's own weights, and stays."""
    model = Watched()
    correction = corrected(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    note(correction, model, 3.0, 4.0)
    optimizer.step()
    model()
    model.weight.grad = torch.full((3, 2), 5.0)
    optimizer.step()
    model.eval()()
    assert [float(seen[0, 0]) for seen in model.seen] == [-6.0, -8.0]


def test_a_forward_between_another_and_its_backward() -> None:
    """As for pseudo-labels: it sees the model's own weights, and backward is none the wiser."""
    model = Watched()
    correction = corrected(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    note(correction, model, 3.0, 4.0)
    optimizer.step()
    loss = model()
    with torch.no_grad():
        model()
    loss.backward()
    assert model.weight.grad is not None
    assert float(model.weight.grad[0, 0]) == 4.0 - 6.0  # on top of the mean, which still lies there
    correction.end_backward()
    assert [float(seen[0, 0]) for seen in model.seen] == [-6.0, -3.0]
    assert float(model.weight[0, 0].detach()) == -3.0


def test_other_weights_for_a_part_of_a_model_that_is_ahead() -> None:
    model = nn.ModuleDict({name: Watched() for name in ("one", "two")})
    model.forward = lambda: [each() for each in model.values()]
    correction = Correction()
    correction.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    starts = enumerate(model.values())
    slices = [GradientSlice(one.weight, 6 * at, 6 * at + 6, 6 * at + 6) for at, one in starts]
    correction.note(slices, torch.full((12,), 3.0), torch.full((12,), 4.0))
    for each in model.values():
        each.weight.grad = torch.full((3, 2), 4.0)
    optimizer.step()
    model()
    model.load_state_dict({"one.weight": torch.full((3, 2), 9.0)}, strict=False)
    assert [float(each.weight.detach()[0, 0]) for each in model.values()] == [9.0, -3.0]


@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_that_changes_the_gradients(foreach: bool) -> None:
    """torch's SGD with Nesterov's momentum does, by foreach: the factor is that of the gradient
    that it was given."""
    model = Watched()
    correction = corrected(model)
    optimizer = torch.optim.SGD(
        model.parameters(), 0.01, momentum=0.9, nesterov=True, foreach=foreach
    )
    for _ in range(2):
        note(correction, model, 3.0, 1.0)
        optimizer.step()
    model()
    momentum = float(optimizer.state[model.weight]["momentum_buffer"][0, 0])
    ahead = float((model.state_dict()["weight"] - model.seen[-1])[0, 0])
    assert ahead == pytest.approx(0.01 * (3 + 0.9 * (0.9 * momentum + 3)), rel=1e-4)


@pytest.mark.parametrize("is_told", [False, True])
def test_a_loss_scale_that_grows(is_told: bool) -> None:
    """A rank's gradient that is longer than the mean is not clipped for it."""
    model = Watched()
    correction = corrected(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ahead = []
    for scale in (8.0, 8.0, 16.0, 16.0, 16.0) if is_told else (8.0,) * 5:
        sends, mean = (torch.full((6,), value * scale) for value in (3.0, 1.0))
        correction.note(
            [GradientSlice(model.weight, 0, 6, 6)], sends, mean, scale if is_told else 1.0
        )
        model.weight.grad = mean.view(3, 2) / scale
        optimizer.step()
        model()
        ahead.append(float((model.state_dict()["weight"] - model.seen[-1])[0, 0]))
    assert ahead == pytest.approx([3.0] * 5)


def test_a_trial_is_cut_as_the_mean_is() -> None:
    """By the mean's factor, whatever the limit was before."""
    model = Watched()
    correction = corrected(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ahead = []
    for limit in (100.0, 8.0, 1.0, 100.0):
        note(correction, model, 50.0, 10.0)
        nn.utils.clip_grad_norm_(model.parameters(), limit * 6**0.5)
        optimizer.step()
        model()
        ahead.append(float((model.state_dict()["weight"] - model.seen[-1])[0, 0]))
    assert ahead == pytest.approx([50.0, 40.0, 5.0, 50.0])


class Counting(torch.optim.SGD):
    """Keeps books of its own, and leaves the step to its class's base, whose hooks torch runs."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        super().__init__(weights, lr=1.0)
        self.count = 0
        self.param_groups[0]["t"] = torch.zeros(())

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        self.param_groups[0]["t"] += 1
        super().step(closure)


def test_a_trial_leaves_no_trace_in_an_optimizer_with_books_of_its_own() -> None:
    model = Watched()
    correction = corrected(model)
    optimizer = Counting(model.parameters())
    stepped: list[bool] = []
    optimizer.register_step_post_hook(
        lambda one, *_: stepped.append(one.param_groups[0]["params"][0] is model.weight)
    )
    for _ in range(3):
        note(correction, model, 3.0, 4.0)
        optimizer.step()
    assert (optimizer.count, float(optimizer.param_groups[0]["t"])) == (3, 3.0)
    assert set(stepped) == {True}
    assert len(stepped) == 6  # the class's own step and its base's


def test_a_state_of_other_shapes() -> None:
    model = Watched()
    correction = corrected(model)
    with pytest.raises(ConfigError, match="of another model"):
        correction.require({"ahead": {"weight": torch.ones(5)}})


def test_hooks_of_a_state_that_is_gone() -> None:
    model = Watched()
    hooks = [HookState(None, model=model, pace="stale1") for _ in range(5)]
    assert len(model._forward_pre_hooks) == 5
    del hooks
    gc.collect()
    assert not model._forward_pre_hooks
    assert not model._state_dict_pre_hooks


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_weights_of_other_dtypes(dtype: torch.dtype) -> None:
    model = Watched().to(dtype)
    correction = corrected(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sent, mean = (torch.full((6,), value, dtype=dtype) for value in (512.0, 1024.0))
    correction.note([GradientSlice(model.weight, 0, 6, 6)], sent, mean)
    model.weight.grad = mean.view(3, 2) / 1024
    optimizer.step()
    model()
    assert float(model.seen[-1][0, 0]) == -0.5


class Stubborn(torch.optim.SGD):
    """Steps certain parameters only."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        if not all(isinstance(weight, nn.Parameter) for weight in self.param_groups[0]["params"]):
            raise KeyError("who is this")


def test_an_optimizer_that_fails_on_trial() -> None:
    model = Watched()
    correction = corrected(model)
    optimizer = Stubborn(model.parameters(), lr=1.0)
    note(correction, model, 3.0, 4.0)
    with pytest.raises(ConfigError, match=r"Stubborn .*'who is this'.*\(correction=False\)"):
        optimizer.step()
    assert optimizer.param_groups[0]["params"] == [model.weight]


class Leader(torch.optim.Optimizer):
    """Has another optimizer step, as ZeroRedundancyOptimizer and Lookahead do."""

    def __init__(self, led: torch.optim.Optimizer) -> None:
        self.led = led
        super().__init__(led.param_groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        self.led.step()


def test_of_an_optimizer_that_leads_another_the_other_is_tried() -> None:
    model = Watched()
    correction = corrected(model)
    optimizer = Leader(torch.optim.SGD(model.parameters(), lr=1.0))
    note(correction, model, 3.0, 4.0)
    optimizer.step()
    assert float(model.weight[0, 0].detach()) == -3.0
    model()
    assert float(model.seen[-1][0, 0]) == -6.0


def test_a_flush_while_the_model_is_ahead() -> None:
    def body(comm: Communicator) -> None:
        model = Watched()
        state = HookState(None, comm, model=model, pace=Stale1(dense_steps=0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        descend(state, model, optimizer, 3)
        own = model.weight.detach().clone()
        model()
        assert not torch.equal(model.weight, own)
        assert state.flush()
        assert torch.equal(model.weight, own)

    run_ranks(1, body)


def test_a_trial_runs_no_hooks_and_leaves_no_trace() -> None:
    model = Watched()
    correction = corrected(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    groups, state = optimizer.param_groups, optimizer.state
    for _ in range(3):
        note(correction, model, 3.0, 1.0)
        optimizer.step()
        schedule.step()
    assert len(calls) == 3
    assert optimizer.param_groups is groups
    assert optimizer.state is state
    assert list(state) == [model.weight]
    assert state[model.weight]["momentum_buffer"][0, 0] == pytest.approx(1 + 0.9 + 0.81)


@pytest.mark.parametrize("fused", [True, False])
def test_a_grad_scalers_scale_is_not_tried(fused: bool) -> None:
    """And a step that it drops moves nothing ahead."""
    model, scaler = Watched(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    correction = corrected(model)
    kind = torch.optim.AdamW if fused else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.5, weight_decay=0.0, fused=fused)
    scaler.scale(torch.ones(1))
    for sent, handed in ((1024.0, 2048.0), (1024.0, 1024.0)):
        note(correction, model, sent, handed)
        scaler.step(optimizer)
        scaler.update()
    alone, other = copy.deepcopy((model, optimizer))
    alone.weight.grad = torch.ones(3, 2)
    other.step()
    model()
    torch.testing.assert_close(model.seen[-1], alone.weight.detach())
    note(correction, model, 3072.0, float("inf"))
    own = model.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, own)
    model()
    assert model.seen[-1].isfinite().all()


def test_copies_of_the_model_go_nowhere() -> None:
    model = Watched()
    correction = corrected(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    note(correction, model, 3.0, 1.0)
    optimizer.step()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other()
        assert torch.equal(other.seen[-1], model.weight)
    del correction
    model()
    assert float(model.seen[-1][0, 0]) == 0.0


def descend(state: HookState, model: Watched, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Each rank has the loss w^2 / 2, and a gradient of its own around it."""
    for _ in range(steps):
        optimizer.zero_grad()
        model().backward()
        assert model.weight.grad is not None
        mine = model.weight.grad + 0.1 * (-1) ** state.comm.rank
        got = reduce(state, model, {"weight": mine}, 1)["weight"]
        model.weight.grad = got.view(3, 2).clone()
        optimizer.step()


@pytest.mark.parametrize(("correction", "ends"), [(True, (0.0, 1e-3)), (False, (1e9, 1e99))])
def test_a_rate_that_delay_alone_does_not_bear(correction: bool, ends: tuple[float, float]) -> None:
    """SGD with momentum .9 bears 3.8 over the curvature; a step late .1, by Jury's criterion."""

    def body(comm: Communicator) -> None:
        model = Watched()
        pace = Stale1(dense_steps=0, correction=correction)
        state = HookState(None, comm, model=model, pace=pace)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        descend(state, model, optimizer, 200)
        assert ends[0] <= float(model.weight.detach().abs().max()) < ends[1]
        state.flush()

    run_ranks(2, body)


def test_the_correction_goes_on_from_a_checkpoint_to_the_bit() -> None:
    def body(comm: Communicator) -> None:
        def start() -> tuple[HookState, Watched, torch.optim.Optimizer]:
            model = Watched()
            state = HookState(None, comm, model=model, pace=Stale1(dense_steps=1))
            return state, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        state, model, optimizer = start()
        descend(state, model, optimizer, 5)
        saved = pickle.loads(
            pickle.dumps((model.state_dict(), optimizer.state_dict(), state.state_dict()))
        )
        again, copied, stepper = start()
        copied.load_state_dict(saved[0])
        stepper.load_state_dict(saved[1])
        again.load_state_dict(saved[2])
        descend(state, model, optimizer, 3)
        descend(again, copied, stepper, 3)
        assert torch.equal(copied.weight, model.weight)
        assert torch.equal(copied.seen[0], model.seen[5])
        assert not torch.equal(copied.seen[0], saved[0]["weight"])
        for one in (state, again):
            one.flush()
        saved[2]["pace"]["correction"] = {"ahead": {"bias": torch.ones(1)}}
        with pytest.raises(ConfigError, match="another model"):
            again.load_state_dict(saved[2])

    run_ranks(2, body)


# ---- the account ----
