"""The union of intervals up to a moment, by hand."""

from __future__ import annotations

import pytest

from ringcomm.adaptive.law import Interval, covered


@pytest.mark.parametrize(
    ("intervals", "until", "length"),
    [
        ([], 5.0, 0.0),
        ([(8.0, 9.0), (2.0, 5.0), (4.0, 6.0)], 8.0, 4.0),  # two overlap, one is later
        ([(2.0, 9.0), (6.0, 10.0)], 6.0, 4.0),  # cut at its end
    ],
)
def test_what_intervals_cover(intervals: list[Interval], until: float, length: float) -> None:
    assert covered(intervals, until) == length
