"""One step of staleness: which gradient is handed out when, what is in flight over a checkpoint,
what is refused, and the weights that backward is done at. (With DDP: test_stale_ranks.py.)"""

from __future__ import annotations

import importlib.util
import pickle
import warnings
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch._dynamo  # which an optimizer imports when it is first made: here, for all ranks
import torch.distributed as dist
from ddp_buckets import LARGE, THRESHOLD, ByStep, Net, Scaler, gradients_of, reduce, trained
from ranks import run_ranks
from torch import nn

from ringcomm import Communicator, ConfigError
from ringcomm.torch import HookState, Stale1, allreduce_hook
from ringcomm.torch.sync.pending import Wire

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]

Gradients = dict[str, torch.Tensor]


def stale(
    comm: Communicator, model: nn.Module, codec: str = "none", dense: int = 2, scaler: Any = None
) -> HookState:
    pace = Stale1(dense_steps=dense)
    return HookState(codec, comm, model=model, threshold=THRESHOLD, pace=pace, scaler=scaler)  # type: ignore[arg-type]


def backward(state: HookState, model: nn.Module, step: int, buckets: int = 2) -> Gradients:
    """A step whose gradients are those of ``gradients_of``."""
    got = reduce(state, model, gradients_of(model, state.comm.rank, step), buckets)
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


def test_a_parameter_that_is_trained_from_later_on() -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        state = stale(comm, model, dense=0)
        model.frozen.requires_grad_(True)
        for step in range(4):
            got = backward(state, model, step)["frozen"].reshape(64, 64)
            due = gradients_of(model, 0, step - 1)["frozen"] if step else torch.zeros(64, 64)
            assert torch.equal(got, due), step
        state.flush()

    run_ranks(1, body)


def test_the_loss_scale_is_that_of_the_step_that_gets_it() -> None:
    def body(comm: Communicator) -> None:
        model, scaler = Net(), Scaler(1024.0)
        state = stale(comm, model, "int4", 0, scaler)
        other = stale(comm, model, "int4", 0, scaler)
        for one, scales in ((state, (1024.0, 512.0)), (other, (1024.0, 1024.0))):
            for step, scale in enumerate(scales):
                scaler.scale = scale
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


def test_gradients_that_were_refused_are_no_means(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = Wire.submit

    def refuse(*_: Any) -> Any:
        raise ConfigError("refused")

    def body(comm: Communicator) -> None:
        model = Net()
        state = stale(comm, model, dense=0)
        backward(state, model, 0, 1)
        with monkeypatch.context() as patched:
            patched.setattr(Wire, "submit", refuse)
            with pytest.raises(ConfigError, match="refused"):
                backward(state, model, 1, 1)
        assert Wire.submit is submit
        assert not any(got.any() for got in backward(state, model, 2, 1).values())
        same(backward(state, model, 3, 1), gradients_of(model, 0, 2))
        state.flush()

    run_ranks(1, body)


def test_states_that_do_not_fit_are_refused() -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        state = stale(comm, model, "int4", dense=1)
        for step in range(4):
            backward(state, model, step)
        saved = state.state_dict()
        with pytest.raises(ConfigError, match="holds gradients in flight of pace='stale1'"):
            HookState("int4", comm, model=model, threshold=THRESHOLD).load_state_dict(saved)
        with pytest.raises(ConfigError, match="of another model"):
            stale(comm, nn.Linear(100, 90)).load_state_dict({"pace": saved["pace"]})
        assert state.flush()
        saved = state.state_dict()
        HookState("int4", comm, model=model, threshold=THRESHOLD).load_state_dict(saved)

    run_ranks(2, body)


def test_a_correction_is_its_ranks_alone() -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = stale(comm, model, dense=0)
        for step in range(2):
            for name, gradient in backward(state, model, step).items():
                dict(model.named_parameters())[name].grad = gradient.reshape(
                    dict(model.named_parameters())[name].shape
                )
            optimizer.step()
        saved = state.state_dict()
        assert saved["pace"]["correction"]["ahead"]
        saved["pace"]["correction"]["exact"]["rank"] ^= 1
        other = stale(comm, Net(), dense=0)
        with pytest.warns(UserWarning, match="the correction: the state belongs to rank"):
            other.load_state_dict(saved)
        assert not other.state_dict()["pace"].get("correction")
        saved["pace"]["correction"]["exact"]["world_size"] = 3
        with pytest.raises(ConfigError, match="for a world of the same size"):
            other.load_state_dict(saved)

    run_ranks(1, body)


def test_a_parameter_that_no_rank_has_used_stays_without_a_gradient() -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        state = stale(comm, model, dense=0)
        gradients = gradients_of(model, comm.rank, 0)
        gradients["head"].zero_()
        reduce(state, model, gradients)
        assert flushed(state, model).keys() == gradients.keys() - {"head"}

    run_ranks(1, body)


# ---- complex gradients ----


def test_complex_gradients_come_a_step_late() -> None:
    """DDP brings them as real numbers. Those in flight go to a checkpoint, and come from it."""
    dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(4, 3, dtype=torch.complex64)
        state = HookState(None, model=model, pace=Stale1(dense_steps=0, correction=False))
        ddp = nn.parallel.DistributedDataParallel(model)
        ddp.register_comm_hook(state, allreduce_hook)
        grads: list[tuple[torch.Tensor, ...]] = []

        def same_grads(due: tuple[torch.Tensor, ...]) -> None:
            torch.testing.assert_close(
                tuple(p.grad for p in model.parameters()), due, rtol=0, atol=0
            )

        for inputs in torch.randn(3, 2, 4, dtype=torch.complex64):
            grads.append(torch.autograd.grad(model(inputs).abs().sum(), list(model.parameters())))
            ddp(inputs).abs().sum().backward()
            if len(grads) > 1:
                same_grads(grads[-2])
            ddp.zero_grad()
        state.load_state_dict(state.state_dict())
        ddp(inputs).abs().sum().backward()
        for _ in range(2):
            same_grads(grads[-1])
            state.flush()
    finally:
        dist.destroy_process_group()


# ---- what is refused, and what is warned of ----


def test_what_does_not_go_with_it() -> None:
    model = Net()
    with pytest.raises(ConfigError, match=r"pace='stale1' with compression=.*give int4"):
        HookState("onebit", model=model, pace="stale1")
    with pytest.raises(ConfigError, match="less than 4 bits"):
        HookState(ByStep("int4", "onebit"), model=model, pace="stale1")
    state = HookState("int4", model=model, pace="stale1")
    with pytest.raises(ConfigError, match=r"give HookState\(\.\.\., model=model\)"):
        HookState("bf16", pace="stale1")
    with pytest.raises(ConfigError, match=r"pace='stale2': give .*did you mean"):
        HookState("bf16", model=model, pace="stale2")  # type: ignore[arg-type]
    for bad in (-1, True, 0.5):
        with pytest.raises(ConfigError, match="Invalid dense_steps"):
            Stale1(dense_steps=bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Invalid correction: 0\.5; give True or False"):
        Stale1(correction=0.5)  # type: ignore[arg-type]
    again = pickle.loads(pickle.dumps(state))
    assert again.compression == "int4"


@pytest.mark.parametrize(
    ("kind", "force", "times"), [("AdamW", False, 1), ("AdamW", True, 0), ("SGD", False, 0)]
)
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
