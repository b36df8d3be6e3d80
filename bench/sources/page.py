"""docs/RESULTS.md and its pictures, made of the sources' rows.

Invariant: the same rows make the same page; what is written by hand stays (columns.filled).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from report import columns

from .source import Claim, Found, Source, due_of, optional

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "RESULTS.md"
PICTURE = "plots/results.png"
PROGRAM = "bench/results.py"
WORDS_FROM = 0.6  # of the picture's width
FEW = 3  # rows due again that are named
HEADS = ("claim", "theirs", "ours", "same baseline?", "bound")

Everything = Mapping[str, tuple[Source, Found]]


def summary(everything: Everything) -> str:
    """How many claims of each source are met, and how many are short; and the machine."""
    lines = []
    for name, (source, rows) in everything.items():
        verdicts = Counter(one.verdict for one in source.claims(rows))
        told = ", ".join(f"{many} {verdict}" for verdict, many in verdicts.items())
        lines.append(f"- [{name}](#{name}): {told}")
    every = [row for _, rows in everything.values() for row in rows.values()]
    machines = sorted({f"{row['cpu']}, torch {row['torch']}" for row in every})
    return "\n".join([*lines, "", f"Machine: {'; '.join(machines)}."])


def line_of(one: Claim) -> tuple[str, ...]:
    """A claim in columns."""
    judged = f"{one.bound}: {one.verdict}"
    return (one.what, one.document, one.ours or "-", one.same_baseline, judged)


def section(name: str, source: Source, rows: Found) -> str:
    """A source's part of the page: its document's claims in a table, ours beyond as a list."""
    lines = [line_of(one) for one in source.claims(rows)]
    claims = [line for line in lines if line[1] != "-"]
    beyond = [
        f"- {what}: {ours} ({judged})" for what, theirs, ours, _, judged in lines if theirs == "-"
    ]
    parts = [
        source.DOCUMENT,
        f"Real: {source.REAL} Emulated: {source.EMULATED}",
        f"`python bench/results.py {name}`{_taken(rows)} {_due(source, rows)}".strip(),
        _table([HEADS, *claims]),
        "\n".join(beyond),
        _table(columns.with_units(optional(source, "brief", rows))),
        *optional(source, "notes", rows),
    ]
    if rows:
        parts.append(f"![{name}](plots/{name}.png)")
    return "\n\n".join(filter(None, parts))


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown of heads and lines; empty where there are no lines."""
    return "\n".join(columns.markdown(rows)) if len(rows) > 1 else ""


def _taken(rows: Found) -> str:
    if not rows:
        return ": not measured yet."
    dates = sorted({str(row["date"]) for row in rows.values()})
    return f"; {' to '.join(dict.fromkeys((dates[0], dates[-1])))}."


def _due(source: Source, rows: Found) -> str:
    """The rows to be measured again, by name where they are few, and why; empty: none."""
    reasons: dict[str, list[str]] = {}
    for point, why in due_of(source, rows).items():
        reasons.setdefault(why, []).append(point)
    said = "; ".join(
        f"{', '.join(points) if len(points) <= FEW else len(points)} ({why})"
        for why, points in reasons.items()
    )
    return f"Due again of {len(rows)} rows: {said}." if said else ""


def write(everything: Everything, chosen: Sequence[str]) -> None:
    """The summary, and the sections and pictures of the chosen sources."""
    text = PAGE.read_text(encoding="utf-8")
    text = columns.filled(text, "summary", summary(everything), PROGRAM)
    for name in chosen:
        source, rows = everything[name]
        text = columns.filled(text, name, section(name, source, rows), PROGRAM)
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
    """What ringcomm reaches of each figure of a document that is like for like."""
    bars = [
        (name, one)
        for name, (source, rows) in everything.items()
        for one in source.claims(rows)
        if one.ratio is not None and one.is_like_for_like
    ]
    figure = _figure(11, max(2.0, 0.36 * len(bars) + 1.4))
    axes = figure.add_subplot()
    for place, (_, one) in enumerate(reversed(bars)):
        ratio = one.ratio or 0.0
        axes.barh(place, ratio, color="tab:blue" if ratio >= 1 else "tab:orange")
        axes.annotate(
            f"{one.ours} (theirs: {one.document})",
            (max(ratio, 1), place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    labels = [f"{name}: {one.what}" for name, one in reversed(bars)]
    axes.set_yticks(range(len(bars)), labels, fontsize=8)
    axes.set_xlim(0, max([1.0, *(one.ratio or 0.0 for _, one in bars)]) / WORDS_FROM)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("ours over theirs, by the same baseline; blue: at least theirs, orange: below")
    figure.savefig(path, dpi=120)


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
