"""A control channel of plain TCP, for rank programs that have no library to talk through.

Rank 0 listens where torchrun's environment says (MASTER_ADDR, MASTER_PORT); the others dial it and
stay connected, as the points of a star. It carries a few bytes at a time and is never timed.

Invariants: all ranks call the same methods in the same order with arrays of one size and dtype. A
connection counts only once it has shown the job's token (PEERS_TOKEN), which the launcher makes.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import socket
import struct
import time

import numpy as np

START_S = 120.0
_HELLO = struct.Struct("!32sI")  # token, rank


class Star:
    """This rank's end of the control channel; has what the floor asks of a Control.

    Attributes:
        rank, world: this rank's number, and how many there are.

    Raises OSError if the ranks have not met in START_S seconds, or if one is lost.
    """

    def __init__(self) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._points: list[socket.socket] = []
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        token = os.environ.get("PEERS_TOKEN", "").encode().ljust(32, b"\0")[:32]
        if self.rank:
            self._points.append(_dial(address, _HELLO.pack(token, self.rank)))
        else:
            self._points = _welcome(address, token, self.world)

    def gather(self, values: np.ndarray) -> np.ndarray:
        """The 1-d arrays of all ranks as (world, size), on every rank."""
        mine = np.ascontiguousarray(values)
        table = np.empty((self.world, mine.size), mine.dtype)
        if self.rank:
            self._points[0].sendall(mine.tobytes())
            everything = _read(self._points[0], table.nbytes)
        else:
            rows = [_read(point, mine.nbytes) for point in self._points]
            everything = b"".join([mine.tobytes(), *rows])
            for point in self._points:
                point.sendall(everything)
        table.reshape(-1)[:] = np.frombuffer(everything, mine.dtype)
        return table

    def barrier(self) -> None:
        """Return when all ranks are here."""
        self.gather(np.zeros(1, np.uint8))

    def close(self) -> None:
        """Hang up."""
        for point in self._points:
            point.close()


def _dial(address: tuple[str, int], hello: bytes) -> socket.socket:
    give_up = time.monotonic() + START_S
    while True:
        try:
            point = socket.create_connection(address, timeout=START_S)
        except ConnectionRefusedError:  # rank 0 is not up yet
            if time.monotonic() > give_up:
                raise
            time.sleep(0.02)
            continue
        point.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        point.sendall(hello)
        return point


def _welcome(address: tuple[str, int], token: bytes, world: int) -> list[socket.socket]:
    """The other ranks' connections in rank order; strangers are turned away."""
    found: dict[int, socket.socket] = {}
    with socket.create_server(address) as listener:
        listener.settimeout(START_S)
        while len(found) < world - 1:
            point, _ = listener.accept()
            point.settimeout(START_S)
            try:
                shown, rank = _HELLO.unpack(_read(point, _HELLO.size))
            except OSError:
                shown, rank = b"", 0
            if not hmac.compare_digest(shown, token) or not 0 < rank < world or rank in found:
                point.close()
                continue
            point.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found[rank] = point
    return [found[rank] for rank in sorted(found)]


def _read(point: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = point.recv(size - len(data))
        if not part:
            raise ConnectionError("a rank has left")
        data += part
    return bytes(data)


def address_of(interface: str) -> str:
    """IPv4 address of an interface (ioctl SIOCGIFADDR)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = interface.encode()[:15].ljust(40, b"\0")
        return socket.inet_ntoa(fcntl.ioctl(any_socket, 0x8915, request)[20:24])
