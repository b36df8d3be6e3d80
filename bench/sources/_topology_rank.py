"""One rank of topologies.py: steps that only exchange a gradient, and what they cost each port.

    _topology_rank.py '{"elements": 2560000, "steps": 5, "algorithm": "ring", "workers": [0, 1, 2],
                        "servers": [3], "piece": 65536}'

Without servers the workers all-reduce. With servers, each of which owns an equal shard, a worker
pushes its gradient to them piece by piece and pulls the sums, with a thread for each server. A
receive is posted before its send, a server answers a piece as soon as it has it from all workers,
so both directions of its port are busy together, and a worker has few pieces under way to a server,
so none runs ahead of the others and they do not overflow the server's port. Rank 0 prints one line
of JSON at the end.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import ringcomm

PERIOD = 251
"""Of the gradients' values: small integers, whose sum over 16 ranks is exact."""
UNTIMED = 1


def cut(begin: int, end: int, piece: int) -> list[slice]:
    """The pieces of the elements from begin to end."""
    return [slice(at, min(end, at + piece)) for at in range(begin, end, piece)]


def shards(elements: int, servers: int, piece: int) -> list[list[slice]]:
    """Of each server, the pieces of its shard."""
    edges = [elements * index // servers for index in range(servers + 1)]
    return [cut(begin, end, piece) for begin, end in itertools.pairwise(edges)]


def push_and_pull(
    comm: ringcomm.Communicator,
    gradient: np.ndarray,
    out: np.ndarray,
    server: int,
    pieces: Sequence[slice],
    window: int,
) -> None:
    """What a worker has to do with one server in a step."""
    answers = [comm.recv(out[part], server, async_op=True) for part in pieces]
    sent = []
    for turn, part in enumerate(pieces):
        if turn >= window:
            answers[turn - window].wait()
        sent.append(comm.send(gradient[part], server, async_op=True))
    for work in [*sent, *answers[-window:]]:
        work.wait()


def serve(
    comm: ringcomm.Communicator, room: np.ndarray, workers: Sequence[int], pieces: Sequence[slice]
) -> None:
    """A server's step; ``room`` has a row for each worker and begins where its shard begins."""
    start = pieces[0].start
    mine = [slice(part.start - start, part.stop - start) for part in pieces]
    coming = [
        [
            comm.recv(row[part], worker, async_op=True)
            for row, worker in zip(room, workers, strict=True)
        ]
        for part in mine
    ]
    leaving = []
    for part, works in zip(mine, coming, strict=True):
        for work in works:
            work.wait()
        total = room[0, part]
        for other in room[1:, part]:
            total += other
        leaving += [comm.send(total, worker, async_op=True) for worker in workers]
    for work in leaving:
        work.wait()


def step_of(
    comm: ringcomm.Communicator, asked: dict[str, Any], gradient: np.ndarray, out: np.ndarray
) -> Callable[[], object]:
    """What this rank does in a step."""
    workers, servers = asked["workers"], asked["servers"]
    if not servers:
        return lambda: comm.allreduce(gradient, out=out)
    pieces = shards(asked["elements"], len(servers), asked["piece"])
    if comm.rank in workers:
        with_one = functools.partial(push_and_pull, comm, gradient, out, window=asked["window"])
        threads = ThreadPoolExecutor(len(servers))
        return lambda: list(threads.map(with_one, servers, pieces))
    own = pieces[servers.index(comm.rank)]
    room = np.zeros((len(workers), own[-1].stop - own[0].start), np.float32)
    return lambda: serve(comm, room, workers, own)


def counters(device: str) -> tuple[int, int]:
    """Bytes that this host's port has sent and received, as the kernel counts them."""
    folder = Path("/sys/class/net", device, "statistics")
    sent, received = (int((folder / f"{way}_bytes").read_text()) for way in ("tx", "rx"))
    return sent, received


def main() -> None:
    """The rank."""
    asked = json.loads(sys.argv[1])
    comm = ringcomm.init(
        config=ringcomm.Config(algorithm=asked["algorithm"], shared_memory=asked["shared_memory"])
    )
    device = os.environ["RINGCOMM_INTERFACES"].split(",")[0]
    values = np.resize(np.arange(PERIOD, dtype=np.float32), asked["elements"])
    gradient, out = values * (comm.rank + 1), np.zeros_like(values)
    step = step_of(comm, asked, gradient, out)
    times = []
    before = counters(device)
    for turn in range(UNTIMED + asked["steps"]):
        comm.barrier()
        if turn == UNTIMED:
            before = counters(device)
            comm.barrier()
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    comm.barrier()
    after = counters(device)
    wrong = 0
    if comm.rank in asked["workers"]:
        wrong = np.count_nonzero(out != values * sum(rank + 1 for rank in asked["workers"]))
    mine = [wrong, *(b - a for a, b in zip(before, after, strict=True)), *times[UNTIMED:]]
    everyone = comm.allgather(np.array(mine, np.float64)).reshape(comm.world_size, -1)
    if comm.rank == 0:
        told = {
            "wrong": int(everyone[:, 0].sum()),
            "sent": everyone[:, 1].tolist(),
            "received": everyone[:, 2].tolist(),
            "times": everyone[asked["workers"], 3:].max(axis=0).tolist(),
        }
        print(json.dumps(told), flush=True)
    ringcomm.shutdown()


if __name__ == "__main__":
    main()
