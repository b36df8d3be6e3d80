"""What an optimizer refuses: hyperparameters, codecs and tensors that it cannot take, and others
that exchange the same gradients."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from ... import codecs
from ...calls import is_number
from ...errors import ConfigError, TensorError
from .. import silence
from ..settings import require
from ..wrapped import wrappers_of

#: Arguments of the 1-bit optimizers that there are no more; see ``names_arguments``.
REMOVED = {
    "deepspeed_compat": "has been removed: the update as published loses accuracy by its "
    "compression. Leave it out; OneBitAdam(refresh=None) keeps the paper's fixed variance",
    "units": "has been removed: the momentum travels in bounded units, which were the default",
    "total_steps": "has been removed, with shares: give freeze= the number of the last dense step",
}


def at_least(value: Any, least: float) -> bool:
    """Whether it is a number, or a tensor of one element, of at least that."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and bool(value >= least)
    return is_number(value) and value >= least


def require_betas(betas: tuple[float, float]) -> None:
    """Raises ConfigError for decays that torch.optim.Adam refuses, in its words."""
    is_pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    require("betas, give two numbers", repr(betas), is_pair)
    for index, beta in enumerate(betas):
        require(f"beta parameter at index {index}", beta, at_least(beta, 0.0) and beta < 1.0)


def require_adam(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """The same for all of its hyperparameters."""
    require("learning rate", lr, at_least(lr, 0.0))
    require("epsilon value", eps, at_least(eps, 0.0))
    require_betas(betas)
    require("weight_decay value", weight_decay, at_least(weight_decay, 0.0))


def codec_name(compression: str | None, what: str = "compression=") -> str:
    """The name of a codec that an exchange may have. Raises ConfigError for others."""
    return codecs.parse(compression, what).name


def require_dense(tensor: torch.Tensor, what: str) -> None:
    """Raises TensorError for what is sparse, sharded, or no real number."""
    if tensor.layout != torch.strided:
        raise TensorError(
            f"{what} is {tensor.layout}, and must be dense: make the layer with sparse=False"
        )
    if hasattr(tensor, "device_mesh"):
        raise TensorError(
            f"{what} is a {type(tensor).__name__}, of which each rank has a part, as FSDP makes "
            "them; this optimizer takes whole models that all ranks have"
        )
    if not tensor.is_floating_point():
        raise TensorError(f"{what} has dtype {tensor.dtype}, and must have real numbers")


def refuse_others(ids: Collection[int], name: str) -> None:
    """Raises ConfigError where something else exchanges the gradients of these parameters.

    Args:
        ids: of the parameters, by id().
        name: the optimizer's class.
    """
    for state in silence.hooks_of_process():
        if not set(state.parameter_ids).isdisjoint(ids):
            raise ConfigError(
                f"a {type(state).__name__} was made for parameters of this {name}: the hook would "
                f"send the gradients and {name} its state. Use one of the two"
            )
    for module in wrappers_of(ids):
        if module.require_backward_grad_sync:
            raise ConfigError(
                f"parameters of this {name} are in a DistributedDataParallel, which sends the "
                f"gradients that {name} sends again in another form. Train the model without DDP, "
                "or call ringcomm.torch.attach(model, optimizer), which stops DDP's exchange for "
                "good, as ddp.require_backward_grad_sync = False does"
            )
