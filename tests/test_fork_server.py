"""Programs that start as forks of a server: none outlives its asker, nor the server its parent.
What else they have of an interpreter's, the tests of ranks show."""

from __future__ import annotations

import os
import select

import fork_server
from faults.job import nursery_of
from patience import PATIENCE
from ranks import start_process

SLEEPS = ["-c", "import os, time; print(os.getppid(), flush=True); time.sleep(600)"]
ASKS = f"""
import time
import fork_server
from faults.job import nursery_of

with nursery_of() as nursery:
    link, _ = fork_server.fork(nursery.folder, {SLEEPS}, nursery.environment, [0, 1, 2])
    time.sleep(600)
"""


def ends(pidfd: int) -> bool:
    try:
        return bool(select.select([pidfd], [], [], PATIENCE)[0])
    finally:
        os.close(pidfd)


def test_a_program_ends_with_its_asker() -> None:
    with nursery_of() as nursery:
        link, pid = fork_server.fork(nursery.folder, SLEEPS, nursery.environment, [0, 1, 2])
        pidfd = os.pidfd_open(pid)
        link.close()
        assert ends(pidfd)


def test_the_server_ends_with_its_parent() -> None:
    with start_process(ASKS, {}) as parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        assert ends(pidfd)
