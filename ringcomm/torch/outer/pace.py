"""Paces: at which iterations a rank enters a round.

    Every(30), 2 fragments      iteration   15    30    45    60
                                fragment     0     1     0     1       each every 30
    AtEnd()                     never: only a flush exchanges, once
    BySpeed(30)                 the fastest rank after 30 iterations, the others after as many as
                                they make in the same time

Invariants: a pace counts its own rounds, not those that a flush adds, so that a flush does not
shift what follows. Speeds come from the headers of a round, which all ranks have alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ...errors import ConfigError, did_you_mean
from .settings import require_whole


class Pace(Protocol):
    """When rounds are due on this rank."""

    @property
    def period(self) -> int | None:
        """Iterations between two rounds of one fragment; None: there is no such number."""
        ...

    def cut(self, fragments: int) -> None:
        """Tells it how many fragments there are, before anything else."""
        ...

    def is_due(self, iteration: int) -> bool:
        """Whether a round is due after so many iterations."""
        ...

    def advance(self, iteration: int) -> None:
        """A round was entered after so many iterations."""
        ...

    def learn(self, speeds: Sequence[float], place: int) -> None:
        """The speeds of a round's ranks in iterations per second, 0.0 where it is not known, and
        which of them is this rank's."""
        ...

    def weight(self, iterations: int) -> float:
        """How much a delta of so many iterations counts, where tokens are not counted."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint stores of it."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what ``state_dict`` returned."""
        ...


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

    def learn(self, speeds: Sequence[float], place: int) -> None:
        """It does not matter."""

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

    def learn(self, speeds: Sequence[float], place: int) -> None:
        """It does not matter."""

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

    def learn(self, speeds: Sequence[float], place: int) -> None:
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


def pace_of(every: object) -> Pace:
    """The pace that OuterStep's ``every`` names or is: a number of iterations, "end", "speed:30".
    Raises ConfigError for anything else."""
    if every == "end":
        return AtEnd()
    if isinstance(every, str) and every.startswith(_SPEED) and every[len(_SPEED) :].isdigit():
        return BySpeed(int(every[len(_SPEED) :]))
    if isinstance(every, int):
        return Every(every)
    if isinstance(every, type) or not callable(getattr(every, "is_due", None)):
        raise ConfigError(f'Invalid every: {every!r}; give a number of iterations, "end", or '
                          f'"speed:30"{did_you_mean(every, ["end", "speed:30"])}')  # fmt: skip
    return every  # type: ignore[return-value]
