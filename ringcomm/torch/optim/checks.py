"""Checks of an optimizer's hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...core.calls import is_number
from ..argument_checks import require, require_whole

#: Removed arguments of the 1-bit optimizers and their replacements; see ``names_arguments``.
REMOVED = {
    "deepspeed_compat": "has been removed: the update as published loses accuracy by its "
    "compression. Leave it out; OneBitAdam(refresh=None) keeps the paper's fixed variance",
    "units": "has been removed: the momentum travels in bounded units, which were the default",
    "total_steps": "has been removed, with shares: give freeze= the number of the last dense step",
}


def at_least(value: Any, least: float) -> bool:
    """Returns whether the value is a number, or a tensor of one element, not below ``least``."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and bool(value >= least)
    return is_number(value) and value >= least


def require_at_least(least: float, values: Mapping[str, Any]) -> None:
    """Raises ConfigError, with the name, for a value that is no number, or below ``least``."""
    for name, value in values.items():
        require(name, value, at_least(value, least))


def require_betas(betas: tuple[float, float]) -> None:
    """Raises ConfigError for decays that torch.optim.Adam refuses, in its words."""
    is_pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    require("betas, give two numbers", repr(betas), is_pair)
    for index, beta in enumerate(betas):
        require(f"beta parameter at index {index}", beta, at_least(beta, 0.0) and beta < 1.0)


def require_adam(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raises ConfigError for hyperparameters that torch.optim.Adam refuses, in its words."""
    require_at_least(
        0.0, {"learning rate": lr, "epsilon value": eps, "weight_decay value": weight_decay}
    )
    require_betas(betas)


def require_max_norm(max_norm: float | None) -> None:
    """Raises ConfigError unless it is None or a positive number."""
    require(
        "max_norm", repr(max_norm), max_norm is None or (at_least(max_norm, 0) and max_norm > 0)
    )


def require_muon(group: Mapping[str, Any]) -> None:
    """Raises ConfigError for hyperparameters that torch.optim.Muon refuses, or fails by later."""
    names = "lr", "momentum", "weight_decay", "eps"
    require_at_least(0.0, {f"{name} value": group[name] for name in names})
    steps = require_whole("ns_steps", group["ns_steps"], 0)
    require("ns_steps, give less than 100", steps, steps < 100)
    coefficients, adjusts = group["ns_coefficients"], group["adjust_lr_fn"]
    is_list = isinstance(coefficients, (tuple, list))
    are_three = is_list and len(coefficients) == 3 and all(map(is_number, coefficients))
    require("ns_coefficients, give three numbers", repr(coefficients), are_three)
    require("adjust_lr_fn", repr(adjusts), adjusts in (None, "original", "match_rms_adamw"))
