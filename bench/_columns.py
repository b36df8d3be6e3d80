"""Tables of text: aligned for a screen, and in markdown to paste."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """A line for each row; columns are flush right, but for those of the numbers in ``left``."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(
        text.ljust(width) if number in left else text.rjust(width)
        for number, (text, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows]  # fmt: skip


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """The same, its first row as heads."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]
