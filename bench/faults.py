"""Breaks every port of every host of an emulated cluster, and tells what each rank made of it.

    python bench/faults.py --out rows.jsonl             # all trials: some 25 minutes
    python bench/faults.py --table rows.jsonl           # the table of docs/RELIABILITY.md

A trial is one fault (a port cut, unplugged, blackholed, or without its address; what one host sends
another lost, one way) in one phase of a job (an idle communicator, small all-reduces, one of 64 MB,
split, bring-up). It takes down when each rank got its exception, and whom that names. Rows are
appended to a file as they come; those that are there are not made again, so that an interrupted run
goes on. Needs root and iproute2 (netlab.py).

In trials/ are the lab's side of a trial (fault_lab.py), the ranks' (fault_rank.py), and verdicts
and table (fault_table.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from lab.wiring import NetLabError, why_unavailable
from trials.fault_lab import FAULTS, PHASES, Cluster, StoppedError, Trial, VoidError
from trials.fault_table import judge, table

TIMEOUT_S = 20.0  # of every collective: what a trial takes at most where a fault is not noticed
QUICK = 12  # trials
MBIT = 200.0  # of a port


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="faults.py",
        description="Break ports of an emulated cluster in every phase of a job.",
        epilog="Exit code: 0, 1 if a trial fell short, 2 if it cannot run.",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="append a JSON line per trial")
    parser.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        help="print the table of these rows as Markdown, and run nothing",
    )
    parser.add_argument("--jobs", type=int, default=3, help="clusters at once; 3 unless given")
    parser.add_argument(
        "--ports",
        type=_numbers,
        default=[2, 1],
        metavar="N,N",
        help="ports per host; 2,1 unless given: with 1 a few trials for comparison",
    )
    parser.add_argument(
        "--worlds",
        type=_numbers,
        default=[2, 3, 4],
        metavar="N,N",
        help="hosts with a rank each; 2,3,4 unless given",
    )
    parser.add_argument(
        "--faults",
        type=_words(FAULTS),
        default=list(FAULTS),
        metavar="NAME,NAME",
        help="; ".join(f"{name}: {what}" for name, what in FAULTS.items()),
    )
    parser.add_argument(
        "--phases",
        type=_words(PHASES),
        default=list(PHASES),
        metavar="NAME,NAME",
        help=f"of {', '.join(PHASES)}; all unless given",
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} of all trials, by chance")
    parser.add_argument("--seed", type=int, default=1, help="decides when faults come, and --quick")
    parser.add_argument("--peer-timeout", type=float, default=3.0, metavar="S")
    return parser.parse_args(argv)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _words(known: Any) -> Any:
    def words(text: str) -> list[str]:
        chosen = text.split(",")
        for word in chosen:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word}: give some of {', '.join(known)}")
        return chosen

    return words


# ---- which trials ----


def plan(options: argparse.Namespace) -> list[Trial]:
    """All trials that the options ask for, in the order in which they are made."""
    trials = [
        Trial(ports, world, phase, fault, host, nic, to, 0)
        for ports, world in itertools.product(options.ports, options.worlds)
        for phase, fault in itertools.product(options.phases, options.faults)
        for host, nic, to in _places(options, ports, world, phase, fault)
    ]
    if options.quick:
        trials = random.Random(options.seed).sample(trials, min(QUICK, len(trials)))
    return trials


def _places(
    options: argparse.Namespace, ports: int, world: int, phase: str, fault: str
) -> Iterator[tuple[int, int, int]]:
    """Every port of every host; with "mute", of every host towards every other. Of hosts with a
    single port, whose faults are those of a host, one place by chance."""
    hosts = range(world)
    every = [
        (host, nic, to)
        for host, nic in itertools.product(hosts, range(ports))
        for to in (hosts if fault == "mute" else (-1,))
        if to != host
    ]
    if ports == 1:
        chance = random.Random(f"{options.seed} {world} {phase} {fault} 0")
        every = [chance.choice(every)]
    yield from every


# ---- making them ----


class Runner:
    """Makes trials on several clusters at once, a thread each, and hands over their rows."""

    def __init__(self, options: argparse.Namespace, trials: Sequence[Trial], done: int) -> None:
        self._options = options
        self._left = list(trials)
        self._count, self._done = len(trials) + done, done
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.rows: list[dict[str, Any]] = []
        self.failed = 0

    def run(self) -> None:
        """Until all are made. Ends, with everything removed, on an exception of this thread."""
        threads = [threading.Thread(target=self._work) for _ in range(self._options.jobs)]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.1)
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _work(self) -> None:
        """One cluster after the other, each for as long as there are trials of its shape."""
        try:
            while (shape := self._shape()) is not None:
                with Cluster(*shape, MBIT, self._stop) as cluster:
                    while (trial := self._next(shape)) is not None:
                        self._make(cluster, trial)
        except StoppedError:
            pass
        except Exception:
            if self._stop.wait(0.5):  # Ctrl-C in a terminal ends ranks and `ip` as well
                return
            self._say(f"faults: {traceback.format_exc()}")
            with self._lock:
                self.failed += 1

    def _shape(self) -> tuple[int, int] | None:
        with self._lock:
            return (self._left[0].world, self._left[0].ports) if self._left else None

    def _next(self, shape: tuple[int, int]) -> Trial | None:
        with self._lock:
            fitting = (t for t in self._left if (t.world, t.ports) == shape)
            trial = next(fitting, None)
            if trial is not None:
                self._left.remove(trial)
            return trial

    def _make(self, cluster: Cluster, trial: Trial) -> None:
        try:
            row = cluster.run(
                trial,
                settings_of(self._options),
                str(self._options.seed),
                TIMEOUT_S + 2 * self._options.peer_timeout,
            )
        except VoidError as void:
            self._say(f"faults: no trial: {void}")
            with self._lock:
                self.failed += 1
            return
        with self._lock:
            self.rows.append(row)
            if self._options.out is not None:
                _append(self._options.out, json.dumps(row))
            self._done += 1
            print(f"[{self._done}/{self._count}] {trial}: {_outcome(row)}", file=sys.stderr)

    def _say(self, text: str) -> None:
        with self._lock:
            print(text, file=sys.stderr)


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """ringcomm's settings of every rank."""
    return {
        "timeout": TIMEOUT_S,
        "peer_timeout": options.peer_timeout,
        "heartbeat": 0.3,
        "recovery": "off",
        "connect_timeout": 3 * options.peer_timeout,  # as ringcomm's defaults are
    }


def _outcome(row: dict[str, Any]) -> str:
    verdict = judge(row)
    what = "started without it" if verdict.left_out else f"{verdict.rail}, {verdict.blame}"
    short = f"; SHORT: {', '.join(verdict.short)}" if verdict.short else ""
    return f"{verdict.seconds:.2f} s, {what}{short}"


# ---- the command ----


def read_rows(path: Path | None) -> list[dict[str, Any]]:
    """The rows of a file; none if there is none. A last line that was cut short is left out."""
    rows = []
    for line in path.read_text().splitlines() if path is not None and path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            print(f"faults: {path} has a line that was cut short", file=sys.stderr)
    return rows


def _append(path: Path, line: str) -> None:
    """Adds a line; a last one that was cut short stays one of its own."""
    with path.open("a+b") as file:
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.write(b"\n")
        file.write(line.encode() + b"\n")


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = _parse(sys.argv[1:] if argv is None else argv)
    if options.table is not None:
        if not options.table.exists():
            print(f"faults: there is no {options.table}", file=sys.stderr)
            return 2
        print(table(read_rows(options.table)))
        return 0
    reason = why_unavailable()
    if reason:
        print(
            f"faults: {reason} Without, `--table FILE` shows rows that were taken before.",
            file=sys.stderr,
        )
        return 2
    rows = read_rows(options.out)
    made = {Trial(**row["trial"]).key for row in rows}
    trials = plan(options)
    left = [trial for trial in trials if trial.key not in made]
    runner = Runner(options, left, len(trials) - len(left))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        runner.run()
    except NetLabError as error:
        print(f"faults: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    rows += runner.rows
    print(table(rows))
    return 1 if runner.failed or any(judge(row).short for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
