"""What guards warn of and refuse: steps without any exchange, optimizers that few-bit and late
gradients do not suit, and ranks that train on the same data."""

from __future__ import annotations

import copy
import gc
import importlib.util
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from patience import PATIENCE

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch._dynamo  # which an optimizer imports when it is first made: here, for all ranks
from ddp_buckets import ByStep, Net, gradients_of, reduce, state_of, trained
from faults import silence as ranks
from faults.job import Job, Nursery
from outer_training import net
from ranks import World, run_ranks
from torch import nn

from ringcomm import Communicator, ConfigError
from ringcomm.torch import HookState, SilenceWarning, Stale1
from ringcomm.torch.guards import (
    NOTHING,
    ONEBIT,
    SILENT_STEPS,
    STALE,
    FirstBatch,
    digest_of,
    refuse_others,
)
from ringcomm.torch.optim import OneBitLamb, ZeroOneAdam
from ringcomm.torch.steps import after_steps, before_steps

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
    assert not warned(lambda: step(optimizer, SILENT_STEPS - 1))
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


def test_a_hook_that_waits_for_the_garbage_collector_is_no_other() -> None:
    model = nn.Linear(2, 2)
    ids = set(map(id, model.parameters()))
    gc.disable()
    try:
        state: Any = HookState("bf16", model=model)
        with pytest.raises(ConfigError, match="a HookState was made for parameters of this Muon"):
            refuse_others(ids, "Muon")
        state.itself = state
        del state
        refuse_others(ids, "Muon")
    finally:
        gc.enable()


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


# ---- optimizers that gradients do not suit ----


def test_which_optimizers_divide_by_their_mean_square() -> None:
    class OnebitAdam(torch.optim.Adam): ...

    class FusedAdam: ...

    class FusedLAMB: ...

    adams = [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adamax, FusedAdam]
    alike = [torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, FusedLAMB]
    linear = [torch.optim.SGD, torch.optim.ASGD, OnebitAdam, OneBitLamb, ZeroOneAdam]
    for unsuited, bad in ((ONEBIT, adams + alike), (STALE, adams)):
        assert not any(map(unsuited.suits, bad))
        assert all(map(unsuited.suits, linear))
    assert all(map(STALE.suits, alike))
    assert (ONEBIT.refused, STALE.refused) == (True, False)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", ["AdamW", "RMSprop", "Adagrad", "Adadelta"])
def test_onebit_is_refused_where_it_is_divided_by_what_is_learnt_of_it(
    kind: str, named: bool
) -> None:
    """On all ranks, in each step, and nothing has been stepped; with a model and without."""

    def body(comm: Communicator) -> None:
        model = Net()
        settings = {"model": model} if named else {"feedback": False}
        state = HookState("onebit", comm, warmup_steps=2, threshold=256, **settings)  # type: ignore[arg-type]
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
        before = [p.detach().clone() for p in model.parameters()]
        for step in range(2):
            reduce(state, model, gradients_of(model, comm.rank, step))
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            with pytest.raises(ConfigError, match=rf"onebit' under {kind}: .*int4.*force=True"):
                optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))
        assert not any(int(one["step"]) for one in optimizer.state.values())
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert not all(map(torch.equal, before, model.parameters()))

    run_ranks(2, body)


def test_onebit_is_refused_where_it_is_chosen_or_used_later() -> None:
    """By another codec in mid-run, and where SGD has stepped others, or all of them, before."""

    def body(comm: Communicator) -> None:
        model = Net()
        state = state_of(comm, model, ByStep("int4", "onebit"))
        first, *others = (p for _, p in trained(model))
        sgd, adam = torch.optim.SGD([first], lr=0.1), torch.optim.AdamW(others, lr=0.1)
        for step in range(2):
            reduce(state, model, gradients_of(model, comm.rank, step))
            sgd.step()
            if step:
                with pytest.raises(ConfigError, match="onebit' under AdamW"):
                    adam.step()
            else:
                adam.step()
        torch.optim.SGD(others, lr=0.1).step()
        with pytest.raises(ConfigError, match="onebit' under AdamW"):
            adam.step()

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("codec", "pace", "kind", "force", "warned", "watches"),
    [
        ("onebit", "every", "AdamW", True, 0, 0),
        ("onebit", "every", "SGD", False, 0, 1),
        ("int4", "every", "AdamW", False, 0, 0),
        ("int4", Stale1(correction=False), "AdamW", False, 1, 0),
        ("int4", Stale1(correction=False), "RMSprop", False, 0, 1),
    ],
)
def test_what_does_not_suit_is_warned_of_once_and_then_not_watched(
    codec: str, pace: Any, kind: str, force: bool, warned: int, watches: int
) -> None:
    gc.collect()  # hooks of states that other tests have left
    before = len(before_steps)

    def body(comm: Communicator) -> None:
        model, stranger = Net(), nn.Linear(3, 3)
        state = state_of(comm, model, codec, force=force, pace=pace)
        others = torch.optim.AdamW(stranger.parameters())
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                reduce(state, model, gradients_of(model, comm.rank, step))
                others.step()
                optimizer.step()
        texts = [str(w.message) for w in caught if "force=True" in str(w.message)]
        assert len(texts) == warned
        assert all(kind in text for text in texts)
        assert len(before_steps) == before + watches
        late = state_of(comm, model, "onebit")
        reduce(late, model, gradients_of(model, comm.rank, 9))
        assert len(before_steps) == before + watches + 1
        del late, state
        until = time.monotonic() + PATIENCE
        while len(before_steps) > before and time.monotonic() < until:
            gc.collect()  # the thread that completed its futures may hold it a moment longer
            time.sleep(0.01)
        assert len(before_steps) == before

    run_ranks(1, body)


# ---- the first batch ----


def test_digests() -> None:
    x = torch.randn(4, 5)
    assert digest_of([x]) == digest_of([x.clone()])
    assert digest_of([x]) != digest_of([x + 1])
    assert digest_of([x]) != digest_of([x.reshape(5, 4)])
    assert digest_of({"ids": torch.arange(3), "more": [x.bfloat16(), torch.ones(2) > 0]}) != NOTHING
    assert digest_of([3, "text", None]) == NOTHING
    model = net()
    first = FirstBatch(model)
    model.eval()
    model(x)
    assert first.digest == NOTHING
    model.train()
    model(x)
    seen = first.digest
    assert seen == digest_of(((x,), {}))
    model(x + 1)
    first.stop()
    model(x + 2)
    assert first.digest == digest_of(((x + 1,), {}))  # the latest before it stopped
