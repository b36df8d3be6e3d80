"""The last round of bring-up: both ends of every lane agree on whether it exists.

A lane counts if both its ends made it. Invariants: every rank judges all pairs from the same
parts, so all succeed or all raise the same table; a pair of ranks without any lane is a failure;
a rail without lanes is left out if the pair has another one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from .join_failure import CONNECTED, MAX_ROWS, NOT_SEEN, Row, join_error
from .lanes import LaneId
from .records import Record
from .settings_exchange import MAX_PORTS


@dataclasses.dataclass(frozen=True)
class Made:
    """Round 3: the lanes that one rank has made."""

    lanes: frozenset[LaneId]
    rows: tuple[Row, ...]
    """Outcome of each rail that this rank tried to make."""

    @classmethod
    def of(cls, lanes: Iterable[LaneId], rows: Iterable[Row]) -> Made:
        """Sorts failures first, in case not all rows fit."""
        ordered = sorted(rows, key=lambda row: (row.state == CONNECTED, row))
        return cls(frozenset(lanes), tuple(ordered[:MAX_ROWS]))

    def to_fields(self) -> dict[str, Any]:
        """Returns the fields for a blob, with one bit per lane."""
        masks: dict[tuple[int, int], int] = {}
        for lane in self.lanes:
            key = (lane.peer, lane.rail)
            masks[key] = masks.get(key, 0) | 1 << lane.lane
        links = [{"peer": p, "rail": r, "lanes": mask} for (p, r), mask in sorted(masks.items())]
        return {"links": links, "rows": [row.to_fields() for row in self.rows]}

    @classmethod
    def from_record(cls, record: Record, world_size: int, lanes_per_rail: int) -> Made:
        """Reads the fields of a blob. Raises BootstrapError."""
        lanes: set[LaneId] = set()
        for link in record.records("links", world_size * MAX_PORTS):
            peer = link.integer("peer", 0, world_size - 1)
            rail = link.integer("rail", 0, world_size * MAX_PORTS)
            mask = link.integer("lanes", 0, (1 << lanes_per_rail) - 1)
            lanes.update(LaneId(peer, rail, i) for i in range(lanes_per_rail) if mask >> i & 1)
        rows = tuple(Row.from_record(row, world_size) for row in record.records("rows", MAX_ROWS))
        return cls(frozenset(lanes), rows)


def agreed(made: Sequence[Made], rank: int) -> list[LaneId]:
    """Returns the lanes of rank that both ends made, in order."""
    return sorted(
        lane for lane in made[rank].lanes if lane._replace(peer=rank) in made[lane.peer].lanes
    )


def check(made: Sequence[Made], hosts: Sequence[str], waited: float) -> None:
    """Raises BootstrapError with a table if any two ranks have no lane between them."""
    joined = {(rank, lane.peer) for rank in range(len(made)) for lane in agreed(made, rank)}
    rows: list[Row] = []
    for low in range(len(made)):
        for high in range(low + 1, len(made)):
            if (high, low) not in joined:
                rows += _why(made, low, high)
    if rows:
        raise join_error(f"not all ranks could be joined within {waited:.1f} s", rows, hosts)


def _why(made: Sequence[Made], low: int, high: int) -> list[Row]:
    """Returns the rows of the two ranks about each other; the higher one dialled."""
    rows = [row for row in made[high].rows if row.rank == low]
    rows += [row for row in made[low].rows if row.rank == high and row.state != NOT_SEEN]
    return rows or [Row(low, high, "", "connected at one end only")]


def reason(made: Sequence[Made], a: int, b: int, rail: int) -> str:
    """Says why a rail between two ranks has no lane."""
    low, high = min(a, b), max(a, b)
    for row in made[high].rows:
        if (row.rank, row.rail) == (low, rail) and row.state != CONNECTED:
            return f"{row.state} at {row.address}" + (f" ({row.detail})" if row.detail else "")
    return "connected at one end only"
