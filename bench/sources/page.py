"""docs/RESULTS.md and its pictures, made of the sources' rows.

Invariant: the same rows make the same page; what is written by hand stays (_columns.filled).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _columns

from .source import Found, Source, due_of, notes_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "RESULTS.md"
PICTURE = "plots/results.png"
PROGRAM = "bench/results.py"
BARS_SHARE = 0.4  # of the picture's width; the rest is for words
TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 20, 30, 50, 100)
HEADS = ("source", "claim", "the document's", "ringcomm's", "bound", "verdict")

Everything = Mapping[str, tuple[Source, Found]]


def summary(everything: Everything) -> str:
    """All claims in one table."""
    lines = [
        (f"[{name}](#{name})", one.what, one.document, one.ours or "-", one.bound, one.verdict)
        for name, (source, rows) in everything.items() for one in source.claims(rows)
    ]  # fmt: skip
    return "\n".join(_columns.markdown([HEADS, *lines]))


def section(name: str, source: Source, rows: Found) -> str:
    """A source's part of the page."""
    parts = [f"{source.DOCUMENT}", f"Real: {source.REAL} Emulated: {source.EMULATED}",
             f"`python bench/results.py {name}`{_taken(rows)} {_due(source, rows)}".strip()]
    table = source.table(rows)
    if len(table) > 1:
        parts.append("\n".join(_columns.markdown(table)))
    parts += notes_of(source, rows)
    if rows:
        parts.append(f"![{name}](plots/{name}.png)")
    return "\n\n".join(parts)


def _taken(rows: Found) -> str:
    if not rows:
        return ": not measured yet."
    dates, cpus, torches = (sorted({str(row[name]) for row in rows.values()})
                            for name in ("date", "cpu", "torch"))  # fmt: skip
    dated = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"; {dated}, {', '.join(cpus)}, torch {', '.join(torches)}."


def _due(source: Source, rows: Found) -> str:
    """How many rows are to be measured again, and why; empty: none."""
    reasons = Counter(due_of(source, rows).values())
    said = " and ".join(f"{many} for {why}" for why, many in reasons.items())
    return f"Of its {len(rows)} rows {reasons.total()} are due again: {said}." if said else ""


def write(everything: Everything, chosen: Sequence[str]) -> None:
    """The summary, and the sections and pictures of the chosen sources."""
    text = PAGE.read_text(encoding="utf-8")
    text = _columns.filled(text, "summary", summary(everything), PROGRAM)
    for name in chosen:
        source, rows = everything[name]
        text = _columns.filled(text, name, section(name, source, rows), PROGRAM)
        if rows:
            draw(source, rows, DOCS / "plots" / f"{name}.png")
    PAGE.write_text(text, encoding="utf-8")
    draw_summary(everything, DOCS / PICTURE)


def draw(source: Source, rows: Found, path: Path) -> None:
    """A source's picture."""
    figure = _figure(9, 4.5)
    source.draw(rows, figure)
    figure.savefig(path, dpi=120)


def draw_summary(everything: Everything, path: Path) -> None:
    """How far ringcomm goes beyond each document: a bar for each claim that has a ratio."""
    bars = [(name, one) for name, (source, rows) in everything.items()
            for one in source.claims(rows) if one.ratio is not None]  # fmt: skip
    figure = _figure(11, max(2.0, 0.36 * len(bars) + 1.2))
    axes = figure.add_subplot()
    ratios = [one.ratio or 0.0 for _, one in bars]
    least, most = 0.95 * min([1.0, *filter(None, ratios)]), max([1.1, *ratios]) ** (1 / BARS_SHARE)
    for place, (ratio, (_, one)) in enumerate(zip(ratios[::-1], bars[::-1], strict=True)):
        axes.barh(place, max(ratio, least) - 1, left=1,
                  color="tab:blue" if ratio >= 1 else "tab:red")  # fmt: skip
        axes.annotate(f"{one.ours} (document: {one.document})", (max(ratio, 1), place),
                      xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    labels = [f"{name}: {one.what}" for name, one in reversed(bars)]
    axes.set_yticks(range(len(bars)), labels, fontsize=8)
    if bars:
        axes.set_xscale("log")
        axes.set_xlim(least, most)
        ticks = [tick for tick in TICKS if least <= tick <= most]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("times better than the document says (1: the same)")
    figure.savefig(path, dpi=120)


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
