"""What exchanges the same weights or gradients as OuterStep does is refused: an optimizer that
exchanges in its step, and a DistributedDataParallel over the ranks that OuterStep exchanges with.

A DDP would average every gradient over them, so that there is nothing left for an outer step to do,
and everything is sent twice. One over the ranks of a host, with OuterStep across hosts, is what
both are for.

Invariants: all ranks refuse alike, as all see all ranks' places.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ...errors import ConfigError
from ..optim.exchanging import ExchangingOptimizer
from ..wrapped import is_sharded, wrappers_of


def require_whole_model(model: nn.Module) -> None:
    """Raises ConfigError for a model that is sharded."""
    for module in model.modules():
        if is_sharded(type(module)):
            raise ConfigError("OuterStep: the model is sharded by FSDP, and no rank has all of it; "
                              "OuterStep takes a model that each rank has whole")  # fmt: skip


def require_plain(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises ConfigError for an optimizer whose step exchanges by itself."""
    for one in optimizers:
        if isinstance(one, ExchangingOptimizer):
            raise ConfigError(
                f"OuterStep: {type(one).__name__} exchanges in each of its steps, so that nothing "
                "is left for an outer step to do; use it alone, or OuterStep with a plain optimizer"
            )


def require_apart(ids: Container[int], places: Sequence[int]) -> None:
    """Raises ConfigError if a DDP with one of the parameters spans ranks of OuterStep's
    communicator, and exchanges.

    Args:
        ids: of the parameters, by id().
        places: the ranks that the communicator connects, by their numbers in torch.distributed's
            default group.
    """
    for wrapper in wrappers_of(ids):
        if not wrapper.require_backward_grad_sync:
            continue
        shared = sorted(set(dist.get_process_group_ranks(wrapper.process_group)) & set(places))
        if len(shared) > 1:
            _refuse(shared)


def _refuse(shared: Sequence[int]) -> None:
    raise ConfigError(
        f"OuterStep: the model is wrapped in DistributedDataParallel over ranks {list(shared)}, "
        "which OuterStep connects as well: each gradient would be averaged over them, and then the "
        "weights once more, so everything is sent twice. Train the model without DDP; or stop "
        "DDP's exchange before attach() by ddp.require_backward_grad_sync = False; or wrap the "
        "model over the ranks of one host, and give OuterStep comm= a communicator that connects "
        "one rank of each host"
    )
