"""Who is told of the steps of optimizers, of all in the process.

torch walks its registry of hooks in each step, and a registry that changes meanwhile, by another
thread or by what the garbage collector takes away, ends that step with an error. So torch has one
hook of ours on each side of a step, from the import of this module on, and listeners come and go
here.

Invariants: a listener is not kept alive. It may come and go within a step, and in any thread: the
listeners are a tuple that is replaced as a whole.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container
from typing import Any

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

Listener = Callable[[Optimizer], None]
"""A bound method, which is told of the optimizer."""


class Listeners:
    """Those on one side of a step.

    Args:
        register: torch's function for a hook there.
    """

    def __init__(self, register: Callable[[Callable[..., None]], Any]) -> None:
        self._lock = threading.Lock()
        self._listeners: tuple[weakref.WeakMethod[Listener], ...] = ()
        register(self._tell)

    def add(self, listener: Listener) -> None:
        """Tells it of each step from now on, as long as there is its owner."""
        with self._lock:
            self._listeners = (*self._without(None), weakref.WeakMethod(listener))

    def remove(self, listener: Listener) -> None:
        """Tells it no more."""
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


def remove_all(handles: list[Any]) -> None:
    """Removes hooks by torch's handles of them, and empties the list."""
    for handle in handles:
        handle.remove()
    handles.clear()


def has_any(optimizer: Any, ids: Container[int]) -> bool:
    """Whether an optimizer has one of these parameters, given by id()."""
    groups = getattr(optimizer, "param_groups", ())
    return any(id(parameter) in ids for group in groups for parameter in group["params"])
