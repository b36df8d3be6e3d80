"""Detects that a rank has left, where nothing but its lanes shows it.

A torch Store, mpi4py, or a parent communicator whose rank lives on does not say that a rank has
given up. Its lanes do: the connected ones have ended, or nothing listens any more where it offered
to. Both can be so for a moment: a dialer that tries again has closed its first lane, and a rank
that has joined and left already has closed all. So a suspicion counts once it has lasted.

Invariant: pure bookkeeping over what ``lost`` says; a rank that is no longer lost is forgotten.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .join_failure import Row
from .loop import LOOK_EVERY, Loop

GRACE = 0.5
"""Seconds after which a suspicion counts."""

Lost = Callable[[], list[Row]]
"""Returns a row for each rank that seems to have left."""


class Suspicion:
    """Ranks that have seemed to be gone for GRACE seconds."""

    def __init__(self, lost: Lost) -> None:
        self._lost = lost
        self._since: dict[int, float] = {}

    def rows(self) -> list[Row]:
        """Returns a row for each rank that has left."""
        now = time.monotonic()
        rows = self._lost()
        self._since = {row.rank: self._since.get(row.rank, now) for row in rows}
        return [row for row in rows if now - self._since[row.rank] >= GRACE]

    def watch(self, loop: Loop, ring: Callable[[], None]) -> None:
        """Calls ring() in this loop while any rank has left."""
        loop.repeat(LOOK_EVERY, lambda: ring() if self.rows() else None)
