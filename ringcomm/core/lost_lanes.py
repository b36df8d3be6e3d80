"""The lanes of a running rc_comm: which are lost, how they are made anew, and what is said of that.

Invariant: a port's loss is logged at most once a minute, whatever its lanes do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from ..bootstrap.keeper import Mark
from ..bootstrap.lanes import LaneId
from ..bootstrap.mesh_result import LaneSocket
from .native import OK, ffi, lib, text

_SILENT_S = 60.0
_log = logging.getLogger("ringcomm")


class CoreLanes:
    """Lanes of an rc_comm, as a LaneKeeper sees them.

    Args:
        handle: the rc_comm, which outlives the keeper.
        lanes: those of the mesh, in its order.
    """

    def __init__(self, handle: Any, lanes: Sequence[LaneSocket]) -> None:
        self._handle = handle
        self._lanes = list(lanes)
        self._places: dict[LaneId, tuple[int, int]] = {}
        self._ids: dict[tuple[int, int], LaneSocket] = {}
        for lane in lanes:
            place = lane.peer, sum(peer == lane.peer for peer, _ in self._ids)
            self._ids[place] = lane
            self._places[LaneId(lane.peer, lane.rail, lane.lane)] = place
        self._rows = ffi.new("rc_lost_lane[]", max(1, len(lanes)))
        self._lost: set[LaneId] = set()
        self._said: dict[int, float] = {}

    def lost(self) -> set[LaneId]:
        """Returns the lanes that are lost now, and logs what has changed."""
        count = lib.rc_comm_lost_lanes(self._handle, self._rows, len(self._lanes))
        why = {self._id(row.peer, row.lane): text(row.why.message) for row in self._rows[0:count]}
        lost = set(why)
        for lane in sorted(lost - self._lost):
            self._say(lane, why[lane], len(lost))
        for lane in sorted(self._lost - lost):
            _log.info("%s is back", self._name(lane))
        self._lost = lost
        return lost

    def drop(self, lane: LaneId) -> Mark | None:
        """Gives a lane up, if it is not lost yet; None if it cannot be made anew."""
        mark = ffi.new("rc_lane_mark *")
        result = lib.rc_comm_drop_lane(self._handle, *self._places[lane], mark)
        fields = (mark.made, mark.received, mark.before, mark.previous, mark.ticket)
        return Mark(*fields) if result == OK else None

    def renew(self, lane: LaneId, fd: int, ours: Mark, theirs: Mark) -> bool:
        """Goes on over a connected socket, which is the core's from now on. False if the lane is
        not where our mark says."""
        marks = (ffi.new("rc_lane_mark *", tuple(mark)) for mark in (ours, theirs))
        return bool(lib.rc_comm_renew_lane(self._handle, *self._places[lane], fd, *marks) == OK)

    def _id(self, peer: int, index: int) -> LaneId:
        lane = self._ids[peer, index]
        return LaneId(lane.peer, lane.rail, lane.lane)

    def _name(self, lane: LaneId) -> str:
        of = self._ids[self._places[lane]]
        return f"rail {lane.rail} to rank {lane.peer} ({of.here} - {of.there})"

    def _say(self, lane: LaneId, why: str, lost: int) -> None:
        port, now = self._ids[self._places[lane]].port, time.monotonic()
        level = logging.INFO if now < self._said.get(port, 0.0) + _SILENT_S else logging.WARNING
        if level == logging.WARNING:
            self._said[port] = now
        _log.log(
            level,
            "%s; %d of %d lanes are left, and it is tried again",
            why or f"rank {lane.peer} has given up {self._name(lane)}",
            len(self._lanes) - lost,
            len(self._lanes),
        )
