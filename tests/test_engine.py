"""An engine that the system refuses: what it lacked, and what to raise."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys

import pytest

from ringcomm import RingcommError
from ringcomm.core import native

NO_THREADS = """
import os, resource
from ringcomm.core import native
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
if os.geteuid() == 0:
    os.setuid(65533)  # root has no such limit
native.Engine("")
"""


def test_without_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = os.listdir("/proc/self/fd")
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(before), hard))
    fillers = []
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        for left in range(2):  # none, and one for two that are needed
            with pytest.raises(RingcommError, match=r"cannot start: .*EMFILE, 24.*`ulimit -n`"):
                native.Engine("")
            if not left and fillers:
                os.close(fillers.pop())
    finally:
        for fd in fillers:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_without_threads() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_THREADS], capture_output=True, text=True, check=False
    )
    assert "RingcommError: the engine cannot start: Resource" in done.stderr
    assert "(EAGAIN, 11): raise `ulimit -u`" in done.stderr
