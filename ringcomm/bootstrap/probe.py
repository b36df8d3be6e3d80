"""Measures the speed of the rails to the other hosts, once while the ranks are joined.

A link divides data among its lanes by measured rates, and the first collective has none yet.
So each rank streams for FILL_S seconds to the next rank on another host, over all rails of that
pair at once, while others stream to it: the traffic of a ring, in which every port of a switch
sends and receives one stream. The receiver measures the later part of the stream, in which the
saved-up tokens of a shaper are used up, and sends the rate back.

    each direction of a probe connection     zeros ... zeros | rate in kB/s, 8 bytes | end of stream

A probe has connections of its own (LaneId.lane == PROBE_LANE), which are closed afterwards, so that
none of its bytes can be left in a lane. Invariants: a pair of ranks with one rail, or on one host,
has none; measure() is over after at most LIMIT_S seconds and never raises: a rail that stalls is
slow.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import selectors
import socket
import struct
import termios
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

PROBE_LANE = 0xFFFF
"""Number of a probe connection among the lanes of its rail."""
FILL_S = 0.1
LIMIT_S = 0.3

_JUDGED = 0.6  # the last part of the stream's time, which is measured
_PIECE = 1 << 20
_LEAST_AHEAD = 32 << 10  # least unacknowledged bytes to keep under way
_RATE = struct.Struct("<Q")
_ZEROS = bytes(_PIECE)
_LOOK_EVERY = 0.001  # seconds between looks at acknowledgements, which wake no selector
_SLOWEST = 1e5  # bytes per second that stand for a rail on which nothing arrives


def target(rank: int, host_numbers: Sequence[int]) -> int | None:
    """Returns the rank that rank streams to; None if all are on one host."""
    world = len(host_numbers)
    following = ((rank + step) % world for step in range(1, world))
    return next((r for r in following if host_numbers[r] != host_numbers[rank]), None)


def peers(rank: int, host_numbers: Sequence[int], rails: Mapping[int, int]) -> set[int]:
    """Returns the ranks that rank needs probe connections to, given the number of rails to each."""
    ours = target(rank, host_numbers)
    return {
        peer
        for peer, count in rails.items()
        if count > 1 and (peer == ours or target(peer, host_numbers) == rank)
    }


class _Stream:
    """One probe connection: streams zeros, measures the received ones and exchanges the rates."""

    def __init__(self, sock: socket.socket, fills: bool) -> None:
        self.sock = sock
        self.reported = 0.0  # rate that the other end measured, bytes per second
        self.fills = fills
        self.sending, self.receiving = True, True
        self._sent = 0
        self._last = b""
        self._arrivals: list[tuple[float, int]] = []
        self._received = 0

    def guarded(self, act: Callable[[], None]) -> None:
        """Calls act; stops using the connection if it fails, which is no error."""
        try:
            act()
        except OSError:
            self.fills = self.sending = self.receiving = False

    def fill(self) -> None:
        """Sends as much as may be unacknowledged: _LEAST_AHEAD plus a quarter of the bytes that
        were acknowledged."""
        if not self.fills:
            return
        under_way = struct.unpack("i", fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4)))[0]
        ahead = _LEAST_AHEAD + (self._sent - under_way) // 4
        with contextlib.suppress(BlockingIOError):
            while under_way < ahead:
                sent = self.sock.send(memoryview(_ZEROS)[: ahead - under_way])
                self._sent += sent
                under_way += sent

    def drain(self, buffer: bytearray) -> None:
        """Receives, notes arrival time and size, and at the end of the stream reads the rate."""
        try:
            count = self.sock.recv_into(buffer)
        except BlockingIOError:
            return
        self._received += count
        self._arrivals.append((time.monotonic(), self._received))
        self._last = (self._last + buffer[max(0, count - _RATE.size) : count])[-_RATE.size :]
        if count == 0:
            self.receiving = False
            if len(self._last) == _RATE.size:
                self.reported = _RATE.unpack(self._last)[0] * 1e3

    def finish(self) -> None:
        """Sends the measured rate behind the data and shuts down the sending side."""
        if self.sending:
            with contextlib.suppress(BlockingIOError):  # full: tried again in the next turn
                self.sock.send(_RATE.pack(round(self.measured_rate() / 1e3)))
                self.sock.shutdown(socket.SHUT_WR)
                self.sending = False

    def measured_rate(self) -> float:
        """Returns bytes per second in the later part of the received stream; 0.0 if none came."""
        if len(self._arrivals) < 2:
            return 0.0
        first, last = self._arrivals[0][0], self._arrivals[-1][0]
        begin = last - _JUDGED * (last - first)
        at, before = next(entry for entry in self._arrivals if entry[0] >= begin)
        return (self._arrivals[-1][1] - before) / (last - at) if last > at else 0.0


def measure(connections: Mapping[K, tuple[socket.socket, bool]]) -> dict[K, float]:
    """Measures all connections at once; returns the sending rates of those flagged True.

    Rates are bytes per second; {} if no bytes arrived on any connection. The sockets are
    non-blocking and stay open.
    """
    streams = {key: _Stream(sock, fills) for key, (sock, fills) in connections.items()}
    buffer = bytearray(_PIECE)
    began = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for stream in streams.values():
            selector.register(stream.sock, selectors.EVENT_READ, stream)
        while any(stream.sending or stream.receiving for stream in streams.values()):
            now = time.monotonic() - began
            if now >= LIMIT_S:
                break
            _turn(selector, streams.values(), buffer, filling=now < FILL_S)
    rates = {
        key: s.reported or s.measured_rate() for key, s in streams.items() if connections[key][1]
    }
    return {key: rate or _SLOWEST for key, rate in rates.items()} if any(rates.values()) else {}


def _turn(
    selector: selectors.BaseSelector, streams: Iterable[_Stream], buffer: bytearray, filling: bool
) -> None:
    for key, _ in selector.select(_LOOK_EVERY):
        stream: _Stream = key.data
        stream.guarded(functools.partial(stream.drain, buffer))
        if not stream.receiving:
            selector.unregister(stream.sock)
    for stream in streams:
        stream.guarded(stream.fill if filling else stream.finish)
