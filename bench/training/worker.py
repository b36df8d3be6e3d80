"""A process that trains for convergence.py: runs come as lines of JSON, rows go back as lines.

    python bench/training/worker.py                               four ranks, threads of a process
    python bench/training/worker.py --rank 0 --port P --gloo Q    one rank of four processes

Each line is answered by one, of a row's measured part or of an error. Ranks in processes all get
the same lines; rank 0's answers count.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is there
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from ranks import World  # noqa: E402

from ringcomm import Communicator, Config  # noqa: E402
from ringcomm.torch import optim, outer, sparse  # noqa: E402, F401 (before ranks' threads do)
from training.plan import RANKS, Run  # noqa: E402
from training.train import Result, train  # noqa: E402

LIMIT_S = 3600.0  # of a run; what takes longer hangs


def config() -> Config:
    """Of all worlds: sums in order of rank wherever a tensor lies, and bytes that pass sockets."""
    return Config(
        algorithm="direct",
        shared_memory=False,
        timeout=LIMIT_S,
        peer_timeout=60.0,
        connect_timeout=600.0,
    )


def in_threads(run: Run, checkpoint: Path, save: Path | None) -> Result:
    """A run by four threads of this process, joined by sockets of the loopback."""
    turn = threading.Lock()

    def rank(comm: Communicator) -> Result:
        return train(comm, run, turn=turn, checkpoint=checkpoint, save=save)

    with World(RANKS, config=config()) as world:
        parts: list[Result] = world.run(rank, timeout=LIMIT_S)
    return {**parts[0], "alike": len({part["weights"] for part in parts}) == 1}


def serve(do: Callable[[Run, Path, Path | None], Result]) -> None:
    """Answers lines until there are no more."""
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.process_time()
        try:
            save = Path(asked["save"]) if asked["save"] else None
            result = do(Run(**asked["run"]), Path(asked["checkpoint"]), save)
            result["cpu_s"] = round(time.process_time() - began, 2)
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), flush=True)
        if "error" in result and dist.is_initialized():
            return  # the other ranks may still be in the run


def main() -> None:
    """Serves."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--gloo", type=int, default=0)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)
    if options.rank < 0:
        serve(in_threads)
        return
    store = f"tcp://127.0.0.1:{options.gloo}"
    dist.init_process_group("gloo", init_method=store, rank=options.rank, world_size=RANKS)
    address = f"tcp://127.0.0.1:{options.port}"

    def in_processes(run: Run, checkpoint: Path, save: Path | None) -> Result:
        with Communicator.create(options.rank, RANKS, init_method=address, config=config()) as comm:
            return train(comm, run, distributed=True, checkpoint=checkpoint, save=save)

    serve(in_processes)


def request(run: Run, checkpoint: Path, save: Path | None = None) -> str:
    """The line that asks for a run."""
    told: dict[str, Any] = {
        "run": dataclasses.asdict(run),
        "checkpoint": str(checkpoint),
        "save": str(save) if save else "",
    }
    return json.dumps(told) + "\n"


if __name__ == "__main__":
    main()
