"""One rank of failover.py: works without end, over ports that die and come back.

    python bench/trials/failover_rank.py SOCKET LOAD

It says over a Unix socket, one JSON message each, what every step came to: when it ended, how long
its call took, whether its result was right, how each lane is, and how many descriptors are open.

Invariant: a step's result is known beforehand, and is not that of the steps before it. A sum is one
of small whole numbers; what no sum tells, int4 with feedback and training, is done again from the
same start, and must come to the bits of the first time, which no fault befell.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import ringcomm
from ringcomm import Communicator

SMALL, CODED, LARGE = 1 << 10, 1 << 20, 16_000_000  # float32 elements
CYCLE = 8
_PAUSE_S = {"small": 0.005, "idle": 0.02, "int4": 0.02}


class Step(NamedTuple):
    """What a step came to."""

    right: bool
    seconds: float = 0.0
    """Of the call."""
    result: str = ""
    """Hash of the loss and the weights, for flapping.py."""


def _sums(comm: Communicator, count: int) -> Iterator[Step]:
    """All-reduces of numbers that change with every step."""
    bases = [((np.arange(count) + 7 * turn) % 251).astype(np.float32) for turn in range(4)]
    tensor, expected = np.empty_like(bases[0]), np.empty_like(bases[0])
    for base in itertools.cycle(bases):
        np.multiply(base, comm.rank + 1, out=tensor)
        np.multiply(base, comm.world_size * (comm.world_size + 1) / 2, out=expected)
        began = time.monotonic()
        comm.allreduce(tensor)
        seconds = time.monotonic() - began
        yield Step(bool(np.array_equal(tensor, expected)), seconds)


def _idle(comm: Communicator, orders: socket.socket) -> Iterator[Step | None]:
    """No call but when one is asked for."""
    sums = _sums(comm, SMALL)
    while True:
        asked = select.select([orders], [], [], 0)[0] and orders.recv(16) == b"call"
        yield next(sums) if asked else None


def _again(cycle: Callable[[], Iterator[bytes]]) -> Iterator[Step]:
    """Cycles from the same start, whose results must be those of the first but one: DDP lays its
    buckets out anew in that."""
    list(cycle())
    first = list(cycle())
    while True:
        began = time.monotonic()
        for number, result in enumerate(cycle()):
            yield Step(result == first[number], time.monotonic() - began)
            began = time.monotonic()


def _coded(comm: Communicator) -> Iterator[Step]:
    def cycle() -> Iterator[bytes]:
        feedback = ringcomm.ErrorFeedback()
        for step in range(CYCLE):
            tensor = np.random.default_rng([comm.rank, step]).standard_normal(CODED, np.float32)
            comm.allreduce(tensor, compression="int4", feedback=feedback)
            yield hashlib.blake2b(tensor.tobytes()).digest()

    return _again(cycle)


def _trainer(comm: Communicator) -> Callable[[int], Iterator[bytes]]:
    """DDP with ringcomm as backend, and its hook. Returns what trains so many steps from the same
    start, and yields hashes of the loss and the weights."""
    import torch

    from ringcomm.torch import HookState, allreduce_hook

    torch.set_num_threads(1)
    torch.manual_seed(0)
    wide, narrow = torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 512)
    ddp = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(wide, torch.nn.Tanh(), narrow)
    )
    ddp.register_comm_hook(HookState(comm=comm), allreduce_hook)
    start = {name: value.clone() for name, value in ddp.state_dict().items()}
    teacher = torch.randn(512, 512, generator=torch.Generator().manual_seed(1)) / 512**0.5

    def train(steps: int) -> Iterator[bytes]:
        ddp.load_state_dict(start)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(steps):
            optimizer.zero_grad()
            batch = torch.randn(16, 512, generator=generator)
            loss = (ddp(batch) - (batch @ teacher).tanh()).square().mean()
            loss.backward()
            optimizer.step()
            state = [loss.detach(), *ddp.state_dict().values()]
            yield hashlib.blake2b(b"".join(each.numpy().tobytes() for each in state)).digest()

    return train


def _training(comm: Communicator) -> Iterator[Step]:
    train = _trainer(comm)
    return _again(lambda: train(CYCLE))


def _trained(comm: Communicator) -> Iterator[Step]:
    for result in _trainer(comm)(sys.maxsize):
        yield Step(right=True, result=result.hex())


LOADS: dict[str, Callable[[Communicator, socket.socket], Iterator[Step | None]]] = {
    "64 MB": lambda comm, _: _sums(comm, LARGE),
    "int4": lambda comm, _: _coded(comm),
    "small": lambda comm, _: _sums(comm, SMALL),
    "ddp": lambda comm, _: _training(comm),
    "idle": _idle,
}
MORE_LOADS: dict[str, Callable[[Communicator, socket.socket], Iterator[Step | None]]] = {
    "one training": lambda comm, _: _trained(comm),
}
"""Of flapping.py."""


def _join(load: str) -> Communicator:
    if load not in ("ddp", "one training"):
        return ringcomm.init()
    import torch.distributed as dist

    from ringcomm.torch.group import world_comm

    dist.init_process_group("ringcomm", init_method="ringcomm://")
    comm = world_comm()
    assert comm is not None
    return comm


def main() -> None:
    """Works until it is ended."""
    events = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    events.connect(sys.argv[1])
    load = sys.argv[2]

    def say(**fields: Any) -> None:
        events.send(json.dumps(fields).encode())

    say(rank=int(os.environ["RANK"]))
    try:
        comm = _join(load)
        for step in (LOADS | MORE_LOADS)[load](comm, events):
            ended = time.monotonic()
            lanes = comm.stats()["lanes"]
            say(
                ended=ended,
                step=step,
                lanes=[
                    [lane[key] for key in ("peer", "rail", "made", "is_lost")] for lane in lanes
                ],  # type: ignore[literal-required]
                fds=len(os.listdir("/proc/self/fd")),
            )
            time.sleep(_PAUSE_S.get(load, 0.0))
    except Exception as error:
        say(failed=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
