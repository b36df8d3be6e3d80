"""The pace: at which iterations a rank enters a round.

    every 30, 2 fragments       iteration   15    30    45    60
                                fragment     0     1     0     1       each every 30
    None                        never: only a flush exchanges, once

Invariants: a pace counts its own rounds, not those that a flush adds, so a flush does not shift
later rounds.
"""

from __future__ import annotations

from ...errors import ConfigError
from ..argument_checks import require_whole
from ..sync.kept import Kept


class Pace(Kept):
    """A round of each fragment every so many iterations.

    Args:
        every: iterations between two rounds of one fragment; None: no round but those of a flush.
        fragments: number of fragments, which take turns.

    Attributes:
        every: as given.

    Raises ConfigError unless ``every`` is None or an integer of at least 1, or if there are more
    fragments than iterations, or several and no rounds: they could not be staggered.
    """

    def __init__(self, every: int | None, fragments: int = 1) -> None:
        if isinstance(every, str):
            raise ConfigError(
                f"Invalid every: {every!r}; give a number of iterations, or None for one exchange "
                'at the end, by flush() or by leaving the "with"'
            )
        self.every = every if every is None else require_whole("every", every, 1)
        if fragments > (1 if every is None else every):
            most = "one exchange, of everything" if every is None else "at most that many"
            raise ConfigError(f"Invalid fragments: {fragments}; with every={every} there is {most}")
        self._fragments = fragments
        self._begin = 0  # iteration at which the present turn of all fragments began
        self._rounds = 0
        self.kept = () if every is None else ("_begin", "_rounds")

    def is_due(self, iteration: int) -> bool:
        """Returns whether a round is due after that many iterations."""
        if self.every is None:
            return False
        return iteration >= self._begin + (self._rounds + 1) * self.every // self._fragments

    def advance(self) -> None:
        """Notes that a round was entered."""
        if self.every is None:
            return
        self._rounds += 1
        if self._rounds == self._fragments:
            self._begin, self._rounds = self._begin + self.every, 0

    def __repr__(self) -> str:
        return f"Pace({self.every})"
