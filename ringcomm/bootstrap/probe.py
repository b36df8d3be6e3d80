"""How fast the rails to the other hosts are, measured once while the ranks are joined.

A link of several lanes gives each its share by measured rates, and the first collective knows none.
So each rank streams for FILL_S seconds to the next rank on another host, over all rails of that
pair at once, while others stream to it: the traffic of a ring, in which every port of a switch
sends and receives one stream. The receiver judges, by the later part of the stream, what a
shaper's savings can no longer flatter; and tells the sender.

    each direction of a probe connection     zeros ... zeros | rate in kB/s, 8 bytes | end of stream

A probe has connections of its own (LaneId.lane == PROBE_LANE), which are closed afterwards, so that
nothing of it can be left in a lane, whatever happened. Invariants: a pair of ranks with one rail,
or on one host, has none; measure() is over after at most LIMIT_S seconds and never raises: a rail
that stalls is slow.
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

_JUDGED = 0.6  # the part of the stream's time that counts, from the end
_PIECE = 1 << 20
_LEAST_AHEAD = 32 << 10  # unacknowledged bytes: what a slow rail must still get rid of
_RATE = struct.Struct("<Q")
_ZEROS = bytes(_PIECE)
_LOOK_EVERY = 0.001  # seconds; acknowledgements come unseen
_SLOWEST = 1e5  # bytes per second, of a rail that brings nothing


def target(rank: int, host_numbers: Sequence[int]) -> int | None:
    """The rank that rank streams to; None if all are on one host."""
    world = len(host_numbers)
    following = ((rank + step) % world for step in range(1, world))
    return next((r for r in following if host_numbers[r] != host_numbers[rank]), None)


def peers(rank: int, host_numbers: Sequence[int], rails: Mapping[int, int]) -> set[int]:
    """The ranks that rank needs probe connections to, given the number of rails to each."""
    ours = target(rank, host_numbers)
    return {
        peer
        for peer, count in rails.items()
        if count > 1 and (peer == ours or target(peer, host_numbers) == rank)
    }


class _Stream:
    """One probe connection: what goes out, what comes in, and what the other end says of it."""

    def __init__(self, sock: socket.socket, fills: bool) -> None:
        self.sock = sock
        self.told = 0.0  # by the other end, bytes per second
        self.fills = fills
        self.sending, self.receiving = True, True
        self._sent = 0
        self._last = b""
        self._arrivals: list[tuple[float, int]] = []
        self._received = 0

    def guarded(self, act: Callable[[], None]) -> None:
        """Does it; a connection that fails meanwhile is of no more use, and no failure."""
        try:
            act()
        except OSError:
            self.fills = self.sending = self.receiving = False

    def fill(self) -> None:
        """Sends what may be under way: little at first, then in proportion to what got through."""
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
        """Takes in what has come."""
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
                self.told = _RATE.unpack(self._last)[0] * 1e3

    def finish(self) -> None:
        """Tells the other end what came, behind what is still on its way."""
        if self.sending:
            with contextlib.suppress(BlockingIOError):  # it is full: at the next turn
                self.sock.send(_RATE.pack(round(self.heard() / 1e3)))
                self.sock.shutdown(socket.SHUT_WR)
                self.sending = False

    def heard(self) -> float:
        """Bytes per second in the later part of what came; 0.0 if nothing did."""
        if len(self._arrivals) < 2:
            return 0.0
        first, last = self._arrivals[0][0], self._arrivals[-1][0]
        begin = last - _JUDGED * (last - first)
        at, before = next(entry for entry in self._arrivals if entry[0] >= begin)
        return (self._arrivals[-1][1] - before) / (last - at) if last > at else 0.0


def measure(connections: Mapping[K, tuple[socket.socket, bool]]) -> dict[K, float]:
    """Bytes per second that go out by each connection of which the second part is True.

    All of them are used at once. The first part is non-blocking and stays open. Empty if nothing
    came through anywhere.
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
    rates = {key: s.told or s.heard() for key, s in streams.items() if connections[key][1]}
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
