"""The lanes of a running rc_comm: which are lost, how they are made anew, and what is said of that.

Invariants: of a port's loss towards a peer is warned at most once a minute, whatever its lanes do;
after close() the rc_comm is not called any more.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from ..bootstrap.keeper import Losses, Mark
from ..bootstrap.lanes import LaneId
from ..bootstrap.mesh_result import LaneSocket
from .native import OK, ffi, lib, text
from .timeline import Timeline

_SILENT_S = 60.0
_log = logging.getLogger("ringcomm")


class CoreLanes:
    """Lanes of an rc_comm, as a LaneKeeper sees them.

    Args:
        handle: the rc_comm, which outlives the keeper.
        lanes: those of the mesh, in its order.
        timeline: is told of losses, too.
    """

    def __init__(
        self, handle: Any, lanes: Sequence[LaneSocket], timeline: Timeline | None = None
    ) -> None:
        self._handle, self._timeline = handle, timeline
        self._ids: dict[tuple[int, int], LaneSocket] = {}
        for lane in lanes:
            self._ids[lane.peer, sum(peer == lane.peer for peer, _ in self._ids)] = lane
        self._places = {self._id(*place): place for place in self._ids}
        self._rows = ffi.new("rc_lost_lane[]", max(1, len(lanes)))
        self._lost = {  # bring-up has warned of these
            self._id(*place): lane.why_not for place, lane in self._ids.items() if lane.why_not
        }
        self._said: dict[tuple[int, int], float] = {}
        self._silent: set[LaneId] = set()
        self._renewed: set[LaneId] = set()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Has every later call do nothing, and waits for one that is under way, even if that is
        interrupted."""
        self._handle = None
        interrupt = None
        while True:
            try:
                with self._lock:
                    break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def losses(self) -> Losses | None:
        """Returns the lanes that are lost now, and logs what has changed; None once the
        communicator has failed."""
        count = self._call(lib.rc_comm_lost_lanes, self._rows, len(self._ids))
        if count is None or count < 0:
            return None
        rows = self._rows[0:count]
        why = {self._id(row.peer, row.lane): text(row.why.message) for row in rows}
        silent = {self._id(row.peer, row.lane) for row in rows if row.is_silent}
        lost = set(why) - silent
        reasons = {lane: reason for lane, reason in self._lost.items() if lane in lost}
        for lane in sorted(lost - self._lost.keys()):
            name = self._name(lane)
            reasons[lane] = why[lane] or f"rank {lane.peer} has given up {name}"
            if lane in self._silent:
                reasons[lane] = f"rank {lane.peer} was silent on {name} and on all others"
            self._say(lane, reasons[lane], len(lost))
        for lane in sorted((self._lost.keys() - lost) & self._renewed):  # the others have ended
            _log.info("%s is back", self._name(lane))
            if self._timeline is not None:
                self._timeline.back(self._name(lane))
        self._lost = reasons
        self._renewed &= lost
        self._silent = silent
        return Losses(lost, silent)

    def drop(self, lane: LaneId) -> Mark | None:
        """Gives a lane up, if it is not lost yet, and logs that; None if it cannot be made anew."""
        mark = ffi.new("rc_lane_mark *")
        result = self._call(lib.rc_comm_drop_lane, *self._places[lane], mark)
        self.losses()  # the lane may be back before the next look
        fields = (mark.made, mark.received, mark.before, mark.previous, mark.ticket)
        return Mark(*fields) if result == OK else None

    def renew(self, lane: LaneId, fd: int, ours: Mark, theirs: Mark) -> bool:
        """Goes on over a connected socket, which is the core's from now on. False if the lane is
        not where our mark says."""
        marks = (ffi.new("rc_lane_mark *", tuple(mark)) for mark in (ours, theirs))
        result = self._call(lib.rc_comm_renew_lane, *self._places[lane], fd, *marks)
        if result is None:
            os.close(fd)
        if result == OK:
            self._renewed.add(lane)
        return bool(result == OK)

    def lose_peer(self, peer: int) -> None:
        """Ends the communicator, as the peer has ended; without effect while it has a lane."""
        self._call(lib.rc_comm_lose_peer, peer)

    def report(self) -> list[dict[str, Any]]:
        """Returns of each lane its name, made, sent_bytes, received_bytes, and why it is lost, or
        None."""
        rows = ffi.new("rc_lane_stats[]", max(1, len(self._ids)))
        count = self._call(lib.rc_comm_lane_stats, rows, len(self._ids)) or 0
        ids = [self._id(row.peer, row.lane) for row in rows[0:count]]
        return [
            {
                "name": self._name(lane),
                "made": row.made,
                "sent_bytes": row.sent_bytes,
                "received_bytes": row.received_bytes,
                "why": self._lost.get(lane),
            }
            for lane, row in zip(ids, rows[0:count], strict=True)
        ]

    def _call(self, function: Any, *arguments: Any) -> Any:
        """Calls a function of the core; None after close()."""
        with self._lock:
            handle = self._handle
            return None if handle is None else function(handle, *arguments)

    def _id(self, peer: int, index: int) -> LaneId:
        lane = self._ids[peer, index]
        return LaneId(lane.peer, lane.rail, lane.lane)

    def _name(self, lane: LaneId) -> str:
        of = self._ids[self._places[lane]]
        which = f"lane {lane.lane} of " if any(lane.lane for lane in self._places) else ""
        return f"{which}rail {lane.rail} to rank {lane.peer} ({of.here} - {of.there})"

    def _say(self, lane: LaneId, why: str, lost: int) -> None:
        way = self._ids[self._places[lane]].port, lane.peer
        now, said = time.monotonic(), self._said.get(way, -math.inf)
        level = logging.INFO if now < said + _SILENT_S else logging.WARNING
        if level == logging.WARNING:
            self._said[way] = now
        if self._timeline is not None:
            self._timeline.lost(self._name(lane), why)
        _log.log(
            level,
            "%s; %d of %d lanes are left, and it is tried again",
            why,
            len(self._ids) - lost,
            len(self._ids),
        )
