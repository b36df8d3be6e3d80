"""Ticks: what tells OuterStep that an iteration is over.

A GradScaler skips optimizer.step() where a gradient overflowed, on each rank by itself, as ranks
train apart. Counted by steps, ranks would disagree about how far they are. So:

    optimizers             an iteration is over when each of them has stepped once more
    optimizers and scaler  when scaler.update() has been called: also where it skipped the steps
    neither                when outer.tick() is called

If ranks skip steps and the scaler was not given, they still meet: a round is entered by each rank
at its own count, one iteration later where a step was skipped, and at the end those that flush join
the rounds of those that do not yet (see rounds.py). That costs waiting, and never a hang.

Invariants: nothing stays on the optimizers or the scaler after ``stop``.
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
        """Ends that."""


class StepTicks:
    """Ticks when each optimizer has stepped once more.

    Where the step of a subclass calls that of its base, torch may run the hooks of both: before,
    before, after, after. Of a step that raises it runs those before it only. So an iteration is
    over at the first hook after a step that follows one before.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._begun: set[int] = set()
        self._stepped: set[int] = set()
        self._handles: list[Any] = []

    def start(self, on_tick: OnTick) -> None:
        """See Ticks."""

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
        """See Ticks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._begun.clear()
        self._stepped.clear()


class ScalerTicks:
    """Ticks when the scaler has been updated. ``update`` is replaced on the scaler itself."""

    def __init__(self, scaler: Any) -> None:
        if not callable(getattr(scaler, "update", None)):
            raise ConfigError(f"scaler={scaler!r}: give a torch.amp.GradScaler, or None")
        self._scaler = scaler

    def start(self, on_tick: OnTick) -> None:
        """See Ticks."""
        update = self._scaler.update

        def update_and_tick(*args: Any, **kwargs: Any) -> Any:
            result = update(*args, **kwargs)
            on_tick()
            return result

        self._scaler.update = update_and_tick

    def stop(self) -> None:
        """See Ticks."""
        self._scaler.__dict__.pop("update", None)


class NoTicks:
    """The caller ticks."""

    def start(self, on_tick: OnTick) -> None:
        """See Ticks."""

    def stop(self) -> None:
        """See Ticks."""


def optimizers_of(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers of OuterStep's argument: one, several or none; those within wrappers of
    frameworks. Raises ConfigError for anything else."""
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
    """The source for what OuterStep was given."""
    if scaler is not None:
        return ScalerTicks(scaler)
    return StepTicks(optimizers) if optimizers else NoTicks()
