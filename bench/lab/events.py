"""A Unix socket by which the ranks of a trial say what happens to them."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def listening(ranks: int, within: float) -> Iterator[tuple[str, socket.socket]]:
    """Yields a path and the socket that listens there, for so many ranks; accept() raises
    TimeoutError after so many seconds."""
    with (
        tempfile.TemporaryDirectory(prefix="ranks-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        path = str(Path(folder, "socket"))
        listener.bind(path)
        listener.listen(ranks)
        listener.settimeout(within)
        yield path, listener
