"""Tables of text: aligned for a screen, and in markdown; how sizes are named in them; and how a
program puts them into a document that is written by hand.

What stands between two marks is made anew each time:

    <!-- scaling: made by bench/results.py --write -->
    ...
    <!-- end of scaling -->
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

_FIGURE = re.compile(r"([-+]?[\d.]+) (\S+)")


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """A line for each row; columns are flush right, but for those of the numbers in ``left``."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if number in left else text.rjust(width)
            for number, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """The same, its first row as heads."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]


def with_units(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The same; a unit that all figures of a column have stands in its head instead."""
    return [
        list(row)
        for row in zip(*(_with_unit(*column) for column in zip(*rows, strict=True)), strict=True)
    ]


def _with_unit(head: str, *cells: str) -> list[str]:
    figures = [_FIGURE.fullmatch(cell) for cell in cells if cell != "-"]
    units = {figure and figure[2] for figure in figures}
    unit = units.pop() if len(units) == 1 else None
    if unit is None:
        return [head, *cells]
    return [f"{head}, {unit}", *(cell.removesuffix(f" {unit}") for cell in cells)]


def filled(text: str, name: str, body: str, program: str) -> str:
    """The document with that body between the marks of that name; at its end, if it has none."""
    first, last = f"<!-- {name}: made by {program} --write -->", f"<!-- end of {name} -->"
    block = f"{first}\n{body.strip()}\n{last}"
    marked = re.compile(re.escape(first) + ".*?" + re.escape(last), re.DOTALL)
    if marked.search(text):
        return marked.sub(lambda _: block, text)
    return f"{text.rstrip()}\n\n## {name}\n\n{block}\n"


def size_name(size: int) -> str:
    """For example "64 KiB", or "16 MB", which is no whole number of MiB."""
    binary, decimal = ((1 << 20, "MiB"), (1 << 10, "KiB")), ((10**6, "MB"), (10**3, "KB"))
    for unit, name in binary if size % 1000 else decimal:
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"
