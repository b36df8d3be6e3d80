"""Tables of text: aligned for a screen, and in markdown to paste; how sizes are named in them."""

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


def size_name(size: int) -> str:
    """For example "64 KiB", or "16 MB", which is no whole number of MiB."""
    binary, decimal = ((1 << 20, "MiB"), (1 << 10, "KiB")), ((10**6, "MB"), (10**3, "KB"))
    for unit, name in binary if size % 1000 else decimal:
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"
