"""Counters of a communicator as Python values (Communicator.stats)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, cast

from ..bootstrap.mesh import RailInfo
from .native import ffi, lib


class LaneStats(TypedDict):
    """Counters of one lane; ``Communicator.stats`` documents them."""

    peer: int
    rail: int
    lane: int
    sent_bytes: int
    received_bytes: int
    sent_frames: int
    received_frames: int
    rate: float
    retransmits: int
    rtt_s: float
    made: int
    is_lost: int
    share: float


class RailStats(TypedDict):
    """Sums over the lanes of a rail."""

    rail: int
    interface: str
    sent_bytes: int
    received_bytes: int
    retransmits: int
    share: float


class Stats(TypedDict):
    """Counters of a communicator; ``Communicator.stats`` returns and documents them."""

    works: int
    payload_bytes: int
    wire_bytes: int
    shared_bytes: int
    engine_cpu_s: float
    waiting_s: float
    threads: int
    lanes: list[LaneStats]
    rails: list[RailStats]


_TOTALS = [name for name in Stats.__annotations__ if name not in ("lanes", "rails")]
_OF_A_LANE = [name for name in LaneStats.__annotations__ if name != "share"]
_SUMMED = [name for name in RailStats.__annotations__ if name not in ("rail", "interface")]


def read_counters(comm: Any, rails: Sequence[RailInfo]) -> Stats:
    """Reads the counters of an open rc_comm."""
    totals = ffi.new("rc_comm_stats *")
    lib.rc_comm_stats_get(comm, totals)
    rows = ffi.new("rc_lane_stats[]", max(1, totals.lanes))
    count = min(lib.rc_comm_lane_stats(comm, rows, totals.lanes), totals.lanes)
    sent = totals.wire_bytes
    lanes: list[dict[str, Any]] = [
        {
            **{name: getattr(row, name) for name in _OF_A_LANE},
            "share": row.sent_bytes / sent if sent else 0.0,
        }
        for row in rows[0:count]
    ]
    by_rail = [
        {
            "rail": rail.index,
            "interface": rail.interface,
            **{
                name: sum(lane[name] for lane in lanes if lane["rail"] == rail.index)
                for name in _SUMMED
            },
        }
        for rail in rails
    ]
    read = {name: getattr(totals, name) for name in _TOTALS}
    return cast(Stats, {**read, "lanes": lanes, "rails": by_rail})


def count_works(comm: Any) -> int:
    """Returns the number of works that an open rc_comm has completed."""
    totals = ffi.new("rc_comm_stats *")
    lib.rc_comm_stats_get(comm, totals)
    return int(totals.works)
