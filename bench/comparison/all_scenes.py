"""`peers.py --all`: runs the scenes of scenes.py one after the other and has their rows judged.

Invariants: what a scene lacks (root, a library, time) is a note and rows "not measured"; the other
scenes run all the same. Past the deadline no scene and no round is begun, so a run is bounded by it
and the longest round.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lab import burners
from lab.site import Site, finish
from lab.wiring import NetLabError
from libraries.contenders import CONTENDERS
from measure.physical import Physical

from comparison import verdicts
from comparison.rounds import Plan, Say, find, run_rounds
from comparison.scenes import Scene
from comparison.standings import Measurement, describe_floor
from comparison.standings import best_floor as best
from comparison.verdicts import Finding

IDLE = Path(__file__).resolve().parents[1] / "measure/idle.py"
SHIFT = Path(__file__).resolve().parents[1] / "measure/shift.py"
LEAD_S, AFTER_S = 2.0, 3.5  # before the first change of a rate, and after each


@dataclasses.dataclass(frozen=True)
class Settings:
    """How thorough a run is.

    Attributes:
        libraries: those to take part; a scene's others are left out.
        envs, install: where the libraries' environments are, and whether to make missing ones.
        rounds: at most so many of each scene.
        budget, floor, timeout: as in Plan.
        idle_s: seconds that an open communicator is watched.
        deadline: time.monotonic() after which nothing is begun.
    """

    libraries: Sequence[str]
    envs: Path
    install: bool = False
    rounds: int = 3
    budget: float = 0.3
    floor: float = 1.0
    timeout: float = 120.0
    idle_s: float = 5.0
    deadline: float = float("inf")


@dataclasses.dataclass
class Outcome:
    """All that a run gave; keyed by the scenes' names."""

    findings: list[Finding] = dataclasses.field(default_factory=list)
    measurements: list[Measurement] = dataclasses.field(default_factory=list)
    floors: dict[str, list[Physical]] = dataclasses.field(default_factory=dict)
    titles: dict[str, str] = dataclasses.field(default_factory=dict)
    stamps: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    changes: dict[str, list[float]] = dataclasses.field(default_factory=dict)


def run(scenes: Sequence[Scene], settings: Settings, say: Say) -> Outcome:
    """Run the scenes; all that was measured."""
    outcome = Outcome()
    wanted = dict.fromkeys(name for scene in scenes for name in scene.libraries)
    found = find(
        [name for name in settings.libraries if name in wanted],
        settings.envs,
        settings.install,
        say,
    )
    for scene in scenes:
        here = {name: found[name] for name in scene.libraries if name in found}
        if time.monotonic() > settings.deadline:
            say(f"{scene.name}: not measured: the run's time is up")
            outcome.findings += [verdicts.missing(scene, goal) for goal in scene.goals]
            continue
        began = time.monotonic()
        try:
            outcome.findings += _RUNNERS[scene.kind](scene, here, settings, outcome, say)
        except NetLabError as error:
            say(f"{scene.name}: not measured: {error}")
            outcome.findings += [verdicts.missing(scene, goal) for goal in scene.goals]
        say(f"{scene.name}: {time.monotonic() - began:.0f} s")
    return outcome


def _enter(scene: Scene) -> Site:
    return Site(
        scene.hosts,
        scene.ranks,
        scene.nics,
        one_subnet=scene.one_subnet,
        sysctls=scene.sysctls,
        slowest=min((goal.mbit for goal in scene.goals if goal.mbit), default=0),
        name=scene.name,
    )


def _sweep(
    scene: Scene, found: dict[str, Path], settings: Settings, outcome: Outcome, say: Say
) -> list[Finding]:
    plan = Plan(
        sizes=scene.all_sizes(),
        wires=scene.wires(),
        rounds=min(scene.rounds, settings.rounds),
        budget=settings.budget,
        floor=settings.floor,
        timeout=settings.timeout,
        deadline=settings.deadline,
    )
    with _enter(scene) as site, contextlib.ExitStack() as stack:
        outcome.titles[scene.name] = f"{scene.name}; {site.congestion}"
        if scene.busy:
            stack.enter_context(burners.burning(burners.all_cores()))
        record = run_rounds(site, found, plan, say)
    outcome.measurements += record.measurements
    outcome.floors[scene.name] = record.floors
    floor = best(record.floors)
    if floor is not None:
        say(f"{scene.name}: {describe_floor(floor)}")
    for one in record.measurements:
        if one.wrong:
            say(
                f"{scene.name}: {one.wrong} wrong elements of {one.label} at {one.size} B in round "
                f"{one.turn + 1}"
            )
    for remark in record.remarks:
        say(f"{scene.name}: {remark}")
    return verdicts.judge(scene, record.measurements, record.floors)


def _idle(
    scene: Scene, found: dict[str, Path], settings: Settings, outcome: Outcome, say: Say
) -> list[Finding]:
    cores: dict[str, float] = {}
    with _enter(scene) as site, tempfile.TemporaryDirectory(prefix="peers-") as folder:
        outcome.titles[scene.name] = site.describe()
        for name, python in found.items():
            target = Path(folder, f"{name}.json")
            ended = CONTENDERS[name].run(
                site,
                python,
                ["--seconds", str(settings.idle_s), "--json", str(target)],
                settings.timeout,
                IDLE,
            )
            if target.exists():
                cores[name] = json.loads(target.read_text())["cores"]
            else:
                reason = ended if isinstance(ended, str) else ended.reason()
                say(f"{name}: idle: not measured: {reason}")
    return verdicts.judge_idle(scene, cores)


def _shift(
    scene: Scene, found: dict[str, Path], settings: Settings, outcome: Outcome, say: Say
) -> list[Finding]:
    """A loop of calls, during which the last port of host 0 gets each goal's rate in turn."""
    size = scene.goals[0].size
    seconds = LEAD_S + AFTER_S * len(scene.goals)
    changes: list[float] = []
    with _enter(scene) as site, tempfile.TemporaryDirectory(prefix="peers-") as folder:
        outcome.titles[scene.name] = f"{scene.name}; {site.congestion}"
        target = Path(folder, "stamps.json")
        job = site.start(
            [
                sys.executable,
                str(SHIFT),
                "--size",
                str(size),
                "--seconds",
                str(seconds),
                "--json",
                str(target),
            ],
            dict(CONTENDERS["ringcomm"].env),
        )
        give_up = time.monotonic() + settings.timeout
        while (
            "began" not in job.output(0)
            and time.monotonic() < give_up
            and any(rank.poll() is None for rank in job.ranks)
        ):
            time.sleep(0.005)
        due = time.monotonic() + LEAD_S
        for goal in scene.goals:
            time.sleep(max(0.0, due - time.monotonic()))
            site.lab.slow(0, len(scene.nics) - 1, goal.mbit)
            changes.append(time.monotonic())
            due += AFTER_S
        ended = finish(job, settings.timeout)
        stamps = json.loads(target.read_text())["stamps"] if target.exists() else []
    if not stamps:
        say(f"{scene.name}: not measured: {ended.reason()}")
    outcome.stamps[scene.name], outcome.changes[scene.name] = stamps, changes
    return verdicts.judge_shift(scene, size, stamps, changes)


_RUNNERS = {"sweep": _sweep, "idle": _idle, "shift": _shift}
