"""Fixtures of the bring-up tests: everything on the loopback, nothing left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from ports import free_port

from ringcomm.bootstrap import strangers


def _open_fds() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except OSError:  # the descriptor of the listing itself
            continue
    return found


@pytest.fixture
def no_leaked_fds() -> Iterator[None]:
    """Fails the test if it leaves a descriptor open."""
    before = _open_fds()
    yield
    for _ in range(20):
        leaked = _open_fds() - before
        if not leaked:
            return
        time.sleep(0.05)
    pytest.fail(f"leaked descriptors: {sorted(leaked)}")


@pytest.fixture(autouse=True)
def fresh_stranger_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test sees the first line about each address."""
    monkeypatch.setattr(strangers.LOG, "_seen", type(strangers.LOG._seen)())


@pytest.fixture
def port() -> int:
    """A loopback port that nobody has just now."""
    return free_port()
