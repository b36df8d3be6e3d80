"""Tells peers where a port listens whose address has moved.

    a lost lane has another address here than its peer knows
        --> this rank listens there, and tells so by a lane of another port; where there is none,
            by that lane once it is back
        --> the peer dials there, and its own news goes there

Invariants: news is believed of the rank alone that has proven to be the lane's other end; the
acceptor owns the sockets that listen on new addresses, one for each address that a port ever had.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from .acceptor import Acceptor
from .dialer import Dial
from .handshake_params import Role
from .lanes import NEWS_LANE, LaneId, Plan
from .loop import Loop, Reading
from .sockets import listen

_AGAIN = 5.0
"""Seconds after which a peer is told once more, while the lane is lost."""
_PATIENCE = 5.0
_NEWS = struct.Struct("<H62s")  # TCP port, address


@dataclasses.dataclass
class _Telling:
    """Latest news of a port to one peer."""

    address: str
    first: float
    """When it was told first since the lane was lost."""
    latest: float
    dial: Dial
    tries: int = 1
    is_over: bool = False
    """The lane was made anew since."""


class MovedPorts:
    """Tells, and hears. close() it before the acceptor and the loop.

    Args:
        loop: where its sockets are watched.
        plan: news of a peer changes its targets.
        acceptor: lets in the peers that are told.
        addresses_now: as in keeper.Keeping.
        heard: called with each lane whose target has changed.
    """

    def __init__(
        self,
        loop: Loop,
        plan: Plan,
        acceptor: Acceptor,
        addresses_now: Callable[[Collection[LaneId]], dict[LaneId, str]],
        heard: Callable[[LaneId], None],
    ) -> None:
        self._loop, self._plan, self._acceptor = loop, plan, acceptor
        self._addresses_now, self._heard = addresses_now, heard
        self._told: dict[LaneId, _Telling] = {}
        self._listeners: dict[str, socket.socket] = {}
        self._readings: dict[socket.socket, Reading] = {}

    def close(self) -> None:
        """Closes the connections by which news goes and comes."""
        for telling in self._told.values():
            telling.dial.stop()
        for sock, reading in self._readings.items():
            reading.stop()
            sock.close()

    def has_told(self, lane: LaneId) -> bool:
        """Returns True if the peer was told where the lane's port listens."""
        return _about(lane) in self._told

    def may_have_helped(self, lane: LaneId) -> bool:
        """Returns True if the peer was told so lately that it may not have dialled yet."""
        told = self._told.get(_about(lane))
        return told is not None and not told.is_over and time.monotonic() < told.first + _AGAIN

    def tell(self, moved: Mapping[LaneId, str], open_lanes: Collection[LaneId]) -> None:
        """Tells the peers of lanes, which are all that are lost, the addresses that their ports
        have here."""
        now = time.monotonic()
        news = {_about(lane): address for lane, address in moved.items()}
        for lane in self._told.keys() - news.keys():
            self._told[lane].is_over = True
        for lane, address in news.items():
            told = self._told.get(lane)
            is_known = told is not None and not told.is_over and told.address == address
            if told is not None and is_known and now < told.latest + _AGAIN:
                continue
            ways = sorted(
                way for way in open_lanes if way.peer == lane.peer and way.rail != lane.rail
            )
            with contextlib.suppress(OSError):  # the port has lost the address again
                if ways:
                    self._tell(lane, address, ways, now)

    def tell_peer(self, lane: LaneId, address: str) -> None:
        """Tells the peer of a lane that is back, where it was made, the address that the lane's
        port has here, unless it was told."""
        told = self._told.get(_about(lane))
        if told is None or told.address != address:
            with contextlib.suppress(OSError):  # the port has lost the address again
                self._tell(_about(lane), address, [lane], time.monotonic())

    def _tell(self, lane: LaneId, address: str, ways: Sequence[LaneId], now: float) -> None:
        if address not in self._listeners:
            self._listeners[address] = listen(address, congestion=self._plan.congestion)
            self._acceptor.add(self._listeners[address])
        told = self._told.get(lane)
        first, tries = now, 0
        if told is not None:
            told.dial.stop()
            tries = told.tries
            first = now if told.is_over or told.address != address else told.first
        way = ways[tries % len(ways)]
        dial = self._plan.dial(
            self._loop,
            Role.LANE_ANEW,
            lane,
            lambda sock: self._say(sock, address),
            self._addresses_now([way])[way],
            by=way,
        )
        self._told[lane] = _Telling(address, first, now, dial, tries + 1)

    def _say(self, sock: socket.socket, address: str) -> None:
        news = _NEWS.pack(self._listeners[address].getsockname()[1], address.encode())
        with contextlib.suppress(OSError):  # it is told again
            sock.send(news, socket.MSG_NOSIGNAL)  # into an empty buffer: all of it
        sock.close()

    def hear(self, lane: LaneId, sock: socket.socket) -> None:
        """Takes the news of a lane's port from a connection, and closes it."""

        def take(news: bytes | None) -> None:
            del self._readings[sock]
            sock.close()
            if news is not None:
                port, address = _NEWS.unpack(news)
                self._take(lane, port, address.rstrip(b"\0"))

        self._readings[sock] = Reading(self._loop, sock, _NEWS.size, _PATIENCE, take)

    def _take(self, about: LaneId, port: int, address: bytes) -> None:
        try:
            there = ipaddress.ip_address(address.decode())
        except ValueError:
            return
        for lane, target in self._plan.targets.items():
            is_alike = there.version == ipaddress.ip_address(target.address).version
            now = dataclasses.replace(target, address=str(there), port=port, link_local=None)
            if _about(lane) == about and is_alike and now != target:
                self._plan.targets[lane] = now
                self._heard(lane)


def _about(lane: LaneId) -> LaneId:
    return lane._replace(lane=NEWS_LANE)
