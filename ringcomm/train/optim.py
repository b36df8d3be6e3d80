"""The optimizers and the learning rate.

Invariants: the rate is a pure function of the step, so there is no scheduler to keep; matrices and
filters decay, biases, norms and other vectors do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..communicator import Communicator
from ..errors import ConfigError
from ..torch import optim, sparse
from .command_line import DDP_METHODS, DENSITY, Options
from .models import family

_DEFAULTS = {
    "sgd": (0.1, 5e-4),
    "adamw": (1e-3, 0.05),
    "muon": (0.02, 0.05),
    "lion": (2e-4, 0.1),
    "lamb": (5e-3, 0.05),
    "zero-one-adam": (1e-3, 0.05),
}
_FINAL_RATE = 0.01
_WARMUP = 0.1  # part of a run in which the rate rises
_MOMENTUM = 0.9  # momentum of sgd
_VARIANCE = 0.3  # part of a run in which ZeroOneAdam learns the variance
_BESIDE_MUON = 0.05  # rate of AdamW, for the other parameters, over Muon's

Groups = list[dict[str, Any]]


class Together:
    """Several optimizers as one, each over parameters of its own.

    A group's "rate_factor", if present, is its share of the run's rate.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)

    @property
    def param_groups(self) -> Groups:
        """Groups of all parts."""
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        """Update the parameters of all parts."""
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        """Drop the gradients of all parts."""
        for part in self.parts:
            part.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return the states by the number of the part."""
        return {str(number): part.state_dict() for number, part in enumerate(self.parts)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the states of all parts."""
        for number, part in enumerate(self.parts):
            part.load_state_dict(state_dict[str(number)])


Optimizer = torch.optim.Optimizer | Together


def groups(model: nn.Module, options: Options) -> Groups:
    """Return two groups of the trained parameters: those with weight decay, those without."""
    decay = choices(options)[2]
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def make_optimizer(groups: Groups, options: Options) -> Optimizer:
    """Make one of torch's optimizers at the peak rate."""
    name, rate, _ = choices(options)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=_MOMENTUM)
    if name == "muon":
        return _muon(groups, rate)
    return torch.optim.AdamW(groups, lr=rate)


def _muon(groups: Groups, rate: float) -> Together:
    """Make Muon for hidden matrices and AdamW for the rest: vectors, filters, and the first and
    last matrix, which embed the inputs and outputs."""
    matrices, vectors = groups[0]["params"], groups[1]
    square = [p for p in matrices[1:-1] if p.dim() == 2]
    hidden = {id(p) for p in square}
    others = [p for p in matrices if id(p) not in hidden]
    decay = groups[0]["weight_decay"]
    beside = [{"params": others, "weight_decay": decay}, vectors]
    adamw = torch.optim.AdamW(
        [{**group, "rate_factor": _BESIDE_MUON} for group in beside], lr=rate * _BESIDE_MUON
    )
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError("--optimizer muon needs PyTorch 2.9 or later")
    if not square:
        raise ConfigError("--optimizer muon is for models with hidden matrices, as ViT and GPT")
    return Together([torch.optim.Muon(square, lr=rate, weight_decay=decay), adamw])


def make_exchanging_optimizer(
    groups: Groups, options: Options, comm: Communicator
) -> torch.optim.Optimizer:
    """Make an optimizer of ringcomm.torch.optim, or of ringcomm.torch.sparse for that method, at
    the peak rate, for ``options.steps`` steps. A collective.
    """
    name, rate, _ = choices(options)
    kinds: dict[str, Callable[..., torch.optim.Optimizer]]
    if options.method == "sparse":
        kinds = {"sgd": sparse.SGD, "adamw": sparse.Adam}
        own: dict[str, Any] = {"density": DENSITY}
    else:
        kinds = {
            "sgd": optim.SGD,
            "adamw": optim.OneBitAdam,
            "lion": optim.Lion,
            "lamb": optim.OneBitLamb,
            "zero-one-adam": optim.ZeroOneAdam,
        }
        own = {"compression": options.codec}
    if name == "sgd":
        own["momentum"] = _MOMENTUM
    if name == "zero-one-adam":
        own["var_freeze_step"] = max(1, round(_VARIANCE * (options.steps or 0)))
    return kinds[name](groups, lr=rate, comm=comm, **own)


def choices(options: Options) -> tuple[str, float, float]:
    """Return (optimizer, peak rate, weight decay) as given, or the defaults for the model."""
    name = options.optimizer or ("sgd" if family(options.model) == "resnet" else "adamw")
    rate, decay = _DEFAULTS[name]
    return name, rate if options.lr is None else options.lr, decay


def require_suitable(options: Options) -> None:
    """Raise ConfigError for an optimizer that cannot use gradients of the codec."""
    name = choices(options)[0]
    if options.codec == "onebit" and options.method in DDP_METHODS and name != "sgd":
        raise ConfigError(
            f"--compression onebit does not go with the gradients of {name}: of "
            "signs it learns that all gradients of a block are equally large; use --method "
            "momentum, which sends what 1 bit suits, or int4, or --optimizer sgd"
        )


def rate_at(step: int, steps: int, peak: float) -> float:
    """Return the learning rate of a step (from 0) of ``steps``.

    It rises in a straight line over the first tenth of the run, then follows half a cosine down to
    1 % of the peak.
    """
    rising = round(_WARMUP * steps)
    if step < rising:
        return peak * (step + 1) / rising
    way = (step - rising) / max(1, steps - rising)
    return peak * (_FINAL_RATE + (1 - _FINAL_RATE) * (1 + math.cos(math.pi * way)) / 2)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_factor", 1.0)
