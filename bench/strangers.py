"""How much longer a start takes while strangers knock at every listener, one row per kind.

    python bench/strangers.py
    python bench/strangers.py --ranks 4 --rate 1000 --rounds 3 --kinds silent,hello --json out.json

All ranks are processes of this host, joined over its loopback with a secret. The last one comes a
second after the others, and dials the lanes a second after that, so that the strangers are at the
rendezvous and at the lane listeners long before it. They come from eight addresses (127.0.0.2 to
127.0.0.9); kinds: connect and close, connect and reset, silent, one byte, the ten bytes with which
every ringcomm begins, HTTP and TLS and noise, and a well-formed HELLO with the job's key id, which
every other stranger follows by a wrong proof. The delay is that of the slowest rank, beside starts
without strangers in the same run, by turns. Nothing leaves the loopback; every start is over after
40 seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from trials.crowd import KINDS

from ringcomm.bootstrap.secret import Secret

TRIALS = Path(__file__).resolve().parent / "trials"
HOLD = 1.0
"""Seconds for which the last rank lets the others wait, at the rendezvous and at their lanes."""
LIMIT = 120.0
QUIET = "none"


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of a job."""

    seconds: float
    """From the last rank's coming until all ranks are joined."""
    growth_kib: int
    """Of the rank that grew the most, at its peak."""
    lines: int
    """In all ranks' logs."""
    rate: float
    """Strangers per second."""
    error: str
    """What the first rank that failed said; empty if all are joined."""


@dataclasses.dataclass(frozen=True)
class Row:
    """All starts among one kind of strangers, beside the quiet ones."""

    kind: str
    rate: float
    delay_s: float
    """Median over the rounds."""
    worst_s: float
    growth_kib: int
    """More than in the quiet starts."""
    lines: int
    """The most of a start."""
    failed: int
    starts: int
    error: str


@contextlib.contextmanager
def processes(commands: Sequence[Sequence[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Runs them; none is left at the end."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    made = [subprocess.Popen([sys.executable, *command], **pipes) for command in commands]
    try:
        yield made
    finally:
        for process in made:
            process.kill()
            process.communicate()


def start(ranks: int, kind: str, rate: float) -> Start:
    """Starts a job once, among strangers of this kind."""
    secret = secrets.token_bytes(32)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rank_file, crowd_file = str(TRIALS / "strangers_rank.py"), str(TRIALS / "crowd.py")
    holds = [0.0] * (ranks - 1) + [HOLD]
    commands = [
        [rank_file, str(rank), str(ranks), str(port), secret.hex(), str(hold)]
        for rank, hold in enumerate(holds)
    ]
    with processes(commands) as job:
        for process in job:
            _line(process)  # ready
        pids = [str(process.pid) for process in job]
        about = [str(LIMIT), Secret(secret).key_id.hex(), str(ranks), *pids]
        crowd = [] if kind == QUIET else [[crowd_file, kind, str(rate), *about]]
        with processes(crowd) as strangers:
            for process in job[:-1]:
                _tell(process)
            time.sleep(HOLD)
            came = time.monotonic()
            _tell(job[-1])
            said = [json.loads(_line(process)) for process in job]
            made = [json.loads(process.communicate("\n", LIMIT)[0]) for process in strangers]
    return Start(
        seconds=max(rank["at"] for rank in said) - came,
        growth_kib=max(rank["growth_kib"] for rank in said),
        lines=sum(rank["lines"] for rank in said),
        rate=sum(one["made"] / one["seconds"] for one in made),
        error=next((rank["error"] for rank in said if rank["error"]), ""),
    )


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def rows(ranks: int, rate: float, rounds: int, kinds: Sequence[str]) -> Iterator[Row]:
    """A row per kind, as soon as it is measured."""
    for kind in kinds:
        quiet, pestered = [], []
        for _ in range(rounds):
            quiet.append(start(ranks, QUIET, 0.0))
            pestered.append(start(ranks, kind, rate))
        usual = statistics.median(one.seconds for one in quiet)
        yield Row(
            kind=kind,
            rate=statistics.median(one.rate for one in pestered),
            delay_s=statistics.median(one.seconds for one in pestered) - usual,
            worst_s=max(one.seconds for one in pestered) - usual,
            growth_kib=max(o.growth_kib for o in pestered) - max(o.growth_kib for o in quiet),
            lines=max(one.lines for one in pestered),
            failed=sum(bool(one.error) for one in pestered),
            starts=rounds,
            error=next((one.error for one in pestered if one.error), ""),
        )


HEAD = f"| {'strangers':<14} | per second | delay | worst | memory | log lines | starts |"


def line(row: Row) -> str:
    """A row as it is printed."""
    done = f"{row.starts - row.failed}/{row.starts}"
    return (
        f"| {row.kind:<14} | {row.rate:>10.0f} | {row.delay_s:>3.2f} s | {row.worst_s:>3.2f} s "
        f"| {row.growth_kib:>4} KiB | {row.lines:>9} | {done:>6} |"
    )


def _kinds(text: str) -> list[str]:
    chosen = text.split(",")
    unknown = [kind for kind in chosen if kind not in KINDS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of: {', '.join(KINDS)}")
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=3, choices=(2, 3, 4))
    parser.add_argument("--rate", type=float, default=1000.0, help="connections per second")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", type=_kinds, default=list(KINDS))
    parser.add_argument("--json", default="", metavar="FILE")
    args = parser.parse_args(argv)
    print(f"{HEAD}\n|---|---|---|---|---|---|---|", flush=True)
    found = []
    for row in rows(args.ranks, args.rate, args.rounds, args.kinds):
        found.append(row)
        print(line(row), flush=True)
    for row in found:
        if row.error:
            print(f"\n{row.kind}: {row.error}")
    if args.json:
        Path(args.json).write_text(json.dumps([dataclasses.asdict(row) for row in found], indent=1))
    return 1 if any(row.failed for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
