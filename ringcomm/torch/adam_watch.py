"""Optimizers that few-bit or late gradients do not suit, and how the hook finds out which is used.

Adam divides each gradient by the root of its own mean square. Of signs times a scale it learns that
all gradients of a block are equally large, so what it is made for is gone, and runs diverge where
the same bits under SGD with momentum do well. RMSprop, Adagrad and others divide alike. 1-bit Adam
works around it by freezing the mean squares after a dense start; its classes are named accordingly
and are let pass.

Invariants: the hook sees gradients, never the optimizer; so it looks at the first step of each one
that has a parameter whose gradient the hook has seen. What is refused is refused before anything
has been stepped, on each rank by itself, as all have the same optimizers.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import ConfigError
from .steps import before_steps, has_any

_LET_PASS = ("onebit", "1bit", "zeroone")
_ADAM = ("adam",)
_DIVIDING = (*_ADAM, "rmsprop", "adagrad", "adadelta", "adafactor", "lamb")


@dataclasses.dataclass(frozen=True)
class Unsuited:
    """Gradients that do not suit some optimizers.

    Attributes:
        text: what to say, with {name} for that of the optimizer's class.
        kinds: words that the names of the optimizers' classes have, in lower case.
        refused: whether it is an error; else a warning.
    """

    text: str
    kinds: tuple[str, ...]
    refused: bool = False

    def suits(self, kind: type) -> bool:
        """Whether a class of optimizers is none of these, neither by ancestry nor by name."""
        return is_named(kind, _LET_PASS) or not is_named(kind, self.kinds)


def is_named(kind: type, words: Iterable[str]) -> bool:
    """Whether one of the words, in lower case, is in the name of the class or of an ancestor."""
    names = [base.__name__.lower() for base in kind.__mro__]
    return any(word in name for name in names for word in words)


ONEBIT = Unsuited(
    "compression='onebit' under {name}: it divides by its own mean square, and of signs it learns "
    "that all gradients of a block are equally large; use SGD with momentum, or int4, or "
    "ringcomm.torch.optim.OneBitAdam without DDP, or HookState(..., force=True) to train all the "
    "same",
    _DIVIDING, refused=True,
)  # fmt: skip
STALE = Unsuited(
    "pace='stale1' under {name}: it loses by gradients that come a step late, and the correction "
    "does not make up for all of it; compare the loss with that of pace='every', try half the "
    "learning rate, or give HookState(..., force=True) to go on without this warning",
    _ADAM,
)  # fmt: skip


class AdamWatch:
    """Refuses optimizers that something does not suit, in each of their steps, or warns, once.

    Args:
        unsuited: what does not suit whom.
    """

    def __init__(self, unsuited: Unsuited) -> None:
        self.unsuited = unsuited
        self._ids: set[int] = set()
        self._is_over = False
        before_steps.add(self._look)

    def see(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watches these as well, unless it is over."""
        if not self._is_over:
            self._ids.update(map(id, parameters))

    def _look(self, optimizer: Any) -> None:
        """Raises ConfigError if it is refused, through ``optimizer.step()``."""
        if not has_any(optimizer, self._ids):
            return
        if self.unsuited.suits(type(optimizer)):
            for group in optimizer.param_groups:
                self._ids.difference_update(map(id, group["params"]))
            if not self._ids:
                self._end()
            return
        text = self.unsuited.text.format(name=type(optimizer).__name__)
        if self.unsuited.refused:
            raise ConfigError(text)
        self._end()
        warnings.warn(text, stacklevel=4)  # told of the line behind torch's and steps.py's

    def _end(self) -> None:
        self._is_over = True
        before_steps.remove(self._look)
