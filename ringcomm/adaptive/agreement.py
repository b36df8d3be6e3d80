"""How the ranks come to one decision: measurements to rank 0, its decision to all, three steps on.

    before step     t           t + 1                   t + 2     t + 3
    all             gather ...  rank 0 decides,                   the decision is
                                its text is spread ...            in force

Each exchange has a whole step to travel in, and is waited for where the next one begins.

Invariants: what is submitted, and before which step, follows from the numbers of the steps and from
what rank 0 has told, so it is the same on all ranks whatever they measure. A window has steps of
one decision only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ..codecs import parse
from .law import DELAY, FIRST_WINDOW, WINDOW, Change, Law, Load, Rung, Seen, Window

_Told = TypeVar("_Told", covariant=True)
Later = Callable[[], _Told]
"""Returns the result of a started exchange; waits while it is in flight. Raises what the collective
raises."""


class Exchange(Protocol):
    """What passes between the ranks; each is a collective."""

    def gather(self, row: Sequence[float]) -> Later[list[list[float]]]:
        """Starts to bring together a row of each rank, in order of ranks."""

    def spread(self, text: str) -> Later[str]:
        """Starts to bring the text of rank 0 to all; others' is not looked at."""


class Agreement:
    """One rank's part.

    Args:
        law: has a say only on the rank that decides.
        decides: this is that rank, the one whose texts are spread.

    Attributes:
        decides: as given.
        window: of this rank, to be filled by whoever measures.
        rung: in force.
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
        self, step: int, exchange: Exchange, load: Load, ready_s: Sequence[float], latency_s: float
    ) -> Change | None:
        """Before a step. The change that is in force from it on; None: none is.

        Args:
            load, ready_s, latency_s: see ``Law.decide``.
        """
        if self._next < 0:
            self._next = step + 1 + FIRST_WINDOW  # one for what only first steps do
        if self._gathered is not None and step > self._gathered[0]:
            self._decide(exchange, load, ready_s, latency_s)
        if self._spread is not None and step >= self._spread[0]:
            return self._take_up(step)
        if step >= self._next and self._gathered is None and self._spread is None:
            self._gathered = step, exchange.gather(self.window.seen().row())
            self.window.empty()
        return None

    def _decide(
        self, exchange: Exchange, load: Load, ready_s: Sequence[float], latency_s: float
    ) -> None:
        assert self._gathered is not None
        at, rows = self._gathered
        self._gathered = None
        seen = [Seen.of_row(row) for row in rows()]
        text = ""
        if self.decides:
            change = self._law.decide(at, seen, load, ready_s, latency_s)
            text = "" if change is None else _written(change)
        self._spread = at + DELAY, exchange.spread(text)

    def _take_up(self, step: int) -> Change | None:
        assert self._spread is not None
        at, told = self._spread
        self._spread = None
        text = told()
        self._next = at - DELAY + WINDOW
        if not text:
            return None
        change = _read(step, text)
        self.rung = change.rung
        self.window.empty()
        self._next = step + FIRST_WINDOW
        return change


def _written(change: Change) -> str:
    rung = change.rung
    return json.dumps([rung.codec.name, rung.accumulate, change.reason])


def _read(step: int, text: str) -> Change:
    codec, accumulate, reason = json.loads(text)
    return Change(step, Rung(parse(codec), accumulate), reason)
