"""How much of the time ranks train where outer steps exchange their weights, over slow links.

    python bench/outer.py                   # 4 hosts: int4 at 1 Gbit/s, sparse at 100 Mbit/s
    python bench/outer.py --hosts 2 --rounds 3

Needs root (netlab) and torch. Compute is emulated, a sleep of --compute for every iteration, so
that hosts which share this machine's cores do not take them from each other; bytes, codecs and the
outer rule are real. By the shape of 350 million parameters and 20 s for 30 iterations, at a tenth.
In one job plain iterations and iterations with OuterStep take turns, from a barrier on.

    goal      at least 97 % of the time without communication: iterations alone over those with

Exit code 1 if a goal was missed, 2 if a job failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from _site import Site
from netlab import NetLabError
from sources import steps

LAYERS, UNTIMED = 16, 1
GOAL = 0.97
HEADS = ("Mbit/s", "way", "alone", "outer", "MB sent", "waited", "trained", "verdict")


@dataclasses.dataclass(frozen=True)
class Way:
    """One line: a link's rate and OuterStep's settings for it."""

    name: str
    mbit: float
    settings: Mapping[str, Any]


WAYS = (
    Way("int4", 1000, {"codec": "int4", "fragments": 4, "delay": 5}),
    Way("sparse 1/64", 100, {"outer": "sparse", "fragments": 4, "delay": 5}),
)


@dataclasses.dataclass(frozen=True)
class Taken:
    """Of as many iterations as a parameter's round has: median seconds alone and with OuterStep,
    and the bytes that a rank sent and the seconds that it waited in them."""

    alone: float
    outer: float
    sent: float
    waited: float

    @property
    def trained(self) -> float:
        """The share of the time that is left for training."""
        return self.alone / self.outer


def measure(way: Way, options: argparse.Namespace) -> Taken:
    """One line of the table."""
    settings = {"every": options.every, **way.settings}
    way_of = {"per": options.every, "moves": True}
    ways = {"alone": {"kind": "alone", **way_of},
            "outer": {"kind": "apart", "settings": settings, **way_of}}  # fmt: skip
    turns = UNTIMED + options.rounds
    asked = {"layers": steps.square(options.parameters, LAYERS),
             "compute_s": options.compute / 1e3, "ways": ways,
             "runs": [{"way": one, "steps": 1, "untimed": 0}
                      for _ in range(turns) for one in ways]}  # fmt: skip
    with Site(options.hosts, options.hosts, [way.mbit]) as site:
        print(f"# {site.describe()}", flush=True)
        told = steps.runs_of(site.run(steps.command(asked), {}, options.timeout))
    alone, outer = (
        statistics.median([one["steps"][0] for one in told if one["way"] == name][UNTIMED:])
        for name in ways
    )
    last = told[-1]
    rounds = last["outer_rounds"] / way.settings["fragments"]  # each fragment has its own
    waited = [one["waited_s"] for one in told if one["way"] == "outer"][UNTIMED:]
    return Taken(alone, outer, last["sent_bytes"] / rounds, statistics.median(waited))


def row(way: Way, one: Taken) -> tuple[str, ...]:
    """A line of the table."""
    return (
        f"{way.mbit:g}", way.name, f"{one.alone:.3f} s", f"{one.outer:.3f} s",
        f"{one.sent / 1e6:.2f}", f"{1e3 * one.waited:.0f} ms", f"{one.trained:.3f}",
        "met" if one.trained >= GOAL else "short",
    )  # fmt: skip


def _line(cells: Sequence[str]) -> str:
    return "  ".join(cell.rjust(11) for cell in cells)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="outer.py", description="The time left for training.")
    add = parser.add_argument
    add("--hosts", type=int, default=4)
    add("--every", type=int, default=30, help="iterations of a round")
    add("--rounds", type=int, default=6, help="measured, of either kind")
    add("--parameters", type=float, default=35e6)
    add("--compute", type=float, default=66.7, metavar="MS", help="of an iteration")
    add("--timeout", type=float, default=600)
    options = parser.parse_args(argv)
    if options.hosts < 2 or options.rounds < 1 or options.compute <= 0 or options.parameters < 64:
        parser.error("give 2 --hosts or more, a round or more, --compute above 0, 64 parameters")
    if options.every < 24:
        parser.error("give --every 24 or more: four fragments are applied 5 iterations late")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = _parse(argv)
    met = True
    print(_line(HEADS))
    try:
        for way in WAYS:
            one = measure(way, options)
            print(_line(row(way, one)), flush=True)
            met = met and one.trained >= GOAL
    except (NetLabError, RuntimeError) as error:
        print(f"outer: {error}", file=sys.stderr)
        return 2
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
