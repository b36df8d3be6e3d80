"""The socket at which a communicator tells what it does."""

from __future__ import annotations

import errno
import math
import os
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from ringcomm.bootstrap.loop import Loop
from ringcomm.bootstrap.status import _PREFIX, StatusSocket, ask_all


def test_an_answer_longer_than_a_sockets_buffer() -> None:
    """It is sent in parts, and who asks and does not read makes nobody wait."""
    before = os.listdir("/proc/self/fd")
    loop, ends = Loop(), list[bool]()
    report = {"lanes": ["a lane's name and its counts"] * 100_000}
    status = StatusSocket(loop, lambda: report)
    loop.repeat(0.01, lambda: None)  # looks at ends
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as idle, ThreadPoolExecutor(1) as thread:
        idle.connect(status._sock.getsockname())
        running = thread.submit(loop.run, lambda: bool(ends), math.inf)
        try:
            assert report in ask_all()
        finally:
            ends.append(True)
        assert running.result()
    status.close()
    loop.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_name_that_is_taken_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _: "taken")
    loop = Loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(f"\0{_PREFIX}taken")
        before = os.listdir("/proc/self/fd")
        with pytest.raises(OSError) as caught:
            StatusSocket(loop, dict)
        assert caught.value.errno == errno.EADDRINUSE
        assert len(os.listdir("/proc/self/fd")) == len(before)
    loop.close()
