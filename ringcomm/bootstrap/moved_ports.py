"""Tells peers where a port listens whose address has moved.

    a lost lane, which its peer dials, has another address here
        --> this rank listens there, and tells so by a lane of another port --> the peer dials there

Invariants: news is believed of the rank alone that has proven to be the lane's other end; the
acceptor owns the sockets that listen on new addresses, one for each address that a port has now.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping

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


class MovedPorts:
    """Tells, and hears. close() it before the acceptor and the loop.

    Args:
        loop: where its sockets are watched.
        plan: news of a peer changes its targets.
        acceptor: lets in the peers that are told.
        heard: called with each lane whose target has changed.
    """

    def __init__(
        self, loop: Loop, plan: Plan, acceptor: Acceptor, heard: Callable[[LaneId], None]
    ) -> None:
        self._loop, self._plan, self._acceptor, self._heard = loop, plan, acceptor, heard
        self._addresses: dict[LaneId, str] = {}  # that the peer was told last
        self._listeners: dict[str, socket.socket] = {}
        self._dials: dict[LaneId, tuple[Dial, float]] = {}
        self._readings: dict[socket.socket, Reading] = {}

    def close(self) -> None:
        """Closes the connections by which news goes and comes."""
        for dial, _ in self._dials.values():
            dial.stop()
        for sock, reading in self._readings.items():
            reading.stop()
            sock.close()

    def tell(self, moved: Mapping[LaneId, str], open_lanes: Collection[LaneId]) -> None:
        """Tells the peers of lanes, which are lost, the addresses that their ports have here."""
        now = time.monotonic()
        news = {lane._replace(lane=NEWS_LANE): address for lane, address in moved.items()}
        for lane in self._dials.keys() - news.keys():
            self._dials.pop(lane)[0].stop()
        for lane, address in news.items():
            dial, began = self._dials.get(lane, (None, 0.0))
            if self._addresses.get(lane) == address and dial is not None and now < began + _AGAIN:
                continue
            way = next((each for each in open_lanes if each.peer == lane.peer), None)
            with contextlib.suppress(OSError):  # the port has lost the address again
                if way is not None:
                    listener = self._listen(lane, address)
                    if dial is not None:
                        dial.stop()
                    self._dials[lane] = self._dial(lane, way, address, listener), now

    def _listen(self, lane: LaneId, address: str) -> socket.socket:
        if address not in self._listeners:
            self._listeners[address] = listen(address)
            self._acceptor.add(self._listeners[address])
        self._addresses[lane] = address
        for old in self._listeners.keys() - set(self._addresses.values()):
            self._acceptor.remove(self._listeners.pop(old))
        return self._listeners[address]

    def _dial(self, lane: LaneId, way: LaneId, address: str, listener: socket.socket) -> Dial:
        news = _NEWS.pack(listener.getsockname()[1], address.encode())

        def say(sock: socket.socket) -> None:
            with contextlib.suppress(OSError):  # it is told again
                sock.send(news, socket.MSG_NOSIGNAL)
            sock.close()

        return self._plan.dial(self._loop, Role.LANE_ANEW, lane, say, by=way)

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
            is_same_port = (lane.peer, lane.rail) == (about.peer, about.rail)
            if is_same_port and there.version == ipaddress.ip_address(target.address).version:
                self._plan.targets[lane] = dataclasses.replace(
                    target, address=str(there), port=port
                )
                self._heard(lane)
