"""Listeners of optimizers' steps: they come and go at any time, and no step fails of it."""

from __future__ import annotations

import importlib.util
import threading

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from torch.optim import Optimizer

from ringcomm.torch.steps import Listeners, after_steps, before_steps

pytestmark = pytest.mark.torch


def optimizer() -> Optimizer:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return torch.optim.SGD([weight], lr=0.1)


class Ear:
    def __init__(self, listeners: Listeners, once: bool = False) -> None:
        self.heard: list[Optimizer] = []
        self._listeners, self._once = listeners, once
        listeners.add(self.hear)

    def hear(self, stepped: Optimizer) -> None:
        self.heard.append(stepped)
        if self._once:
            self._listeners.remove(self.hear)


@pytest.mark.parametrize("listeners", [before_steps, after_steps])
def test_listeners_come_and_go(listeners: Listeners) -> None:
    before = len(listeners)
    always, once = Ear(listeners), Ear(listeners, once=True)
    stepper = optimizer()
    for _ in range(3):
        stepper.step()
    assert always.heard == [stepper] * 3
    assert once.heard == [stepper]
    assert len(listeners) == before + 1
    del always
    stepper.step()
    assert len(listeners) == before


def test_listeners_come_in_other_threads_while_one_steps() -> None:
    """torch's own registry ends a step with "OrderedDict mutated during iteration"."""
    first, over = Ear(after_steps), threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            Ear(after_steps)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    stepper = optimizer()
    try:
        for _ in range(300):
            stepper.step()
    finally:
        over.set()
        thread.join()
    assert len(first.heard) == 300
