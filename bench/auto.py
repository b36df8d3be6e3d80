"""Whether compression="auto" chooses well: its steps beside those of every fixed codec.

    python bench/auto.py                                  # 4 hosts at 100, 1000 and 10000 Mbit/s
    python bench/auto.py --rates 1000 --drop 0 --hosts 2

Needs root (netlab) and torch. Compute is emulated: layers sleep, a third of --compute in forward.
At each rate one job takes steps of every fixed codec, then of auto, then of the fixed ones again,
so that a load that comes and goes touches all. Of auto the first --settle steps do not count.

    goals
    at every rate                       at most 1.05 times the step of the best fixed codec
    where none hides (10000 Mbit/s)     at most 1.02 times the step of none
    the rate drops to a tenth           the codec in use is at most 1.05 times the best there within
    before a step (--drop)              60 steps

Medians, seconds. Exit code 1 if a goal was missed, 2 if a job failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from _job import Job
from _site import Site, finish
from netlab import NetLabError
from sources import steps

FIXED = ("none", "bf16", "int8")
NEAR, NONE_HIDES, FOLLOWS = 1.05, 1.02, 60
LAYERS = 16
UNTIMED = 2
HEADS = ("Mbit/s", *FIXED, "auto", "by then", "/ best", "/ none", "verdict")


@dataclasses.dataclass(frozen=True)
class Taken:
    """One rate: median seconds of a step.

    Attributes:
        fixed: by codec.
        auto: after it has settled.
        codec: that auto was in at the end.
    """

    mbit: float
    fixed: Mapping[str, float]
    auto: float
    codec: str

    @property
    def over_best(self) -> float:
        """Auto's step over that of the best fixed codec."""
        return self.auto / min(self.fixed.values())

    @property
    def is_met(self) -> bool:
        """Both goals of a rate."""
        hides = self.fixed["none"] <= NONE_HIDES * min(self.fixed.values())
        return self.over_best <= NEAR and (
            not hides or self.auto <= NONE_HIDES * self.fixed["none"]
        )


def followed_after(
    codecs: Sequence[Mapping[str, Any]], drop: int, fixed: Mapping[str, float]
) -> int | None:
    """Steps from the drop until auto used a codec that is near the best there, to stay; None: it
    does not at the end."""
    good = {codec for codec, step_s in fixed.items() if step_s <= NEAR * min(fixed.values())}
    since = None
    for stretch in codecs:
        if stretch["codec"] not in good:
            since = None
        elif since is None:
            since = stretch["first"]
    return None if since is None else max(0, since - drop)


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By fixed codec, over all its runs."""
    taken: dict[str, list[float]] = {codec: [] for codec in FIXED}
    for one in runs:
        if one["way"] in taken:
            taken[one["way"]] += one["steps"][UNTIMED:]
    return {codec: statistics.median(seconds) for codec, seconds in taken.items()}


def _command(options: argparse.Namespace, runs: Sequence[tuple[str, int]]) -> list[str]:
    ways = {
        codec: {"kind": "gradients", "codec": codec, "bucket_mb": options.bucket_mb,
                "tell": codec == "auto"} for codec, _ in runs
    }  # fmt: skip
    return steps.command({
        "layers": steps.square(options.parameters, LAYERS), "compute_s": options.compute / 1e3,
        "ways": ways,
        "runs": [{"way": codec, "steps": UNTIMED + count, "untimed": 0} for codec, count in runs],
    })  # fmt: skip


def _told(job: Job, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs of a job. Raises RuntimeError with what it said."""
    ended = finish(job, options.timeout)
    runs = steps.runs_of(ended)
    for line in re.findall(r"auto: .*", ended.output):
        print(f"#   {line}", flush=True)
    return runs


def at_rate(mbit: float, options: argparse.Namespace) -> Taken:
    """One line of the table."""
    fixed = [(codec, options.steps) for codec in FIXED]
    runs = [*fixed, ("auto", options.settle + options.steps), *fixed]
    with Site(options.hosts, options.hosts, [mbit]) as site:
        print(f"# {site.describe()}", flush=True)
        told = _told(site.start(_command(options, runs), {}), options)
    (auto,) = (one for one in told if one["way"] == "auto")
    settled = auto["steps"][-options.steps :]
    return Taken(mbit, medians(told), statistics.median(settled), auto["codecs"][-1]["codec"])


def drop(mbit: float, options: argparse.Namespace) -> tuple[int | None, dict[str, float]]:
    """Steps after which auto had followed a drop to a tenth, and the fixed codecs' steps there."""
    before = options.settle
    runs = [("auto", before + FOLLOWS + options.steps), *((c, options.steps) for c in FIXED)]
    with Site(options.hosts, options.hosts, [mbit]) as site:
        job = site.start(_command(options, runs), {})
        _wait_for_step(job, before, options.timeout)
        for host in range(options.hosts):
            site.slow(host, 0, mbit / 10)
        at = _latest_step(job)
        told = _told(job, options)
    (auto,) = (one for one in told if one["way"] == "auto")
    fixed = medians(told)
    used = ", ".join(f"{one['codec']} from {one['first']}" for one in auto["codecs"])
    print(f"# {mbit:g} to {mbit / 10:g} Mbit/s before step {at + 1}: {used}")
    return followed_after(auto["codecs"], at + 1, fixed), fixed


def _latest_step(job: Job) -> int:
    steps = re.findall(r'^\{"step": (\d+)\}', job.output(0), re.MULTILINE)
    return int(steps[-1]) if steps else -1


def _wait_for_step(job: Job, step: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while _latest_step(job) < step:
        if time.monotonic() > deadline or job.ranks[0].poll() is not None:
            return  # the job tells why
        time.sleep(0.005)


def row(one: Taken) -> tuple[str, ...]:
    """A line of the table."""
    times = [f"{1e3 * seconds:.1f} ms" for seconds in (*one.fixed.values(), one.auto)]
    return (
        f"{one.mbit:g}", *times, one.codec, f"{one.over_best:.3f}",
        f"{one.auto / one.fixed['none']:.3f}", "met" if one.is_met else "short",
    )  # fmt: skip


def _line(cells: Sequence[str]) -> str:
    return "  ".join(cell.rjust(9) for cell in cells)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="auto.py", description="How well auto chooses.")
    add = parser.add_argument
    add("--hosts", type=int, default=4)
    add("--rates", type=lambda text: [float(part) for part in text.split(",")],
        default="100,1000,10000", metavar="LIST", help="Mbit/s")
    add("--drop", type=float, default=1000, metavar="MBIT",
        help="the rate that drops to a tenth in mid-run; 0: none does")
    add("--parameters", type=float, default=2.5e6)
    add("--compute", type=float, default=200, metavar="MS", help="of a step, forward and backward")
    add("--bucket-mb", type=float, default=1.0, help="DDP's buckets, in MB of float32")
    add("--settle", type=int, default=80, help="steps of auto that do not count")
    add("--steps", type=int, default=20)
    add("--timeout", type=float, default=600)
    options = parser.parse_args(argv)
    if options.hosts < 2 or options.steps < 1 or options.parameters < LAYERS:
        parser.error(f"give 2 --hosts or more, a step or more, and {LAYERS} parameters or more")
    if any(rate < 10 for rate in options.rates) or 0 < options.drop < 10 or options.compute <= 0:
        parser.error("give rates of 10 Mbit/s or more, and --compute above 0")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = _parse(argv)
    met = True
    print(_line(HEADS))
    try:
        for mbit in options.rates:
            one = at_rate(mbit, options)
            print(_line(row(one)), flush=True)
            met = met and one.is_met
        if options.drop:
            after, _ = drop(options.drop, options)
            follows = after is not None and after <= FOLLOWS
            print(f"followed after {after} steps: {'met' if follows else 'short'}")
            met = met and follows
    except (NetLabError, RuntimeError) as error:
        print(f"auto: {error}", file=sys.stderr)
        return 2
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
