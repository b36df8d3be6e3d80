"""Optimizers that one-bit gradients do not suit, and how the hook finds out which one is used.

Adam divides each gradient by the root of its own mean square. Of signs times a scale it learns that
all gradients of a block are equally large, so what it is made for is gone, and runs diverge where
the same bits under SGD with momentum do well. 1-bit Adam works around it by freezing the mean
squares after a dense start; its classes are named accordingly and are let pass.

Invariants: the hook sees gradients, never the optimizer; so it looks at the first step of one that
has a parameter of the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Container
from typing import Any

from .steps import before_steps, has_any

_LET_PASS = ("onebit", "1bit", "zeroone")
ONEBIT = (
    "compression='onebit' under {name}: of signs, it learns that all gradients of a block are "
    "equally large; use SGD with momentum, or int4, or HookState(..., force=True) to go on "
    "without this warning"
)
STALE = (
    "pace='stale1' under {name}: it loses by gradients that come a step late, and the correction "
    "does not make up for all of it; compare the loss with that of pace='every', try half the "
    "learning rate, or give HookState(..., force=True) to go on without this warning"
)


def is_plain_adam(kind: type) -> bool:
    """Whether a class of optimizers is Adam, or one of its kin by ancestry or name."""
    names = [base.__name__.lower() for base in kind.__mro__]
    adam = any("adam" in name for name in names)
    return adam and not any(word in name for name in names for word in _LET_PASS)


class AdamWatch:
    """Warns, once, if the optimizer that next steps one of some parameters is a plain Adam.

    Args:
        ids: of the parameters, by id().
        text: what to say, with {name} for that of the optimizer's class.
    """

    def __init__(self, ids: Container[int], text: str) -> None:
        self._ids, self._text = ids, text
        before_steps.add(self._look)

    def _look(self, optimizer: Any) -> None:
        if has_any(optimizer, self._ids):
            before_steps.remove(self._look)
            if is_plain_adam(type(optimizer)):  # told of the line behind torch's and steps.py's
                warnings.warn(self._text.format(name=type(optimizer).__name__), stacklevel=4)
