"""The socket at which a communicator tells what it does."""

from __future__ import annotations

import errno
import os
import secrets
import socket

import pytest

from ringcomm.bootstrap.loop import Loop
from ringcomm.bootstrap.status import _PREFIX, StatusSocket


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
