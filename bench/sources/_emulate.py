"""A device of a given speed, emulated: forward and backward take as long as they would there.

Each module with parameters of its own sleeps in proportion to how many it has, or to a cost that is
given: after its forward, and before its backward, so that gradients become ready one after the
other, as on a device. Several forwards may precede the first backward, as in a pipeline. What
this machine computes meanwhile counts as part of the time: modules sleep until a moment of a
schedule, not for a time. Where the machine is slower than the schedule, it sleeps no more, and the
step takes longer than was asked for.

    forward   |-- layer 1 --|--- layer 2 ---|            a third of the time
    backward  |------ layer 2 ------|--- layer 1 ---|    two thirds, as it does twice the work

Invariants: a sleeping module uses no processor, so many ranks may share few cores; evaluation and
everything else under no_grad is not slowed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

FORWARD_SHARE = 1 / 3


class _Schedule:
    """Moments to sleep until, from a start on: at the latest the first time that passes."""

    def __init__(self) -> None:
        self._due: float | None = None

    def start(self) -> None:
        self._due = time.perf_counter()

    def pass_time(self, seconds: float) -> None:
        if self._due is None:
            self.start()
        assert self._due is not None
        self._due += seconds
        left = self._due - time.perf_counter()
        if left > 0:
            time.sleep(left)


class EmulatedDevice:
    """Slows a model down, from when it is made.

    Args:
        model: hooks are put on its modules.
        seconds: that one forward and backward take together.
        cost: of a module that has parameters of its own; how many, unless given.
    """

    def __init__(
        self, model: nn.Module, seconds: float, cost: Callable[[nn.Module], float] | None = None
    ) -> None:
        self._forward, self._backward = _Schedule(), _Schedule()
        cost = cost or _parameters
        costs = {module: cost(module) for module in model.modules() if _parameters(module)}
        total = sum(costs.values())
        model.register_forward_pre_hook(self._begin)
        for module, own in costs.items():
            if own:
                share = seconds * own / total
                times = FORWARD_SHARE * share, (1 - FORWARD_SHARE) * share
                module.register_forward_hook(self._slow(*times))

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._forward.start()
        self._backward = _Schedule()  # of what this forward records

    def _slow(self, forward: float, backward: float) -> Any:
        """A module's forward hook."""

        def after_forward(module: nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                self._forward.pass_time(forward)
                if isinstance(output, Tensor) and output.requires_grad:
                    schedule = self._backward
                    output.register_hook(  # type: ignore[no-untyped-call]
                        lambda gradient: schedule.pass_time(backward)
                    )

        return after_forward


def _parameters(module: nn.Module) -> float:
    return sum(parameter.numel() for parameter in module.parameters(recurse=False))
