"""One rank of outer.py: iterations that sleep, alone and with OuterStep in turn.

    _outer_rank.py '{"settings": {"every": 30, "codec": "int4"}, "rounds": 6, "parameters": 1000000,
                     "compute_s": 0.05}'

An iteration sleeps and then moves all weights a little, as an inner optimizer would. Rank 0 prints
one line of JSON at the end.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ringcomm.torch import OuterStep

LAYERS = 16
UNTIMED = 1  # rounds of either kind


def main() -> None:
    """The rank."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("ringcomm")
    comm: Any = dist.group.WORLD.comm  # type: ignore[union-attr]
    width = asked["parameters"] // LAYERS
    model = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(LAYERS))
    noise = torch.randn(width, generator=torch.Generator().manual_seed(comm.rank)).mul_(1e-3)
    every, compute_s = asked["settings"]["every"], asked["compute_s"]

    def iterate(number: int) -> None:
        began = time.perf_counter()
        with torch.no_grad():
            model[number % LAYERS].add_(noise)
        time.sleep(max(0.0, compute_s - (time.perf_counter() - began)))

    taken: dict[str, list[float]] = {"alone": [], "outer": []}
    with OuterStep(model, None, comm=comm, **asked["settings"]) as outer:
        for turn in range(UNTIMED + asked["rounds"]):
            for way in ("alone", "outer"):
                comm.barrier()
                began = time.perf_counter()
                for number in range(every):
                    iterate(number)
                    if way == "outer":
                        outer.tick()
                if turn >= UNTIMED:
                    taken[way].append(time.perf_counter() - began)
        report = outer.report()
    if comm.rank == 0:
        told = {**taken, "sent_bytes": report.sent_bytes, "waited_s": report.waited_s,
                "rounds": outer.rounds}  # fmt: skip
        print(json.dumps(told), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
