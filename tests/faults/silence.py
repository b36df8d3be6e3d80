"""Ranks whose optimizers step, on a group of backend "ringcomm", with and without exchange."""

from __future__ import annotations

import os
import warnings

import torch
import torch.distributed as dist
from faults.rank import Rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringcomm.torch

STEPS = 5


def steps(rank: Rank, how: str) -> None:
    """Five of them, after a barrier and a broadcast as a script may have them to set itself up.
    Reports what was warned of. How: the ranks train apart; by DDP; by DDP with gradients that are
    accumulated; by DDP of gloo; by hand; by an OuterStep whose "with" was forgotten; or one model
    is made for inference alone."""
    torch.set_num_threads(1)
    dist.init_process_group("ringcomm")
    dist.barrier()
    model = nn.Linear(3, 3)
    dist.broadcast(next(model.parameters()).data, 0)
    other = dist.new_group(backend="gloo") if how == "gloo" else None
    trained: nn.Module = model
    if how in ("ddp", "accumulated", "gloo"):
        trained = DistributedDataParallel(model, process_group=other)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = ringcomm.torch.OuterStep(model, optimizer) if how == "outer" else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(STEPS):
            if how == "accumulated":
                with trained.no_sync():  # type: ignore[operator]
                    trained(torch.ones(2, 3)).sum().backward()
            if how == "inference":
                with torch.no_grad():
                    trained(torch.ones(2, 3))
                continue
            trained(torch.ones(2, 3)).sum().backward()
            if how == "by hand":
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
    mine = [str(w.message) for w in caught if w.category is ringcomm.torch.SilenceWarning]
    rank.emit("warned", texts=mine)
    del outer
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)
