"""What sweep.py shows: the table, the verdicts, and the JSON file.

Invariant: every figure printed here was measured in this run or follows from such figures alone;
there is no figure to compare with in this file.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from measure.floor import Floor
from measure.timing import Row

from report.columns import size_name

WIDTH = 80  # of the table of ringcomm alone
LARGE_BYTES = 4_000_000  # from here on a link's burst no longer counts


class Table:
    """The lines of the table: as wide as the labels need, with a column for each other library."""

    def __init__(self, labels: Sequence[str], others: Sequence[str]) -> None:
        self._others = others
        self._columns = (
            ("size", "", 7),
            ("library", "wire", 2 + max(map(len, labels))),
            ("time", "(us)", 10),
            ("p99", "(us)", 10),
            ("algbw", "(GB/s)", 8),
            ("busbw", "(GB/s)", 8),
            ("wirebw", "(GB/s)", 8),
            ("#wrong", "", 7),
            ("cpu", "(s/GB)", 7),
            *((f"x {name}", "(busbw)", 8) for name in others),
        )

    def header(self) -> str:
        """Two lines: names and units of the columns."""
        lines = (self._line([column[part] for column in self._columns]) for part in (0, 1))
        return "\n".join("#" + line[1:] for line in lines)

    def line(self, row: Row) -> str:
        """One line of the table."""
        wire = "-" if row.wirebw is None else f"{row.wirebw:.4f}"
        cpu = f"{row.cpu_s_per_gb:.3f}" if row.cpu_s_per_gb < 1000 else f"{row.cpu_s_per_gb:.0e}"
        ratios = (f"{row.ratios[name]:.2f}" if name in row.ratios else "" for name in self._others)
        return self._line(
            [
                size_name(row.size),
                f"{row.library} {row.compression}",
                f"{row.time_us:.1f}",
                f"{row.p99_us:.1f}",
                f"{row.algbw:.4f}",
                f"{row.busbw:.4f}",
                wire,
                str(row.wrong),
                cpu,
                *ratios,
            ]
        )

    def _line(self, cells: Sequence[str]) -> str:
        widths = (width for _, _, width in self._columns)
        return "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def comment(text: str) -> str:
    """A line about the run, broken at the width of the table."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent="# ",
        subsequent_indent="#   ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def add_ratios(rows: Sequence[Row], subject: str) -> None:
    """Give the subject's rows of one size their ratio to each other library's row."""
    others = {row.library: row for row in rows if row.library != subject}
    for row in rows:
        if row.library == subject:
            row.ratios = {name: other.time_us / row.time_us for name, other in others.items()}


# --- the end of the report ---


def describe_floor(floors: Sequence[Floor]) -> list[str]:
    """The floor in words; ``floors`` holds its measurements in order of time."""
    best = best_floor(floors)
    if best is None:
        return []
    named = zip(best.rails, best.gbps, strict=True)
    rails = ", ".join(f"{name} {rate:.4f}" for name, rate in named)
    takes = ", ".join(f"{floor.total:.4f}" for floor in floors)
    takes = f"; before and after: {takes}" if len(floors) > 1 else ""
    return [
        f"floor: {best.total:.4f} GB/s into each rank by bare TCP streams, all ranks at once "
        f"({rails}; {best.congestion}; {best.cpu_s_per_gb:.3f} CPU s/GB{takes})"
    ]


def best_floor(floors: Sequence[Floor]) -> Floor | None:
    """The best measurement: the hardest to come up to."""
    return max(floors, key=lambda floor: floor.total, default=None)


def verdicts(rows: Sequence[Row], floor: Floor | None) -> list[str]:
    """A line for each comparison that the rows allow, large sizes only."""
    found = []
    large = [row for row in rows if row.size >= LARGE_BYTES]
    plain = {(row.library, row.size): row for row in large if row.compression == "none"}
    for row in large:
        head = f"{row.size} B, {row.library} {row.compression}:"
        if floor is not None and floor.total and row.compression == "none":
            found.append(
                f"{head} busbw {row.busbw:.4f} GB/s = "
                f"{100 * row.busbw / floor.total:.1f} % of the floor"
            )
        base = plain.get((row.library, row.size))
        if row.compression != "none" and base is not None:
            found.append(
                f"{head} algbw {row.algbw:.4f} GB/s = {row.algbw / base.algbw:.2f} x uncompressed"
            )
    wrong = sum(row.wrong for row in rows)
    checked = sum(row.count for row in rows)
    found.append(f"wrong elements: {wrong} of {checked} results per rank, checked before timing")
    return found


# --- files ---


def write_json(
    path: Path, rows: Iterable[Row], floors: Sequence[Floor], about: dict[str, Any]
) -> None:
    """All that was measured, with what is known about the run."""
    best = best_floor(floors)
    document = {
        **about,
        "floor_gbps": None if best is None else best.total,
        "floors": [dataclasses.asdict(floor) for floor in floors],
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
