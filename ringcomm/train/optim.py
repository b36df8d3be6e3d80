"""The optimizers and the learning rate.

Invariants: the rate is a pure function of the step, so there is no scheduler to keep; matrices and
filters decay, biases, norms and other vectors do not.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from ..errors import ConfigError
from .models import family
from .options import Options

_DEFAULTS = {"sgd": (0.1, 5e-4), "adamw": (1e-3, 0.05)}
_FINAL_RATE = 0.01


def make_optimizer(model: nn.Module, options: Options) -> torch.optim.Optimizer:
    """SGD with momentum or AdamW over ``model``, at the peak rate."""
    name, rate, decay = choices(options)
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=options.momentum)
    return torch.optim.AdamW(groups, lr=rate)


def choices(options: Options) -> tuple[str, float, float]:
    """(optimizer, peak rate, weight decay) as given, or as suits the model."""
    name = options.optimizer or ("sgd" if family(options.model) == "resnet" else "adamw")
    rate, decay = _DEFAULTS[name]
    return (
        name,
        rate if options.lr is None else options.lr,
        decay if options.weight_decay is None else options.weight_decay,
    )


def require_suitable(options: Options) -> None:
    """Raises ConfigError for an optimizer that cannot use what the codec delivers."""
    if options.codec == "onebit" and not options.force and choices(options)[0] == "adamw":
        raise ConfigError(
            "--compression onebit does not go with AdamW: of signs it learns that all gradients "
            "of a block are equally large; use int4, or --optimizer sgd, or --force to try"
        )


def rate_at(step: int, steps: int, peak: float, warmup: float) -> float:
    """Learning rate of a step (from 0) of ``steps``.

    It rises in a straight line over the first ``warmup`` part of the run, then follows half a
    cosine down to 1 % of the peak.
    """
    rising = round(warmup * steps)
    if step < rising:
        return peak * (step + 1) / rising
    way = (step - rising) / max(1, steps - rising)
    return peak * (_FINAL_RATE + (1 - _FINAL_RATE) * (1 + math.cos(math.pi * way)) / 2)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use ``rate`` in the coming step."""
    for group in optimizer.param_groups:
        group["lr"] = rate
