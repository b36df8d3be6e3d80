"""One rank of strangers.py: joins the others when told, and says what that took, as JSON.

    python bench/trials/strangers_rank.py RANK WORLD PORT SECRET HOLD

HOLD is for how many seconds this rank waits before it dials the others' lanes, whose listeners are
open meanwhile. It reads one line before it begins, and leaves when its input ends.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from ringcomm.bootstrap import lanes, mesh
from ringcomm.bootstrap.launch import Identity
from ringcomm.bootstrap.secret import Secret
from ringcomm.config import Config
from ringcomm.errors import RingcommError


class Counter(logging.Handler):
    """Counts the lines of a log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = 0

    def emit(self, _record: logging.LogRecord) -> None:
        self.lines += 1


def memory(field: str) -> int:
    """Of this process, in KiB."""
    with open("/proc/self/status", encoding="ascii") as file:
        found = next(line for line in file if line.startswith(field))
    return int(found.split()[1])


def hold_lanes(seconds: float) -> None:
    """Lets time pass before this rank connects to the others' lanes."""
    honest = lanes.LaneMaker.run

    def run(maker: lanes.LaneMaker, *arguments: Any) -> None:
        time.sleep(seconds)
        honest(maker, *arguments)

    lanes.LaneMaker.run = run  # type: ignore[method-assign]


def main() -> None:
    rank, world, port = map(int, sys.argv[1:4])
    secret, hold = Secret(bytes.fromhex(sys.argv[4])), float(sys.argv[5])
    hold_lanes(hold)
    counter = Counter()
    log = logging.getLogger("ringcomm")
    log.addHandler(counter)
    log.setLevel(logging.INFO)
    log.propagate = False
    print("ready", flush=True)
    sys.stdin.readline()
    before = memory("VmRSS")
    me = Identity(rank, world, None, None, "127.0.0.1", (port,), "explicit", "strangers")
    error = ""
    try:
        joined = mesh.join(me, Config(connect_timeout=90.0), secret)
    except RingcommError as failure:
        error = str(failure)
    # The clock is the same in all processes of a host.
    said = {
        "at": time.monotonic(),
        "error": error,
        "lines": counter.lines,
        "growth_kib": memory("VmHWM") - before,
    }
    print(json.dumps(said), flush=True)
    sys.stdin.readline()
    if not error:
        joined.close()


if __name__ == "__main__":
    main()
