"""Messages of a rank to all others: a Hello before a round, and a Header beside its deltas.

    Hello     setup and progress: who needs the state, and who sends it       before the round
    Header    whether it flushes, and whether its deltas count                beside the deltas

Each is gathered on all ranks, so decisions from them are the same everywhere. Hellos are exchanged
at the start, and before each round if ranks may come back.

Invariants: a message has a fixed size. A delta that does not count is zero, so that it can be sent
before the others' headers are known. A rank that is set up differently is refused on all alike.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import ClassVar, TypeVar

import numpy as np

from ...communicator import Communicator
from ...core.work import Work
from ...errors import MismatchError

M = TypeVar("M", bound="Message")


@dataclasses.dataclass(frozen=True)
class Message:
    """Numbers and bytes of one rank.

    Attributes:
        layout: the fields, in their order.
    """

    layout: ClassVar[struct.Struct]

    def gathered(self, comm: Communicator, timeout: float | None) -> Work:
        """Submits the exchange of these messages."""
        packed = np.frombuffer(self.layout.pack(*dataclasses.astuple(self)), np.uint8)
        return comm.allgather(packed, async_op=True, timeout=timeout)

    @classmethod
    def rows(cls: type[M], work: Work) -> list[M]:
        """Returns the messages of all ranks. Raises what the collective raises."""
        return [cls(*cls.layout.unpack(bytes(row))) for row in np.asarray(work.wait())]


@dataclasses.dataclass(frozen=True)
class Hello(Message):
    """Setup and progress of one rank.

    Attributes:
        is_starting: it has just been attached, and is in no round.
        has_state: it has loaded a state, or taken part in a round; and not apart from the others.
        number: number of its next round.
        place: its rank in torch.distributed's default group; -1 without one.
        setup: digest of all settings that must be the same on all ranks.
    """

    layout = struct.Struct("<??6xqq16s")
    is_starting: bool
    has_state: bool
    number: int
    place: int
    setup: bytes

    def exchanged(self, comm: Communicator, timeout: float | None) -> Hellos:
        """Returns the hellos of all ranks. Raises MismatchError if they are set up differently."""
        return Hellos(Hello.rows(self.gathered(comm, timeout)), comm.rank)


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


@dataclasses.dataclass(frozen=True)
class Header(Message):
    """One rank's flags in a round.

    Attributes:
        is_ending: it flushes.
        has_unsent: it has trained since its last rounds.
        is_dropped: its delta is not finite, and does not count.
        counts: its delta counts; else it is zero.
        data: digest of its first batch; zeros if unknown.
    """

    layout = struct.Struct("<4?4x16s")
    is_ending: bool
    has_unsent: bool
    is_dropped: bool
    counts: bool
    data: bytes = bytes(16)


class Headers:
    """Headers of all ranks of a round, in the order of its communicator."""

    def __init__(self, rows: Sequence[Header]) -> None:
        self.rows = list(rows)

    @property
    def is_over(self) -> bool:
        """Whether all ranks flush, and none has anything left to send."""
        return all(row.is_ending and not row.has_unsent for row in self.rows)

    @property
    def all_end(self) -> bool:
        """Whether all ranks flush."""
        return all(row.is_ending for row in self.rows)

    @property
    def dropped(self) -> list[int]:
        """Ranks of the communicator whose deltas were not finite."""
        return [rank for rank, row in enumerate(self.rows) if row.is_dropped]

    @property
    def counting(self) -> int:
        """Number of deltas that count."""
        return sum(row.counts for row in self.rows)

    def same_data(self) -> list[tuple[int, int]]:
        """Returns pairs of ranks of the communicator that have trained on the same first batch."""
        known: dict[bytes, int] = {}
        pairs = []
        for rank, row in enumerate(self.rows):
            if any(row.data):
                first = known.setdefault(row.data, rank)
                if first != rank:
                    pairs.append((first, rank))
        return pairs
