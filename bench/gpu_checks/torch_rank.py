"""One rank of gloo or NCCL for gpu_check.py: all-reduces of a float32 tensor, verified and timed.

    torch_rank.py '{"backend": "nccl", "bytes": 100000000, "calls": 5, "device": "cuda"}'

Rank 0 prints a line of JSON: seconds of a call (median of the mean over ranks, each to the end of
the GPU's work), whether the result was right on all ranks, and NCCL's version.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_checks.link_rank import own_cores


def main() -> None:
    """The rank."""
    asked = json.loads(sys.argv[1])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own_cores(rank, world)
    if asked["backend"] == "nccl":
        os.environ["NCCL_HOSTID"] = f"r{rank}"  # else NCCL refuses two ranks on a GPU
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device(asked["device"])
    dist.init_process_group(asked["backend"], timeout=datetime.timedelta(seconds=60))

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    x = torch.full((asked["bytes"] // 4,), rank + 1.0, device=device)
    dist.all_reduce(x)
    right = bool((x == world * (world + 1) / 2).all())
    x.zero_()
    took = []
    for _ in range(asked["calls"] + 1):  # the first uses up what the links let through at once
        synchronize()
        began = time.perf_counter()
        dist.all_reduce(x)
        synchronize()
        took.append(time.perf_counter() - began)
    table: Any = torch.tensor([*took[1:], 0.0 if right else 1.0], device=device)
    dist.all_reduce(table)
    if rank == 0:
        nccl: Any = torch.cuda.nccl
        version = nccl.version() if asked["backend"] == "nccl" else ""
        told = {
            "seconds": float(table[:-1].median()) / world,
            "right": float(table[-1]) == 0,
            "version": ".".join(map(str, version)),
        }
        print(json.dumps(told), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
