"""From what was measured of a scene to its rows: measured, beside floor and peers, met or short.

Pure functions of the measurements.

Invariants: ratios to a peer are taken within a round, and only then their median over the rounds.
Peers' ratios are theirs over ringcomm's, so above 1 ringcomm is better in every row. A wrong
element makes a row "wrong", whatever its speed.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence

from measure.physical import Physical
from report.columns import size_name

from comparison.scenes import Goal, Scene
from comparison.standings import SUBJECTS, Measurement, best_floor, floor_us, ratios_to, short

STEADY_S = 0.5  # over which a changed rate must hold
NEAR = 0.9  # of the new sum


@dataclasses.dataclass(frozen=True)
class Finding:
    """One row.

    Attributes:
        group, scene: as in scenes.py.
        what: the row in words.
        goal, measured: in words, with units.
        value: measured, in the unit of the goal's limit; None where it was not measured.
        spread: (largest - smallest) / median over the rounds.
        stolen: cores that the machine's host took while ringcomm was timed; mean of the rounds.
        over_floor: ringcomm's figure over the floor's; None where there is no floor to it.
        peers: by library: its figure over ringcomm's.
        verdict: "met", "short", "wrong" or "not measured"; after a colon, more about it. A row that
            is short says what bare streams or copies take, where they would not meet it either.
    """

    group: str
    scene: str
    what: str
    goal: str
    measured: str
    value: float | None
    spread: float | None
    stolen: float | None
    over_floor: float | None
    peers: Mapping[str, float]
    verdict: str


def judge(
    scene: Scene, measurements: Sequence[Measurement], floors: Sequence[Physical]
) -> list[Finding]:
    """The rows of a scene of kind "sweep"."""
    return [_judge_one(scene, goal, measurements, floors) for goal in scene.goals]


def _judge_one(
    scene: Scene, goal: Goal, measurements: Sequence[Measurement], floors: Sequence[Physical]
) -> Finding:
    here = [one for one in measurements if one.size == goal.size]
    subject = next((name for name in SUBJECTS if name in scene.libraries), "")
    mine = [one for one in here if (one.library, one.wire) == (subject, goal.wire)]
    others: dict[str, list[Measurement]] = {}
    for one in here:
        if one.library not in SUBJECTS:
            others.setdefault(one.label, []).append(one)
    values = _values(scene, goal, mine, others, floors)
    if not values:
        return missing(scene, goal)
    figure = "cpu" if goal.figure.startswith("cpu") else "time_us"
    peers = {
        name: statistics.median(ratios)
        for name, theirs in others.items()
        if (ratios := ratios_to(mine, theirs, figure))
    }
    value = statistics.median(values)
    wrong = sum(one.wrong for one in mine)
    outcome = verdict(goal, value)
    if outcome == "short":
        outcome += _beyond_floor(scene, goal, floors)
    return dataclasses.replace(
        missing(scene, goal),
        measured=_said(goal, value, mine),
        value=value,
        spread=(max(values) - min(values)) / value if value else 0.0,
        stolen=statistics.mean(one.stolen for one in mine),
        over_floor=_over_floor(scene, goal, mine, floors),
        peers=peers,
        verdict=f"wrong: {wrong} elements" if wrong else outcome,
    )


def _values(
    scene: Scene,
    goal: Goal,
    mine: Sequence[Measurement],
    others: Mapping[str, Sequence[Measurement]],
    floors: Sequence[Physical],
) -> list[float]:
    """The judged figure, round by round."""
    if goal.figure in ("time_us", "cpu"):
        return [getattr(one, goal.figure) for one in mine]
    if goal.figure == "share":
        return [one.busbw / scene.line() for one in mine]
    if goal.figure == "cpu_floor":
        floor = best_floor(floors)
        return [one.cpu / floor.stream_cpu for one in mine] if floor else []
    rivals = [
        one
        for name, theirs in others.items()
        for one in theirs
        if goal.figure == "best" or name == goal.figure
    ]
    fastest: dict[int, float] = {}
    for one in rivals:
        fastest[one.turn] = min(one.time_us, fastest.get(one.turn, one.time_us))
    return [one.time_us / fastest[one.turn] for one in mine if one.turn in fastest]


def _over_floor(
    scene: Scene, goal: Goal, mine: Sequence[Measurement], floors: Sequence[Physical]
) -> float | None:
    floor = best_floor(floors)
    if floor is None:
        return None
    if goal.figure.startswith("cpu"):
        return statistics.median(one.cpu for one in mine) / floor.stream_cpu
    bound = _floor_us(scene, goal, floor)
    return statistics.median(one.time_us for one in mine) / bound if bound else None


def _floor_us(scene: Scene, goal: Goal, floor: Physical) -> float | None:
    bound = floor_us(floor, goal.size, scene.ranks, scene.group == "shared")
    sent = 0.5 if goal.wire in ("bf16", "fp16") else 1.0
    return bound * sent if bound else None


def _beyond_floor(scene: Scene, goal: Goal, floors: Sequence[Physical]) -> str:
    """What the floor is, if it would fall short of the goal as well."""
    floor = best_floor(floors)
    if floor is None:
        return ""
    bound = _floor_us(scene, goal, floor)
    if goal.figure == "time_us" and bound and bound > goal.limit:
        return f": the floor is {time_name(bound)}"
    if goal.figure == "share" and floor.stream / scene.line() < goal.limit:
        return f": the floor is {100 * floor.stream / scene.line():.1f} %"
    if goal.figure == "cpu" and floor.stream_cpu > goal.limit:
        return f": the floor is {short(floor.stream_cpu)} s/GB"
    return ""


def verdict(goal: Goal, value: float) -> str:
    """The word "met" or "short"; a ratio is judged as it is shown, to two places."""
    if goal.figure == "share":
        return "met" if value >= goal.limit else "short"
    if goal.figure in ("best", "gloo", "cpu_floor"):
        value = round(value, 2)
    return "met" if value <= goal.limit else "short"


def missing(scene: Scene, goal: Goal) -> Finding:
    """The row, without a figure."""
    return Finding(
        scene.group,
        scene.name,
        _what(scene, goal),
        _goal(goal),
        "-",
        None,
        None,
        None,
        None,
        {},
        "not measured",
    )


# --- ranks that wait, and rates that change ---


def judge_idle(scene: Scene, cores: Mapping[str, float]) -> list[Finding]:
    """Rows of "idle": cores per rank by library; the subjects get a row each."""
    peers = {name: value for name, value in cores.items() if name not in SUBJECTS}
    found = []
    for goal, name in itertools.product(scene.goals, SUBJECTS):
        row = missing(scene, goal)
        row = dataclasses.replace(row, what=f"{row.what}, {name}")
        if name in cores:
            value = cores[name]
            row = dataclasses.replace(
                row,
                measured=f"{100 * value:.4f} % of a core",
                value=value,
                verdict=verdict(goal, value),
                peers={peer: theirs / value for peer, theirs in peers.items() if value},
            )
        found.append(row)
    return found


def judge_shift(
    scene: Scene, size: int, stamps: Sequence[float], changes: Sequence[float]
) -> list[Finding]:
    """Rows of "shift": rank 0's moments between its calls of ``size`` bytes, and when each goal's
    rate was set."""
    found = []
    ends = [*changes[1:], stamps[-1] if stamps else 0.0]
    for goal, change, end in zip(scene.goals, changes, ends, strict=False):
        line = dataclasses.replace(scene, nics=(*scene.nics[:-1], goal.mbit)).line()
        part = [stamp for stamp in stamps if change <= stamp <= end]
        row = missing(scene, goal)
        if len(part) > 2:
            value = followed(part, size, change, NEAR * line)
            steady = size * (len(part) - 1) / (part[-1] - part[0]) / 1e9 / line
            text = "never" if value is None else f"{value:.2f} s"
            row = dataclasses.replace(
                row,
                measured=f"{text} ({100 * steady:.0f} % on average)",
                value=value,
                verdict="short" if value is None else verdict(goal, value),
            )
        found.append(row)
    return found


def followed(stamps: Sequence[float], size: int, change: float, wanted: float) -> float | None:
    """Seconds from the change to the first call from which on STEADY_S of calls carry ``wanted``
    GB/s; None if that never is so."""
    ahead = 0
    for at, begin in enumerate(stamps):
        ahead = max(ahead, at + 1)
        while ahead < len(stamps) and stamps[ahead] - begin < STEADY_S:
            ahead += 1
        if ahead >= len(stamps):
            return None
        if size * (ahead - at) / (stamps[ahead] - begin) / 1e9 >= wanted:
            return begin - change
    return None


# --- words ---


def _what(scene: Scene, goal: Goal) -> str:
    about = {
        "cpu": ", CPU",
        "cpu_floor": ", CPU over the floor's",
        "gloo": ", over gloo",
        "best": ", over the best peer",
    }
    size = f", {size_name(goal.size)}" if goal.size else ""
    rate = f", set to {goal.mbit:g}" if goal.mbit else ""
    return f"{scene.name}{size}{rate}{about.get(goal.figure, '')}"


def _goal(goal: Goal) -> str:
    if goal.figure == "time_us":
        return f"<= {time_name(goal.limit)}"
    if goal.figure == "share":
        return f">= {100 * goal.limit:g} % of the line"
    return "<= " + {
        "cpu": f"{goal.limit:.2f} s/GB",
        "idle": f"{100 * goal.limit:g} % of a core",
        "follow_s": f"{goal.limit:g} s",
    }.get(goal.figure, f"{goal.limit:.2f} x")


def _said(goal: Goal, value: float, mine: Sequence[Measurement]) -> str:
    time_us = time_name(statistics.median(one.time_us for one in mine))
    if goal.figure == "time_us":
        return time_us
    if goal.figure.startswith("cpu"):
        cpu = f"{short(statistics.median(one.cpu for one in mine))} s/GB"
        return cpu if goal.figure == "cpu" else f"{value:.2f} x ({cpu})"
    return (
        f"{100 * value:.1f} % ({time_us})"
        if goal.figure == "share"
        else f"{value:.2f} x ({time_us})"
    )


def time_name(us: float) -> str:
    """For example "12.0 us" or "5.13 ms"."""
    return f"{short(us)} us" if us < 1000 else f"{short(us / 1000)} ms"
