"""Headers: what each rank tells the others in a round, beside its deltas.

Headers are gathered on all ranks, so whatever follows from them is the same everywhere: whether a
flush is over, how deltas are weighted, how fast the ranks are, whether they train on the same data.

Invariants: a header has a fixed size. Weights are relative to a reference that all ranks know
before the round, so that a contribution can leave before the others' weights are known.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence

import numpy as np
import torch

from ...communicator import Communicator
from ...errors import MismatchError
from ...work import Work

_LAYOUT = struct.Struct("<4?4xqddd16s")  # the fields of a Header, in their order


@dataclasses.dataclass(frozen=True)
class Header:
    """One rank's.

    Attributes:
        counts_tokens: ``weight`` is a number of tokens.
        is_ending: it flushes.
        has_unsent: it has trained since its last rounds.
        is_dropped: its delta is not finite, and does not count.
        iteration: how many it has made.
        weight: of its delta; 0.0: it brings none.
        speed: iterations per second, 0.0 where it is not known.
        trip: seconds that its latest transfer took, 0.0 where there was none.
        data: a digest of its first batch; zeros where it is not known.
    """

    counts_tokens: bool
    is_ending: bool
    has_unsent: bool
    is_dropped: bool
    iteration: int
    weight: float
    speed: float
    trip: float = 0.0
    data: bytes = bytes(16)

    def gathered(self, comm: Communicator, timeout: float | None) -> Work:
        """Submits the exchange of headers."""
        packed = np.frombuffer(_LAYOUT.pack(*dataclasses.astuple(self)), np.uint8)
        return comm.allgather(packed, async_op=True, timeout=timeout)


class Headers:
    """Those of all ranks of a round, in the order of its communicator."""

    def __init__(self, rows: Sequence[Header]) -> None:
        self.rows = list(rows)
        counting = [row.counts_tokens for row in self.rows if row.weight > 0]
        if any(counting) and not all(counting):
            raise MismatchError(
                "OuterStep: some ranks call outer.count(tokens), and some do not; all must, or none"
            )

    @classmethod
    def of(cls, work: Work) -> Headers:
        """Waits for the exchange. Raises MismatchError if some ranks count tokens and others do
        not, and what the collective raises."""
        return cls([Header(*_LAYOUT.unpack(bytes(row))) for row in np.asarray(work.wait())])

    @property
    def is_over(self) -> bool:
        """All ranks flush, and none has anything left to send."""
        return all(row.is_ending and not row.has_unsent for row in self.rows)

    @property
    def all_end(self) -> bool:
        """All ranks flush."""
        return all(row.is_ending for row in self.rows)

    @property
    def dropped(self) -> list[int]:
        """Ranks of the communicator whose deltas were not finite."""
        return [rank for rank, row in enumerate(self.rows) if row.is_dropped]

    @property
    def speeds(self) -> list[float]:
        """Iterations per second by rank, 0.0 unknown."""
        return [row.speed for row in self.rows]

    @property
    def trips(self) -> list[float]:
        """Seconds of the latest transfer by rank, 0.0 none."""
        return [row.trip for row in self.rows]

    @property
    def total(self) -> float:
        """The sum of the weights."""
        return sum(row.weight for row in self.rows)

    @property
    def mean(self) -> float:
        """The mean weight of those that bring something; 1.0 if nobody does."""
        weights = [row.weight for row in self.rows if row.weight > 0]
        return sum(weights) / len(weights) if weights else 1.0

    def same_data(self) -> list[tuple[int, int]]:
        """Pairs of ranks of the communicator that have trained on the same first batch."""
        known: dict[bytes, int] = {}
        pairs = []
        for rank, row in enumerate(self.rows):
            if any(row.data):
                first = known.setdefault(row.data, rank)
                if first != rank:
                    pairs.append((first, rank))
        return pairs


def scale(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiplies in place, unless the factor is one: then no bit changes."""
    return tensor if factor == 1.0 else tensor.mul_(factor)
