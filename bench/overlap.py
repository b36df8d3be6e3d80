"""What communication costs a training step, where compute is emulated: DDP with ringcomm's hook.

    python bench/overlap.py                       # 4 hosts on 1 Gbit/s, 25 M parameters
    python bench/overlap.py --codecs bf16 --factors 1,3 --bucket-mb 2

Needs root (netlab) and torch. For each codec a job of one rank per host takes DDP steps in which
layers sleep as long as a device would compute: a third of it in forward, two thirds in backward, in
all a multiple (--factors; 0: none) of the time that the codec's bytes take on the wire, the floor.
No step can be shorter than the larger of compute and floor; the goal is 1.10 of that.

DDP cannot reach it at every factor. It exchanges nothing while forward computes, so a step takes at
least forward + floor: the column `DDP's bound` is the larger of that and compute. At factor 1 it is
1.33 of the larger of the two, whatever the library. The verdict is about the goal all the same.

Exit code 1 if a result was not finite, 2 if a job failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence

from _site import Site
from netlab import NetLabError
from sources import steps

from ringcomm.codecs import parse
from ringcomm.errors import ConfigError

GOAL = 1.10
LAYERS, UNTIMED = 16, 2
HEADS = ("codec", "compute", "", "floor", "step", "/ max", "goal", "verdict", "DDP's bound",
         "/ bound", "hidden", "exposed", "wire / formula", "CPU s of all ranks")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Taken:
    """One codec at one compute time; means over steps and ranks, seconds and bytes of a step."""

    compute_s: float
    finite: bool
    buckets: int
    step_s: float
    hidden_s: float
    exposed_s: float
    wire_bytes: float
    port_bytes: float
    cpu_s: float


def floor_s(codec: str, parameters: int, hosts: int, mbit: float) -> float:
    """Seconds that those bytes take on a link of that rate, if it carried nothing else."""
    return steps.payload_bytes(codec, parameters, hosts) * 8 / (mbit * 1e6)


def ddp_bound_s(compute_s: float, floor: float, forward: float) -> float:
    """The least that a step of DDP can take: it exchanges nothing in forward."""
    return max(compute_s, forward * compute_s + floor)


def row(
    codec: str, one: Taken, floor: float, formula: float, options: argparse.Namespace
) -> tuple[str, ...]:
    """A line of the table."""
    least = max(one.compute_s, floor)
    bound = ddp_bound_s(one.compute_s, floor, options.forward)
    verdict = "wrong" if not one.finite else "met" if one.step_s <= GOAL * least else "short"
    milliseconds = (f"{1e3 * value:.1f} ms" for value in (
        one.compute_s, floor, one.step_s, bound, one.hidden_s, one.exposed_s
    ))  # fmt: skip
    compute, wire, step, bound_ms, hidden, exposed = milliseconds
    return (
        codec, compute, f"{one.compute_s / floor:.1f} x", wire, step, f"{one.step_s / least:.3f}",
        f"{GOAL:.2f}", verdict, bound_ms, f"{one.step_s / bound:.3f}", hidden, exposed,
        f"{one.wire_bytes / formula:.3f}", f"{one.cpu_s * options.hosts:.3f}",
    )  # fmt: skip


def measure(codec: str, floor: float, options: argparse.Namespace) -> list[Taken]:
    """Runs a codec's job. Raises NetLabError, or RuntimeError with what the job said."""
    way = {"kind": "gradients", "codec": codec, "bucket_mb": options.bucket_mb}
    ways = {f"{factor}": {**way, "compute_s": factor * floor} for factor in options.factors}
    asked = {
        "layers": steps.square(options.parameters, LAYERS), "compute_s": 0.0,
        "forward": options.forward, "ways": ways,
        "runs": [{"way": name, "steps": options.steps, "untimed": UNTIMED} for name in ways],
    }  # fmt: skip
    with Site(options.hosts, options.hosts, [options.rate]) as site:
        print(f"# {codec}: {site.describe()}; {os.cpu_count()} cores for all", flush=True)
        told = steps.runs_of(site.run(steps.command(asked), {}, options.timeout))
    names = [field.name for field in dataclasses.fields(Taken) if field.name != "compute_s"]
    return [
        Taken(ways[one["way"]]["compute_s"], **{name: one[name] for name in names})
        for one in told
    ]  # fmt: skip


def _line(cells: Sequence[str]) -> str:
    """Columns of widths that serve any row."""
    return "  ".join(
        cell.rjust(max(len(head), 9))
        for cell, head in zip(cells, HEADS, strict=True)
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[float]:
        return [float(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(prog="overlap.py", description="Steps with emulated compute.")
    add = parser.add_argument
    add("--hosts", type=int, default=4)
    add("--rate", type=float, default=1000, metavar="MBIT")
    add("--parameters", type=float, default=25e6)
    add("--codecs", type=lambda text: text.split(","), default="bf16,int8,onebit", metavar="LIST")
    add("--factors", type=numbers, default="0,1,3", help="compute over the floor")
    add("--forward", type=float, default=1 / 3, help="the forward's part of compute")
    add("--steps", type=int, default=5)
    add("--bucket-mb", type=float, default=5.0, help="DDP's buckets, in MB of float32")
    add("--timeout", type=float, default=300)
    options = parser.parse_args(argv)
    try:
        for codec in options.codecs:
            parse(codec, "--codecs ")
    except ConfigError as error:
        parser.error(str(error))
    if options.hosts < 2 or options.steps < 1 or options.parameters < LAYERS:
        parser.error(f"give 2 --hosts or more, a step or more, and {LAYERS} parameters or more")
    if not 0 <= options.forward < 1 or min(options.factors) < 0:
        parser.error("give --forward from 0 to below 1, and --factors of 0 or more")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = _parse(argv)
    parameters = sum(rows * columns for rows, columns in steps.square(options.parameters, LAYERS))
    finite = True
    print(f"# {parameters:,} parameters; compute is emulated: layers sleep")
    print(_line(HEADS))
    try:
        for codec in options.codecs:
            floor = floor_s(codec, parameters, options.hosts, options.rate)
            formula = steps.payload_bytes(codec, parameters, options.hosts)
            for one in measure(codec, floor, options):
                print(_line(row(codec, one, floor, formula, options)), flush=True)
                finite = finite and one.finite
    except (NetLabError, RuntimeError) as error:
        print(f"overlap: {error}", file=sys.stderr)
        return 2
    return 0 if finite else 1


if __name__ == "__main__":
    sys.exit(main())
