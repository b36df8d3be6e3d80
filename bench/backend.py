"""What a collective of torch.distributed takes by backend "ringcomm" and by "gloo", in one run.

    torchrun --standalone --nproc-per-node 2 bench/backend.py
    torchrun --standalone --nproc-per-node 2 bench/backend.py --sizes 4,1M --call all_gather

The two backends are timed by turns, round by round, in the same processes; a round's time is that
of the slowest rank, and a row has the medians of all rounds, and of their ratios. Calls are waited
for (``async_op=False``), as most are; ``--asynchronous`` takes ``get_future().wait()``, as DDP
does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from sweep import parse_sizes

import ringcomm.torch  # noqa: F401

BACKENDS = ("ringcomm", "gloo")
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def call_of(name: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> Callable[[bool], object]:
    """One collective on a tensor, as ``f(async_op)``."""
    n = dist.get_world_size()
    if name == "all_reduce":
        return lambda a: dist.all_reduce(tensor, group=group, async_op=a)
    if name == "all_gather":
        out = tensor.new_empty(n * tensor.numel())
        return lambda a: _all_gather(out, tensor, group=group, async_op=a)
    if name == "broadcast":
        return lambda a: dist.broadcast(tensor, 0, group=group, async_op=a)
    return lambda a: dist.barrier(group=group, async_op=a)


def seconds(call: Callable[[bool], object], repeats: int, asynchronous: bool) -> float:
    """Of one call, the mean of some in succession."""
    began = time.perf_counter()
    for _ in range(repeats):
        work = call(asynchronous)
        if asynchronous:
            work.get_future().wait()  # type: ignore[attr-defined]
    return (time.perf_counter() - began) / repeats


def row(args: argparse.Namespace, size: int, groups: dict[str, dist.ProcessGroup]) -> None:
    """Times one size, and prints it on rank 0."""
    calls, times = {}, {name: [] for name in BACKENDS}  # type: ignore[var-annotated]
    for name, group in groups.items():
        tensor = torch.zeros(max(1, size // 4))
        calls[name] = call_of(args.call, tensor, group)
        seconds(calls[name], 3, args.asynchronous)
    repeats = max(2, min(200, (4 << 20) // max(size, 1)))
    for number in range(args.rounds):
        for name in BACKENDS if number % 2 else reversed(BACKENDS):
            dist.barrier(group=groups["gloo"])
            took = torch.tensor(seconds(calls[name], repeats, args.asynchronous))
            dist.all_reduce(took, op=dist.ReduceOp.MAX, group=groups["gloo"])
            times[name].append(float(took))
    ours, theirs = (statistics.median(times[name]) for name in BACKENDS)
    ratio = statistics.median(a / b for a, b in zip(*times.values(), strict=True))
    if dist.get_rank() == 0:
        print(f"{size:>10} {ours * 1e6:>12.1f} {theirs * 1e6:>12.1f} {ratio:>8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=parse_sizes, default=parse_sizes("4,1K,16K,256K,1M,4M,16M"))
    parser.add_argument("--call", default="all_reduce",
                        choices=("all_reduce", "all_gather", "broadcast", "barrier"))  # fmt: skip
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--asynchronous", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("ringcomm")
    groups = {"ringcomm": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    if dist.get_rank() == 0:
        print(f"{args.call}, {dist.get_world_size()} ranks; us per call, medians of {args.rounds}")
        print(f"{'bytes':>10} {'ringcomm':>12} {'gloo':>12} {'ratio':>8}")
    for size in args.sizes:
        row(args, size, groups)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
