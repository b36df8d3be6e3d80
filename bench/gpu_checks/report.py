"""Verdicts of gpu_check.py: how a step tells of a check, and how a run shows them.

A step is a process of its own and writes a line of JSON for each check as it goes; whatever else
it writes is kept for when it fails. Verdicts: ok; short, a goal of speed is missed; wrong, a result
is, or a step broke; skipped, with the reason.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence

from report.columns import aligned

VERDICTS = ("ok", "short", "wrong", "skipped")
HEADS = ("step", "check", "measured", "goal", "verdict")


@dataclasses.dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        measured, goal: with units; "" where there is none.
        why: more about it: the reason of a verdict, or what belongs to the figure.
    """

    step: str
    name: str
    verdict: str
    measured: str = ""
    goal: str = ""
    why: str = ""

    def line(self) -> str:
        """As it is printed when it is done."""
        figure = self.measured + (f" (goal {self.goal})" if self.goal else "")
        said = ": ".join(part for part in (f"{self.step}, {self.name}", figure) if part)
        return f"{self.verdict:7} {said}" + (f"; {self.why}" if self.why else "")


def tell(name: str, verdict: str, measured: str = "", goal: str = "", why: str = "") -> None:
    """Tells of a check, in a step's process."""
    assert verdict in VERDICTS
    fields = {"name": name, "verdict": verdict, "measured": measured, "goal": goal, "why": why}
    print(json.dumps(fields), flush=True)


def at_least(measured: float, goal: float) -> str:
    """The verdict of a figure that should be large."""
    return "ok" if measured >= goal else "short"


def at_most(measured: float, goal: float) -> str:
    """The verdict of a figure that should be small."""
    return "ok" if measured <= goal else "short"


def read(step: str, line: str) -> Check | None:
    """The check that a step's line tells of; None for any other line."""
    if not line.startswith('{"name"'):
        return None
    return Check(step, **json.loads(line))


def table(checks: Sequence[Check]) -> str:
    """All checks, a line each, and how many of each verdict."""
    rows = [HEADS, *((c.step, c.name, c.measured, c.goal, c.verdict) for c in checks)]
    lines = aligned(rows, left=range(len(HEADS)))
    counts = ((verdict, sum(c.verdict == verdict for c in checks)) for verdict in VERDICTS)
    return "\n".join([*lines, ", ".join(f"{count} {verdict}" for verdict, count in counts)])


def write_json(checks: Sequence[Check], about: dict[str, object]) -> None:
    """To $OUT/gpu_check.json, if OUT is set."""
    folder = os.environ.get("OUT")
    if not folder:
        return
    try:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "gpu_check.json"), "w", encoding="utf-8") as file:
            records = [dataclasses.asdict(check) for check in checks]
            json.dump({**about, "checks": records}, file, indent=1)
            file.write("\n")
    except OSError as error:
        print(f"gpu_check: no JSON was written: {error}", file=sys.stderr)
