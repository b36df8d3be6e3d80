"""What a module of this package has: it reproduces what one document claims, and goes further.

    DOCUMENT        which document, and what it claims, in one or two sentences
    REAL, EMULATED  what of the figures is real (sockets, bytes, arithmetic), and what is emulated
    WITHOUT_ROOT    what can be run without root
    HARNESS         a number; one more wherever older measurements count no longer
    points(quick)   what is to be measured, in order of value
    measure(point)  measures it; raises RuntimeError with one sentence
    claims(found)   each claim with the document's figure, ours, the bound and the verdict
    table(found)    a table, its first row the heads
    draw(found, figure)     the same as a picture, with matplotlib
    brief(found)    the page's table, where claims and picture do not have its figures
    notes(found)    sentences with figures

The last five are functions of rows alone, any of which may be missing; only some sources have the
last two (optional()).

Invariant: a row counts only under the key of its point, which is made of all that defines the
measurement; so a changed point or harness is measured anew. One that counts may be due again all
the same (due()): it stands until then, and the page says so.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from lab.wiring import CABLES
from report.rows import Row, Rows, is_dirty

Found = Mapping[str, Row]
"""The rows of a source's points, by the point's name."""

SLOW_MBIT = 100.0  # from here down a step's bytes are few beside what older cables let through
OLDER_CABLES, UNCOMMITTED = "older cables", "files in no commit"  # docs/RESULTS.md says why
_ORDER = ("scaling", "slow", "real", "onebit", "overlap", "topologies", "collectives", "hybrid")


@dataclasses.dataclass(frozen=True)
class Point:
    """One measurement. All that defines it, repetitions included, is in its settings (JSON).

    Attributes:
        mbit: rate of its slowest cable, which needs root to be laid; None: there is none.
    """

    name: str
    settings: Mapping[str, Any]
    mbit: float | None = None

    def key(self, source: str, harness: int) -> str:
        """What its row is found by."""
        told = json.dumps([source, harness, self.name, self.settings], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A figure beside a bound, and beside the document's where that has one.

    Attributes:
        what: is compared, as "one port alone, fp32".
        document: the document's figure in words, or "-".
        ours: the same, "" where it was not measured.
        bound: what ours has to reach.
        met: whether it does; None: not measured.
        ratio: ours over the document's, above 1 where ours is better, 0 where it never gets there,
            for the picture; None: none.
        baselines: what the document's figure is held against, and what ours; "" where there is
            none. Only figures with the same one are like for like.
        calibrated: it holds by construction, as what was emulated was set by it.
    """

    what: str
    document: str
    ours: str
    bound: str
    met: bool | None
    ratio: float | None = None
    baselines: tuple[str, str] = ("", "")
    calibrated: bool = False

    @property
    def verdict(self) -> str:
        """In words."""
        if self.met is None:
            return "not measured"
        return "short" if not self.met else "calibration" if self.calibrated else "met"

    @property
    def is_like_for_like(self) -> bool:
        """Whether both figures are held against the same."""
        return bool(self.baselines[0]) and self.baselines[0] == self.baselines[1]

    @property
    def same_baseline(self) -> str:
        """In words, with both where they differ."""
        theirs, ours = self.baselines
        if not theirs:
            return "-"
        return "yes" if self.is_like_for_like else f"no: {theirs}; {ours}"


class Source(Protocol):
    """Such a module; see above."""

    DOCUMENT: str
    REAL: str
    EMULATED: str
    WITHOUT_ROOT: str
    HARNESS: int

    def points(self, quick: bool) -> Sequence[Point]: ...
    def measure(self, point: Point) -> Mapping[str, Any]: ...
    def claims(self, found: Found) -> Sequence[Claim]: ...
    def table(self, found: Found) -> list[Sequence[str]]: ...
    def draw(self, found: Found, figure: Any) -> None: ...


def names() -> list[str]:
    """Of all sources, in the order of the summary."""
    folder = Path(__file__).parent
    return [name for name in _ORDER if (folder / f"{name}.py").exists()]


def load(name: str) -> Source:
    """The module."""
    return cast(Source, importlib.import_module(f"{__package__}.{name}"))


def due(point: Point, row: Row) -> str:
    """Why a point's row is to be measured again, empty where it is not."""
    if point.mbit is not None and point.mbit <= SLOW_MBIT and row.get("cables", 1) < CABLES:
        return OLDER_CABLES
    return UNCOMMITTED if is_dirty(row) else ""


def due_of(source: Source, rows: Found) -> dict[str, str]:
    """Of its points that are due again: why."""
    reasons = {
        point.name: due(point, rows[point.name])
        for point in source.points(False)
        if point.name in rows
    }
    return {name: why for name, why in reasons.items() if why}


def optional(source: Source, name: str, found: Found) -> list[Any]:
    """Lines or sentences by a function that only some sources have; none where it is missing."""
    make = getattr(source, name, None)
    return list(make(found)) if make else []


def found(rows: Rows, name: str, quick: bool) -> dict[str, Row]:
    """The rows of its points that are there."""
    source = load(name)
    rows_of = {
        point.name: rows.find(point.key(name, source.HARNESS)) for point in source.points(quick)
    }
    return {point: row for point, row in rows_of.items() if row is not None}
