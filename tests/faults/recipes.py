"""Ranks that run the README's Python as it is printed, each block with what stands around it."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np
import torch
import torch._dynamo  # which DDP imports when it is first used: here once for all ranks
import torch.distributed as dist
from faults.rank import Rank
from readme import code
from torch import nn

import ringcomm

STEPS = 3


def _run(name: str, **names: Any) -> dict[str, Any]:
    exec(code(name), names)
    return names


def numpy(rank: Rank) -> None:
    """What the tensor is in the end."""
    names = _run("numpy")
    rank.emit("numpy", x=[float(names["x"].min()), float(names["x"].max())])
    ringcomm.shutdown()


def feedback(rank: Rank) -> None:
    """How far the sum of all means is from the exact one, of the size of one rounding."""
    ringcomm.init()
    given = [
        np.random.default_rng([rank.number, step]).standard_normal(9000).astype(np.float32)
        for step in range(STEPS)
    ]
    exact = ringcomm.allreduce(np.sum(given, axis=0), "avg")
    tensors = [gradient.copy() for gradient in given]
    names = _run("feedback", ringcomm=ringcomm, gradients=lambda: iter(tensors))
    left = ringcomm.allreduce(names["feedback"].worker, "avg")
    lacks = exact - np.sum(tensors, axis=0)
    rank.emit("feedback", lacks=float(abs(lacks).max()), unkept=float(abs(lacks - left).max()))
    ringcomm.shutdown()


def backend(rank: Rank) -> None:
    """A sum, and by what."""
    _run("backend")
    x = torch.ones(3)
    dist.all_reduce(x)
    rank.emit("backend", name=dist.get_backend(), x=x.tolist())
    _end()


def hook(rank: Rank) -> None:
    """Gradients by the hook, over another backend."""
    model = _model()
    names = _run("hook", model=model)
    rank.emit("gradients", **_gradients(rank, model, names["ddp"]))
    rank.emit("carried", works=ringcomm.default_communicator().stats()["works"])
    _end()
    ringcomm.shutdown()
    os._exit(0)  # DDP would destroy gloo's group: see parallel._job


def hierarchical(rank: Rank) -> None:
    """Gradients by the hierarchical hook, of two hosts of two ranks each by their variables."""
    _run("backend")
    model = _model()
    ddp = nn.parallel.DistributedDataParallel(model)
    _run("hierarchical", torch=torch, ddp=ddp)
    rank.emit("gradients", **_gradients(rank, model, ddp))
    _end()
    os._exit(0)  # the state's communicators are nobody's here


def methods(rank: Rank) -> None:
    """The three ways over slow links, a model each."""
    _run("backend")
    model, small, large = _model(), _model(), _model()
    ddp = nn.parallel.DistributedDataParallel(model)
    adamw = torch.optim.AdamW(large.parameters(), 0.01)
    names = _run("methods", ddp=ddp, model=model, small=small, large=large, adamw=adamw)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    with names["outer"] as outer:
        for step in range(3):
            for net, optimizer in ((ddp, sgd), (small, names["optimizer"]), (large, adamw)):
                optimizer.zero_grad()
                torch.manual_seed(10 * step + rank.number)
                net(torch.randn(8, 64)).square().mean().backward()
                optimizer.step()
    assert outer.iteration == 3
    rank.emit("trained", weights=[_digest(one) for one in (model, small, large)],
              untrained=_digest(_model()))  # fmt: skip
    _end()


def _digest(model: nn.Module) -> str:
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def _model() -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 3))


def _gradients(rank: Rank, model: nn.Module, ddp: nn.Module) -> dict[str, Any]:
    """How far the hook's gradients are from the mean, relative to their size, and whether all ranks
    have the same."""
    torch.manual_seed(rank.number)
    x = torch.randn(8, 64)
    model(x).square().sum().backward()
    mean = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    model.zero_grad()
    ddp(x).square().sum().backward()
    got = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    first = got.clone()
    dist.broadcast(first, 0)
    error = float((got - mean).abs().max() / mean.abs().max())
    return {"error": error, "equal": torch.equal(first, got)}


def _end() -> None:
    dist.barrier()
    dist.destroy_process_group()
