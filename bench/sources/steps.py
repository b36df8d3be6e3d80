"""Training steps whose compute is emulated, over the hosts of a netlab; real bytes, real codecs.

A job has ways of making steps (_steps_rank.py knows which there are) and runs: so many steps by one
way, one run after the other. Ways by turns in one job meet the same network and the same load.

    told = steps.run(site, job)         {"fp32": [Run, Run], "bf16": [Run, Run]}

Invariants: a step's time is the mean over the ranks; nothing of another way is in flight while one
is timed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _site import Ended, Site

from ringcomm.codecs import parse

RANK = Path(__file__).with_name("_steps_rank.py")
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "eth0"}
GOODPUT = 1448 / 1514  # of a port's rate, in payload of TCP
UNTIMED = 3  # steps: DDP makes its buckets anew after the first, PowerSGD begins after the second

Way = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Job:
    """What the ranks do.

    Attributes:
        layers: rows and columns of each layer's weight, from the input on.
        compute_s: forward and backward of an iteration.
        ways: settings by name.
        rounds: of all ways, in order, each so many steps.
        settle: steps of a way's first run that do not count.

    A way may have steps, settle and untimed (of its later runs) of its own.
    """

    layers: Sequence[Sequence[int]]
    compute_s: float
    ways: Mapping[str, Way]
    rounds: int
    steps: int
    settle: int = UNTIMED

    def asked(self) -> dict[str, Any]:
        """As the rank program takes it."""
        runs = [
            {"way": name, "steps": way.get("steps", self.steps),
             "untimed": way.get("untimed", 1) if number else way.get("settle", self.settle)}
            for number in range(self.rounds) for name, way in self.ways.items()
        ]  # fmt: skip
        return {"layers": [list(shape) for shape in self.layers], "compute_s": self.compute_s,
                "ways": {**self.ways}, "runs": runs}  # fmt: skip


def square(parameters: float, layers: int) -> list[list[int]]:
    """Layers of about so many parameters in all."""
    width = round(math.sqrt(parameters / layers))
    return [[width, width]] * layers


def command(asked: Mapping[str, Any]) -> list[str]:
    """Of a rank."""
    return [sys.executable, str(RANK), json.dumps(asked)]


def runs_of(ended: Ended) -> list[dict[str, Any]]:
    """What rank 0 told of each run. Raises RuntimeError with what a job that fails said."""
    return [record for record in ended.records() if "way" in record]


def run(site: Site, job: Job, timeout: float) -> dict[str, list[dict[str, Any]]]:
    """The runs of each way. Raises RuntimeError with what a job that fails said."""
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in job.ways}
    for one in runs_of(site.run(command(job.asked()), ENVIRONMENT, timeout)):
        runs[one["way"]].append(one)
    return runs


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A way in a row: the median of its rounds, all of them, and what a step sends.

    step_s is that of all iterations of a step; see per.
    """
    rounds = [one["step_s"] for one in runs]
    if not all(one["finite"] for one in runs):
        raise RuntimeError(f"{runs[0]['way']}: a gradient is not finite")
    return {
        "step_s": statistics.median(rounds), "rounds": rounds, "per": runs[0]["per"],
        **{name: statistics.median(one[name] for one in runs)
           for name in ("port_bytes", "cpu_s", "waited_s")},
    }  # fmt: skip


def efficiency(way: Mapping[str, Any], compute_s: float) -> float:
    """The share of the time that a way of a row leaves for compute."""
    return float(way["per"] * compute_s / way["step_s"])


def payload_bytes(codec: str, parameters: int, hosts: int) -> float:
    """What a rank must send for a step: 2 (N-1)/N of the encoded gradients."""
    return parameters * parse(codec).bits / 8 * 2 * (hosts - 1) / hosts


def wire_s(codec: str, parameters: int, hosts: int, mbit: float) -> float:
    """Seconds that they take on ports of that rate together, by TCP's payload."""
    return payload_bytes(codec, parameters, hosts) * 8 / (mbit * 1e6 * GOODPUT)
