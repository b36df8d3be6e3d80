"""Fixtures of the bring-up tests: everything on the loopback, nothing left behind."""

from __future__ import annotations

import os
import threading
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
    for _ in range(200):
        leaked = _open_fds() - before
        if not leaked:
            return
        time.sleep(0.05)
    pytest.fail(f"leaked descriptors: {sorted(leaked)}")


class SteadyClock:
    """time.monotonic, but that it stands still with a process that does: the ranks are threads, and
    that none of them ran for a second says nothing about a rank that is given half of one."""

    STEP, MOST = 0.02, 0.1  # seconds: between two looks, and what counts of any time between two

    def __init__(self) -> None:
        self._read = time.monotonic
        now = self._read()
        self._mark = now, now  # at the latest look: the time there, and here
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def __call__(self) -> float:
        there, here = self._mark
        return here + min(self._read() - there, self.MOST)

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(self.STEP):
            there, here = self._mark
            now = self._read()
            self._mark = now, here + min(now - there, self.MOST)


@pytest.fixture(autouse=True)
def steady_clock() -> Iterator[None]:
    """For the library and the tests alike."""
    clock = SteadyClock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", clock)
        yield
    clock.close()


@pytest.fixture(autouse=True)
def fresh_stranger_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test sees the first line about each address."""
    monkeypatch.setattr(strangers.LOG, "_seen", type(strangers.LOG._seen)())


@pytest.fixture
def port() -> int:
    """A loopback port that nobody has just now."""
    return free_port()
