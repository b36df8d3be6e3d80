"""One rank of the step hierarchy: DDP steps with HierarchicalState, verified.

    hierarchy_rank.py '{"device": "cuda", "local": "nccl", "hosts": 2, "codecs": ["bf16"],
                             "width": 512, "layers": 8, "bucket_mb": 1, "steps": 5}'

Rank 0 prints a line of JSON once the local groups work, and one for each codec: seconds of a step
(the median, mean over the ranks), how far the gradients are from the mean of all ranks' (relative,
of all elements), and whether they have the same bits on all ranks.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_checks.link_rank import own_cores
from gpu_checks.train_rank import Trainer, mean
from ringcomm.torch import HierarchicalState, allreduce_hook

WARM_STEPS = 3  # after the first, DDP makes its buckets anew


def gradients(model: nn.Module) -> Any:
    """Of all parameters, on the host."""
    found = [one.grad.detach().cpu().reshape(-1) for one in model.parameters()]  # type: ignore[union-attr]
    return torch.cat(found).numpy()


def local_group(asked: dict[str, Any], world: int, device: torch.device) -> Any:
    """That of this rank's host, once it has shown that it works."""
    group, _ = dist.new_subgroups(
        world // asked["hosts"], backend=asked["local"], timeout=datetime.timedelta(seconds=30)
    )
    probe = torch.ones(1000, device=device)
    dist.all_reduce(probe, group=group)
    assert float(probe.sum()) == 1000 * world // asked["hosts"], "the local group sums wrongly"
    return group


def measure(asked: dict[str, Any], codec: str, comm: Any, local: Any) -> dict[str, Any]:
    """One codec; the same on all ranks."""
    trainer = Trainer(asked, comm.rank)
    trainer.step(trainer.model)
    expected = comm.allreduce(gradients(trainer.model).astype(np.float64), "avg")
    ddp = DistributedDataParallel(
        trainer.model, bucket_cap_mb=asked["bucket_mb"], gradient_as_bucket_view=True
    )
    name = None if codec == "none" else codec
    state = HierarchicalState(name, comm, local_group=local, model=trainer.model)
    ddp.register_comm_hook(state, allreduce_hook)
    for _ in range(WARM_STEPS):
        trainer.step(ddp)
    comm.barrier()
    step_s = trainer.seconds(trainer.step, ddp, asked["steps"])
    found = gradients(trainer.model)
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    digest = hashlib.blake2b(found.tobytes(), digest_size=8).digest()
    digests = comm.allgather(np.frombuffer(digest, np.uint8))
    step_s, error = mean(comm, step_s, error)
    state.close()
    same = bool((digests == digests[0]).all())
    return {"codec": codec, "step_s": step_s, "error": error, "same": same}


def main() -> None:
    """The rank."""
    asked = json.loads(sys.argv[1])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own_cores(rank, world)
    if asked["local"] == "nccl":
        os.environ["NCCL_HOSTID"] = f"r{rank}"  # else NCCL refuses two ranks on a GPU
    torch.set_num_threads(1)
    dist.init_process_group("ringcomm")
    comm: Any = dist.group.WORLD.comm  # type: ignore[union-attr]
    local = local_group(asked, world, torch.device(asked["device"]))
    comm.barrier()
    if rank == 0:
        print(json.dumps({"local": asked["local"]}), flush=True)
    for codec in asked["codecs"]:
        told = measure(asked, codec, comm, local)
        if rank == 0:
            print(json.dumps(told), flush=True)
    comm.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
