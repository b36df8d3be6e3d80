"""One rank of the step links: all-reduces of a GPU tensor by each codec, verified and timed.

    link_rank.py '{"bytes": 100000000, "codecs": ["none", "bf16"], "calls": 5}'

Rank 0 prints a line of JSON for each codec: seconds of the calls (means over ranks, each to the end
of the tensor's stream), and whether the first result had the bits of a host tensor's on all ranks.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ringcomm
from gpu_checks.driver import Array, Driver
from ringcomm.codecs import parse


def own_cores(rank: int, world: int) -> None:
    """A share of the machine's cores, where each rank gets two or more."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // world
    if share >= 2:
        os.sched_setaffinity(0, cores[rank * share : (rank + 1) * share])


def measure(driver: Driver, codec: str, values: Any, calls: int) -> dict[str, Any]:
    """One codec; the same on all ranks."""
    stream = driver.stream()
    src = Array.of(driver, values, stream=stream)
    out = Array(driver, values.shape, np.float32, stream)
    needs = parse(codec).needs_feedback
    here, there = (ringcomm.ErrorFeedback() if needs else None for _ in range(2))
    name = None if codec == "none" else codec

    def call() -> float:
        began = time.perf_counter()
        ringcomm.allreduce(src, "avg", out=out, compression=name, feedback=here)
        driver.wait(stream)
        return time.perf_counter() - began

    call()
    host = values.copy()
    ringcomm.allreduce(host, "avg", compression=name, feedback=there)
    same = np.array([float(np.array_equal(out.read().view(np.uint32), host.view(np.uint32)))])
    del host
    ringcomm.allreduce(same, "min")
    ringcomm.barrier()
    call()  # uses up what the links let through at once
    took = ringcomm.allreduce(np.array([call() for _ in range(calls)]), "avg")
    return {"codec": codec, "seconds": statistics.median(took.tolist()), "same": bool(same[0])}


def main() -> None:
    """The rank."""
    asked = json.loads(sys.argv[1])
    own_cores(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    ringcomm.init()
    driver = Driver()
    random = np.random.default_rng(ringcomm.rank())
    values = random.standard_normal(asked["bytes"] // 4, np.float32)
    for codec in asked["codecs"]:
        told = measure(driver, codec, values, asked["calls"])
        if ringcomm.rank() == 0:
            print(json.dumps(told), flush=True)
    ringcomm.shutdown()


if __name__ == "__main__":
    main()
