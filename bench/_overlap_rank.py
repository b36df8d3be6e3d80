"""One rank of overlap.py: DDP steps whose compute is emulated, by one codec, timed.

    _overlap_rank.py '{"codec": "int8", "compute_s": [0, 0.3], "steps": 4, "layers": 16,
                       "width": 1250, "bucket_mb": 5, "forward": 0.333}'

Rank 0 prints a line of JSON for each compute time (Taken of overlap.py). The model's layers compute
nothing: they sleep (ringcomm.train.emulate), and their gradients lie in DDP's buckets already, as a
device's own memory traffic is no load of the host. So all processor time is that of communication.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringcomm.torch import HookState, allreduce_hook
from ringcomm.train.emulate import EmulatedDevice

UNTIMED = 2  # steps: after the first, DDP makes its buckets anew


class _Pass(torch.autograd.Function):
    """Backward leaves the weight's gradient as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class Layer(nn.Module):
    """A square matrix with a gradient."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.zeros(width, width))
        self.weight.grad = torch.randn(width, width, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Pass.apply(x, self.weight)
        return out


def run(asked: dict[str, Any], compute_s: float) -> dict[str, Any]:
    """The steps at one compute time; what the ranks saw on average."""
    comm: Any = dist.group.WORLD.comm  # type: ignore[union-attr]
    layers = asked["layers"]
    model = nn.Sequential(
        *(Layer(asked["width"], comm.rank * layers + layer) for layer in range(layers))
    )
    ddp = DistributedDataParallel(
        model, bucket_cap_mb=asked["bucket_mb"], gradient_as_bucket_view=True
    )
    state = HookState(asked["codec"], comm, model=model, force=True)
    ddp.register_comm_hook(state, allreduce_hook)
    for _ in range(UNTIMED):
        ddp(torch.ones(1)).sum().backward()
    EmulatedDevice(model, compute_s, asked["forward"])
    comm.barrier()
    state.reset()
    cpu, sent, began = time.process_time(), _port_bytes(), time.perf_counter()
    for _ in range(asked["steps"]):
        ddp(torch.ones(1)).sum().backward()
    took = time.perf_counter() - began
    cpu, sent = time.process_time() - cpu, _port_bytes() - sent
    steps = state.report()["steps"]
    parts = [sum(step[name] for step in steps) for name in ("hidden_s", "exposed_s", "wire_bytes")]
    finite = all(bool(layer.weight.grad.isfinite().all()) for layer in model)  # type: ignore[union-attr]
    means = comm.allreduce(np.array([took, *parts, sent, cpu]) / asked["steps"], "avg")
    names = ("step_s", "hidden_s", "exposed_s", "wire_bytes", "port_bytes", "cpu_s")
    return {"compute_s": compute_s, "finite": finite, "buckets": steps[-1]["buckets"],
            **dict(zip(names, means.tolist(), strict=True))}  # fmt: skip


def _port_bytes() -> int:
    """Sent by this host's network ports, link headers included."""
    return sum(int(path.read_text()) for path in
               Path("/sys/class/net").glob("eth*/statistics/tx_bytes"))  # fmt: skip


def main() -> None:
    """The rank."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("ringcomm")
    for compute_s in asked["compute_s"]:
        told = run(asked, compute_s)
        if dist.get_rank() == 0:
            print(json.dumps(told), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
