"""What `peers.py --all` shows and writes: the table, markdown, JSON and a plot per group.

Invariant: every figure comes from the Outcome; none is kept here.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from report import columns

from comparison.all_scenes import Outcome
from comparison.scenes import Scene
from comparison.standings import merge, plot, short
from comparison.verdicts import Finding

HEADS = (
    "row",
    "goal",
    "measured",
    "spread",
    "stolen",
    "x floor",
    "peers' figure over ringcomm's",
    "verdict",
)


def cells(finding: Finding) -> tuple[str, ...]:
    """A finding as the columns of HEADS."""
    peers = ", ".join(f"{name} {short(ratio)}" for name, ratio in finding.peers.items())
    spread = "-" if finding.spread is None else f"{100 * finding.spread:.0f} %"
    stolen = "-" if finding.stolen is None else f"{finding.stolen:.2f}"
    floor = "-" if finding.over_floor is None else short(finding.over_floor)
    return (
        finding.what,
        finding.goal,
        finding.measured,
        spread,
        stolen,
        floor,
        peers or "-",
        finding.verdict,
    )


def table(findings: Sequence[Finding]) -> list[str]:
    """Aligned lines, with a blank line between groups."""
    head, *rows = columns.aligned([HEADS, *map(cells, findings)], left=(0, 6, 7))
    lines, last = [head], ""
    for row, finding in zip(rows, findings, strict=True):
        if finding.group != last:
            last = finding.group
            lines.append("")
        lines.append(row)
    return lines


def summary(findings: Sequence[Finding]) -> str:
    """How many rows came out how."""
    verdicts = [finding.verdict.partition(":")[0] for finding in findings]
    return ", ".join(f"{verdicts.count(name)} {name}" for name in dict.fromkeys(verdicts))


def markdown(findings: Sequence[Finding], about: Mapping[str, Any]) -> str:
    """Returns the table in full, under what is known about the run."""
    lines = [
        f"{about['started']}; {about['cpus']} CPUs, {about['cpu']}; Linux {about['kernel']}; "
        f"Python {about['python']}; load before and after {about['load']}; up to "
        f"{about['rounds']} rounds. {summary(findings)}.",
        "",
        *columns.markdown([HEADS, *map(cells, findings)]),
    ]
    return "\n".join(lines) + "\n"


def document(outcome: Outcome, about: Mapping[str, Any]) -> str:
    """All of it as JSON."""
    return (
        json.dumps(
            {
                **about,
                "findings": [dataclasses.asdict(finding) for finding in outcome.findings],
                "measurements": [dataclasses.asdict(one) for one in outcome.measurements],
                "floors": {
                    where: [dataclasses.asdict(floor) for floor in floors]
                    for where, floors in outcome.floors.items()
                },
                "stamps": outcome.stamps,
                "changes": outcome.changes,
            },
            indent=1,
        )
        + "\n"
    )


def plots(path: Path, scenes: Sequence[Scene], outcome: Outcome) -> list[Path]:
    """A file for each group that has curves: FILE-GROUP.png; the files written."""
    standings = merge(
        outcome.measurements,
        outcome.floors,
        {scene.name: scene.ranks for scene in scenes},
        [scene.name for scene in scenes if scene.group == "shared"],
    )
    written = []
    for group in dict.fromkeys(scene.group for scene in scenes):
        titles = {
            scene.name: outcome.titles[scene.name]
            for scene in scenes
            if scene.group == group
            and scene.kind == "sweep"
            and len({one.size for one in standings if one.where == scene.name}) > 1
        }
        target = path.with_name(f"{path.stem}-{group}{path.suffix}")
        if titles:
            plot(target, standings, titles)
            written.append(target)
        for scene in scenes:
            if scene.group == group and outcome.stamps.get(scene.name):
                _plot_shift(target, scene, outcome)
                written.append(target)
    return written


def _plot_shift(path: Path, scene: Scene, outcome: Outcome) -> None:
    """Rate over time, with the moments of change and 90 % of what the ports then carry."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    stamps, changes = outcome.stamps[scene.name], outcome.changes[scene.name]
    size = scene.goals[0].size
    begin = stamps[0]
    figure, axes = pyplot.subplots(figsize=(9, 4.4), layout="constrained")
    axes.step(
        [stamp - begin for stamp in stamps[1:]],
        [size / (after - before) / 1e9 for before, after in itertools.pairwise(stamps)],
        where="pre",
        label=f"busbw, each call of {columns.size_name(size)}",
    )
    for goal, change in zip(scene.goals, changes, strict=False):
        line = dataclasses.replace(scene, nics=(*scene.nics[:-1], goal.mbit)).line()
        axes.axvline(change - begin, color="gray", linestyle=":")
        axes.hlines(
            0.9 * line,
            change - begin,
            change - begin + 3,
            colors="black",
            linestyles="--",
            label=f"90 % of the sum, {goal.mbit:g}",
        )
    axes.set(xlabel="time (s)", ylabel="busbw (GB/s)", title=outcome.titles[scene.name], ylim=0)
    figure.legend(loc="outside lower center", ncols=1 + len(scene.goals))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
