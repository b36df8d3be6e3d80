"""What a communicator has counted, as Python values (Communicator.stats)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._native import ffi, lib
from .bootstrap.mesh import RailInfo

_TOTALS = ("works", "payload_bytes", "wire_bytes", "shared_bytes", "engine_cpu_s", "waiting_s",
           "threads")
_OF_A_LANE = ("peer", "rail", "lane", "sent_bytes", "received_bytes", "sent_frames",
              "received_frames", "rate", "retransmits", "rtt_s")  # fmt: skip
_OF_A_RAIL = ("sent_bytes", "received_bytes", "retransmits", "share")


def read_counters(comm: Any, rails: Sequence[RailInfo]) -> dict[str, Any]:
    """Of an open rc_comm; the keys are those of Communicator.stats."""
    totals = ffi.new("rc_comm_stats *")
    lib.rc_comm_stats_get(comm, totals)
    rows = ffi.new("rc_lane_stats[]", max(1, totals.lanes))
    count = min(lib.rc_comm_lane_stats(comm, rows, totals.lanes), totals.lanes)
    lanes = [{name: getattr(rows[i], name) for name in _OF_A_LANE} for i in range(count)]
    for lane in lanes:
        lane["share"] = lane["sent_bytes"] / totals.wire_bytes if totals.wire_bytes else 0.0
    return {
        **{name: getattr(totals, name) for name in _TOTALS},
        "lanes": lanes,
        "rails": [_sum_of_rail(rail, lanes) for rail in rails],
    }


def count_works(comm: Any) -> int:
    """Works that an open rc_comm has completed."""
    totals = ffi.new("rc_comm_stats *")
    lib.rc_comm_stats_get(comm, totals)
    return int(totals.works)


def _sum_of_rail(rail: RailInfo, lanes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {"rail": rail.index, "interface": rail.interface}
    for name in _OF_A_RAIL:
        total[name] = sum(lane[name] for lane in lanes if lane["rail"] == rail.index)
    return total
