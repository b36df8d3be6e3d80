"""What optimizers of ringcomm.torch.optim refuse: gradients and hooks that do not go with them, and
ranks that differ."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import pickle
from functools import partial
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from optim_steps import THRESHOLD, Net, go_on, set_gradients, sgd
from ranks import run_ranks
from torch import nn

from ringcomm import Communicator, ConfigError, MismatchError, RingcommError, TensorError
from ringcomm.torch import HookState, sparse
from ringcomm.torch.optim import (
    SGD,
    Lion,
    OneBitAdam,
    OneBitLamb,
    WireOptimizer,
    ZeroOneAdam,
    exchanging,
)

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]


@pytest.mark.parametrize("overlap", [False, True])
def test_sparse_gradients_are_refused(overlap: bool) -> None:
    def body(comm: Communicator) -> None:
        embedding = nn.Embedding(10, 4, sparse=True)
        optimizer = sgd(embedding, comm, overlap=overlap)
        embedding(torch.tensor([1, 2])).sum().backward()
        optimizer.step()

    with pytest.raises(TensorError, match=r"a gradient is .*sparse=False"):
        run_ranks(1, body)


def test_complex_parameters_are_refused() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(TensorError, match="real numbers"):
            SGD([nn.Parameter(torch.zeros(3, dtype=torch.complex64))], comm=comm)

    run_ranks(1, body)


def test_a_hook_for_the_same_model_is_refused() -> None:
    def body(comm: Communicator) -> None:
        model, other = Net(), Net()
        state = HookState("int8", comm, model=model)
        unrelated = HookState("int8", comm, model=other)
        optimizer = sgd(model, comm)
        set_gradients(model, 0, 0)
        with pytest.raises(ConfigError, match="HookState was made for parameters of this SGD"):
            optimizer.step()
        del state, unrelated

    run_ranks(2, body)


def test_a_hook_that_comes_later_is_refused() -> None:
    """Some steps after it, by looks that get rare."""

    def body(comm: Communicator) -> None:
        model = Net()
        optimizer = sgd(model, comm)
        go_on(model, optimizer, comm, range(3))
        state = HookState("int8", comm, model=model)
        with pytest.raises(ConfigError, match="HookState was made for parameters of this SGD"):
            go_on(model, optimizer, comm, range(3, 6))
        assert optimizer.steps == 3
        del state

    run_ranks(2, body)


def test_what_is_no_communicator_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"give a ringcomm\.Communicator: 3"):
        sgd(Net(), 3)  # type: ignore[arg-type]


def test_optimizers_cannot_be_copied() -> None:
    """A copy would have no communicator, no spans and no residuals."""

    def body(comm: Communicator) -> None:
        with sparse.SGD(Net().parameters(), comm=comm) as other:
            for one in (sgd(Net(), comm), sgd(Net(), comm, overlap=True), other):
                for copied in (copy.copy, copy.deepcopy, pickle.dumps):
                    with pytest.raises(TypeError, match=r"copied or pickled; use state_dict\(\)"):
                        copied(one)

    run_ranks(1, body)


def test_parameters_that_are_not_the_models_are_noticed() -> None:
    def body(comm: Communicator) -> None:
        model, other = Net(), Net()
        optimizer = sgd(model, comm)
        for step in range(3):
            set_gradients(model if comm.rank else other, 0, step)
            if comm.rank == 0 and step == 2:
                with pytest.raises(RingcommError, match=r"no gradient of any .* on rank 0"):
                    optimizer.step()
            else:
                optimizer.step()

    run_ranks(2, body)


def test_ranks_with_other_models_fail_at_once() -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(100, 100 + comm.rank)
        with pytest.raises(MismatchError, match=r"different parameters; rank . has 2"):
            sgd(model, comm)

    run_ranks(3, body)


def test_a_group_that_differs_between_ranks_is_not_added() -> None:
    def body(comm: Communicator) -> None:
        optimizer = sgd(nn.Linear(4, 4), comm)
        with pytest.raises(MismatchError, match="different parameters"):
            optimizer.add_param_group({"params": nn.Parameter(torch.zeros(4 + comm.rank))})
        assert len(optimizer.param_groups) == 1

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        (SGD, "max_norm", (None, 1.0)),
        (SGD, "threshold", (1024, 4096)),
        (SGD, "span_bytes", (1024, 4096)),
        (SGD, "compression", ("int4", "onebit")),
        (SGD, "warmup_steps", (0, 3)),
        (SGD, "overlap", (False, True)),
        (Lion, "compression", ("onebit", "int4")),
        (OneBitAdam, "freeze", (3, 4)),
        (OneBitAdam, "refresh", (None, "exponential")),
        (OneBitLamb, "dense", ("bf16", "none")),
        (OneBitLamb, "freeze", (3, "stable")),
        (partial(ZeroOneAdam, var_freeze_step=3), "local_step_clipper", (3, 4)),
    ],
)
def test_ranks_that_make_other_optimizers_fail_at_once(
    make: Any, name: str, values: tuple[Any, Any]
) -> None:
    """With all ranks told which setting it is."""

    def body(comm: Communicator) -> None:
        with pytest.raises(MismatchError, match=f"{name} is {values[0]} on rank 0 and .* 1"):
            make(Net().parameters(), comm=comm, **{name: values[comm.rank]})

    run_ranks(2, body)


@pytest.mark.parametrize("kind", [SGD, Lion, OneBitAdam, OneBitLamb, ZeroOneAdam])
def test_each_setting_is_compared(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the constructor takes is in the parameter groups, or among what is fixed."""
    seen: list[str] = []
    monkeypatch.setattr(exchanging, "require_alike", lambda _, about: seen.extend(about))

    def body(comm: Communicator) -> None:
        more = {"var_freeze_step": 3} if kind is ZeroOneAdam else {}
        optimizer = kind(Net().parameters(), comm=comm, **more)
        taken = {
            **inspect.signature(kind).parameters,
            **inspect.signature(WireOptimizer).parameters,
        }
        others = {"params", "comm", "settings", "defaults", "rule", "fixed"}
        assert set(taken) - others <= {*seen, *optimizer.defaults}

    run_ranks(1, body)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "make",
    [partial(OneBitAdam, freeze=2, refresh=None), partial(ZeroOneAdam, var_freeze_step=2)],
)
def test_a_step_of_parameters_that_come_too_late_changes_nothing(make: Any, overlap: bool) -> None:
    """The next one, without them, is made."""

    def body(comm: Communicator) -> None:
        params = [nn.Parameter(torch.ones(8, 16)) for _ in range(3)]
        optimizer = make(params[:2], comm=comm, threshold=0, span_bytes=1, overlap=overlap)

        def step(some: list[nn.Parameter]) -> list[torch.Tensor]:
            optimizer.zero_grad()
            for one in some:
                one.backward(torch.ones_like(one))
            optimizer.step()
            return [one.detach().clone() for one in params]

        before = [step(params[:2]) for _ in range(3)][-1]
        optimizer.add_param_group({"params": params[2:]})
        with pytest.raises(ConfigError, match="variance is unknown"):
            step(params)
        assert all(map(torch.equal, params, before))
        assert optimizer.steps == 3
        assert not any(map(torch.equal, step(params[:2])[:2], before))

    run_ranks(2, body)


@pytest.mark.parametrize("setting", ["lr", "steps"])
def test_ranks_with_other_rates_fail_at_the_step(setting: str) -> None:
    """So do ranks that are at other steps, as where one of them has loaded no checkpoint."""

    def body(comm: Communicator) -> None:
        model = Net()
        optimizer = sgd(model, comm)
        go_on(model, optimizer, comm, range(2))
        if comm.rank == 1 and setting == "lr":
            optimizer.param_groups[0]["lr"] = 0.2
        elif comm.rank == 1:
            optimizer.steps = 7
        set_gradients(model, 0, 2)
        told = "steps is 2 on rank 0 and 7" if setting == "steps" else r"\['lr'\] is 0.1 on rank 0"
        with pytest.raises(MismatchError, match=told):
            optimizer.step()

    run_ranks(3, body)


def test_rates_may_differ_in_their_last_bits() -> None:
    """As those that a schedule computes on hosts with other mathematical libraries."""

    def body(comm: Communicator) -> None:
        model = Net()
        optimizer = Lion(model.parameters(), 0.1, comm=comm, threshold=THRESHOLD)
        if comm.rank:
            optimizer.param_groups[0]["lr"] *= 1 + 2**-52
            optimizer.param_groups[0]["betas"] = (0.9 * (1 + 2**-52), 0.99)
        go_on(model, optimizer, comm, range(2))

    run_ranks(2, body)
