"""Arithmetic of time intervals, (begin, end) in seconds of one clock."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def covered(intervals: Iterable[Interval], until: float) -> float:
    """Returns the length of the intervals' union, up to a moment."""
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        end = min(end, until)
        if end > reached:
            length += end - max(begin, reached)
            reached = end
    return length
