"""Trains for minutes over two ports, one of which goes and comes at random, and once more without.

    python bench/flapping.py --minutes 10

Two hosts train with DDP (trials/failover_rank.py). At any time at most one port is broken, by one
of failover.py's faults. The second run takes as many steps from the same start, undisturbed: after
each step each rank must have had the same loss and weights in both runs, bit for bit. Needs what
failover.py needs.
"""

from __future__ import annotations

import argparse
import functools
import random
import subprocess
import sys
import time
from collections.abc import Sequence

from failover import FAULTS, Drill, FailedError, Place, befall, mend
from lab.wiring import NetLabError, why_unavailable

_MBIT = 400.0
_LONGEST_S = 10.0  # with and without a fault


class Training(Drill):
    """A job that trains, and the results of each rank's steps."""

    def __init__(self) -> None:
        super().__init__(2, "one training", _MBIT)

    def results(self) -> list[list[str]]:
        """Of each rank, step by step."""
        return [[step["step"][2] for step in rank.steps] for rank in self.ranks]

    def has(self, steps: int) -> bool:
        """Whether each rank has taken so many steps."""
        return all(len(rank.steps) >= steps for rank in self.ranks)

    def made(self) -> int:
        """How many connections have been made anew."""
        return sum(number - 1 for rank in self.ranks for *_, number, _ in rank.lanes()) // 2

    def flap(self, seconds: float, chance: random.Random) -> list[int]:
        """Breaks ports and mends them for so long; returns the connections that each fault cost."""
        cost, until = list[int](), time.monotonic() + seconds
        self.wait(self.is_whole, "all lanes")
        while time.monotonic() < until:
            host, nic = chance.randrange(2), chance.randrange(2)
            fault = chance.choice(list(FAULTS))
            place = Place(host, nic, 1 - host if fault == "mute" else -1)
            befall(self.lab, fault, place, self.mbit)
            self.pump(lambda: False, chance.uniform(0.0, _LONGEST_S))
            mend(self.lab, Place(-1, nic) if fault == "switch" else place)
            mended = time.monotonic()
            self.pump(lambda: False, chance.uniform(0.0, _LONGEST_S))
            whole = functools.partial(self.is_whole, mended + 0.1)
            self.wait(whole, f"all lanes after {fault}")
            cost.append(self.made() - sum(cost))
        return cost


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns 0 if the runs are equal, 1 if not, 2 if it cannot run."""
    parser = argparse.ArgumentParser(
        prog="flapping.py", description="Compare training beside failing ports with one without."
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    if reason := why_unavailable():
        print(f"flapping: {reason}", file=sys.stderr)
        return 2
    try:
        with Training() as hurt:
            cost = hurt.flap(60 * options.minutes, random.Random(options.seed))
            found = hurt.results()
        steps = min(map(len, found))
        with Training() as quiet:
            quiet.wait(lambda: quiet.has(steps), "as many steps", 120 * options.minutes)
            expected = quiet.results()
    except (FailedError, NetLabError, OSError, subprocess.CalledProcessError) as error:
        print(f"flapping: {error}", file=sys.stderr)
        return 1 if isinstance(error, FailedError) else 2
    wrong = [
        step
        for step in range(steps)
        if any(ours[step] != theirs[step] for ours, theirs in zip(found, expected, strict=True))
    ]
    hits = sum(map(bool, cost))
    vain = len(cost) - hits
    print(f"{steps} steps; {hits} faults cost {sum(cost)} connections, {vain} none")
    print(f"step {wrong[0]} differs" if wrong else "loss and weights equal after every step")
    return int(bool(wrong) or hits == 0)


if __name__ == "__main__":
    sys.exit(main())
