"""Hellos: messages in which ranks tell their setup and progress before a round.

They are exchanged at the start, and before each round if ranks may come back. From them all ranks
know alike which ranks need the state, and which one sends it: the first of those that are furthest.

Invariants: a rank that is set up differently is refused on all ranks alike.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence

import numpy as np

from ...communicator import Communicator
from ...errors import MismatchError

_LAYOUT = struct.Struct("<??6xqq16s")  # the fields of a Hello, in their order


@dataclasses.dataclass(frozen=True)
class Hello:
    """Setup and progress of one rank.

    Attributes:
        is_starting: it has just been attached, and is in no round.
        has_state: it has loaded a state, or taken part in a round; and not apart from the others.
        number: number of its next round.
        place: its rank in torch.distributed's default group; -1 without one.
        setup: digest of all settings that must be the same on all ranks.
    """

    is_starting: bool
    has_state: bool
    number: int
    place: int
    setup: bytes

    def exchanged(self, comm: Communicator, timeout: float | None) -> Hellos:
        """Returns the hellos of all ranks. Raises MismatchError if they are set up differently."""
        packed = np.frombuffer(_LAYOUT.pack(*dataclasses.astuple(self)), np.uint8)
        rows = comm.allgather(packed, timeout=timeout)
        return Hellos([Hello(*_LAYOUT.unpack(bytes(row))) for row in np.asarray(rows)], comm.rank)


class Hellos:
    """Hellos of all ranks, in the order of the communicator."""

    def __init__(self, rows: Sequence[Hello], rank: int) -> None:
        self.rows, self._rank = list(rows), rank
        other = [at for at, row in enumerate(self.rows) if row.setup != self.rows[0].setup]
        if other:
            raise MismatchError(
                f"OuterStep is set up differently on ranks 0 and {other[0]}: model, weights that "
                "are not trained, every, outer, compression, fragments and delay must be "
                "the same on all",
                rank=other[0],
            )

    @property
    def all_start(self) -> bool:
        """Whether no rank is in a round."""
        return all(row.is_starting for row in self.rows)

    @property
    def leader(self) -> int:
        """Rank that sends the state."""
        most = max(_progress(row) for row in self.rows)
        return next(at for at, row in enumerate(self.rows) if _progress(row) == most)

    @property
    def needs_state(self) -> list[bool]:
        """Whether each rank must be given the state: it has none, or is behind."""
        most = max(_progress(row) for row in self.rows)
        return [not row.has_state or _progress(row) < most for row in self.rows]

    @property
    def own_need(self) -> bool:
        """Whether this rank must be given the state."""
        return self.needs_state[self._rank]


def _progress(row: Hello) -> int:
    return row.number if row.has_state else -1
