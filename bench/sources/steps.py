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
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.job import Job as Started
from lab.site import Ended, Site, finish

from ringcomm.codecs import parse

RANK = Path(__file__).with_name("_steps_rank.py")
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "eth0"}
ALONE = "compute alone"  # the way that others are held against
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
            {
                "way": name,
                "steps": way.get("steps", self.steps),
                "untimed": way.get("untimed", 1) if number else way.get("settle", self.settle),
            }
            for number in range(self.rounds)
            for name, way in self.ways.items()
        ]
        return {
            "layers": [list(shape) for shape in self.layers],
            "compute_s": self.compute_s,
            "ways": {**self.ways},
            "runs": runs,
        }


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
    asked = job.asked()
    started = site.start(command(asked), ENVIRONMENT)
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(started, len(asked["runs"]), over))
    watcher.start()
    try:
        ended = finish(started, timeout)
    finally:
        over.set()
        watcher.join()
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in job.ways}
    for one in runs_of(ended):
        runs[one["way"]].append(one)
    return runs


def _watch(job: Started, total: int, over: threading.Event) -> None:
    """Says of each run when it has ended."""
    told = 0
    while not over.wait(0.5):
        lines = [line for line in job.output(0).splitlines(True) if line[-1] == "\n"]
        done = [json.loads(line) for line in lines if line.startswith('{"way"')]
        for number, one in enumerate(done[told:], told + 1):
            said = f"{one['way']}, {1e3 * one['step_s']:.0f} ms a step"
            print(f"#   run {number} of {total}: {said}", flush=True)
        told = len(done)


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A way in a row: the median of its rounds, all of them, and what a step sends.

    step_s is that of all iterations of a step; see per.
    """
    rounds = [one["step_s"] for one in runs]
    if not all(one["finite"] for one in runs):
        raise RuntimeError(f"{runs[0]['way']}: a gradient is not finite")
    return {
        "step_s": statistics.median(rounds),
        "rounds": rounds,
        "per": runs[0]["per"],
        **{
            name: statistics.median(one[name] for one in runs)
            for name in ("port_bytes", "cpu_s", "waited_s")
        },
    }


def efficiency(ways: Mapping[str, Mapping[str, Any]], name: str) -> float:
    """The share of the time that a way of a row leaves for compute: what the compute alone took in
    the same round over what the way took; the median of the rounds."""
    return statistics.median(efficiencies(ways, name))


def efficiencies(ways: Mapping[str, Mapping[str, Any]], name: str) -> list[float]:
    """Of each round."""
    way, alone = ways[name], ways[ALONE]
    return [
        way["per"] * compute_s / step_s
        for compute_s, step_s in zip(alone["rounds"], way["rounds"], strict=True)
    ]


def exchange_s(ways: Mapping[str, Mapping[str, Any]], name: str) -> float:
    """Seconds that a way's step takes beyond compute, in the same way."""
    way, alone = ways[name], ways[ALONE]
    return statistics.median(
        step_s - way["per"] * compute_s
        for compute_s, step_s in zip(alone["rounds"], way["rounds"], strict=True)
    )


def payload_bytes(codec: str, parameters: int, hosts: int) -> float:
    """What a rank must send for a step: 2 (N-1)/N of the encoded gradients."""
    return parameters * parse(codec).bits / 8 * 2 * (hosts - 1) / hosts


def wire_s(codec: str, parameters: int, hosts: int, mbit: float) -> float:
    """Seconds that they take on ports of that rate together, by TCP's payload."""
    return payload_bytes(codec, parameters, hosts) * 8 / (mbit * 1e6 * GOODPUT)
