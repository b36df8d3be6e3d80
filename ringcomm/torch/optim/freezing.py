"""When the variance of a one-bit Adam is frozen, and when it is renewed.

Invariants: decisions follow from the number of the step, from settings, and from sums that are
equal on all ranks.
"""

from __future__ import annotations

from typing import Literal

from ...core.calls import is_integer
from ..argument_checks import require
from ..sync.kept import Kept

Freeze = int | Literal["stable"]
_RATIO = 0.96  # 1-bit Adam's: least ratio of a stable variance at both ends of its memory
_LOOKS_BACK = 100  # longest memory, in steps, if the variance will be renewed
_LOOKS = 16  # number of times it is examined in the length of its memory


def steps_remembered(beta2: float) -> int:
    """Returns the number of steps that a mean with this beta remembers."""
    return max(1, round(1 / (1 - beta2)))


class FreezePoint(Kept):
    """Finds the step after which the variance stays fixed.

    Args:
        freeze: the number of the step; or "stable": when the sum of the variance has changed by
            less than 4 % in the steps that it remembers, and the learning rate does not rise; at
            the latest when the rate has not risen for five times as many.
        beta2: the variance's.
        renews: whether it will be renewed: then an early freeze costs little, and it looks back
            and waits less long.

    Attributes:
        step: the step; None: not known yet.
    """

    kept = ("step", "_seen", "_rate", "_steady")

    def __init__(self, freeze: Freeze, beta2: float, *, renews: bool) -> None:
        fits = freeze == "stable" if isinstance(freeze, str) else is_integer(freeze) and freeze >= 1
        require("freeze value, give the number of a step, or 'stable'", repr(freeze), fits)
        self._memory, self._patience = steps_remembered(beta2), 5
        if renews:
            self._memory, self._patience = min(self._memory, _LOOKS_BACK), 2
        self._stride = max(1, self._memory // _LOOKS)
        self._seen: list[float] = []
        self._rate: float | None = None  # at the latest look
        self._steady = 0
        self.step = None if isinstance(freeze, str) else int(freeze)

    def is_due(self, step: int) -> bool:
        """Returns whether ``look`` needs the sum of the variance after this step."""
        return self.step is None and step % self._stride == 0

    def look(self, step: int, size: float, rate: float) -> None:
        """Decides, given the sum of the unbiased variance and the learning rate."""
        rises, self._rate = self._rate is not None and rate > self._rate, rate
        self._steady = 0 if rises else self._steady + 1
        self._seen.append(size)
        back = self._memory // self._stride
        if len(self._seen) <= back:
            return
        before = self._seen[-1 - back]
        del self._seen[: -1 - back]
        stable = size > 0 and min(size, before) >= _RATIO * max(size, before)
        if not rises and (stable or self._steady > self._patience * back):
            self.step = step


class Renewals(Kept):
    """Steps at growing intervals, as in 0/1 Adam: an interval doubles when it was used ``uses``
    times. Each step is a multiple of its interval after the step given to ``begin``.

    Args:
        uses: number of uses of an interval.
        most: the longest interval.
        first: the first interval.
    """

    kept = ("interval", "_used", "_start", "_next", "count")

    def __init__(self, uses: int, most: int, first: int = 1) -> None:
        self._uses, self._most = uses, most
        self.interval, self._used = first, 0
        self._start, self._next = 0, first
        self.count = 0

    def begin(self, step: int) -> None:
        """Counts steps from this one on."""
        self._start, self._next = step, step + self.interval

    def is_due(self, step: int) -> bool:
        """Returns whether a renewal is due at that step, or was due and has not been made."""
        return step >= self._next

    def advance(self, step: int) -> None:
        """Notes that a renewal was made at that step."""
        self.count += 1
        self._used += 1
        if self._used == self._uses:
            self._used, self.interval = 0, min(2 * self.interval, self._most)
        passed = step - self._start
        self._next = step + self.interval - passed % self.interval
