"""Strangers that knock at the listeners of some processes of this host, at a steady rate.

    python bench/trials/crowd.py KIND RATE SECONDS KEY_ID WORLD PID...

Connects from 127.0.0.2 to 127.0.0.9 by turns to whatever these processes listen on at 127.0.0.1,
and does what its kind does. Prints how many connections it has made, as JSON. Invariants: it ends
after SECONDS, or as soon as its input ends; it connects to nothing but the listeners of these
processes on the loopback.
"""

from __future__ import annotations

import collections
import json
import os
import resource
import select
import socket
import struct
import sys
import time

ADDRESSES = [f"127.0.0.{number}" for number in range(2, 10)]
KINDS = ("close", "reset", "silent", "one byte", "public bytes", "noise", "hello")

_TICK = 0.005
_LOOK_EVERY = 0.05
_LISTEN, _LOOPBACK = "0A", "0100007F"
_LINGER_0 = struct.pack("ii", 1, 0)
_PUBLIC = b"RCOMMhi\n\1\0"
_NOISE = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    bytes(range(255, -1, -1)) * 16,
)


def listeners_of(pids: list[int]) -> list[int]:
    """Ports of 127.0.0.1 that these processes listen on."""
    inodes = set()
    for pid in pids:
        try:
            folder = f"/proc/{pid}/fd"
            inodes.update(os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder))
        except OSError:  # the process, or a descriptor of it, is gone
            continue
    with open("/proc/net/tcp", encoding="ascii") as file:
        rows = [line.split() for line in file][1:]
    return [
        int(row[1].split(":")[1], 16)
        for row in rows
        if row[3] == _LISTEN and row[1].startswith(_LOOPBACK) and f"socket:[{row[9]}]" in inodes
    ]


def hello(key_id: bytes, world: int, role: int) -> bytes:
    """A well-formed HELLO of one who knows all that is public about a job."""
    head = struct.pack("<8sHBBIIIHHI", b"RCOMMhi\n", 1, role, 1, world, world - 1, 0, 0, 0, 0)
    return head + os.urandom(32) + key_id + os.urandom(32) + bytes(28)


class Crowd:
    """The connections, each with what its kind does."""

    def __init__(self, kind: str, key_id: bytes, world: int) -> None:
        self._kind = kind
        self._key_id, self._world = key_id, world
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = max(64, soft - 64)
        self._held: collections.deque[socket.socket] = collections.deque()
        self.made = self.unheard = 0

    def knock(self, port: int) -> None:
        """One more connection."""
        sock = socket.socket()
        sock.setblocking(False)
        sock.bind((ADDRESSES[self.made % len(ADDRESSES)], 0))
        sock.connect_ex(("127.0.0.1", port))
        self.made += 1
        if self._kind == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
        try:
            sock.send(self._words())
        except OSError:  # the listener's queue is full, or it has closed already
            self.unheard += 1
        if self._kind in ("close", "reset"):
            sock.close()
            return
        self._held.append(sock)
        if len(self._held) > self._most:
            self._held.popleft().close()

    def _words(self) -> bytes:
        if self._kind == "one byte":
            return b"R"
        if self._kind == "public bytes":
            return _PUBLIC
        if self._kind == "noise":
            return _NOISE[self.made % len(_NOISE)]
        if self._kind == "hello":  # every other one with a wrong proof, the others stay
            words = hello(self._key_id, self._world, 1 + self.made // 2 % 2)
            return words + os.urandom(32) if self.made % 2 else words
        return b""


def main() -> None:
    kind, rate, seconds, key_id, world = sys.argv[1:6]
    pids = [int(pid) for pid in sys.argv[6:]]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    crowd = Crowd(kind, bytes.fromhex(key_id), int(world))
    began = looked = time.monotonic()
    ports: list[int] = []
    due, last = 0.0, began
    while time.monotonic() - began < float(seconds):
        if select.select([sys.stdin], [], [], _TICK)[0]:
            break
        now = time.monotonic()
        if not ports or now - looked > _LOOK_EVERY:
            ports, looked = listeners_of(pids), now
        due = min(due + float(rate) * (now - last), float(rate) / 5)  # stalls are not made up for
        last = now
        while ports and due >= 1.0:
            crowd.knock(ports[crowd.made // len(ADDRESSES) % len(ports)])
            due -= 1.0
    print(json.dumps({"made": crowd.made, "seconds": time.monotonic() - began}))


if __name__ == "__main__":
    main()
