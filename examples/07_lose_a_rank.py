"""Trains on without a rank that has died, and takes it in again when it is back.

Command:

    python examples/07_lose_a_rank.py

Expected output:

    rank 0 went on without [2], took in [2]
    learned [1.0, -2.0, 3.0]
    exit codes [0, 0, 0]

If it fails:

- All of your ranks end with one, by torchrun: start each by itself; docs/LOSING_A_RANK.md.
- PeerLostError: fewer than min_peers are left, or hosts= names no host where others run.
"""

import os
import sys
from subprocess import Popen
from time import sleep

import torch

from ringcomm.membership import Membership
from ringcomm.torch import OuterStep


def start_all() -> None:
    job = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", **os.environ}
    ranks = [Popen([sys.executable, __file__], env={**job, "RANK": str(rank)}) for rank in range(3)]
    ranks[2].wait()  # until it has died
    ranks[2] = Popen([sys.executable, __file__, "--again"], env={**job, "RANK": "2"})
    print("exit codes", [process.wait() for process in ranks])


def train(again: bool) -> None:
    members = Membership(min_peers=2, rejoin=again, hosts=["localhost"] if again else [])
    torch.manual_seed(members.rank)  # each rank has data of its own
    model = torch.nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with members, OuterStep(model, optimizer, every=10, compression="int4", comm=members) as outer:
        while outer.report().iterations < 20 if again else 2 not in outer.report().joined:
            if outer.iteration == 25 and members.rank == 2 and not again:
                os._exit(1)  # as if its host had failed
            x = torch.randn(16, 3)
            optimizer.zero_grad()
            (model(x) - x @ torch.tensor([[1.0], [-2.0], [3.0]])).square().mean().backward()
            optimizer.step()
            sleep(0.01)  # stands for a larger model
    if members.rank == 0:
        print(f"rank 0 went on without {outer.report().left}, took in {outer.report().joined}")
        print("learned", [round(weight, 1) for weight in model.weight[0].tolist()])


if "RANK" in os.environ:
    train("--again" in sys.argv)
else:
    start_all()
