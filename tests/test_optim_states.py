"""Checkpoints of the optimizers of ringcomm.torch.optim: in mid-run, at the same and at another
world size; and states that are refused."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from optim_steps import THRESHOLD, Net, alike, flat, go_on, mean_gradients, steps_of
from ranks import run_ranks
from tensors import stored

from ringcomm import Communicator, ConfigError
from ringcomm.torch.optim import SGD, Lion, OneBitAdam, WireOptimizer

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]


def sgd(codec: str) -> Callable[..., WireOptimizer]:
    return lambda params, comm: SGD(
        params,
        0.1,
        compression=codec,
        comm=comm,
        threshold=THRESHOLD,  # type: ignore[arg-type]
    )


def lion(**settings: Any) -> Callable[..., WireOptimizer]:
    return lambda params, comm: Lion(params, 1e-2, comm=comm, threshold=THRESHOLD, **settings)


def apart() -> Callable[..., WireOptimizer]:
    """Whose ranks have squares of their own."""
    return lambda params, comm: OneBitAdam(params, 1e-2, freeze=1, comm=comm, threshold=THRESHOLD)


@pytest.mark.parametrize(
    ("codec", "ranks", "dtype", "last"),
    [
        ("int4", 3, torch.float32, "optimizer"),
        ("onebit", 2, torch.bfloat16, "optimizer"),
        ("onebit", 2, torch.bfloat16, "model"),
    ],
)
def test_a_restart_goes_on_to_the_bit(
    codec: str, ranks: int, dtype: torch.dtype, last: str
) -> None:
    """Momenta, master copies and residuals: each rank's own. In any order of the loads."""
    make = sgd(codec)

    def body(comm: Communicator) -> tuple[Any, Any]:
        model, optimizer = steps_of(comm, make, range(5), Net(dtype))
        weights, state = stored([model.state_dict(), optimizer.state_dict()])
        other = Net(dtype, seed=9)
        restored = make(list(other.parameters()), comm)
        if last == "optimizer":
            other.load_state_dict(weights)
        restored.load_state_dict(state)
        if last == "model":
            other.load_state_dict(weights)
        assert restored.steps == 5
        go_on(model, optimizer, comm, range(5, 9))
        go_on(other, restored, comm, range(5, 9))
        return model, other

    pairs = run_ranks(ranks, body)
    assert alike([model for pair in pairs for model in pair])


def test_torchs_form_is_kept() -> None:
    """Each parameter's momentum in its shape, as torch.optim.SGD's state has it, and schedulers
    find the groups."""

    def body(comm: Communicator) -> None:
        model, optimizer = steps_of(comm, sgd("none"), range(2))
        state = optimizer.state_dict()
        plain = torch.optim.SGD(model.parameters(), 0.1, 0.9)
        theirs = plain.state_dict()
        assert set(theirs) < set(state)
        trained = [
            n for n, (_, p) in enumerate(model.named_parameters()) if p.requires_grad and p.numel()
        ]
        assert sorted(state["state"]) == trained
        for number, parameter in enumerate(model.parameters()):
            if number in trained:
                assert state["state"][number]["momentum_buffer"].shape == parameter.shape
        names = set(theirs["param_groups"][0]) & set(state["param_groups"][0])
        assert names >= {"lr", "momentum", "dampening", "weight_decay", "nesterov", "params"}
        assert state["param_groups"][0]["params"] == theirs["param_groups"][0]["params"]

    run_ranks(1, body)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_in_another_world_the_sum_of_what_was_sent_is_exact(before: int, after: int) -> None:
    """With momentum 0 and lr 1 the parameters have the sum of what arrived."""

    def make(params: Any, comm: Communicator) -> SGD:
        return SGD(params, 1.0, 0.0, compression="onebit", comm=comm, threshold=THRESHOLD)

    def first(comm: Communicator) -> Any:
        model, optimizer = steps_of(comm, make, range(10))
        return stored([model.state_dict(), optimizer.gather_state_dict()])

    files = run_ranks(before, first)

    def second(comm: Communicator) -> torch.Tensor:
        model = Net()
        optimizer = make(list(model.parameters()), comm)
        weights, state = files[0]
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        go_on(model, optimizer, comm, range(10, 20))
        left = optimizer.feedback.gather_state_dict(comm)["tensors"]
        span = next(span for span in optimizer.spans if not span.is_small)
        place = next(p for p in span.slices if p.tensor is model.embed)
        lacks = left[f"momentum/{span.name}"]
        return model.embed.detach() - place.of(lacks["worker"] + lacks["owner"])

    exact, model = Net().embed.detach().double(), Net()
    for step in range(20):
        mean_gradients(model, before if step < 10 else after, step)
        exact -= model.embed.grad.double()
    for got in run_ranks(after, second):
        assert torch.allclose(got, exact.float(), atol=2e-4)


def test_what_differs_between_ranks_is_averaged_for_another_world() -> None:
    """The squares of OneBitAdam's renewals."""

    def body(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        model, optimizer = steps_of(comm, apart(), range(3))
        own = optimizer.state[model.head]["own_sq"].clone()
        state = optimizer.gather_state_dict()
        assert torch.equal(optimizer.state[model.head]["own_sq"], own)
        number = [id(p) for p in model.parameters()].index(id(model.head))
        return own, state["state"][number]["own_sq"]

    (one, mean), (other, same) = run_ranks(2, body)
    assert not torch.equal(one, other)
    assert torch.equal(mean, same)
    assert torch.allclose(mean, (one + other) / 2, atol=1e-7)


def test_a_state_of_another_method_is_refused_by_name() -> None:
    def body(comm: Communicator) -> None:
        model, optimizer = steps_of(comm, sgd("onebit"), range(2))
        state, before = optimizer.state_dict(), flat(model)
        other = lion()(list(model.parameters()), comm)
        with pytest.raises(ConfigError, match="state is of SGD, and this optimizer is Lion"):
            other.load_state_dict(state)
        plain = torch.optim.SGD(model.parameters(), 0.1, 0.9)
        plain.step()
        with pytest.raises(ConfigError, match=r"momentum_buffer\), and none of ringcomm's Lion"):
            other.load_state_dict(plain.state_dict())
        state["ringcomm"]["format"] = 99
        with pytest.raises(ConfigError, match="format 99"):
            optimizer.load_state_dict(state)
        del before

    run_ranks(1, body)


def test_a_state_of_another_model_changes_nothing() -> None:
    def body(comm: Communicator) -> None:
        model, optimizer = steps_of(comm, sgd("onebit"), range(2))
        small = [torch.nn.Parameter(torch.zeros(70, 80)), torch.nn.Parameter(torch.zeros(3))]
        other = sgd("onebit")(small, comm)
        small[0].grad = torch.ones(70, 80)
        other.step()
        before = other.state_dict()
        with pytest.raises(ConfigError, match="another model"):
            other.load_state_dict(optimizer.state_dict())
        with pytest.raises(ConfigError, match=r"another model|momentum_buffer of parameter 0"):
            optimizer.load_state_dict(other.state_dict())
        after = other.state_dict()
        assert before["ringcomm"]["spans"] == after["ringcomm"]["spans"]
        assert torch.equal(*(s["state"][0]["momentum_buffer"] for s in (before, after)))
        go_on(model, optimizer, comm, range(2, 3))

    run_ranks(2, body)


def test_a_state_of_before_the_first_step() -> None:
    def body(comm: Communicator) -> torch.Tensor:
        model, optimizer = steps_of(comm, sgd("onebit"), [])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.load_state_dict(stored(optimizer.state_dict()))
        go_on(model, optimizer, comm, range(2))
        return flat(model)

    def plain(comm: Communicator) -> torch.Tensor:
        return flat(steps_of(comm, sgd("onebit"), range(2))[0])

    assert torch.equal(run_ranks(2, body)[0], run_ranks(2, plain)[0])
