"""Facts from the launcher about this process, read before PyTorch is loaded.

They only decide which rank prints an error that all share, how ranks share the cores of their
host, and whether torchrun keeps a store for us. ``ringcomm.init`` decides which ranks take part.
"""

from __future__ import annotations

import os

from ..bootstrap.launch import Identity, detect
from ..errors import ConfigError


class SharedError(ConfigError):
    """A ConfigError that every rank raises with the same text."""


def rank() -> int:
    """Return this process's rank; 0 without a launcher."""
    launched = _launched()
    return launched.rank if launched else 0


def by_torchrun() -> bool:
    """Return True if torchrun started this process, and so keeps a store for it."""
    launched = _launched()
    return launched is not None and launched.launcher == "torchrun"


def default_threads() -> int:
    """Return this process's share of the cores that it and the other ranks of its host may use."""
    launched = _launched()
    local = launched.local_world_size if launched else 1
    return max(1, len(os.sched_getaffinity(0)) // (local or 1))


def let_idle_threads_sleep() -> None:
    """Keep OpenMP's threads from spinning while they wait; only of use before PyTorch is loaded.

    A spinning thread takes the core of the communication thread, or of another rank, for which it
    waits: on two busy cores a step of ResNet-8 took ten times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _launched() -> Identity | None:
    try:
        return detect(os.environ)
    except ConfigError:
        return None  # ringcomm.init will raise the error
