"""All-reduces back to back for some seconds, as a rank program, for rates that change meanwhile.

Rank 0 writes the moments between its calls (time.monotonic(), the same for every process of the
machine) as JSON at the end, and says "began" before the first.

Invariant: rank 0's clock alone ends the loop; the others learn it from the result, whose first
element is not 0 in the last call.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import ringcomm


def loop(size: int, seconds: float) -> list[float]:
    """Moments before the first call and after each; called by all ranks."""
    tensor = np.ones(size // 4, np.float32)
    for _ in range(3):
        ringcomm.allreduce(tensor, "avg")
    print("began", flush=True)
    stamps = [time.monotonic()]
    end = stamps[0] + seconds
    stop = False
    while not stop:
        tensor[0] = ringcomm.rank() == 0 and stamps[-1] >= end
        ringcomm.allreduce(tensor, "avg")
        stamps.append(time.monotonic())
        stop = bool(tensor[0])
    return stamps


def main(argv: Sequence[str] | None = None) -> int:
    """The rank program; returns its exit code."""
    parser = argparse.ArgumentParser(prog="shift.py", description="All-reduces back to back.")
    parser.add_argument("--size", type=int, default=4_000_000, help="bytes")
    parser.add_argument("--seconds", type=float, default=9.0)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(argv)
    ringcomm.init()
    stamps = loop(options.size, options.seconds)
    if ringcomm.rank() == 0:
        options.json.write_text(json.dumps({"stamps": stamps}) + "\n")
    ringcomm.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
