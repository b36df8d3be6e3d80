"""A word where ranks train apart: optimizers step, and nothing has been exchanged.

A hook that was never registered, or a framework that leaves DistributedDataParallel out, trains as
many models as there are ranks without any error. So what is meant to carry gradients is watched
from the moment that it is made: a hook by its state, and the default process group where its
backend is "ringcomm". If it has carried nothing when optimizers have made STEPS steps, it is warned
of, once.

    HookState with a model     steps of optimizers that have one of its parameters; its buckets
    HookState without one      steps of any; buckets of any hook of the process
    OuterStep                  steps of optimizers that have one of its parameters; its iterations
    default process group      steps of any; works of any communicator of the process, but for those
                               before the first step, which are of its set-up. Not where there is a
                               DDP or FSDP module, which may well use another group; nor where one
                               of the above counts steps, and so tells what is amiss by itself

An optimizer's step follows communication also where gradients are accumulated, and what only
infers steps no optimizer.

Invariants: a watch ends with the first bucket or work that it sees, with its warning, or with what
it watches, which it does not keep alive. Where nothing is watched, steps are not followed.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..communicator import works_of_process
from ..errors import NotInitializedError
from .steps import after_steps, has_any
from .wrapped import is_exchanged

if TYPE_CHECKING:
    from .group import RingcommGroup
    from .hooks import HookState

STEPS = 3


class SilenceWarning(UserWarning):
    """Optimizers step, and nothing has been exchanged between the ranks."""


class _Watch:
    """Of one thing that ought to carry something.

    Args:
        owner: the thing.
        carried: how much it has carried so far.
        text: what to say of it; None: nothing after all.
        before: how much it had carried when it began; None: find out at the first step.
        ids: of the parameters whose optimizers count, by id(); None: all count.
    """

    def __init__(
        self, owner: Any, carried: Callable[[Any], int], text: Callable[[Any], str | None],
        before: int | None, ids: Callable[[Any], Container[int]] | None = None,
    ) -> None:  # fmt: skip
        self._owner = weakref.ref(owner)
        self._carried, self._text = carried, text
        self._before, self._ids = before, ids
        self._steps = 0
        self.is_over = False

    def is_of(self, owner: object) -> bool:
        """Whether that is its thing."""
        return self._owner() is owner

    @property
    def has_begun(self) -> bool:
        """It has counted steps, and its thing is still there."""
        return self._steps > 0 and self._owner() is not None

    def look(self, optimizer: Any) -> str | None:
        """After a step: what to say, if anything; and whether it is over."""
        owner = self._owner()
        if owner is None:
            self.is_over = True
            return None
        if self._ids is not None and not has_any(optimizer, self._ids(owner)):
            return None
        carried = self._carried(owner)
        if self._before is None:
            self._before = carried
        self._steps += 1
        is_silent = carried == self._before
        self.is_over = not is_silent or self._steps == STEPS
        return self._text(owner) if is_silent and self.is_over else None


class _Watches:
    """All of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[_Watch] = []

    def add(self, watch: _Watch) -> None:
        with self._lock:
            if not self._all:
                after_steps.add(self._look)
            self._all.append(watch)

    def forget(self, owner: object) -> None:
        """Watches a thing no more."""
        self._end(lambda watch: watch.is_of(owner))

    def any_but(self, owner: object) -> bool:
        """Whether another thing's watch has begun."""
        return any(watch.has_begun and not watch.is_of(owner) for watch in self._all)

    def _end(self, is_over: Callable[[_Watch], bool]) -> None:
        with self._lock:
            self._all = [watch for watch in self._all if not is_over(watch)]
            if not self._all:
                after_steps.remove(self._look)

    def _look(self, optimizer: Any) -> None:
        for watch in list(self._all):
            text = watch.look(optimizer)
            if text is not None:  # told of the line behind torch's and steps.py's
                warnings.warn(text, SilenceWarning, stacklevel=4)
        if any(watch.is_over for watch in self._all):
            self._end(lambda watch: watch.is_over)


_watches = _Watches()
_hooks: weakref.WeakSet[HookState] = weakref.WeakSet()
forget = _watches.forget


def watch_hook(state: HookState) -> None:
    """Watches a hook's state."""
    _hooks.add(state)
    if state.parameter_ids:
        carried, ids = (lambda one: one.account.carried), (lambda one: one.parameter_ids)
        _watches.add(_Watch(state, carried, _of_hook, 0, ids))
    else:
        _watches.add(_Watch(state, lambda _: _buckets_of_process(), _of_hook, 0))


def watch_group(group: RingcommGroup) -> None:
    """Watches a default process group."""
    if group.comm.world_size > 1:
        _watches.add(_Watch(group, lambda _: works_of_process(), _of_group, None))


def hooks_of_process() -> list[HookState]:
    """All hooks' states that there are."""
    return list(_hooks)


def watch_steps(
    owner: Any, carried: Callable[[Any], int], text: Callable[[Any], str | None],
    ids: Callable[[Any], Container[int]],
) -> None:  # fmt: skip
    """Watches anything else that ought to follow the steps of optimizers.

    Args:
        owner: the thing.
        carried: how much it has carried since it was made.
        text: what to say where that does not change.
        ids: of the parameters whose optimizers count, by id().
    """
    _watches.add(_Watch(owner, carried, text, carried(owner), ids))


def _buckets_of_process() -> int:
    return sum(state.account.carried for state in hooks_of_process())


def _of_hook(state: HookState) -> str | None:
    try:
        ranks = state.comm.world_size
    except NotInitializedError:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks == 1:
        return None
    return (
        f"{STEPS} optimizer steps, and this {type(state).__name__} has seen no gradients: it is no "
        f"hook of a DistributedDataParallel, and the {ranks} ranks may train apart. Call "
        "ddp.register_comm_hook(state, allreduce_hook) on the wrapped model. On hosts without GPUs "
        "Lightning wants that in on_fit_start, and Accelerate wraps the model with "
        "Accelerator(cpu=True) only"
    )


def _of_group(group: RingcommGroup) -> str | None:
    if dist.group.WORLD is not group or _watches.any_but(group) or is_exchanged():
        return None
    return (
        f"{STEPS} optimizer steps, and nothing has passed between the {group.comm.world_size} "
        "ranks of process group 'ringcomm': each trains a model of its own. Wrap the model in "
        "torch.nn.parallel.DistributedDataParallel. On hosts without GPUs Accelerate does that "
        "with Accelerator(cpu=True) only, and transformers with TrainingArguments(use_cpu=True). "
        "If it is meant so: warnings.simplefilter('ignore', ringcomm.torch.SilenceWarning)"
    )
