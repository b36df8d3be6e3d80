"""From torch's AdamW to OneBitAdam and back, by their states; and layers that are trained later."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from optim_steps import THRESHOLD, Net, flat, go_on, mean_gradients
from ranks import run_ranks
from tensors import stored

from ringcomm import Communicator, ConfigError
from ringcomm.torch.optim import OneBitAdam, OneBitLamb, saved

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]

RANKS = 2
TORCH: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
EPS = 2.0**-23
Model = torch.nn.Module


def adamw(steps: int, dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[Model, Any]:
    """After so many steps by the mean of the ranks' gradients."""
    model = Net(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), **{**TORCH, **settings})
    go_dense(model, optimizer, range(steps))
    return model, optimizer


def go_dense(model: Model, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        mean_gradients(model, RANKS, step)
        optimizer.step()


def onebit(comm: Communicator, model: Model, **settings: Any) -> OneBitAdam:
    settings = {"freeze": 1000, "dense": "none", "threshold": THRESHOLD, **settings}
    return OneBitAdam(model.parameters(), comm=comm, **settings)


def assert_as_close(found: torch.Tensor, expected: torch.Tensor, steps: int) -> None:
    """Each step rounds a weight, and an update of at most some times lr, a few times."""
    bound = steps * EPS * (4 * float(expected.abs().max()) + 64 * TORCH["lr"])
    assert float((found - expected).abs().max()) <= bound


@pytest.mark.parametrize("overlap", [False, True])
def test_the_dense_stage_goes_on_as_adamw_does(overlap: bool) -> None:
    """Also with parameters that have made fewer steps than others, or none."""

    def late(model: Model, step: int) -> None:
        if step < 4:
            model.get_parameter("filter").grad = None
            model.get_parameter("norm").grad = None
        if step < 6:
            model.get_parameter("head").grad = None

    model = Net()
    plain = torch.optim.AdamW(model.parameters(), **TORCH)
    for step in range(6):
        mean_gradients(model, RANKS, step)
        late(model, step)
        plain.step()
    saved = stored([model.state_dict(), plain.state_dict()])
    go_dense(model, plain, range(6, 12))

    def body(comm: Communicator) -> torch.Tensor:
        other = Net(seed=9)
        other.load_state_dict(saved[0])
        optimizer = onebit(comm, other, lr=0.5, overlap=overlap)
        optimizer.load_state_dict(saved[1])
        assert optimizer.param_groups[0]["lr"] == TORCH["lr"]
        assert set(optimizer.param_groups[0]) == {"params", "lr", "betas", "eps", "weight_decay"}
        assert optimizer.steps == 6
        go_on(other, optimizer, comm, range(6, 12))
        return flat(other)

    for found in run_ranks(RANKS, body):
        assert_as_close(found, flat(model), 12)


def test_the_first_renewals_do_not_lengthen_steps() -> None:
    """What a rank's own gradients come to is unknown then, and is taken for as much as may be: a
    variance that is too small would make steps too long."""
    model, plain = adamw(30)
    saved = stored([model.state_dict(), plain.state_dict()])

    def body(comm: Communicator) -> Any:
        other = Net(seed=9)
        other.load_state_dict(saved[0])
        optimizer = onebit(comm, other, freeze=1)
        optimizer.load_state_dict(saved[1])
        go_on(other, optimizer, comm, range(30, 32))
        assert optimizer.frozen_at == 1
        assert optimizer.renewals == 1
        return {
            name: optimizer.state[p]["exp_avg_sq"].clone()
            for name, p in other.named_parameters()
            if p in optimizer.state
        }

    for name, found in run_ranks(RANKS, body)[0].items():
        parameter = model.get_parameter(name)
        if parameter.numel():  # two steps' part may be less than it was
            least = 0.95**2 * plain.state[parameter]["exp_avg_sq"] / (1 - 0.95**32)
            assert float((found / least).min()) >= 1 - 1e-5


@pytest.mark.parametrize("frozen", [False, True])
def test_back_to_adamw(frozen: bool) -> None:
    """In the dense stage AdamW goes on as if it had been there all the time. After the freeze its
    next step is by the moments as they are, which have no bias left to correct."""

    def body(comm: Communicator) -> Any:
        model = Net()
        optimizer = onebit(comm, model, **TORCH, freeze=3 if frozen else 1000)
        go_on(model, optimizer, comm, range(6))
        own, state = optimizer.state_dict(), stored(optimizer.gather_state_dict())
        weights = stored(model.state_dict())
        again = Net(seed=9)
        again.load_state_dict(weights)
        optimizer = onebit(comm, again, freeze=3 if frozen else 1000)
        optimizer.load_state_dict(state)  # which is its own, too
        assert optimizer.steps == 6
        return weights, state, own["state"], flat(model)

    weights, state, own, _ = run_ranks(RANKS, body)[0]
    for index, one in own.items():
        assert torch.equal(one["step"], state["state"][index]["step"])
    model = Net(seed=9)
    model.load_state_dict(weights)
    plain = torch.optim.AdamW(model.parameters())
    plain.load_state_dict(state)
    assert plain.param_groups[0]["weight_decay"] == TORCH["weight_decay"]
    if not frozen:
        expected, reference = adamw(6)
        go_dense(expected, reference, range(6, 9))
        go_dense(model, plain, range(6, 9))
        assert_as_close(flat(model), flat(expected), 9)
        return
    embed, before = model.get_parameter("embed"), weights["embed"]
    kept = {name: plain.state[embed][name].clone() for name in ("exp_avg", "exp_avg_sq")}
    go_dense(model, plain, range(6, 7))
    gradient = embed.grad
    moment = kept["exp_avg"].lerp(gradient, 0.1)
    square = kept["exp_avg_sq"] * 0.95 + gradient * gradient * 0.05
    update = moment / (square.sqrt() + 1e-8)
    wanted = before * (1 - 0.01 * 0.1) - 0.01 * update
    torch.testing.assert_close(embed.detach(), wanted, rtol=1e-5, atol=1e-6)
    go_dense(model, plain, range(7, 20))
    assert bool(torch.isfinite(flat(model)).all())


def test_there_and_back_with_sixteen_bits() -> None:
    model, plain = adamw(4, torch.bfloat16)
    saved = stored([model.state_dict(), plain.state_dict()])

    def body(comm: Communicator) -> Any:
        other = Net(torch.bfloat16, seed=9)
        other.load_state_dict(saved[0])
        optimizer = onebit(comm, other, freeze=6)
        optimizer.load_state_dict(saved[1])
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            if p in plain.state:
                exact = plain.state[p]["exp_avg"].float()
                assert torch.equal(optimizer.state[q]["exp_avg"], exact)
        go_on(other, optimizer, comm, range(4, 9))
        assert optimizer.frozen_at == 6
        return stored([other.state_dict(), optimizer.gather_state_dict()])

    weights, state = run_ranks(RANKS, body)[0]
    model.load_state_dict(weights)
    plain.load_state_dict(state)
    go_dense(model, plain, range(9, 12))
    assert bool(torch.isfinite(flat(model)).all())


def test_settings_that_mean_something_else_are_refused() -> None:
    def adam(**settings: Any) -> Any:
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), **settings)
        go_dense(model, optimizer, range(2))
        return optimizer.state_dict()

    def body(comm: Communicator) -> None:
        optimizer = onebit(comm, Net())
        before = optimizer.param_groups[0]["lr"]
        refused = [
            (adam(lr=0.5, amsgrad=True), "amsgrad=True"),
            (adam(lr=0.5, maximize=True), "maximize=True"),
            (torch.optim.SGD(Net().parameters(), 0.5).state_dict(), "none of ringcomm's OneBit"),
        ]
        decayed = adam(lr=0.5, weight_decay=0.1)
        if "decoupled_weight_decay" in decayed["param_groups"][0]:  # else it may be AdamW's
            refused.append((decayed, "weight_decay=0.1 in the gradient"))
        for state, text in refused:
            with pytest.raises(ConfigError, match=text):
                optimizer.load_state_dict(state)
        small = torch.nn.Linear(3, 3)
        small(torch.ones(3)).sum().backward()
        other = torch.optim.AdamW(small.parameters())
        other.step()
        with pytest.raises(ValueError, match=r"group|another model"):
            optimizer.load_state_dict(other.state_dict())
        assert optimizer.param_groups[0]["lr"] == before
        optimizer.load_state_dict(adam(lr=0.5))
        assert optimizer.param_groups[0]["lr"] == 0.5
        with pytest.raises(ConfigError, match="none of ringcomm's OneBitLamb"):
            OneBitLamb(Net().parameters(), comm=comm).load_state_dict(adam())

    run_ranks(1, body)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("source", ["AdamW", "OneBitAdam"])
def test_a_layer_that_is_trained_since(source: str, overlap: bool) -> None:
    """It begins anew, on all ranks alike, and is in the next state."""

    def saved_by(comm: Communicator) -> Any:
        if source == "AdamW":
            model, plain = adamw(5)
            return stored([model.state_dict(), plain.state_dict()])
        model = Net()
        optimizer = onebit(comm, model, freeze=3)
        go_on(model, optimizer, comm, range(5))
        return stored([model.state_dict(), optimizer.state_dict()])

    def body(comm: Communicator) -> torch.Tensor:
        weights, state = saved_by(comm)
        model = Net(seed=9)
        model.load_state_dict(weights)
        thawed = model.get_parameter("frozen").requires_grad_(True)
        optimizer = onebit(comm, model, freeze=3, overlap=overlap)
        optimizer.load_state_dict(state)
        assert thawed not in optimizer.state
        go_on(model, optimizer, comm, range(5, 12))
        assert not torch.equal(thawed.detach(), weights["frozen"])
        step = optimizer.state_dict()["state"][6]["step"]
        assert float(step) >= 7
        assert math.isfinite(float(flat(model).sum()))
        return flat(model)

    here, there = run_ranks(RANKS, body)
    assert torch.equal(here, there)


def test_of_an_adams_state_moments_alone_are_taken() -> None:
    """A state that some tool has kept in torch's form has this optimizer's master copy, too."""

    def body(comm: Communicator) -> None:
        model = Net(torch.bfloat16)
        optimizer = onebit(comm, model)
        go_on(model, optimizer, comm, range(3))
        state = optimizer.state_dict()
        del state[saved.KEY]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        before = flat(model)
        optimizer.load_state_dict(state)
        go_on(model, optimizer, comm, range(3, 4))
        moved = float((flat(model) - before).abs().max())
        assert 0 < moved <= 8 * TORCH["lr"] + 2**-8 * float(before.abs().max())

    run_ranks(RANKS, body)
