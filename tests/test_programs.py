"""Random programs: every rank runs the same list of collectives and messages, each at a pace of its
own, waiting for some at once and for others much later. Whatever the mixture, all must complete,
and every result must be the reference's.

A program is made from its seed. Calls stand in the same order on all ranks, so it cannot deadlock
by itself; what could is the credit that bounds how far a rank may run ahead, which is why it is
small here (8 segments of 4 KiB) beside the tensors, and heartbeats, which would mend it, are rare.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference
from ranks import World
from reference import OPS, Array
from tensors import inputs, same

from ringcomm import Communicator, Config

pytestmark = pytest.mark.usefixtures("nothing_left")

KINDS = (
    "allreduce",
    "broadcast",
    "reduce",
    "allgather",
    "reduce_scatter",
    "gather",
    "scatter",
    "alltoall",
    "barrier",
    "message",
    "message",
)
COUNTS = (0, 1, 300, 5000, 40_000)
STEPS = 60


@dataclasses.dataclass(frozen=True)
class Step:
    """One call of the program; source and target are of a message, source also a root."""

    kind: str
    dtype: str
    op: str
    count: int
    source: int
    target: int


def program(seed: int, n: int) -> list[Step]:
    rng = random.Random(seed)
    steps = []
    for _ in range(STEPS):
        source, target = rng.sample(range(n), 2)
        steps.append(
            Step(
                rng.choice(KINDS),
                rng.choice(["f32", "f16", "i32", "f64"]),
                rng.choice(OPS),
                rng.choice(COUNTS),
                source,
                target,
            )
        )
    return steps


def call(comm: Communicator, step: Step) -> tuple[Any, Array | None]:
    """Submits the step; returns the work (None if this rank has no part) and what it must give."""
    n, rank, root = comm.world_size, comm.rank, step.source
    dtype, op, count = step.dtype, step.op, step.count
    whole = inputs(dtype, count * n, n)
    parts = [x[:count] for x in whole]
    mine, all_mine = parts[rank].copy(), whole[rank].copy()
    at_root = rank == root
    if step.kind == "allreduce":
        return comm.allreduce(mine, op, async_op=True), reference.allreduce(parts, dtype, op)
    if step.kind == "broadcast":
        return comm.broadcast(mine, root, async_op=True), parts[root]
    if step.kind == "reduce":
        work = comm.reduce(mine, root, op, async_op=True)
        return work, reference.reduce(parts, dtype, op, root) if at_root else parts[rank]
    if step.kind == "allgather":
        return comm.allgather(mine, async_op=True), reference.allgather(parts, dtype)
    if step.kind == "reduce_scatter":
        work = comm.reduce_scatter(all_mine, op, async_op=True)
        return work, reference.reduce_scatter(whole, dtype, op)[rank]
    if step.kind == "gather":
        work = comm.gather(mine, root, async_op=True)
        return work, reference.allgather(parts, dtype) if at_root else None
    if step.kind == "scatter":
        work = comm.scatter(all_mine.reshape(n, count), root, async_op=True)
        return work, whole[root][rank * count : (rank + 1) * count]
    if step.kind == "alltoall":
        return comm.alltoall(all_mine, async_op=True), reference.alltoall(whole, dtype)[rank]
    if step.kind == "barrier":
        return comm.barrier(async_op=True), None
    if at_root:
        return comm.send(mine, step.target, async_op=True), parts[rank]
    if rank == step.target:
        return comm.recv(np.zeros_like(mine), root, async_op=True), parts[root]
    return None, None


def runner(seed: int, steps: list[Step]) -> Callable[[Communicator], None]:
    def run(comm: Communicator) -> None:
        rng = random.Random(seed * 1000 + comm.rank)
        patience = rng.choice([0.0, 0.3, 1.0])  # how readily this rank waits
        open_works: list[tuple[int, Any, Array | None]] = []

        def finish(index: int) -> None:
            number, work, expected = open_works.pop(index)
            result = work.wait()
            right = result is None if expected is None else same(result, expected)
            assert right, f"rank {comm.rank}, step {number}: {steps[number]}"

        for number, step in enumerate(steps):
            if rng.random() < 0.1:
                time.sleep(rng.random() * 0.01)
            work, expected = call(comm, step)
            if work is not None:
                open_works.append((number, work, expected))
            while open_works and rng.random() < patience:
                finish(rng.randrange(len(open_works)))
        while open_works:
            finish(rng.randrange(len(open_works)))

    return run


@pytest.mark.parametrize("seed", range(8))
def test_random_programs(seed: int) -> None:
    """Worlds of each size meet both segments, both engines and both numbers of lanes."""
    n, half = 2 + seed % 4, seed // 4
    config = Config(
        segment_bytes=(4096, 65536)[half], timeout=20.0, heartbeat=10.0, peer_timeout=30.0
    )
    engines = ("own", "shared")[(seed + half) % 2]
    lanes, rails = 1 + (seed // 2 + half) % 2, 1 + seed % 3 // 2
    with World(n, lanes=lanes, rails=rails, config=config, engines=engines) as w:
        w.run(runner(seed, program(seed, n)))
