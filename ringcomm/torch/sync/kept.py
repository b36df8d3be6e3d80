"""Kept: an object whose state in a checkpoint is some of its attributes.

Invariants: a state holds None, numbers, strings, and lists and dictionaries of these, so torch.load
reads it with weights_only=True. It shares no memory with the object.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


class Kept:
    """Base of objects that a checkpoint keeps.

    Attributes:
        kept: the attributes. A state has them without their leading underscores; of another Kept it
            has that one's state.
    """

    kept: tuple[str, ...] = ()

    def saved(self) -> dict[str, Any]:
        """Returns the state."""
        held = {name.lstrip("_"): getattr(self, name) for name in self.kept}
        return {
            name: one.saved() if isinstance(one, Kept) else copy.deepcopy(one)
            for name, one in held.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what ``saved`` returned."""
        for name in self.kept:
            held, value = getattr(self, name), state[name.lstrip("_")]
            if isinstance(held, Kept):
                held.restore(value)
            else:
                setattr(self, name, copy.deepcopy(value))
