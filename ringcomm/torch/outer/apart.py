"""A DistributedDataParallel over the ranks that OuterStep exchanges with is refused.

It would average every gradient over them, so that there is nothing left for an outer step to do,
and everything is sent twice. One over the ranks of a host, with OuterStep across hosts, is what
both are for.

Invariants: all ranks refuse alike, as all see all ranks' places.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from ...errors import ConfigError
from ..wrapped import is_sharded


def require_whole_model(model: nn.Module) -> None:
    """Raises ConfigError for a model that is sharded."""
    for module in model.modules():
        if is_sharded(type(module)):
            raise ConfigError("OuterStep: the model is sharded by FSDP, and no rank has all of it; "
                              "OuterStep takes a model that each rank has whole")  # fmt: skip


def require_apart(model: nn.Module, places: Sequence[int]) -> None:
    """Raises ConfigError if the model's DDP spans ranks of OuterStep's communicator.

    Args:
        places: the ranks that the communicator connects, by their numbers in torch.distributed's
            default group.
    """
    group = getattr(model, "process_group", None)
    if type(model).__name__ != "DistributedDataParallel" or group is None:
        return
    spanned = set(dist.get_process_group_ranks(group))
    shared = sorted(spanned & set(places))
    if len(shared) > 1:
        raise ConfigError(
            f"OuterStep: the model is wrapped in DistributedDataParallel over ranks {shared}, "
            "which OuterStep connects as well: each gradient would be averaged over them, and then "
            "the weights once more, so everything is sent twice. Give OuterStep the model without "
            "DDP; or wrap it over the ranks of one host, and give OuterStep comm= a communicator "
            "that connects one rank of each host"
        )
