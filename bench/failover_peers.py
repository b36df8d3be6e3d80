"""Breaks a port under other libraries, as failover.py does under ringcomm, and tells what they do.

    python bench/failover_peers.py --out rows.jsonl       # all trials; goes on where it was stopped
    python bench/failover_peers.py --table rows.jsonl

Each trial is a job of its own on two hosts with two ports, both of which the library has:
all-reduces of 4 MB without end, of which gloo sends half in a group of each port. The second port,
which no launcher or store uses, is broken at a random moment for 30 s. What the ranks do meanwhile,
and in the 90 s after the repair, is the outcome:

    goes on    calls end while the port is broken
    waits      none does, and calls end once it is mended
    ends       every rank ends by itself
    hangs      neither, or one rank alone ends

The longest gap is that between the ends of two calls; it says how much of "goes on" was a stall.

Needs what failover.py needs, and peers.py's environment of Open MPI (`peers.py --install`).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import select
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from failover import FAULTS, Place, Rank, befall, mend, read_rows
from lab.events import listening
from lab.site import Site
from lab.wiring import NetLabError, why_unavailable
from libraries.contenders import CONTENDERS, ENVS

LIBRARIES = ("ringcomm", "gloo-ports", "openmpi-tcp")
_BYTES, _MBIT = 4_000_000, 400.0
_BROKEN_S, _MENDED_S = 30.0, 90.0  # TCP sends again at 51 s and 102 s, say
_NIC = 1
_START_S = 120.0
_CALLS = 2  # that show that a job works: one may have been all but over
Row = dict[str, Any]


class Job:
    """A library's job; a context manager."""

    def __init__(self, library: str) -> None:
        self.library = library
        self.site = Site(2, 2, [_MBIT, _MBIT], slowest=_MBIT / 100)
        self.ranks: dict[socket.socket, Rank] = {}
        self.ended: dict[socket.socket, float] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Job:
        with contextlib.ExitStack() as stack:
            path, listener = stack.enter_context(listening(2, _START_S))
            stack.enter_context(self.site)
            self._start(path)
            for _ in range(2):
                self.ranks[stack.enter_context(listener.accept()[0])] = Rank()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, path: str) -> None:
        contender = CONTENDERS[self.library]
        python = contender.find(ENVS)
        if isinstance(python, str):
            raise NetLabError(f"{self.library}: {python}")
        program = Path(__file__).parent / "trials" / "failover_peer_rank.py"
        options = [path, str(_BYTES)]
        limit = _START_S + _BROKEN_S + _MENDED_S + 10
        threading.Thread(
            target=contender.run,
            args=(self.site, python, options, limit, program),
            daemon=True,  # run() ends with its ranks, whose sockets are closed
        ).start()

    def calls(self, since: float) -> int:
        """Of the rank that has made the fewest."""
        return min(
            sum(step["ended"] > since for step in rank.steps) for rank in self.ranks.values()
        )

    def hear(self, seconds: float, calls: int, since: float) -> bool:
        """Takes what the ranks say until each has made so many calls, or all have ended."""
        deadline = time.monotonic() + seconds
        while self.calls(since) < calls and len(self.ended) < 2:
            if time.monotonic() > deadline:
                return False
            living = [each for each in self.ranks if each not in self.ended]
            for ready in select.select(living, [], [], 0.05)[0]:
                data = ready.recv(1 << 16)
                self.ranks[ready].take(json.loads(data) if data else {})
                if not data:
                    self.ended[ready] = time.monotonic()
        return self.calls(since) >= calls


def longest_gap(rank: Rank) -> float:
    """Seconds between the ends of two calls."""
    return max(after["ended"] - before["ended"] for before, after in itertools.pairwise(rank.steps))


def trial(library: str, fault: str, seed: str) -> Row:
    """The trial's row."""
    chance = random.Random(f"{library} {fault} {seed}")
    host = chance.randrange(2)
    place = Place(-1 if fault == "switch" else host, _NIC, 1 - host if fault == "mute" else -1)
    with Job(library) as job:
        if not job.hear(_START_S, _CALLS, 0.0):
            raise NetLabError(f"{library} does not start")
        job.hear(chance.uniform(0.0, 1.0), sys.maxsize, 0.0)
        hit = time.monotonic()
        befall(job.site.lab, fault, place, _MBIT)
        in_it = job.hear(_BROKEN_S, _CALLS, hit + 0.5)
        late = hit + _BROKEN_S - time.monotonic()
        if in_it and late > 0:
            job.hear(late, sys.maxsize, 0.0)
        mend(job.site.lab, place)
        mended = time.monotonic()
        after = job.hear(_MENDED_S, _CALLS, mended)
        over = len(job.ended) == 2
        outcome = "ends" if over else "goes on" if in_it else "waits" if after else "hangs"
        return {
            "library": library,
            "fault": fault,
            "seed": seed,
            "outcome": outcome,
            "gap": round(max(map(longest_gap, job.ranks.values())), 2),
            "seconds": round(max(job.ended.values()) - hit, 2) if over else None,
            "wrong": sum(rank.wrong for rank in job.ranks.values()),
            "said": sorted({rank.failed for rank in job.ranks.values() if rank.failed}),
        }


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| library, fault | trials | outcome | longest gap, s | ended after, s | wrong |"]
    lines.append("|---|---|---|---|---|---|")
    for library in LIBRARIES:
        for fault in FAULTS:
            group = [row for row in rows if (row["library"], row["fault"]) == (library, fault)]
            outcomes = [row["outcome"] for row in group]
            times = [row["seconds"] for row in group if row["seconds"] is not None]
            counted = ", ".join(f"{outcomes.count(each)} {each}" for each in sorted({*outcomes}))
            gaps = [row["gap"] for row in group]
            wrong = sum(row["wrong"] for row in group)
            name = f"{library}, {fault}"
            if group:
                spans = f"{_span(gaps)} | {_span(times)}"
                lines.append(f"| {name} | {len(group)} | {counted} | {spans} | {wrong} |")
    return "\n".join(lines)


def _span(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f}, {max(values):.1f}" if values else "-"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns 0, or 2 if it cannot run."""
    parser = argparse.ArgumentParser(
        prog="failover_peers.py", description="Break ports under gloo and Open MPI."
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="append a JSON line per trial")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of these rows")
    parser.add_argument("--trials", type=int, default=3, help="of each kind; 3 unless given")
    options = parser.parse_args(argv)
    if options.table is not None:
        print(table(read_rows(options.table)))
        return 0
    if reason := why_unavailable():
        print(f"failover_peers: {reason}", file=sys.stderr)
        return 2
    rows = read_rows(options.out)
    done = {(row["library"], row["fault"], row["seed"]) for row in rows}
    for seed in map(str, range(options.trials)):
        for library in LIBRARIES:
            for fault in FAULTS:
                if (library, fault, seed) in done:
                    continue
                try:
                    row = trial(library, fault, seed)
                except (NetLabError, OSError, subprocess.CalledProcessError) as error:
                    print(f"failover_peers: {error}", file=sys.stderr)
                    return 2
                rows.append(row)
                print(row, file=sys.stderr)
                if options.out is not None:
                    with options.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
