"""Checks of settings, worded as torch.optim words them.

Invariants: each check raises ConfigError, which is a ValueError, too. Numbers may be Python's or
numpy's; bool is no number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..config import names_arguments
from ..core.calls import is_integer, is_number
from ..errors import ConfigError

_ABLE: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "comm": ("a ringcomm.Communicator", ("allreduce",)),
    "model": ("a torch.nn.Module", ("named_parameters",)),
    "scaler": ("a torch.amp.GradScaler", ("get_scale",)),
    "compression": (
        'a codec, "auto" or a CodecPolicy, such as ringcomm.torch.Auto(model)',
        ("codec", "begin", "look", "note"),
    ),
    "transport": ("a Transport", ("bind", "begin", "launch")),
}


_F = TypeVar("_F", bound=Callable[..., Any])


def takes(
    settings: type | None = None,
    renamed: Mapping[str, str] | None = None,
    removed: Mapping[str, str] | None = None,
) -> Callable[[_F], _F]:
    """Decorates a function, which may pass on ``**settings``, a TypedDict of that class: other
    names raise ConfigError, with the nearest known name; see ``names_arguments``."""

    def decorate(function: _F) -> _F:
        more = settings.__annotations__ if settings else {}
        return names_arguments(function, more, renamed or {}, removed or {})

    return decorate


def require(what: str, value: object, holds: bool) -> None:
    """Raises ConfigError unless ``holds``. If ``value`` is None, ``what`` is the whole text."""
    if not holds:
        raise ConfigError(what if value is None else f"Invalid {what}: {value}")


def require_number(
    name: str,
    value: Any,
    least: float,
    most: float,
    *,
    open_least: bool = False,
    open_most: bool = False,
) -> float:
    """Returns the value as a float. Raises ConfigError unless it is a finite number between the
    bounds; open bounds are excluded."""
    low, high = ("(" if open_least else "["), (")" if open_most else "]")
    fits = is_number(value) and math.isfinite(value) and least <= value <= most
    if not fits or (open_least and value == least) or (open_most and value == most):
        raise ConfigError(
            f"Invalid {name}: {value!r}; give a number in {low}{least:g}, {most:g}{high}"
        )
    return float(value)


def require_whole(name: str, value: Any, least: int) -> int:
    """Returns the value as an int. Raises ConfigError unless it is an integer of at least
    ``least``."""
    if not is_integer(value) or value < least:
        raise ConfigError(f"Invalid {name}: {value!r}; give an integer of at least {least}")
    return int(value)


def require_truth(name: str, value: Any) -> bool:
    """Returns the value. Raises ConfigError unless it is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"Invalid {name}: {value!r}; give True or False")
    return value


def require_able(name: str, value: object) -> None:
    """Raises ConfigError if the argument of that name is neither None nor an object with the
    methods that it needs."""
    give, methods = _ABLE[name]
    able = all(callable(getattr(value, method, None)) for method in methods)
    if value is not None and (isinstance(value, type) or not able):
        raise ConfigError(f"{name}={value!r}: give {give}, or None")
