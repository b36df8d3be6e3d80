"""One rank of auto.py: DDP steps whose compute is emulated, by one codec after the other, timed.

    _auto_rank.py '{"runs": [["bf16", 10], ["auto", 80]], "compute_s": 0.2, "layers": 16,
                    "width": 395, "bucket_mb": 1}'

Rank 0 prints a line of JSON after each step of "auto" ({"step": 17}), so that the link can be
changed at a step, and one for each run: its codec, the seconds of every step, and which codec was
in use when.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from _overlap_rank import UNTIMED, Layer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringcomm.torch import HookState, allreduce_hook
from ringcomm.train.emulate import EmulatedDevice


def run(asked: dict[str, Any], codec: str, steps: int) -> dict[str, Any]:
    """The steps of one codec."""
    comm: Any = dist.group.WORLD.comm  # type: ignore[union-attr]
    layers = asked["layers"]
    model = nn.Sequential(
        *(Layer(asked["width"], comm.rank * layers + layer) for layer in range(layers))
    )
    ddp = DistributedDataParallel(
        model, bucket_cap_mb=asked["bucket_mb"], gradient_as_bucket_view=True
    )
    EmulatedDevice(model, asked["compute_s"])
    state: Any = HookState(codec, comm, model=model)  # type: ignore[arg-type]
    ddp.register_comm_hook(state, allreduce_hook)
    taken = []
    for step in range(UNTIMED + steps):
        began = time.perf_counter()
        ddp(torch.ones(1)).sum().backward()
        taken.append(time.perf_counter() - began)
        if codec == "auto" and comm.rank == 0:
            print(json.dumps({"step": step}), flush=True)
    return {"codec": codec, "steps": taken, "codecs": state.report()["codecs"]}


def main() -> None:
    """The rank."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("ringcomm").setLevel(logging.INFO)
    dist.init_process_group("ringcomm")
    for codec, steps in asked["runs"]:
        told = run(asked, codec, steps)
        if dist.get_rank() == 0:
            print(json.dumps(told), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
