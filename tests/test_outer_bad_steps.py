"""A gradient that is not finite under OuterStep: its step is left out, and the rank goes on with
weights and a state that are finite."""

from __future__ import annotations

import importlib.util
import logging
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from outer_training import backward, batch, net, weights
from ranks import World
from torch import nn

from ringcomm import Communicator
from ringcomm.torch import OuterStep

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]

EVERY, STEPS, BAD = 4, 12, 5  # the bad step is the second of the second round
Make = Callable[[nn.Module], torch.optim.Optimizer]


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """The model's, which Muon takes; its vectors are not trained then."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 2)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 0.01),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), 0.01, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), 0.01),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["muon"] = lambda model: torch.optim.Muon(matrices(model), 0.01)


def all_finite(optimizer: torch.optim.Optimizer) -> bool:
    return all(
        bool(value.isfinite().all())
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def spoil(model: nn.Module, value: float) -> None:
    """One element of one gradient."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.view(-1)[0] = value
            return


def told(caught: list[warnings.WarningMessage]) -> list[str]:
    """The texts; each points to the line that has led to it."""
    found = [one for one in caught if "not finite" in str(one.message)]
    assert all(one.filename == __file__ for one in found), [one.filename for one in found]
    return [str(one.message) for one in found]


Step = Callable[[nn.Module, torch.optim.Optimizer, bool], None]


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, is_bad: bool) -> None:
    if is_bad:
        spoil(model, math.nan)
    optimizer.step()


def by_closure(model: nn.Module, optimizer: torch.optim.Optimizer, is_bad: bool) -> None:
    """As Lightning steps: the gradients are made within the step."""
    made = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    optimizer.zero_grad()

    def closure() -> float:
        for parameter, gradient in zip(model.parameters(), made, strict=True):
            parameter.grad = gradient
        if is_bad:
            spoil(model, math.inf)
        return 0.0

    optimizer.step(closure)


def trained(
    comm: Communicator, make: Make, step: Step, **way: Any
) -> tuple[nn.Module, torch.optim.Optimizer, OuterStep, list[torch.Tensor]]:
    """A run in which rank 1 has one bad step. With it the anchor after each round."""
    model = net()
    optimizer = make(model)
    outer = OuterStep(model, optimizer, every=EVERY, comm=comm, **way)
    anchors: list[torch.Tensor] = []
    with outer:
        for number in range(STEPS):
            optimizer.zero_grad()
            backward(model, batch(comm.rank, number))
            step(model, optimizer, comm.rank == 1 and number == BAD)
            if outer.rounds > len(anchors):
                with outer.anchor():
                    anchors.append(weights(model))
    return model, optimizer, outer, anchors


@pytest.mark.parametrize(
    ("name", "step"), [*((name, plain) for name in OPTIMIZERS), ("adamw", by_closure)]
)
def test_one_bad_gradient_costs_its_step_alone(name: str, step: Step) -> None:
    def rank(comm: Communicator) -> Any:
        model, optimizer, outer, anchors = trained(comm, OPTIMIZERS[name], step)
        assert all_finite(optimizer)
        return weights(model), outer.report(), anchors

    with warnings.catch_warnings(record=True) as caught, World(2) as world:
        warnings.simplefilter("always")  # it goes for all threads
        (here, healthy, anchors), (there, report, others) = world.run(rank)
    assert torch.equal(here, there)
    assert all(map(torch.equal, anchors, others))
    assert bool(torch.isfinite(here).all())
    assert (healthy.skipped, report.skipped) == (0, 1)
    assert (healthy.dropped, report.dropped) == (0, 0)
    (text,) = told(caught)
    assert "'0.weight'" in text
    assert "rank 1" in text
    assert f"iteration {BAD + 1}" in text


def test_deltas_count_as_those_of_a_run_that_makes_no_such_step() -> None:
    """To the bit: nothing is lost but the step."""

    def without(model: nn.Module, optimizer: torch.optim.Optimizer, is_bad: bool) -> None:
        if is_bad:
            optimizer.zero_grad()
        optimizer.step()

    def run(step: Step) -> list[torch.Tensor]:
        def rank(comm: Communicator) -> list[torch.Tensor]:
            return trained(comm, OPTIMIZERS["adamw"], step)[-1]

        with warnings.catch_warnings(), World(2) as world:
            warnings.simplefilter("ignore")
            first: list[torch.Tensor] = world.run(rank)[0]
            return first

    assert all(map(torch.equal, run(plain), run(without)))


@pytest.mark.parametrize("way", [{}, {"fragments": 2, "delay": 1}], ids=str)
def test_a_state_that_is_spoilt_all_the_same_begins_anew(
    way: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """By an optimizer whose step overflows though all gradients are finite."""

    class Overflowing(torch.optim.AdamW):
        is_bad = False

    def overflow(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        assert isinstance(optimizer, Overflowing)
        if optimizer.is_bad:
            for parameter, state in optimizer.state.items():
                parameter.data.fill_(math.inf)
                state["exp_avg"].fill_(math.nan)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = Overflowing(model.parameters(), 0.01)
        optimizer.register_step_post_hook(overflow)
        return optimizer

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, is_bad: bool) -> None:
        assert isinstance(optimizer, Overflowing)
        optimizer.is_bad = is_bad
        optimizer.step()

    def rank(comm: Communicator) -> Any:
        model, optimizer, outer, _ = trained(comm, make, step, **way)
        assert all_finite(optimizer)
        return weights(model), outer.report().dropped

    caplog.set_level(logging.WARNING, "ringcomm")
    with warnings.catch_warnings(record=True) as caught, World(2) as world:
        warnings.simplefilter("always")
        (here, healthy), (there, dropped) = world.run(rank)
    assert torch.equal(here, there)
    assert bool(torch.isfinite(here).all())
    assert (healthy, dropped) == (0, 1)
    texts = [text for text in told(caught) if "went on from the anchor" in text]
    assert len(texts) == 1
    number = re.search(r"did not count in (round \d+),", texts[0])
    assert number is not None
    logged = [text for text in caplog.messages if "without the deltas of ranks [1]" in text]
    assert len(logged) == 2
    assert all(number[1] in text for text in logged)
    assert "state of 4 parameters was not finite either" in texts[0]
    assert "the weights of rank 1" in texts[0]


@pytest.mark.parametrize("is_given", [True, False])
def test_what_a_scaler_drops_is_left_to_it(is_given: bool) -> None:
    """Its skipped steps are iterations where OuterStep knows the scaler; else this rank has fewer,
    and the last rounds are those of its end."""
    bad = (BAD, BAD + 1, BAD + 4)

    def rank(comm: Communicator) -> Any:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
        outer = OuterStep(
            model, optimizer, every=EVERY, comm=comm, scaler=scaler if is_given else None
        )
        with outer:
            for number in range(STEPS):
                optimizer.zero_grad()
                loss = (model(batch(comm.rank, number)) ** 2).sum()
                scaler.scale(loss).backward()
                if comm.rank == 1 and number in bad:
                    spoil(model, math.inf)
                scaler.step(optimizer)
                scaler.update()
            iterations = outer.iteration
        assert all_finite(optimizer)
        return weights(model), outer.report().skipped, outer.rounds, iterations, scaler.get_scale()

    with warnings.catch_warnings(record=True) as caught, World(2) as world:
        warnings.simplefilter("always")
        (here, *first), (there, *second) = world.run(rank)
    assert torch.equal(here, there)
    assert bool(torch.isfinite(here).all())
    rounds = STEPS // EVERY
    assert first == [0, rounds, STEPS, 16.0]
    assert second == [0, rounds, STEPS if is_given else STEPS - len(bad), 2.0]
    assert told(caught) == []


def test_a_run_of_bad_steps_is_told_at_growing_intervals() -> None:
    def rank(comm: Communicator) -> int:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with OuterStep(model, optimizer, every=4, comm=comm) as outer:
            for number in range(12):
                optimizer.zero_grad()
                backward(model, batch(0, number))
                spoil(model, math.nan)
                optimizer.step()
        return outer.report().skipped

    with warnings.catch_warnings(record=True) as caught, World(1) as world:
        warnings.simplefilter("always")
        assert world.run(rank) == [12]
    assert ["1 so far" in text or "10 so far" in text for text in told(caught)] == [True, True]
