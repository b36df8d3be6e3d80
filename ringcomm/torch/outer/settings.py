"""Checks of hyperparameters, worded as torch.optim words them.

Invariants: what is refused is a ConfigError, which is a ValueError too, and says what to give.
"""

from __future__ import annotations

import math
from typing import Any

from ...errors import ConfigError


def is_number(value: Any) -> bool:
    """Whether it is a finite number, and no truth value."""
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return plain and math.isfinite(value)


def require_number(
    name: str, value: Any, least: float, most: float, *, open_least: bool = False,
    open_most: bool = False,
) -> float:  # fmt: skip
    """The value, if it is a number between the bounds, of which open ones are excluded."""
    low, high = ("(" if open_least else "["), (")" if open_most else "]")
    fits = is_number(value) and least <= value <= most
    if not fits or (open_least and value == least) or (open_most and value == most):
        raise ConfigError(f"Invalid {name}: {value!r}; give a number in {low}{least:g}, "
                          f"{most:g}{high}")  # fmt: skip
    return float(value)


def require_whole(name: str, value: Any, least: int) -> int:
    """The value, if it is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"Invalid {name}: {value!r}; give an integer of at least {least}")
    return value
