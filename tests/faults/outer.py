"""Ranks that train by OuterStep, go on without who is lost or late, and with who comes back."""

from __future__ import annotations

import hashlib
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from faults.rank import Rank
from outer_training import learn, net, pupil, train, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringcomm.torch
from ringcomm.membership import Membership
from ringcomm.torch import OuterStep


def digest(model: nn.Module) -> str:
    return hashlib.blake2b(weights(model).numpy().tobytes(), digest_size=8).hexdigest()


def rounds(
    rank: Rank,
    grace_s: float = 30.0,
    rejoin: bool = False,
    hold: int = -1,
    min_peers: int | None = None,
    step_s: float = 0.01,
    **settings: Any,
) -> None:
    """Trains until it is told to stop, and reports each round. When round ``hold`` is over, this
    rank waits until it is told to go on."""
    torch.set_num_threads(1)
    model = net(sizes=(5, 16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    config = ringcomm.Config.from_env(timeout=60.0)
    with Membership(
        grace_s=grace_s, min_peers=min_peers, rejoin=rejoin, config=config
    ) as membership:
        outer = OuterStep(model, optimizer, comm=membership, **{"every": 4, **settings})
        with outer:
            rank.emit("attached", iteration=outer.iteration, number=outer.rounds)
            known = outer.rounds
            while not (outer.rounds != hold and rank.was_told()):
                if outer.rounds == hold:
                    hold = -1
                    rank.emit("holds")
                    rank.wait_for_go()
                train(model, optimizer, rank.number, [outer.iteration])
                time.sleep(step_s)
                if outer.rounds != known:
                    known = outer.rounds
                    with outer.anchor():
                        rank.emit(
                            "round",
                            number=known,
                            members=membership.members,
                            anchor=digest(model),
                            iteration=outer.iteration,
                        )
        report = outer.report()
    rank.emit(
        "end",
        weights=digest(model),
        repeated=report.repeated,
        left=report.left,
        joined=report.joined,
        number=outer.rounds,
    )


kept: list[OuterStep] = []
"""To the end of the program."""


def left_attached(rank: Rank) -> None:
    """Trains one step, and ends with the program."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept.append(OuterStep(model, optimizer, comm=ringcomm.init()).attach())
    train(model, optimizer, 0, range(1))


def beside_ddp(rank: Rank) -> None:
    """OuterStep on a model in DDP: over all ranks, or over those of pairs; and without DDP on the
    default group. Reports how each attach ended, and what was warned of."""
    torch.set_num_threads(1)
    dist.init_process_group("ringcomm")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for how in ("ddp", "local ddp", "apart"):
        model: nn.Module = nn.Linear(3, 3)
        comm = None
        if how == "ddp":
            model = DistributedDataParallel(model)
        elif how == "local ddp":
            model = DistributedDataParallel(model, process_group=pairs[rank.number // 2])
            comm = across[rank.number % 2].comm  # type: ignore[union-attr]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = OuterStep(model, optimizer, every=4, comm=comm)
        error = rank.attempt("attached", outer.attach)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if error is None:
                for step in range(6):
                    optimizer.zero_grad()
                    (model(torch.full((2, 3), 1.0 + rank.number + step)) ** 2).sum().backward()
                    optimizer.step()
                outer.flush()
                outer.detach()
        rank.emit("warned", texts=[str(w.message) for w in caught], weights=digest(model))
    dist.destroy_process_group()


def remedies(rank: Rank) -> None:
    """Follows what the refusal of a DDP over the same ranks names, after it was refused: the model
    without DDP, and DDP with its exchange stopped. Reports the refusal and both ends."""
    torch.set_num_threads(1)
    dist.init_process_group("ringcomm")
    for remedy in ("Train the model without DDP", "ddp.require_backward_grad_sync = False"):
        model = net(seed=rank.number)
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rank.attempt("refused", OuterStep(ddp, optimizer, every=2).attach)
        trained: nn.Module = ddp
        if remedy.startswith("ddp"):
            ddp.require_backward_grad_sync = False
        else:
            trained = model
            del ddp
        with OuterStep(trained, optimizer, every=2) as outer:
            train(trained, optimizer, rank.number, range(4))
        rank.emit("followed", remedy=remedy, rounds=outer.rounds, weights=digest(model))
    dist.destroy_process_group()


def lessons(rank: Rank, seed: int, hold: int, settings: dict[str, Any]) -> None:
    """Learns, and reports how. Before step ``hold`` this rank waits until it is told to go on."""
    torch.set_num_threads(1)
    model = pupil(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)

    def before_step(step: int) -> None:
        if step == hold:
            rank.emit("holds")
            rank.wait_for_go()

    config = ringcomm.Config.from_env(timeout=60.0)
    with Membership(grace_s=30.0, config=config) as membership:
        outer = OuterStep(model, optimizer, comm=membership, **settings)
        curve = learn(outer, model, optimizer, seed, rank.number, before_step)
    rank.emit("learnt", curve=curve, left=outer.report().left)
