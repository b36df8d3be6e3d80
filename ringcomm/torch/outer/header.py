"""Headers: a rank's flags in a round, sent beside its deltas.

Headers are gathered on all ranks, so decisions from them are the same everywhere: whether a flush
is over, how many deltas a mean has, whether ranks train on the same data.

Invariants: a header has a fixed size. A delta that does not count is zero, so that it can be sent
before the others' headers are known.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence

import numpy as np

from ...communicator import Communicator
from ...core.work import Work

_LAYOUT = struct.Struct("<4?4x16s")  # the fields of a Header, in their order


@dataclasses.dataclass(frozen=True)
class Header:
    """One rank's flags in a round.

    Attributes:
        is_ending: it flushes.
        has_unsent: it has trained since its last rounds.
        is_dropped: its delta is not finite, and does not count.
        counts: its delta counts; else it is zero.
        data: digest of its first batch; zeros if unknown.
    """

    is_ending: bool
    has_unsent: bool
    is_dropped: bool
    counts: bool
    data: bytes = bytes(16)

    def gathered(self, comm: Communicator, timeout: float | None) -> Work:
        """Submits the exchange of headers."""
        packed = np.frombuffer(_LAYOUT.pack(*dataclasses.astuple(self)), np.uint8)
        return comm.allgather(packed, async_op=True, timeout=timeout)


class Headers:
    """Headers of all ranks of a round, in the order of its communicator."""

    def __init__(self, rows: Sequence[Header]) -> None:
        self.rows = list(rows)

    @classmethod
    def of(cls, work: Work) -> Headers:
        """Waits for the exchange. Raises what the collective raises."""
        return cls([Header(*_LAYOUT.unpack(bytes(row))) for row in np.asarray(work.wait())])

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
