"""One step of staleness: which gradient is handed out when, what is in flight over a checkpoint,
what is refused, and the weights that backward is done at. (With DDP: test_stale_ranks.py.)"""

from __future__ import annotations

import copy
import importlib.util
import pickle
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch._dynamo  # which an optimizer imports when it is first made: here, for all ranks
from ddp_buckets import LARGE, THRESHOLD, Net, gradients_of, reduce, trained
from ranks import run_ranks
from torch import nn

from ringcomm import Communicator, ConfigError
from ringcomm.torch import HookState, Stale1
from ringcomm.torch.account import Account
from ringcomm.torch.prediction import TrialStep
from ringcomm.work import WorkStats

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]

Gradients = dict[str, torch.Tensor]


def stale(comm: Communicator, model: nn.Module, codec: str = "none", dense: int = 2) -> HookState:
    pace = Stale1(dense_steps=dense)
    return HookState(codec, comm, model=model, threshold=THRESHOLD, pace=pace)


def backward(
    state: HookState, model: nn.Module, step: int, buckets: int = 2, unused: tuple[str, ...] = ()
) -> Gradients:
    """A step whose gradients are those of ``gradients_of``, made by autograd."""
    gradients = gradients_of(model, state.comm.rank, step)
    for name, parameter in trained(model):
        parameter.grad = None
        if name in unused:
            gradients[name].zero_()
        else:
            (parameter * gradients[name]).sum().backward()
    got = reduce(state, model, gradients, buckets)
    return {name: one.clone() for name, one in got.items()}


def flushed(state: HookState, model: nn.Module) -> Gradients:
    for _, parameter in trained(model):
        parameter.grad = None
    assert state.flush()
    found = [(name, p) for name, p in trained(model) if p.grad is not None or not p.numel()]
    return {name: p.clone() if p.grad is None else p.grad.clone() for name, p in found}


def same(one: Gradients, other: Gradients) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name].reshape(-1), other[name].reshape(-1)), name


def zeros(model: nn.Module) -> Gradients:
    return {name: torch.zeros_like(p) for name, p in trained(model)}


# ---- what is handed out ----


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int4"])
def test_each_gradient_is_handed_out_once_and_in_order(codec: str) -> None:
    """With the very bits of synchronous training, however DDP lays its buckets out."""
    steps, dense = 7, 2

    def body(comm: Communicator) -> None:
        model = Net()
        plain = HookState(codec, comm, model=model, threshold=THRESHOLD)
        exact = [backward(plain, model, step) for step in range(steps)]
        state = stale(comm, model, codec, dense)
        layouts = [2, 1, 2, 2, 3, 1, 2] if codec != "bf16" else [2] * steps
        got = [backward(state, model, step, layouts[step]) for step in range(steps)]
        got.append(flushed(state, model))
        same(got[dense], zeros(model))
        del got[dense]
        for mine, theirs in zip(got, exact, strict=True):
            same(mine, theirs)
        assert not state.flush()
        same(backward(state, model, steps), zeros(model))
        assert state.flush()

    run_ranks(2, body)


def test_a_parameter_that_no_rank_uses_gets_its_gradient_later() -> None:
    """DDP drops what is handed out for it meanwhile."""

    def body(comm: Communicator) -> None:
        model = Net()
        state, plain = stale(comm, model, dense=0), HookState(None, comm)
        exact = backward(plain, model, 0)["embed"]
        backward(state, model, 0)
        dropped = backward(state, model, 1, unused=("embed",))["embed"]
        assert torch.equal(dropped, exact)
        for step in (2, 3):
            again = backward(state, model, step, unused=("embed",))["embed"]
            assert torch.equal(again, exact)
        assert torch.equal(backward(state, model, 4)["embed"], exact)
        late = backward(state, model, 5)["embed"]
        assert torch.equal(late, backward(plain, model, 4)["embed"])
        state.flush()

    run_ranks(2, body)


def test_a_parameter_that_one_rank_uses_gets_its_gradient_once() -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        state = stale(comm, model, dense=0)
        backward(state, model, 0)
        backward(state, model, 1, unused=("embed",) if comm.rank else ())
        got = backward(state, model, 2)["embed"]
        assert torch.equal(got, gradients_of(model, 0, 1)["embed"].reshape(got.shape) / 2)
        state.flush()

    run_ranks(2, body)


def test_what_nobody_used_at_the_end_has_no_gradient() -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        state = stale(comm, model, dense=0)
        backward(state, model, 0, unused=("embed",))
        got = flushed(state, model)
        assert sorted(got) == sorted(set(dict(trained(model))) - {"embed"})

    run_ranks(1, body)


def test_the_loss_scale_is_that_of_the_step_that_gets_it() -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        state = stale(comm, model, "int4", dense=0)
        other = stale(comm, model, "int4", dense=0)
        for one, scales in ((state, (1024.0, 512.0)), (other, (1024.0, 1024.0))):
            for step, scale in enumerate(scales):
                one.loss_scale = scale
                got = backward(one, model, step)
            if one is state:
                halved = got
        same({name: 2 * one for name, one in halved.items()}, got)
        state.flush()
        other.flush()

    run_ranks(2, body)


def test_a_step_that_is_dropped_leaves_the_residuals() -> None:
    """It is known of one step later, before others have used them."""

    def body(comm: Communicator) -> None:
        model = Net()
        states = [stale(comm, model, "int4", dense=0) for _ in range(2)]
        got: list[list[Gradients]] = [[], []]
        for dropped, state in enumerate(states):
            for step in range(4):
                if step != 2:
                    got[dropped].append(backward(state, model, step))
                elif dropped:
                    gradients = gradients_of(model, comm.rank, step)
                    gradients["head"].view(-1)[0] = float("inf")
                    reduce(state, model, gradients, 2)
            got[dropped].append(flushed(state, model))
        for name in LARGE:
            assert torch.equal(got[0][-1][name], got[1][-1][name])

    run_ranks(2, body)


# ---- checkpoints ----


@pytest.mark.parametrize("codec", ["none", "int4"])
def test_a_restart_goes_on_to_the_bit(codec: str) -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        state = stale(comm, model, codec, dense=1)
        for step in range(4):
            backward(state, model, step, unused=("embed",) if step == 3 else ())
        saved = pickle.loads(pickle.dumps(state.state_dict(exact=codec == "int4")))
        assert saved["steps"] == 4
        again = stale(comm, model, codec, dense=1)
        again.load_state_dict(saved)
        for step in range(4, 6):
            same(backward(again, model, step), backward(state, model, step))
        same(flushed(again, model), flushed(state, model))
        with pytest.raises(ConfigError, match="holds gradients in flight of pace='stale1'"):
            HookState(codec, comm, model=model, threshold=THRESHOLD).load_state_dict(saved)
        with pytest.raises(ConfigError, match="of another model"):
            stale(comm, nn.Linear(100, 90)).load_state_dict({"pace": saved["pace"]})

    run_ranks(2, body)


# ---- what is refused, and what is warned of ----


def test_what_does_not_go_with_it() -> None:
    model = Net()
    for codec in ("onebit", "topk:0.01"):
        with pytest.raises(ConfigError, match=r"pace='stale1' with compression=.*give int4"):
            HookState(codec, model=model, pace="stale1")  # type: ignore[arg-type]
    state = HookState("int4", model=model, pace="stale1")
    with pytest.raises(ConfigError, match="less than 4 bits"):
        state.compression = "onebit"
    assert state.compression == "int4"
    with pytest.raises(ConfigError, match=r"give HookState\(\.\.\., model=model\)"):
        HookState("bf16", pace="stale1")
    with pytest.raises(ConfigError, match=r"pace='stale2': give .*did you mean"):
        HookState("bf16", model=model, pace="stale2")  # type: ignore[arg-type]
    for bad in (-1, True, 0.5):
        with pytest.raises(ConfigError, match="Invalid dense_steps"):
            Stale1(dense_steps=bad)  # type: ignore[arg-type]
    again = pickle.loads(pickle.dumps(state))
    assert again.compression == "int4"


@pytest.mark.parametrize(("kind", "force", "times"),
                         [("AdamW", False, 1), ("AdamW", True, 0), ("SGD", False, 0)])  # fmt: skip
def test_adam_is_warned_of(kind: str, force: bool, times: int) -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        state = HookState(None, comm, model=model, pace="stale1", force=force)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                backward(state, model, step)
                optimizer.step()
        texts = [str(w.message) for w in caught if "stale1" in str(w.message)]
        assert len(texts) == times
        assert all("AdamW" in text and "pace='every'" in text for text in texts)

    run_ranks(1, body)


# ---- the correction ----


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
    "muon": lambda weights: torch.optim.Muon(weights, 0.1),
}


def corrected(model: Watched) -> TrialStep:
    correction = TrialStep()
    correction.attach(model)
    return correction


def note(correction: TrialStep, model: Watched, sent: float, handed: float) -> None:
    """What the hook does in a backward: ``sent`` travels, ``handed`` is handed out."""
    sends, mean = (torch.full((6,), value) for value in (sent, handed))
    correction.note([(model.weight, 0, 6)], sends, mean)
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
        correction.note([(model.weight, 0, 6)], torch.tensor([1.0, lost] * 3), torch.zeros(6))
        optimizer.step()
        assert seen() == -3.0
    note(correction, model, 3.0, 0.0)
    correction.forget()
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


def test_a_trial_is_clipped_where_means_are() -> None:
    """One rank's gradient is longer than the mean; and the limit is learnt of those clipped."""
    model = Watched()
    correction = corrected(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ahead = []
    for sent, handed in ((1.0, 2.0), (100.0, 2.0), (3.0, 8.0), (100.0, 2.0), (3.0, 0.0)):
        note(correction, model, sent, handed)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0 * 6**0.5)
        optimizer.step()
        model()
        ahead.append(float((model.state_dict()["weight"] - model.seen[-1])[0, 0]))
    assert ahead == pytest.approx([1.0, 100.0, 3.0, 5.0, 3.0], rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_weights_of_other_dtypes(dtype: torch.dtype) -> None:
    model = Watched().to(dtype)
    correction = corrected(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sent, mean = (torch.full((6,), value, dtype=dtype) for value in (512.0, 1024.0))
    correction.note([(model.weight, 0, 6)], sent, mean)
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
def test_a_rate_that_delay_alone_does_not_bear(
    correction: bool, ends: tuple[float, float]
) -> None:
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
        saved = pickle.loads(pickle.dumps(
            (model.state_dict(), optimizer.state_dict(), state.state_dict(exact=True))
        ))  # fmt: skip
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


def test_an_account_of_steps_that_travel_during_the_next() -> None:
    account = Account()
    account.deferred = True
    sent = [WorkStats(sent_bytes=10)]
    overs: list[Any] = []
    for _ in range(3):
        with account.stall():
            for over in overs:
                over(sent)
        overs = [account.submit(100, last=False), account.submit(100, last=True)]
    assert len(account.report().steps) == 2
    for over in overs:
        over(sent)
    first, second, third = account.report().steps
    for step in (first, second, third):
        assert step["step_s"] == pytest.approx(step["compute_s"] + step["exposed_s"])
        assert step["wire_bytes"] == 20
        assert step["hidden_s"] <= step["in_flight_s"]
    assert first["exposed_s"] < 1.0
    assert second["exposed_s"] > 0
    assert [len(account.news()), len(account.news())] == [3, 0]
