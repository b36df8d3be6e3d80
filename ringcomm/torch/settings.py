"""Checks of settings, worded as torch.optim words them.

Invariants: what is refused is a ConfigError, which is a ValueError too. Numbers may be Python's or
numpy's; truth values are none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..calls import is_integer, is_number
from ..config import names_arguments
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
    """A decorator of a function, which may pass on ``**settings``, a TypedDict of that class: it
    raises ConfigError for other names, with the one that was meant; see ``names_arguments``."""

    def decorate(function: _F) -> _F:
        more = settings.__annotations__ if settings else {}
        return names_arguments(function, more, renamed or {}, removed or {})

    return decorate


def require(what: str, value: object, holds: bool) -> None:
    """Raises ConfigError unless it holds; value None: ``what`` is the whole text."""
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
    """The value, if it is a finite number between the bounds, of which open ones are excluded."""
    low, high = ("(" if open_least else "["), (")" if open_most else "]")
    fits = is_number(value) and math.isfinite(value) and least <= value <= most
    if not fits or (open_least and value == least) or (open_most and value == most):
        raise ConfigError(
            f"Invalid {name}: {value!r}; give a number in {low}{least:g}, {most:g}{high}"
        )
    return float(value)


def require_whole(name: str, value: Any, least: int) -> int:
    """The value, if it is an integer of at least ``least``."""
    if not is_integer(value) or value < least:
        raise ConfigError(f"Invalid {name}: {value!r}; give an integer of at least {least}")
    return int(value)


def require_truth(name: str, value: Any) -> bool:
    """The value, if it is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"Invalid {name}: {value!r}; give True or False")
    return value


def require_able(name: str, value: object) -> None:
    """Raises ConfigError if an argument of that name is neither None nor an object that can do what
    it is for."""
    give, methods = _ABLE[name]
    able = all(callable(getattr(value, method, None)) for method in methods)
    if value is not None and (isinstance(value, type) or not able):
        raise ConfigError(f"{name}={value!r}: give {give}, or None")
