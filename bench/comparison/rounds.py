"""Rounds of jobs at one site: each library in turn, the order rotated, and the floor.

Invariants: two libraries never run at once. A library that fails is told of and left out from then
on; it takes nothing else with it. Past the deadline no round is begun.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.site import Site
from libraries.contenders import CONTENDERS, WHEELS, Contender, install
from measure.physical import Physical

from comparison.standings import Measurement

FLOOR = Path(__file__).resolve().parents[1] / "measure/physical.py"

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What every job of a site is asked to do.

    Attributes:
        sizes: bytes of the tensors.
        wires: wire formats, for the libraries that take any.
        rounds: how many times each library's job is run.
        budget: seconds for each size of a job.
        floor: seconds of bare streams in each round; 0: no floor.
        timeout: seconds of a job.
        deadline: time.monotonic() after which none is started.
        collective, apart: as of sweep.py.
    """

    sizes: Sequence[int]
    wires: Sequence[str] = ("none",)
    rounds: int = 3
    budget: float = 0.3
    floor: float = 1.0
    timeout: float = 300.0
    deadline: float = float("inf")
    collective: str = "allreduce"
    apart: bool = False


@dataclasses.dataclass
class Record:
    """What one site's rounds gave."""

    measurements: list[Measurement] = dataclasses.field(default_factory=list)
    floors: list[Physical] = dataclasses.field(default_factory=list)
    congestion: dict[str, str] = dataclasses.field(default_factory=dict)
    """By library: the default that its ranks saw."""
    remarks: dict[str, None] = dataclasses.field(default_factory=dict)
    """What ringcomm said of its ports, each line once, in order."""


def find(names: Sequence[str], folder: Path, may_install: bool, say: Say) -> dict[str, Path]:
    """The interpreter of each library that is there, installed first if so asked."""
    found: dict[str, Path] = {}
    for contender in (CONTENDERS[name] for name in names):
        python = contender.find(folder)
        if isinstance(python, str) and may_install:
            say(f"installing {', '.join(WHEELS[contender.home])} in {folder}")
            python = install(folder, contender.home) or contender.find(folder)
        if isinstance(python, str):
            say(f"{contender.name}: skipped: {python}")
        else:
            found[contender.name] = python
    return found


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The order of round ``turn``: each library comes first as often as any other."""
    at = turn % max(1, len(names))
    return [*names[at:], *names[:at]]


def run_rounds(site: Site, found: dict[str, Path], plan: Plan, say: Say) -> Record:
    """All rounds at one site."""
    record = Record()
    names = list(found)
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        target = Path(folder, "result.json")
        for turn in range(plan.rounds):
            if time.monotonic() > plan.deadline:
                say(f"{site.name}: stopped before round {turn + 1}: the run's time is up")
                break
            if plan.floor:
                take_floor(site, target, record, plan, say)
            for name in rotated(list(found), turn):
                if name not in names:
                    continue
                reason = _take(site, CONTENDERS[name], found[name], target, plan, turn, record)
                if reason:
                    say(f"{name} on {site.name}: skipped from round {turn + 1} on: {reason}")
                    names.remove(name)
    return record


def _take(
    site: Site,
    contender: Contender,
    python: Path,
    target: Path,
    plan: Plan,
    turn: int,
    record: Record,
) -> str | None:
    """One job; its rows go into the record. The reason if it failed."""
    target.unlink(missing_ok=True)
    wires = plan.wires if contender.wires else ["none"]
    ended = contender.run(
        site,
        python,
        [
            "--sizes",
            ",".join(map(str, plan.sizes)),
            "--compression",
            ",".join(wires),
            "--budget",
            str(plan.budget),
            "--floor",
            "0",
            "--json",
            str(target),
            "--collective",
            plan.collective,
            *(["--apart"] if plan.apart else []),
        ],
        plan.timeout,
    )
    if isinstance(ended, str):
        return ended
    if not target.exists():  # an exit code of 1 with a result: an element was wrong
        return ended.reason()
    if f"# mpi: {contender.brand}" not in ended.output and contender.brand:
        return f"mpi4py has found another MPI than {contender.brand}"
    if contender.subject == "ringcomm":
        record.remarks |= dict.fromkeys(_remarks(ended.output))
    document = json.loads(target.read_text())
    record.congestion[contender.name] = document["congestion"]
    record.measurements += [
        Measurement(
            site.name,
            contender.name,
            row["compression"],
            row["size"],
            turn,
            row["time_us"],
            row["busbw"],
            row["cpu_s_per_gb"],
            row["wrong"],
            row["stolen"],
        )
        for row in document["rows"]
    ]
    return None


def _remarks(output: str) -> list[str]:
    """Of all that a job's ranks wrote, how the bytes were spread and which settings are missing."""
    lines = (line.removeprefix("# ").strip() for line in output.splitlines())
    return [line for line in lines if line.startswith("rails: ") or "sysctl" in line]


def take_floor(site: Site, target: Path, record: Record, plan: Plan, say: Say) -> None:
    """One measurement of the floor, into the record; or a word on why there is none."""
    target.unlink(missing_ok=True)
    ended = site.run(
        [
            sys.executable,
            str(FLOOR),
            "--congestion",
            site.congestion,
            "--seconds",
            str(plan.floor),
            "--json",
            str(target),
        ],
        {},
        plan.timeout,
    )
    if target.exists():
        record.floors.append(Physical.read(target))
    else:
        say(f"floor on {site.name}: not measured: {ended.reason()}")
