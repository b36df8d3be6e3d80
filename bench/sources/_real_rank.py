"""One rank of real.py: a run of convergence.py on a host of its own, by the clock.

    _real_rank.py '{"run": {"setting": "T1", "method": "int4", "lr": 0.01, "seed": 1,
                            "role": "final", "steps": 400}, "every": 10, "limit_s": 480}'

In torchrun's environment. Rank 0 prints a line of JSON at the end.

Invariant: forward and backward are timed alone before the run, while all ranks compute; from then
on all bytes that leave the port are those of the run, and of what stops its clock.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from _steps_rank import port_bytes  # noqa: E402
from training.plan import RANKS, SETTINGS, Run  # noqa: E402
from training.tasks import task_of  # noqa: E402
from training.train import train  # noqa: E402
from training.watch import Watch  # noqa: E402

from ringcomm import Communicator  # noqa: E402

ALONE = 12  # steps in which compute is timed, at most as many as are trained


def compute_s(comm: Communicator, run: Run) -> float:
    """Forward and backward of a step while all ranks compute and nothing is exchanged: the
    median."""
    task = task_of(SETTINGS[run.setting])
    model, batches = task.model(run.seed), task.batches(run.seed, comm.rank, RANKS)
    taken = []
    for _ in range(min(ALONE, run.steps)):
        inputs, targets = batches.next()
        began = time.perf_counter()
        task.loss_of(model, inputs, targets).backward()
        taken.append(time.perf_counter() - began)
        comm.barrier()
    return statistics.median(taken)


def main() -> None:
    """The rank."""
    asked: dict[str, Any] = json.loads(sys.argv[1])
    run = Run(**asked["run"])
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    dist.init_process_group("gloo")
    with Communicator.create(rank, world, init_method=f"tcp://{host}:{port + 1}") as comm:
        alone_s = compute_s(comm, run)
        watch = Watch(comm, every=asked["every"], limit_s=asked["limit_s"], sent=port_bytes)
        train(comm, run, distributed=True, watch=watch)
        if rank == 0:
            told = {"curve": watch.curve, "compute_s": alone_s, "over": watch.is_over}
            print(json.dumps(told), flush=True)
        comm.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
