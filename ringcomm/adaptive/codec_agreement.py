"""Agreement of the ranks on a codec: measurements to rank 0, its decision to all, 3 steps later.

    before step     t           t + 1                   t + 2     t + 3
    all             gather ...  rank 0 decides,                   the decision is
                                its text is spread ...            in force

Each exchange has a whole step to travel in; the next one's start waits for it.

Invariants: the exchanges, and the steps before which they are submitted, follow from the numbers
of the steps and from rank 0's decisions, so they are the same on all ranks whatever they measure. A
window has steps of one decision only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ..codecs import parse
from .law import DELAY, FIRST_WINDOW, WINDOW, Change, Law, Load, Rung, Window, WindowMedians

_Result = TypeVar("_Result", covariant=True)
Later = Callable[[], _Result]
"""Waits for a started exchange and returns its result. Raises the errors of the collective."""


class Collectives(Protocol):
    """Collectives by which the ranks agree."""

    def gather(self, row: Sequence[float]) -> Later[list[list[float]]]:
        """Starts gathering one row of each rank, in order of ranks."""

    def spread(self, text: str) -> Later[str]:
        """Starts broadcasting rank 0's text; the other ranks' text is ignored."""


class Agreement:
    """One rank's part in the agreement.

    Args:
        law: makes the decision on the rank that decides; elsewhere only its first rung is used.
        decides: True on that rank, whose texts are broadcast.

    Attributes:
        decides: as given.
        window: steps of this rank, filled by the code that measures them.
        rung: the rung in force.
    """

    def __init__(self, law: Law, decides: bool) -> None:
        self.window = Window()
        self.rung = law.rung
        self._law = law
        self.decides = decides
        self._next = -1  # the step before which the window is gathered; -1: not known yet
        self._gathered: tuple[int, Later[list[list[float]]]] | None = None
        self._spread: tuple[int, Later[str]] | None = None

    def begin(
        self,
        step: int,
        exchange: Collectives,
        load: Load,
        ready_s: Sequence[float],
        latency_s: float,
    ) -> Change | None:
        """Call before a step. Returns the change that is in force from this step on, or None.

        Args:
            load, ready_s, latency_s: see ``Law.decide``.
        """
        if self._next < 0:
            self._next = step + 1 + FIRST_WINDOW  # one more for work that only first steps do
        if self._gathered is not None and step > self._gathered[0]:
            self._decide(exchange, load, ready_s, latency_s)
        if self._spread is not None and step >= self._spread[0]:
            return self._take_up(step)
        if step >= self._next and self._gathered is None and self._spread is None:
            self._gathered = step, exchange.gather(self.window.medians())
            self.window = Window()
        return None

    def _decide(
        self, exchange: Collectives, load: Load, ready_s: Sequence[float], latency_s: float
    ) -> None:
        assert self._gathered is not None
        at, rows = self._gathered
        self._gathered = None
        medians = [WindowMedians(*row) for row in rows()]
        text = ""
        if self.decides:
            change = self._law.decide(at, medians, load, ready_s, latency_s)
            if change is not None:
                codec = change.rung.codec.name
                text = json.dumps([codec, change.rung.accumulate, change.reason])
        self._spread = at + DELAY, exchange.spread(text)

    def _take_up(self, step: int) -> Change | None:
        assert self._spread is not None
        at, later = self._spread
        self._spread = None
        text = later()
        self._next = at - DELAY + WINDOW
        if not text:
            return None
        codec, accumulate, reason = json.loads(text)
        change = Change(step, Rung(parse(codec), accumulate), reason)
        self.rung = change.rung
        self.window = Window()
        self._next = step + FIRST_WINDOW
        return change
