"""A warning where optimizers step and nothing is exchanged, and none where something is."""

from __future__ import annotations

import copy
import gc
import importlib.util
import warnings
from collections.abc import Callable, Iterator

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from faults import silence as ranks
from faults.job import Job, Nursery
from ranks import World
from torch import nn

from ringcomm import Communicator
from ringcomm.torch import HookState, SilenceWarning, silence
from ringcomm.torch.steps import after_steps

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "RINGCOMM_INTERFACES": "lo"}


# ---- a process group ----


@pytest.mark.parametrize(
    ("how", "expected"),
    [("apart", 1), ("ddp", 0), ("accumulated", 0), ("gloo", 0), ("by hand", 0), ("inference", 0)],
)
def test_a_group_that_carries_nothing(torch_nursery: Nursery, how: str, expected: int) -> None:
    with Job(torch_nursery, 2, LOOPBACK) as job:
        job.start(ranks.steps, how=how)
        for event in job.expect_all("warned"):
            assert len(event["texts"]) == expected, event
            for text in event["texts"]:
                assert "between the 2 ranks of process group 'ringcomm': each trains" in text
                assert "DistributedDataParallel" in text
        job.finish(quietly=False)


def test_a_group_beside_an_outer_step_that_is_not_attached(torch_nursery: Nursery) -> None:
    """One remedy is named, and not DDP, which OuterStep would refuse."""
    with Job(torch_nursery, 2, LOOPBACK) as job:
        job.start(ranks.steps, how="outer")
        for event in job.expect_all("warned"):
            (text,) = event["texts"]
            assert "OuterStep is not attached" in text
            assert "DistributedDataParallel" not in text
        job.finish(quietly=False)


# ---- a hook's state ----


@pytest.fixture
def comm() -> Iterator[Communicator]:
    gc.collect()  # states of other tests
    with World(2) as world:
        yield world.comms[0]


def optimizer_of(*models: nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for model in models for parameter in model.parameters()]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return torch.optim.SGD(parameters)


def warned(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if w.category is SilenceWarning]


def step(optimizer: torch.optim.Optimizer, times: int = 5) -> None:
    for _ in range(times):
        optimizer.step()


def carry(state: HookState) -> None:
    state.account.submit(8, last=True)([])


def test_a_hook_that_is_not_registered(comm: Communicator) -> None:
    state = HookState("bf16", comm)
    optimizer = optimizer_of(nn.Linear(2, 2))
    assert not warned(lambda: step(optimizer, silence.STEPS - 1))
    (text,) = warned(lambda: step(optimizer))
    assert "3 optimizer steps, and this HookState has seen no gradients" in text
    assert "the 2 ranks may train apart" in text
    assert "register_comm_hook" in text
    assert not warned(lambda: step(optimizer))
    del state


def test_a_hook_that_carries(comm: Communicator) -> None:
    state = HookState("bf16", comm)
    carry(state)
    assert not warned(lambda: step(optimizer_of(nn.Linear(2, 2))))


def test_two_models_and_two_optimizers(comm: Communicator) -> None:
    """One is stepped several times before the other has its first gradients, as in a GAN."""
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    states = [HookState("bf16", comm, model=model) for model in models]
    first, second = map(optimizer_of, models)
    carry(states[0])
    assert not warned(lambda: step(first))
    (text,) = warned(lambda: step(second))
    assert "has seen no gradients" in text
    nameless = [HookState("bf16", comm), HookState("bf16", comm)]
    carry(nameless[0])
    assert not warned(lambda: step(first))


def test_others_that_are_not_asked(comm: Communicator) -> None:
    optimizer = optimizer_of(nn.Linear(2, 2))
    with World(1) as alone:
        state = HookState("bf16", alone.comms[0])
        assert not warned(lambda: step(optimizer))
    state = HookState("bf16", comm)
    carry(state)
    step(optimizer)
    copies = copy.deepcopy(state), HookState("bf16")  # which has no communicator at all
    assert not warned(lambda: step(optimizer))
    del copies


def test_steps_are_followed_only_where_something_is_watched(comm: Communicator) -> None:
    optimizer = optimizer_of(nn.Linear(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(optimizer)  # what other tests have left
    before = len(after_steps)
    state = HookState("bf16", comm)
    assert len(after_steps) == before + 1
    carry(state)
    optimizer.step()
    assert len(after_steps) == before
    state = HookState("bf16", comm)
    del state
    gc.collect()
    optimizer.step()
    assert len(after_steps) == before
