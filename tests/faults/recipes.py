"""Ranks that run the Python of the README and docs/ as it is printed, each block with what stands
around it."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # which DDP imports when it is first used: here once for all ranks
import torch.distributed as dist
from faults.rank import Rank
from readme import code
from torch import nn

import ringcomm
import ringcomm.torch
from ringcomm.torch import HookState, OuterStep, allreduce_hook

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
    rank.emit(
        "trained",
        weights=[_digest(one) for one in (model, small, large)],
        untrained=_digest(_model()),
    )
    _end()


# ---- docs/CHECKPOINTS.md ----


class _Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(64, 200), nn.Linear(200, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))  # type: ignore[no-any-return]


def _page(name: str, folder: str, **names: Any) -> dict[str, Any]:
    known = {
        "torch": torch,
        "dist": dist,
        "ringcomm": ringcomm,
        "folder": Path(folder),
        "HookState": HookState,
        "allreduce_hook": allreduce_hook,
        "OuterStep": OuterStep,
        "DistributedDataParallel": nn.parallel.DistributedDataParallel,
        **names,
    }
    exec(code(name), known)
    return known


def _fresh() -> dict[str, Any]:
    model = _Headed()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), 0.01)}


def _train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        net(torch.randn(8, 64, generator=generator)).square().mean().backward()
        optimizer.step()


def _alike(model: nn.Module) -> bool:
    """Whether all ranks have the same weights, all finite."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, _digest(model))
    flat = nn.utils.parameters_to_vector(model.parameters())
    return len(set(found)) == 1 and bool(flat.isfinite().all())


def checkpoints(rank: Rank, folder: str) -> None:
    """Saves in each way, and goes on from it in the same job."""
    _run("backend")
    told = {
        "own": _hooked(folder),
        "gathered": _from_gathered(folder),
        "scaler": _scaled(folder),
        "optimizers": _there_and_back(folder),
        "later": _later(folder),
        "outer": _outer(folder),
    }
    rank.emit("saved", **told)
    _end()


def checkpoints_elsewhere(rank: Rank, folder: str) -> None:
    """Goes on from the files of another job, of other ranks."""
    _run("backend")
    rank.emit(
        "loaded",
        gathered=_from_gathered(folder),
        optimizers=_there_and_back(folder),
        outer=_from_outer(folder),
    )
    _end()


def _hooked(folder: str) -> bool:
    """Whether a restart from each rank's own state is the unbroken run to the bit."""
    job = _fresh()
    hook = HookState("int4", model=job["model"])
    ddp = nn.parallel.DistributedDataParallel(job["model"])
    ddp.register_comm_hook(hook, allreduce_hook)
    _train(ddp, job["optimizer"], range(3))
    for name in ("save gathered", "save own"):
        _page(name, folder, **job, hook=hook)
    _train(ddp, job["optimizer"], range(3, 6))
    again = _page("load own", folder, **_fresh())
    _train(again["ddp"], again["optimizer"], range(3, 6))
    return _digest(again["model"]) == _digest(job["model"])


def _from_gathered(folder: str) -> bool:
    again = _page("load gathered", folder, **_fresh())
    _train(again["ddp"], again["optimizer"], range(3, 6))
    return _alike(again["model"])


def _scaled(folder: str) -> bool:
    saved = {"scaler": torch.amp.GradScaler("cpu", init_scale=8.0).state_dict()}
    saved["hook"] = torch.load(Path(folder) / "all.pt", weights_only=True)["hook"]
    again = _page("scaler", folder, model=_Headed(), device="cpu", state=saved)
    same = again["state"]["scaler"]["scale"] == again["scaler"].get_scale() == 8.0
    return same and again["state"]["hook"].keys() == saved["hook"].keys()


def _there_and_back(folder: str) -> bool:
    again = _page("to OneBitAdam", folder, model=_Headed())
    model, optimizer = again["model"], again["optimizer"]
    _train(model, optimizer, range(3, 6))
    alike = optimizer.steps == 6 and _alike(model)
    back = _page("to AdamW", folder, model=model, optimizer=optimizer)["adamw"]
    for parameter in model.parameters():  # as DDP would
        dist.all_reduce(parameter.grad)
    back.step()
    return alike and float(back.state[model.body.weight]["step"]) == 7 and _alike(model)


def _later(folder: str) -> bool:
    model = _Headed()
    model.head.requires_grad_(False)
    optimizer = ringcomm.torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    _train(model, optimizer, range(2))
    state = optimizer.gather_state_dict()
    if dist.get_rank() == 0:
        torch.save(state, Path(folder) / "sgd.pt")
    dist.barrier()
    before = model.head.weight.clone()
    again = _page("trained later", folder, model=model)
    _train(model, again["optimizer"], range(2, 5))
    return _alike(model) and not torch.equal(before, model.head.weight)


def _outer(folder: str) -> bool:
    job = _fresh()
    outer = OuterStep(**job, every=2, compression="int4")
    with outer:
        _train(job["model"], job["optimizer"], range(3))
        _page("save outer", folder, **job, outer=outer)
    return _from_outer(folder)


def _from_outer(folder: str) -> bool:
    again = _page("load outer", folder, **_fresh())
    begins = all(
        torch.equal(one, again["state"]["model"][name])
        for name, one in again["model"].state_dict().items()
    )
    with again["outer"]:
        _train(again["model"], again["optimizer"], range(3, 5))
    return begins and _alike(again["model"])


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


# ---- docs/LOSING_A_RANK.md ----


def losing(rank: Rank, folder: str, again: bool = False, hold: int = -1) -> None:
    """Trains until rank 0 is told to stop, which tells the others by a file when: rounds later,
    as ranks are less than one apart. Before step ``hold`` it waits; before step 95, behind the
    round that it would miss, it says so."""
    sys.argv = ["train.py", "--again"] if again else ["train.py"]
    job = _fresh()
    steps = 0

    told, draft = Path(folder, "last"), Path(folder, "draft")

    class Told:
        """The last iteration, once it is known."""

        def __gt__(self, iteration: int) -> bool:
            if rank.number == 0 and not told.exists() and rank.was_told():
                draft.write_text(str(iteration + 100))
                draft.rename(told)
            return not told.exists() or iteration < int(told.read_text())

    def loss_of(model: nn.Module, number: int) -> torch.Tensor:
        nonlocal steps
        if steps == 0 and again:
            rank.emit("back", iteration=names["outer"].iteration)
        if steps == hold:
            rank.emit("holds")
            rank.wait_for_go()
        if steps == 95 and not again:
            rank.emit("went on")
        steps += 1
        generator = torch.Generator().manual_seed(10 * steps + number)
        loss: torch.Tensor = model(torch.randn(8, 64, generator=generator)).square().mean()
        return loss

    names = {"os": os, "sys": sys, "torch": torch, "last": Told(), "loss_of": loss_of, **job}
    exec(code("program"), names)
    report = names["outer"].report()
    rank.emit("trained", weights=_digest(job["model"]), left=report.left, joined=report.joined)
