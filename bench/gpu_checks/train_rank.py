"""One rank of the step train: DDP steps on a GPU with ringcomm's hook, beside compute alone.

    train_rank.py '{"device": "cuda", "width": 1250, "layers": 16, "target_s": 0.1,
                         "steps": 6, "codec": "bf16", "bucket_mb": 5}'

Rank 0 prints a line of JSON, means over the ranks: seconds of a step's compute (all ranks at once,
without exchange), of its forward, of a DDP step; the error of a gradient, and whether it has the
same bits on all ranks. The batch is chosen so that compute takes about target_s.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_checks.link_rank import own_cores
from ringcomm.torch import HookState, allreduce_hook

MOST = 1 << 16  # examples of a batch


class Trainer:
    """A model of square layers, and what one step of it is."""

    def __init__(self, asked: dict[str, Any], rank: int) -> None:
        self.device = torch.device(asked["device"])
        torch.manual_seed(1)
        width = asked["width"]
        layers = [nn.Linear(width, width, bias=False) for _ in range(asked["layers"])]
        self.model = nn.Sequential(*layers).to(self.device)
        self._random = torch.Generator().manual_seed(rank)
        self.width = width
        self.take(64)

    def take(self, batch: int) -> None:
        """Another batch."""
        self.batch = batch
        self.x = torch.randn(batch, self.width, generator=self._random).to(self.device)

    def step(self, model: nn.Module) -> None:
        self.model.zero_grad(set_to_none=False)
        model(self.x).square().mean().backward()

    def forward(self, model: nn.Module) -> None:
        with torch.no_grad():
            model(self.x)

    def seconds(self, call: Callable[[nn.Module], None], model: nn.Module, steps: int) -> float:
        """Of one, the median, each to the end of the GPU's work."""
        took = []
        for _ in range(steps):
            self.synchronize()
            began = time.perf_counter()
            call(model)
            self.synchronize()
            took.append(time.perf_counter() - began)
        return statistics.median(took)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def gradient(self) -> Any:
        """Of the first layer, on the host."""
        first = next(self.model.parameters())
        assert first.grad is not None
        return first.grad.detach().cpu().numpy().copy()


def mean(comm: Any, *values: float) -> list[float]:
    """Over the ranks."""
    return list(map(float, comm.allreduce(np.array(values), "avg")))


def choose_batch(trainer: Trainer, comm: Any, target_s: float) -> None:
    """The same on all ranks, which compute at once."""
    for _ in range(3):
        trainer.step(trainer.model)
        comm.barrier()
        (took,) = mean(comm, trainer.seconds(trainer.step, trainer.model, 3))
        batch = int(trainer.batch * min(64.0, target_s / took))
        trainer.take(max(16, min(MOST, batch)))


def main() -> None:
    """The rank."""
    asked = json.loads(sys.argv[1])
    own_cores(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    torch.set_num_threads(1)
    dist.init_process_group("ringcomm")
    comm: Any = dist.group.WORLD.comm  # type: ignore[union-attr]
    trainer = Trainer(asked, comm.rank)
    choose_batch(trainer, comm, asked["target_s"])
    steps = asked["steps"]
    trainer.step(trainer.model)
    expected = comm.allreduce(trainer.gradient(), "avg")
    comm.barrier()
    compute_s = trainer.seconds(trainer.step, trainer.model, steps)
    comm.barrier()
    forward_s = trainer.seconds(trainer.forward, trainer.model, steps)
    ddp = DistributedDataParallel(
        trainer.model, bucket_cap_mb=asked["bucket_mb"], gradient_as_bucket_view=True
    )
    state = HookState(asked["codec"], comm, model=trainer.model)
    ddp.register_comm_hook(state, allreduce_hook)
    for _ in range(3):  # after the first, DDP makes its buckets anew
        trainer.step(ddp)
    comm.barrier()
    step_s = trainer.seconds(trainer.step, ddp, steps)
    found = trainer.gradient()
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    digest = hashlib.blake2b(found.tobytes(), digest_size=8).digest()
    digests = comm.allgather(np.frombuffer(digest, np.uint8))
    means = mean(comm, compute_s, forward_s, step_s, error)
    if comm.rank == 0:
        names = ("compute_s", "forward_s", "step_s", "error")
        same = bool((digests == digests[0]).all())
        told = {**dict(zip(names, means, strict=True)), "same": same, "batch": trainer.batch}
        print(json.dumps(told), flush=True)
    comm.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
