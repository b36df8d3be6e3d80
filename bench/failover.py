"""Breaks ports under jobs that go on, and tells what each fault cost them.

    python bench/failover.py --out rows.jsonl             # all trials; goes on where it was stopped
    python bench/failover.py --table rows.jsonl           # what came of them

A job has two ports on each of 2 or 4 hosts (netlab.py). A trial waits until all lanes are there,
those of the port for 2 s, after which they are tried at once if they are lost; breaks the port at a
random moment, lets the job work until both ends have given its lanes up, and longer, mends it, and
waits until both ports carry again. It takes down whether every result since the last trial was
right (trials/failover_rank.py), and:

    stall  how much later a step ended than at the speed of the ports that were left; steps after
           the repair are judged by that speed, too
    left   the share of their speed that calls had without the port, of 64 MB
    back   seconds from the repair (or reset) until each rank had said that no lane is lost, and two
           steps had ended, at least 0.1; of 64 MB, until the first of two calls in a row began that
           had 95 % of the speed of the job's first calls
    uneven how much later than their median the slowest of the job's first steps ended: what a
           stall of a job without faults comes to
    fds    descriptors that are open more than at the job's start

A trial whose fault takes no lane has failed, but for a cable that is only slow. A trial may run
beside other work, and says how much there was (others). Needs root, iproute2, and a kernel
that lets `ss -K` reset connections.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import random
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lab.cluster import NetLab
from lab.events import listening
from lab.wiring import NetLabError, why_unavailable
from report.rows import Load, about
from trials.failover_rank import LOADS

FAULTS = {
    "reset": "every connection of the port is reset, once",
    "unplug": "the switch's end goes down: the port has no carrier",
    "blackhole": "the switch drops what comes from the port and goes to it",
    "mute": "what the host sends to the next one by the port is lost",
    "slow": "the cable has 1 % of its rate",
    "flush": "the port loses its address",
    "switch": "all ports of the switch have no carrier",
}
STALL_S = {"reset": 0.3, "unplug": 0.3, "switch": 0.3}
MOST_STALL_S, LEAST_LEFT, MOST_BACK_S, FULL = 1.5, 0.9, 5.0, 0.95
_LONG_S = 90.0
_WITHOUT_S = 1.5  # at least
_STEADY_S = 2.0  # keeper.py's
_STEPS = 5  # that tell the speed
_STEPS_WITHOUT = 4  # the port, with that in which it broke
_MOST_TRIALS = {"reset": 50, "unplug": 50}  # of a kind; so 500 on 2 and 4 hosts, of five loads
_TRIALS = 20
Row = dict[str, Any]


class FailedError(Exception):
    """The job has ended, or does not come to where it should."""


@dataclasses.dataclass
class Rank:
    """What a rank has said since the last trial."""

    steps: list[Row] = dataclasses.field(default_factory=list)
    calls: int = 0
    wrong: int = 0
    failed: str = ""

    def take(self, said: Row) -> None:
        """A message."""
        self.failed = self.failed or said.get("failed", "")
        if "ended" in said:
            self.steps.append(said)
            self.calls += said["step"] is not None
            self.wrong += said["step"] is not None and not said["step"][0]

    def times(self, since: float, until: float = float("inf")) -> list[tuple[float, float, float]]:
        """(began, ended, seconds of the call) of the steps that ended in between."""
        return [
            (before["ended"], step["ended"], (step["step"] or [True, 0.0])[1])
            for before, step in itertools.pairwise(self.steps)
            if since < step["ended"] <= until
        ]

    def lanes(self) -> list[list[int]]:
        """[peer, rail, number of the connection, whether it is lost] of each as last heard."""
        return self.steps[-1]["lanes"] if self.steps else []


@dataclasses.dataclass(frozen=True)
class Place:
    """What a fault hurts: the lanes over a port, those to one host alone (to), or all of a rail
    (host -1)."""

    host: int
    nic: int
    to: int = -1

    def hurts(self, rank: int, peer: int, rail: int) -> bool:
        """Whether the lanes of this rank to that peer, on this rail, are hit."""
        ends = {rank, peer}
        hit = ends == {self.host, self.to} if self.to >= 0 else self.host in ends or self.host < 0
        return hit and rail == self.nic


def befall(lab: NetLab, fault: str, place: Place, mbit: float) -> None:
    """Breaks what is at a place. mbit: of the port."""
    if fault == "reset":
        there = ["ip", "netns", "exec", lab.namespace(place.host), "ss", "-K"]
        address = lab.address(place.host, place.nic)
        subprocess.run(
            [*there, "state", "established", "src", address], check=True, capture_output=True
        )
    elif fault == "mute":
        lab.mute(place.host, place.nic, place.to)
    elif fault == "slow":
        lab.slow(place.host, place.nic, mbit / 100, loses_queue=True)
    elif fault == "switch":
        for host in range(lab.hosts):
            lab.unplug(host, place.nic)
    else:
        getattr(lab, fault)(place.host, place.nic)


def mend(lab: NetLab, place: Place) -> None:
    """Undoes it."""
    for host in range(lab.hosts) if place.host < 0 else [place.host]:
        lab.restore(host, place.nic)


class Drill:
    """A job of one load on a cluster; a context manager.

    Args:
        world: hosts, with a rank each.
        load: a key of LOADS.
        mbit: of each of the two ports of a host.
    """

    def __init__(self, world: int, load: str, mbit: float) -> None:
        self.world, self.load, self.mbit = world, load, mbit
        self.lab = NetLab(world, [mbit, mbit], slowest=mbit)  # and no packet is larger than a burst
        self.ranks = [Rank() for _ in range(world)]
        self._by_socket: dict[socket.socket, Rank] = {}
        self._stack = contextlib.ExitStack()
        self._usual = 0.0  # seconds of a step, at the job's start; and of its call
        self._usual_call = self._uneven = 0.0
        self._fds: list[int] = []
        self._asked = 0
        self._mended: dict[int, float] = {}  # when all lanes of a rail were there again

    def __enter__(self) -> Drill:
        with contextlib.ExitStack() as stack:
            path, listener = stack.enter_context(listening(self.world, _LONG_S))
            stack.enter_context(self.lab)
            program = Path(__file__).parent / "trials" / "failover_rank.py"
            environment = {"RINGCOMM_TIMEOUT": "60"}
            argv = [sys.executable, str(program), path, self.load]
            self.lab.start(argv, env=environment, quiet=True)
            for _ in range(self.world):
                connected = stack.enter_context(listener.accept()[0])
                self._by_socket[connected] = self.ranks[json.loads(connected.recv(1 << 16))["rank"]]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # ---- what the ranks say ----

    def pump(self, done: Callable[[], bool], within: float) -> bool:
        """Takes what the ranks say until done(), or for so long; whether it was done."""
        deadline = time.monotonic() + within
        while not done():
            if time.monotonic() > deadline:
                return False
            for ready in select.select(list(self._by_socket), [], [], 0.05)[0]:
                data = ready.recv(1 << 16) or b'{"failed": "the rank has ended"}'
                self._by_socket[ready].take(json.loads(data))
            if failed := [rank.failed for rank in self.ranks if rank.failed]:
                raise FailedError(failed[0])
        return True

    def wait(self, done: Callable[[], bool], what: str, within: float = _LONG_S) -> None:
        """Until done(); raises FailedError after a long time."""
        if not self.pump(done, within):
            raise FailedError(f"not in {within:.0f} s: {what}")

    def is_whole(self, since: float = 0.0) -> bool:
        """As each rank has said since then."""
        return all(
            rank.steps
            and rank.steps[-1]["ended"] > since
            and len(rank.lanes()) == 2 * (self.world - 1)
            and not any(lost for *_, lost in rank.lanes())
            for rank in self.ranks
        )

    def _made(self, place: Place) -> list[int]:
        """The numbers of the connections at a place; -1: that is lost."""
        return [
            -1 if lost else made
            for number, rank in enumerate(self.ranks)
            for peer, rail, made, lost in rank.lanes()
            if place.hurts(number, peer, rail)
        ]

    def _call(self) -> None:
        """Asks idle ranks for a call."""
        for each in self._by_socket if self.load == "idle" else ():
            each.send(b"call")
            self._asked += each is next(iter(self._by_socket))

    # ---- a trial ----

    def run(self, fault: str, seed: str) -> Row:
        """The trial's row."""
        try:
            return self._run(fault, seed)
        except (OSError, subprocess.CalledProcessError) as error:
            raise FailedError(f"{type(error).__name__}: {error}") from error

    def _run(self, fault: str, seed: str) -> Row:
        chance = random.Random(f"{self.world} {self.load} {fault} {seed}")
        others = Load()
        host, nic = chance.randrange(self.world), chance.randrange(2)
        to = (host + chance.choice([1, -1])) % self.world if fault == "mute" else -1
        place = Place(-1 if fault == "switch" else host, nic, to)
        self._begin(chance, nic)
        before = self._made(place)
        hit = time.monotonic()
        befall(self.lab, fault, place, self.mbit)
        self._call()
        if fault != "reset":
            self.pump(
                lambda: self._has_worked(fault, place, hit), _WITHOUT_S + 10 * self._usual + 8
            )
            mend(self.lab, place)
        mended = time.monotonic()
        self._call()
        self._wait_until_back(mended if fault != "reset" else hit)
        self._mended[nic] = time.monotonic()
        if (
            fault != "slow"
            and min(a - b for a, b in zip(self._made(place), before, strict=True)) < 1
        ):
            raise FailedError("the fault did not take hold: a lane was not lost")
        slower = (2 / 1.01 if fault == "slow" else 2.0) if self.load == "64 MB" else 1.0
        row = {
            "hosts": self.world,
            "load": self.load,
            "mbit": self.mbit,
            "fault": fault,
            "seed": seed,
            "place": dataclasses.astuple(place),
            "usual": round(self._usual, 4),
            "stall": round(self._stall(hit, 1.0 if fault == "reset" else slower), 3),
            "left": self._left(hit, mended, slower) if fault != "reset" else None,
            "back": round(max(map(self._back_at, self.ranks)) - mended, 3),
            "uneven": round(self._uneven, 3),
            "wrong": sum(rank.wrong for rank in self.ranks),
            "fds": max(
                rank.steps[-1]["fds"] - fds for rank, fds in zip(self.ranks, self._fds, strict=True)
            ),
            "others": others.about(),
        }
        for rank in self.ranks:
            del rank.steps[:-1]
            rank.wrong = 0
        return row

    def _begin(self, chance: random.Random, nic: int) -> None:
        """Waits until all is well, for a random while more, and learns the speed at first."""
        self.wait(self.is_whole, "all lanes")
        if not self._fds:
            since = time.monotonic()
            self.wait(lambda: self._has_done(_STEPS, since), "steps")
            steps = [step for rank in self.ranks for step in rank.times(since)]
            taken = [ended - began for began, ended, _ in steps]
            self._usual = statistics.median(taken)
            self._uneven = max(taken) - self._usual
            self._usual_call = statistics.median(seconds for *_, seconds in steps)
            self._fds = [rank.steps[-1]["fds"] for rank in self.ranks]
        steady = self._mended.get(nic, 0.0) + _STEADY_S - time.monotonic()
        self.pump(lambda: False, max(0.0, steady) + chance.uniform(0.0, max(0.5, self._usual)))
        self.wait(self.is_whole, "all lanes, still")

    def _has_done(self, steps: int, since: float) -> bool:
        return all(len(rank.times(since)) >= steps for rank in self.ranks)

    def _has_worked(self, fault: str, place: Place, hit: float) -> bool:
        is_lost = fault == "slow" or max(self._made(place)) < 0
        has_worked = self._has_done(_STEPS_WITHOUT, hit)
        return is_lost and has_worked and time.monotonic() > hit + _WITHOUT_S

    def _wait_until_back(self, mended: float) -> None:
        def is_fast(rank: Rank) -> bool:
            if self.load == "idle":
                return rank.calls == self._asked
            steps = rank.times(mended)[-2:]
            most = self._usual_call / FULL if self.load == "64 MB" else float("inf")
            return len(steps) == 2 and all(seconds <= most for *_, seconds in steps)

        self.wait(
            lambda: self.is_whole(mended + 0.1) and all(map(is_fast, self.ranks)),
            "all lanes and their speed after the repair",
        )

    def _back_at(self, rank: Rank) -> float:
        """When it was back: by what it said last, or as the call before its last began."""
        if self.load != "64 MB":
            return float(rank.steps[-1]["ended"])
        return float(rank.steps[-2]["ended"] - rank.steps[-2]["step"][1])

    def _stall(self, hit: float, slower: float) -> float:
        late = [0.0]
        for rank in self.ranks:
            for began, ended, _ in rank.times(0.0):
                before = min(max(0.0, hit - began), self._usual)
                late.append(ended - began - before - (self._usual - before) * slower)
        return max(late)

    def _left(self, hit: float, mended: float, slower: float) -> float | None:
        """Of the steps that began after that in which the fault came."""
        if self.load != "64 MB":
            return None
        calls = [seconds for rank in self.ranks for *_, seconds in rank.times(hit, mended)[1:]]
        return round(slower * self._usual_call / statistics.median(calls), 3) if calls else 0.0


# ---- rows ----


def short(row: Row) -> list[str]:
    """In what a row falls short."""
    if row.get("failed"):
        return ["failed"]
    return [
        name
        for name, is_short in (
            ("wrong", row["wrong"] > 0),
            ("stall", row["stall"] > STALL_S.get(row["fault"], MOST_STALL_S)),
            ("left", row["left"] is not None and row["left"] < LEAST_LEFT),
            ("back", row["back"] > MOST_BACK_S),
            ("descriptors", row["fds"] > 0),
        )
        if is_short
    ]


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        "| hosts, fault | trials | right to the end | stall: median, slowest | uneven: slowest "
        "| left: median, least | back: median, slowest | short |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for world, fault in itertools.product(sorted({row["hosts"] for row in rows}), FAULTS):
        group = [row for row in rows if (row["hosts"], row["fault"]) == (world, fault)]
        if not group:
            continue
        whole = [row for row in group if not row.get("failed")]
        fine = sum(row["wrong"] == 0 for row in whole)
        lefts = [row["left"] for row in whole if row["left"] is not None]
        cells = [
            f"{world}, {fault}",
            str(len(group)),
            str(fine),
            _span([row["stall"] for row in whole], max),
            f"{max((row['uneven'] for row in whole), default=0.0):.2f}",
            _span(lefts, min),
            _span([row["back"] for row in whole], max),
            str(sum(bool(short(row)) for row in group)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _span(values: Sequence[float], end: Callable[[Sequence[float]], float]) -> str:
    return f"{statistics.median(values):.2f}, {end(values):.2f}" if values else "-"


def read_rows(path: Path | None) -> list[Row]:
    """The rows of a file; none if there is none. A line that was cut short is left out."""
    rows = []
    for line in path.read_text().splitlines() if path is not None and path.exists() else []:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


# ---- the command ----


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="failover.py",
        description="Break ports of an emulated cluster under jobs that go on.",
        epilog="Exit code: 0, 1 if a trial fell short, 2 if it cannot run.",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="append a JSON line per trial")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of these rows")
    parser.add_argument(
        "--trials",
        type=int,
        help=f"of each kind; {_TRIALS} unless given, {_MOST_TRIALS['reset']} of what cuts a cable",
    )
    parser.add_argument("--minutes", type=float, default=0, help="begin no trial after so many")
    parser.add_argument("--mbit", type=float, default=400.0, help="of a port; 400 unless given")
    for name, known in (("faults", FAULTS), ("loads", LOADS), ("hosts", ("2", "4"))):
        parser.add_argument(
            f"--{name}",
            type=lambda text: text.split(","),
            default=list(known),
            help=f"of {', '.join(known)}; all unless given",
        )
    return parser.parse_args(argv)


@dataclasses.dataclass
class Run:
    """What one start of the command makes: trials of each kind that the rows lack."""

    options: argparse.Namespace
    rows: list[Row]
    until: float
    about: Row = dataclasses.field(default_factory=about)

    def missing(self, world: int, load: str) -> list[tuple[str, str]]:
        """(fault, seed) of a job's trials; none once the time is over."""
        if time.monotonic() > self.until:
            return []
        kind = {"hosts": world, "load": load, "mbit": self.options.mbit}
        done = {(row["fault"], row["seed"]) for row in self.rows if kind.items() <= row.items()}
        return [
            (fault, str(seed))
            for seed in range(self.options.trials or max(_TRIALS, *_MOST_TRIALS.values()))
            for fault in self.options.faults
            if seed < (self.options.trials or _MOST_TRIALS.get(fault, _TRIALS))
            and (fault, str(seed)) not in done
        ]

    def trials(self, world: int, load: str) -> Iterator[Row]:
        """Makes one job's trials, until one fails."""
        with Drill(world, load, self.options.mbit) as drill:
            while missing := self.missing(world, load):
                fault, seed = missing[0]
                try:
                    yield drill.run(fault, seed)
                except FailedError as error:
                    kind = {"hosts": world, "load": load, "mbit": self.options.mbit}
                    yield kind | {"fault": fault, "seed": seed, "failed": str(error)}
                    return

    def make(self) -> None:
        """All that are missing."""
        for world, load in itertools.product(map(int, self.options.hosts), self.options.loads):
            while self.missing(world, load):
                for row in self.trials(world, load):
                    self._take(row)

    def _take(self, row: Row) -> None:
        row |= self.about
        self.rows.append(row)
        print(f"{row} {short(row) or ''}", file=sys.stderr)
        if self.options.out is not None:
            with self.options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = _parse(sys.argv[1:] if argv is None else argv)
    if options.table is not None:
        print(table(read_rows(options.table)))
        return 0
    if reason := why_unavailable():
        print(f"failover: {reason}", file=sys.stderr)
        return 2
    until = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    run = Run(options, read_rows(options.out), until)
    try:
        run.make()
    except (NetLabError, TimeoutError) as error:
        print(f"failover: {error}", file=sys.stderr)
        return 2
    print(table(run.rows))
    return int(any(map(short, run.rows)))


if __name__ == "__main__":
    sys.exit(main())
