"""How long tests wait. None of these measures speed: a test that goes well takes a moment, and only
one that fails takes them.

Invariants: each is seconds above what a good run takes, so that a machine which stands still for a
second or two, as busy ones do, fails nothing; and far below the time at which what is wrong would
pass for right.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

PATIENCE = float(os.environ.get("TESTS_PATIENCE", "120"))
"""Seconds for what is not under test, such as start-up, with ten busy processes on two cores. Where
many tests are to fail, as by mutants.py, the variable has them fail sooner."""
PROMPT = 15.0
"""Seconds within which what must not wait for a timeout is over: losses are known, calls refused,
communicators closed. Such timeouts are of 20 s and more in tests that look at this."""
SILENCE = 60.0
"""Config.peer_timeout of ranks whose losses must be known promptly: not by their silence."""


def until(condition: Callable[[], object], within: float = PATIENCE) -> bool:
    """Waits for what is about to happen; whether it has."""
    give_up = time.monotonic() + within
    while not condition():
        if time.monotonic() > give_up:
            return bool(condition())
        time.sleep(0.002)
    return True
