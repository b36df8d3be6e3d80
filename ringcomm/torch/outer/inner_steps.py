"""Inner steps: an OuterStep follows the steps of the optimizers, and skips bad ones.

**Ends of iterations.** A GradScaler skips optimizer.step() if a gradient overflowed, on each rank
by itself, as ranks train apart. If steps were counted, ranks would disagree on the number of
iterations. So:

    optimizers             an iteration is over when each of them has stepped once more
    scaler                 when scaler.update() has been called: even if it skipped the steps
    neither                when outer.tick() is called

If ranks skip steps and the scaler was not given, their rounds still come about: each rank enters a
round at its own count, one iteration later if it skipped a step, and at the end ranks that flush
join the rounds of the others (rounds.py). That costs waiting, and never a hang.

**Bad steps.** One NaN would spoil the weights in this step, and the moments of an optimizer such as
Adam for ever: that rank's deltas would not count in any later round. So gradients are checked
before each step, as a GradScaler does, in one pass that writes nothing. If one is not finite, or so
large that its square is not, the gradients are set to None, and the optimizer changes nothing.

Weights that a step itself spoils are found when the rank's delta is taken (round.py). They are then
replaced by the anchor, and the optimizer's state of each parameter is reset where that state is not
finite. A copy of the state as of the last round would lose less, but cost AdamW the memory of two
more models for a rare case.

Invariants: a step that a GradScaler checks is not checked here. All hooks are entered in an
ExitStack, whose end removes them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...errors import ConfigError, warn_caller
from ..guards import tensors_in
from ..sync.bucket import all_finite
from ..wrapped import bare_optimizer
from .rounds import Rounds


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


def require_scaler(scaler: Any) -> None:
    """Raises ConfigError unless it is None or can be followed."""
    if scaler is not None and not callable(getattr(scaler, "update", None)):
        raise ConfigError(f"scaler={scaler!r}: give a torch.amp.GradScaler, or None")


def follow_scaler(scaler: Any, on_tick: Callable[[], None], hooks: contextlib.ExitStack) -> None:
    """Calls ``on_tick`` after each ``scaler.update()``, whose replacement stays until ``hooks`` is
    closed."""
    update = scaler.update

    def update_and_tick(*args: Any, **kwargs: Any) -> Any:
        result = update(*args, **kwargs)
        on_tick()
        return result

    scaler.update = update_and_tick
    hooks.callback(vars(scaler).pop, "update", None)


def follow_steps(
    optimizers: Sequence[torch.optim.Optimizer],
    on_tick: Callable[[], None],
    hooks: contextlib.ExitStack,
) -> None:
    """Calls ``on_tick`` when each optimizer has stepped once more.

    If the step of a subclass calls its base's, torch may run the hooks of both: before, before,
    after, after. If a step raises, only the hooks before it run. So a step is over at the first
    hook after it that follows one before it.
    """
    begun: set[int] = set()
    stepped: set[int] = set()

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        begun.add(id(optimizer))

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in begun:
            return
        begun.remove(id(optimizer))
        stepped.add(id(optimizer))
        if len(stepped) == len(optimizers):
            stepped.clear()
            on_tick()

    for one in optimizers:
        hooks.enter_context(one.register_step_pre_hook(before_step))
        hooks.enter_context(one.register_step_post_hook(after_step))


class Guard:
    """Checks the steps of the optimizers of one rank.

    Args:
        optimizers: the optimizers that OuterStep was given.
        names: names of the model's trained parameters, by id().
        rounds: they count iterations.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str], rounds: Rounds
    ) -> None:
        self._optimizers, self._names, self._rounds = optimizers, names, rounds
        self._dropped_at = -1  # round in which the weights were last not finite

    def follow(self, hooks: contextlib.ExitStack) -> None:
        """Checks the gradients before each step from now on."""
        for one in self._optimizers:
            hooks.enter_context(one.register_step_pre_hook(self._look))

    def _look(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Checks the gradients before a step; of a step with a closure, after the closure. Returns
        the step's arguments with such a closure, or None."""
        if getattr(optimizer, "found_inf", None) is not None:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._drop_unless_finite(optimizer)
            return None

        def looked_at() -> Any:
            loss = closure()
            self._drop_unless_finite(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": looked_at}
        return (args[0], looked_at, *args[2:]), kwargs

    def _drop_unless_finite(self, optimizer: torch.optim.Optimizer) -> None:
        held = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        bad = _first_not_finite([parameter.grad for parameter in held])
        if bad is None:
            return
        for parameter in held:
            parameter.grad = None
        self._rounds.report.skipped += 1
        count = self._rounds.report.skipped
        if count == 10 ** (len(str(count)) - 1):
            name = self._names.get(id(held[bad]), "a parameter")
            warn_caller(
                f"OuterStep: the gradient of {name!r} is not finite on rank {self._rounds.rank} in "
                f"iteration {self._rounds.iteration + 1}: the step is left out there, {count} so "
                "far (outer.report().skipped)"
            )

    def resume_from_anchor(self) -> None:
        """Resets what is not finite in the optimizers' states, and warns: the weights were not
        finite, and the anchor has replaced them."""
        before, self._dropped_at = self._dropped_at, self._rounds.number
        also, mended = "", self._mend()
        if mended:
            also = (
                f". Its optimizer's state of {mended} parameters was not finite either, and "
                "begins anew"
            )
        elif not self._optimizers and before == self._rounds.number - 1:
            also = (
                ". This is the second time in a row: the optimizer's state, such as Adam's "
                "means, may not be finite either. Clear it (optimizer.state.clear()), or give "
                "OuterStep the optimizer"
            )
        warn_caller(
            f"OuterStep: the weights of rank {self._rounds.rank} were not finite after iteration "
            f"{self._rounds.iteration}: they did not count in round {self._rounds.number - 1}, and "
            f"it went on from the anchor{also}"
        )

    def _mend(self) -> int:
        """Resets the optimizers' state of each parameter of which it is not finite. Returns the
        number of these parameters."""
        mended = 0
        for optimizer in self._optimizers:
            for parameter in [p for p in optimizer.state if id(p) in self._names]:
                kept = [
                    one for one in tensors_in(optimizer.state[parameter]) if one.is_floating_point()
                ]
                if all(map(all_finite, kept)):
                    continue
                mended += 1
                if isinstance(optimizer, torch.optim.Adagrad):  # its state is made in __init__ only
                    for tensor in kept:
                        tensor.nan_to_num_(0.0, 0.0, 0.0)
                else:
                    del optimizer.state[parameter]
        return mended


def _first_not_finite(gradients: Sequence[torch.Tensor]) -> int | None:
    """Returns the index of the first gradient that is not finite, or whose square is not; None if
    there is none. Waits for one result on each device."""
    dense = [one.coalesce().values() if one.is_sparse else one for one in gradients]
    for device in {one.device for one in dense if one.numel()}:
        at = [index for index, one in enumerate(dense) if one.device == device and one.numel()]
        here = [dense[index] for index in at]
        wide = functools.reduce(torch.promote_types, (one.dtype for one in here), torch.float32)
        finite = torch.stack(torch._foreach_norm(here, 2, dtype=wide)).isfinite()
        if not bool(finite.all()):
            return at[int(finite.logical_not().nonzero()[0])]
    return None
