"""Ticks: signals to OuterStep that an iteration is over.

A GradScaler skips optimizer.step() if a gradient overflowed, on each rank by itself, as ranks train
apart. If steps were counted, ranks would disagree on the number of iterations. So:

    optimizers             an iteration is over when each of them has stepped once more
    optimizers and scaler  when scaler.update() has been called: even if it skipped the steps
    neither                when outer.tick() is called

If ranks skip steps and the scaler was not given, their rounds still come about: each rank enters a
round at its own count, one iteration later if it skipped a step, and at the end ranks that flush
join the rounds of the others (rounds.py). That costs waiting, and never a hang.

Invariants: ``stop`` removes all hooks from the optimizers and the scaler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ...errors import ConfigError
from ..wrapped import bare_optimizer

OnTick = Callable[[], None]


class Ticks(Protocol):
    """A source of ticks."""

    def start(self, on_tick: OnTick) -> None:
        """Calls ``on_tick`` at the end of each iteration from now on."""

    def stop(self) -> None:
        """Ends the calls."""


class StepTicks:
    """Ticks when each optimizer has stepped once more.

    If the step of a subclass calls its base's, torch may run the hooks of both: before, before,
    after, after. If a step raises, only the hooks before it run. So a step is over at the first
    hook after it that follows one before it.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._begun: set[int] = set()
        self._stepped: set[int] = set()
        self._handles: list[Any] = []

    def start(self, on_tick: OnTick) -> None:
        def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._begun.add(id(optimizer))

        def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if id(optimizer) not in self._begun:
                return
            self._begun.remove(id(optimizer))
            self._stepped.add(id(optimizer))
            if len(self._stepped) == len(self._optimizers):
                self._stepped.clear()
                on_tick()

        for one in self._optimizers:
            self._handles.append(one.register_step_pre_hook(before_step))
            self._handles.append(one.register_step_post_hook(after_step))

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._begun.clear()
        self._stepped.clear()


class ScalerTicks:
    """Ticks when the scaler has been updated, by a replacement of its ``update``."""

    def __init__(self, scaler: Any) -> None:
        if not callable(getattr(scaler, "update", None)):
            raise ConfigError(f"scaler={scaler!r}: give a torch.amp.GradScaler, or None")
        self._scaler = scaler

    def start(self, on_tick: OnTick) -> None:
        update = self._scaler.update

        def update_and_tick(*args: Any, **kwargs: Any) -> Any:
            result = update(*args, **kwargs)
            on_tick()
            return result

        self._scaler.update = update_and_tick

    def stop(self) -> None:
        self._scaler.__dict__.pop("update", None)


class NoTicks:
    """Never ticks: the caller calls outer.tick()."""

    def start(self, on_tick: OnTick) -> None:
        """Does nothing."""

    def stop(self) -> None:
        """Does nothing."""


def optimizers_of(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Returns the optimizers in OuterStep's argument, one, several or none, without frameworks'
    wrappers. Raises ConfigError for anything else."""
    given = [] if optimizer is None else [optimizer]
    if isinstance(optimizer, (list, tuple)):
        given = list(optimizer)
    found = [bare_optimizer(one) for one in given]
    if any(not isinstance(one, torch.optim.Optimizer) for one in found):
        raise ConfigError(
            f"optimizer={optimizer!r}: give a torch.optim.Optimizer, a list of them, "
            "or None and call outer.tick() after each iteration"
        )
    return found


def ticks_of(optimizers: Sequence[torch.optim.Optimizer], scaler: Any) -> Ticks:
    """Returns the source of ticks for OuterStep's optimizers and scaler."""
    if scaler is not None:
        return ScalerTicks(scaler)
    return StepTicks(optimizers) if optimizers else NoTicks()
