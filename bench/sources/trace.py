"""A link whose rate changes: how it is made, and how it is played to a lab while a job runs.

    python bench/sources/trace.py > bench/traces/wan115.json       makes the file that ships, again

Logarithms of the rate follow an autoregression of the first order with KEEP from one part to the
next, so that a bad stretch lasts some minutes, cut off at LEAST and MOST, and scaled to the mean.

Invariant: the file follows from the constants here alone; a test makes it again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

FILE = Path(__file__).resolve().parent.parent / "traces" / "wan115.json"
SEED, PARTS, PART_S, MEAN_MBIT = 115, 60, 10.0, 115.0
KEEP, SPREAD = 0.8, 0.5
LEAST, MOST = 0.2, 3.0  # of the mean


@dataclasses.dataclass(frozen=True)
class Trace:
    """Rates one after the other, each for as long."""

    part_s: float
    mbit: tuple[float, ...]

    @property
    def mean_mbit(self) -> float:
        """Over its length."""
        return sum(self.mbit) / len(self.mbit)

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.part_s * len(self.mbit)

    def scaled(self, rate: float, seconds: float) -> Trace:
        """With rates and parts of other sizes."""
        return Trace(self.part_s * seconds, tuple(rate * mbit for mbit in self.mbit))


def make() -> Trace:
    """The trace that ships."""
    source, level, rates = random.Random(SEED), 0.0, []
    for _ in range(PARTS):
        level = KEEP * level + SPREAD * math.sqrt(1 - KEEP * KEEP) * source.gauss(0.0, 1.0)
        rates.append(math.exp(level))
    for _ in range(20):  # until what is cut off moves the mean no more
        mean = sum(rates) / PARTS
        rates = [min(MOST, max(LEAST, rate / mean)) for rate in rates]
    return Trace(PART_S, tuple(round(MEAN_MBIT * rate, 1) for rate in rates))


def load(path: Path = FILE) -> Trace:
    """A trace of a file."""
    told = json.loads(path.read_text(encoding="utf-8"))
    return Trace(told["part_s"], tuple(told["mbit"]))


@contextlib.contextmanager
def played(trace: Trace, slow: Callable[[int, int, float], None], hosts: int) -> Iterator[None]:
    """The ports of all hosts follow the trace, from its beginning and over and over.

    slow: sets the Mbit/s of a host's port.
    """
    ended = threading.Event()
    failed: list[BaseException] = []

    def play() -> None:
        began = time.monotonic()
        try:
            for number, mbit in enumerate(itertools.cycle(trace.mbit)):
                for host in range(hosts):
                    slow(host, 0, mbit)
                if ended.wait(max(0.0, began + (number + 1) * trace.part_s - time.monotonic())):
                    return
        except Exception as error:  # told of at the end
            failed.append(error)

    player = threading.Thread(target=play, name="trace", daemon=True)
    player.start()
    try:
        yield
    finally:
        ended.set()
        player.join()
    if failed:
        raise RuntimeError(f"the link could not follow its trace: {failed[0]}")


def text(trace: Trace) -> str:
    """Of the file."""
    about = f"bench/sources/trace.py: seed {SEED}, {PARTS} parts, mean {MEAN_MBIT:g} Mbit/s"
    told = {"about": about, "part_s": trace.part_s, "mbit": list(trace.mbit)}
    return json.dumps(told, indent=1) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text(make()))
