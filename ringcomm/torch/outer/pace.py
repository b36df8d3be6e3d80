"""Paces: at which iterations a rank enters a round.

    Every(30), 2 fragments      iteration   15    30    45    60
                                fragment     0     1     0     1       each every 30
    AtEnd()                     never: only a flush exchanges, once
    BySpeed(30)                 the fastest rank after 30 iterations, the others after as many as
                                they make in the same time
    Fitted()                    as seldom as it takes for rounds to cost next to nothing

Invariants: a pace counts its own rounds, not those that a flush adds, so that a flush does not
shift what follows. Speeds come from the headers of a round, which all ranks have alike.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ...adaptive.law import inner_steps
from ...errors import ConfigError, did_you_mean
from ..settings import require_whole

_log = logging.getLogger("ringcomm")


class Pace(Protocol):
    """When rounds are due on this rank."""

    @property
    def period(self) -> int | None:
        """Iterations between two rounds of one fragment; None: there is no such number."""

    def cut(self, fragments: int) -> None:
        """Tells it how many fragments there are, before anything else."""

    def is_due(self, iteration: int) -> bool:
        """Whether a round is due after so many iterations."""

    def advance(self, iteration: int) -> None:
        """A round was entered after so many iterations."""

    def learn(self, speeds: Sequence[float], trips: Sequence[float], place: int) -> None:
        """Of a round's ranks: their speeds in iterations per second, and the seconds that their
        latest round's transfer took, 0.0 where that is not known; and which is this rank's."""

    def weight(self, iterations: int) -> float:
        """How much a delta of so many iterations counts, where tokens are not counted."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint stores of it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what ``state_dict`` returned."""


class Every:
    """A round of each fragment every so many iterations.

    Raises ConfigError unless that is an integer of at least 1.
    """

    def __init__(self, iterations: int) -> None:
        self._every = require_whole("every", iterations, 1)
        self._fragments = 1
        self._begin = 0  # the iteration that rounds are counted from
        self._rounds = 0

    @property
    def period(self) -> int | None:
        """See Pace."""
        return self._every

    def cut(self, fragments: int) -> None:
        """Raises ConfigError if there are more fragments than iterations."""
        if fragments > self._every:
            raise ConfigError(f"Invalid fragments: {fragments}; with every={self._every} give at "
                              "most that many")  # fmt: skip
        self._fragments = fragments

    def is_due(self, iteration: int) -> bool:
        """See Pace."""
        return iteration >= self._begin + (self._rounds + 1) * self._every // self._fragments

    def advance(self, iteration: int) -> None:
        """See Pace."""
        self._rounds += 1
        if self._rounds == self._fragments:
            self._begin, self._rounds = self._begin + self._every, 0

    def learn(self, speeds: Sequence[float], trips: Sequence[float], place: int) -> None:
        """Ignores speeds and transfers."""

    def weight(self, iterations: int) -> float:
        """All deltas count alike."""
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        """See Pace."""
        return {"begin": self._begin, "rounds": self._rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Pace."""
        self._begin, self._rounds = int(state["begin"]), int(state["rounds"])

    def __repr__(self) -> str:
        return f"Every({self._every})"


class Fitted(Every):
    """The fewest iterations between two rounds of a fragment with which rounds cost at most a share
    of the time, by what ranks have measured: the speed of the slowest, the longest transfer.

    All ranks see the same headers, so all change alike, and between two rounds of all fragments
    only. Outer rates stay: gamma / (1 - mu) does not depend on the number of iterations.

    Args:
        share: of the time, that rounds may cost.
        least, most: bounds of the iterations; it begins with ``least``.
        delay: of OuterStep, behind which a transfer hides.
    """

    def __init__(
        self, share: float = 0.03, least: int = 10, most: int = 500, delay: int = 0
    ) -> None:
        super().__init__(require_whole("least", least, 1))
        if not 0 < share < 1:
            raise ConfigError(f"Invalid share: {share}; give a number between 0 and 1")
        require_whole("most", most, least)
        self._share, self._least, self._most, self._delay = share, least, most, delay
        self._wanted, self._why = self._every, ""

    def cut(self, fragments: int) -> None:
        """At least an iteration for each fragment, and more than the delay."""
        self._least = max(self._least, fragments * (self._delay + 1))
        self._every = self._wanted = self._least
        super().cut(fragments)

    def advance(self, iteration: int) -> None:
        """See Pace."""
        super().advance(iteration)
        if self._rounds == 0 and self._wanted != self._every:
            _log.info("outer step: every %d iterations from %d on: %s", self._wanted, iteration,
                      self._why)  # fmt: skip
            self._every = self._wanted

    def learn(self, speeds: Sequence[float], trips: Sequence[float], place: int) -> None:
        """See Pace."""
        if not all(speed > 0 for speed in speeds) or not any(trips):
            return
        step_s, trip = 1 / min(speeds), max(trips)
        each = inner_steps(step_s, trip, 1.0, overlap=self._delay, share=self._share)
        wanted = min(self._most, max(self._least, each * self._fragments))
        if not 0.8 < wanted / self._wanted < 1.25:  # noise moves nothing
            self._wanted = wanted
            self._why = (f"a transfer takes {1e3 * trip:.0f} ms, an iteration "
                         f"{1e3 * step_s:.0f} ms")  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """See Pace."""
        return {**super().state_dict(), "every": self._every, "wanted": self._wanted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Pace."""
        super().load_state_dict(state)
        self._every, self._wanted = int(state["every"]), int(state["wanted"])

    def __repr__(self) -> str:
        return f"Fitted({self._share}, {self._least}, {self._most}, {self._delay})"


class AtEnd:
    """No round but those of a flush."""

    period: int | None = None

    def cut(self, fragments: int) -> None:
        """Raises ConfigError for more than one: they could not be staggered."""
        if fragments > 1:
            raise ConfigError(f'Invalid fragments: {fragments}; with every="end" there is one '
                              "exchange, of everything")  # fmt: skip

    def is_due(self, iteration: int) -> bool:
        """Never."""
        return False

    def advance(self, iteration: int) -> None:
        """It does not matter."""

    def learn(self, speeds: Sequence[float], trips: Sequence[float], place: int) -> None:
        """Ignores speeds and transfers."""

    def weight(self, iterations: int) -> float:
        """All deltas count alike."""
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing."""

    def __repr__(self) -> str:
        return "AtEnd()"


class BySpeed:
    """Rounds at equal times: the fastest rank makes so many iterations between two rounds of a
    fragment, the others as many as they make in that time, by the speeds of the round before.

    Raises ConfigError unless that is an integer of at least 1.
    """

    def __init__(self, iterations: int) -> None:
        self._most = require_whole("every", iterations, 1)
        self._fragments = 1
        self._own = iterations
        self._next: float | None = None
        self._begin = 0.0

    @property
    def period(self) -> int | None:
        """See Pace."""
        return self._most

    @property
    def own(self) -> int:
        """Iterations that this rank makes between two rounds of a fragment."""
        return self._own

    def cut(self, fragments: int) -> None:
        """Raises ConfigError if there are more fragments than iterations."""
        Every(self._most).cut(fragments)
        self._fragments = fragments

    def is_due(self, iteration: int) -> bool:
        """See Pace."""
        return iteration >= self._begin + max(1.0, self._own / self._fragments)

    def advance(self, iteration: int) -> None:
        """See Pace."""
        self._begin = max(self._begin + max(1.0, self._own / self._fragments), iteration - 1.0)

    def learn(self, speeds: Sequence[float], trips: Sequence[float], place: int) -> None:
        """See Pace."""
        if all(speed > 0 for speed in speeds):
            self._own = max(1, round(self._most * speeds[place] / max(speeds)))

    def weight(self, iterations: int) -> float:
        """A delta counts as many times as it has iterations."""
        return float(iterations)

    def state_dict(self) -> dict[str, Any]:
        """See Pace."""
        return {"begin": self._begin, "own": self._own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Pace."""
        self._begin, self._own = float(state["begin"]), int(state["own"])

    def __repr__(self) -> str:
        return f"BySpeed({self._most})"


_SPEED = "speed:"
_NAMES = ["end", "auto", "speed:30"]


def pace_of(every: object, delay: int = 0) -> Pace:
    """The pace that OuterStep's ``every`` names or is: a number of iterations, "end", "speed:30",
    "auto". Raises ConfigError for anything else."""
    if every == "end":
        return AtEnd()
    if every == "auto":
        return Fitted(delay=delay)
    if isinstance(every, str) and every.startswith(_SPEED) and every[len(_SPEED) :].isdigit():
        return BySpeed(int(every[len(_SPEED) :]))
    if isinstance(every, int):
        return Every(every)
    if isinstance(every, type) or not callable(getattr(every, "is_due", None)):
        raise ConfigError(f'Invalid every: {every!r}; give a number of iterations, "end", '
                          f'"auto" or "speed:30"{did_you_mean(every, _NAMES)}')  # fmt: skip
    return every  # type: ignore[return-value]
