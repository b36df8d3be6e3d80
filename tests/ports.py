"""Ports of the loopback for tests that run at the same time."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket

_candidates = itertools.count(os.getpid() * 16 % 8000, 16)


def free_port() -> int:
    """A loopback port that nobody has just now, below those that the kernel gives to connections,
    with room for the next few that ringcomm tries."""
    for candidate in itertools.islice(_candidates, 3000):
        port = 20000 + candidate % 12000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port")
