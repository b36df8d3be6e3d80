"""Other work on the machine: processes that do nothing but take a core each.

Invariant: none outlives the block, nor the process that started them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

_BURN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100000))\n"


@contextlib.contextmanager
def burning(count: int) -> Iterator[None]:
    """Load ``count`` cores for as long as the block lasts."""
    burners = [subprocess.Popen([sys.executable, "-S", "-c", _BURN]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
        for burner in burners:
            burner.wait()


def all_cores() -> int:
    """How many there are to load."""
    return len(os.sched_getaffinity(0))
