"""Tells how a running communicator's lanes are: `python -m ringcomm jobs` asks for it.

Each LaneKeeper listens on an abstract Unix socket, "ringcomm-" and a random number, which ends with
its process, and which processes in the same network namespace find.

Invariants: only processes of one user answer each other; who asks makes nobody wait, and nothing
that it sends is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from .loop import READ, WRITE, Loop

_PREFIX = "ringcomm-"
_PEER = struct.Struct("3i")  # process, user, group
_PATIENCE = 2.0
"""Seconds for an answer to be made and taken, and from a failure to let somebody in until the next
try."""


class StatusSocket:
    """Answers in a loop.

    Args:
        loop: where its socket is watched.
        report: makes the answer, a JSON value.
    """

    def __init__(self, loop: Loop, report: Callable[[], Any]) -> None:
        self._loop, self._report = loop, report
        self._askers: set[socket.socket] = set()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with contextlib.ExitStack() as on_error:
            on_error.enter_context(self._sock)
            self._sock.bind(f"\0{_PREFIX}{secrets.token_hex(8)}")
            self._sock.listen(8)
            self._listen()
            on_error.pop_all()

    def close(self) -> None:
        """Stops listening, and ends answers that are not sent yet."""
        self._loop.forget(self._sock)
        self._sock.close()
        for asker in list(self._askers):
            self._end(asker)

    def _listen(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.watch(self._sock, READ, self._answer)

    def _answer(self) -> None:
        try:
            asker, _ = self._sock.accept()
        except OSError:  # who has asked is gone, or this process has no descriptors left
            self._loop.forget(self._sock)
            self._loop.call_at(time.monotonic() + _PATIENCE, self._listen)
            return
        asker.setblocking(False)
        self._askers.add(asker)
        self._loop.call_at(time.monotonic() + _PATIENCE, lambda: self._end(asker))
        is_ours = _user_of(asker) == os.geteuid()
        self._send(asker, memoryview(json.dumps(self._report()).encode() if is_ours else b""))

    def _send(self, asker: socket.socket, answer: memoryview) -> None:
        """Sends what the socket takes now, and the rest once it takes more."""
        try:
            rest = answer[asker.send(answer, socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            rest = answer
        except OSError:  # who has asked is gone
            rest = answer[:0]
        if rest:
            self._loop.watch(asker, WRITE, lambda: self._send(asker, rest))
        else:
            self._end(asker)

    def _end(self, asker: socket.socket) -> None:
        self._loop.forget(asker)
        self._askers.discard(asker)
        asker.close()


def ask_all() -> list[Any]:
    """Returns the reports of this user's communicators here. Raises OSError if the system does not
    tell which sockets there are."""
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as file:
        names = {line.split()[-1][1:] for line in file if f" @{_PREFIX}" in line}
    reports = [_ask(name) for name in sorted(names)]
    return [report for report in reports if report is not None]


def _ask(name: str) -> Any:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_PATIENCE)
        try:
            sock.connect("\0" + name)
            if _user_of(sock) != os.geteuid():
                return None
            answer = b"".join(iter(lambda: sock.recv(1 << 16), b""))
            return json.loads(answer)
        except (OSError, ValueError):  # it has just ended, or is another user's
            return None


def _user_of(sock: socket.socket) -> int:
    peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(peer)[1])
