"""Calls at the ends of a step: around every torch optimizer step, and after a backward.

torch walks its registry of hooks in each step; if another thread or the garbage collector changes
it meanwhile, the step ends with an error. So torch has one hook of ours on each side of a step,
from the import of this module on, and listeners are added and removed here.

Invariants: a listener is not kept alive. It may be added or removed within a step, and in any
thread: the listeners are a tuple that is replaced as a whole.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

Listener = Callable[[Optimizer], None]
"""A bound method, called with the optimizer."""


class Listeners:
    """Listeners on one side of a step.

    Args:
        register: torch's function that adds a hook there.
    """

    def __init__(self, register: Callable[[Callable[..., None]], Any]) -> None:
        self._lock = threading.Lock()
        self._listeners: tuple[weakref.WeakMethod[Listener], ...] = ()
        register(self._tell)

    def add(self, listener: Listener) -> None:
        """Calls a listener at each step from now on, as long as its owner lives."""
        with self._lock:
            self._listeners = (*self._without(None), weakref.WeakMethod(listener))

    def remove(self, listener: Listener) -> None:
        """Ends the calls of a listener."""
        with self._lock:
            self._listeners = self._without(listener)

    def __len__(self) -> int:
        return len(self._without(None))

    def _without(self, gone: Listener | None) -> tuple[weakref.WeakMethod[Listener], ...]:
        return tuple(one for one in self._listeners if one() not in (None, gone))

    def _tell(self, optimizer: Optimizer, *_: Any) -> None:
        for one in self._listeners:
            listener = one()
            if listener is not None:
                listener(optimizer)


before_steps = Listeners(register_optimizer_step_pre_hook)
after_steps = Listeners(register_optimizer_step_post_hook)
_engine: Any = torch.autograd.Variable._execution_engine


def after_backward(call: Callable[[], object]) -> bool:
    """Queues a call for the end of the backward that this thread runs, after calls queued before.
    Returns False, and never calls, if this thread runs no backward."""
    try:
        _engine.queue_callback(call)
    except RuntimeError:
        return False
    return True


def remove_all(handles: list[Any]) -> None:
    """Removes hooks by torch's handles, and empties the list."""
    for handle in handles:
        handle.remove()
    handles.clear()


def has_any(optimizer: Any, ids: Container[int]) -> bool:
    """Returns whether an optimizer has one of these parameters, given by id()."""
    groups = getattr(optimizer, "param_groups", ())
    return any(id(parameter) in ids for group in groups for parameter in group["params"])
