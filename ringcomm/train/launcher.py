"""Facts from the launcher about this process, read before PyTorch is loaded.

They only decide which rank prints an error that all share, and how ranks share the cores of their
host. ``ringcomm.init`` decides which ranks take part.
"""

from __future__ import annotations

import contextlib
import os

from ..bootstrap.launch import Identity, detect
from ..errors import ConfigError


class SharedError(ConfigError):
    """A ConfigError that every rank raises with the same text."""


def rank() -> int:
    """Return this process's rank; 0 without a launcher."""
    return _launched().rank


def default_threads() -> int:
    """Return this process's share of the cores that it and the other ranks of its host may use."""
    return max(1, len(os.sched_getaffinity(0)) // (_launched().local_world_size or 1))


def let_idle_threads_sleep() -> None:
    """Keep OpenMP's threads from spinning while they wait; only of use before PyTorch is loaded.

    A spinning thread takes the core of the communication thread, or of another rank, for which it
    waits: on two busy cores a step of ResNet-8 took ten times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _launched() -> Identity:
    with contextlib.suppress(ConfigError):  # ringcomm.init will raise it
        if found := detect(os.environ):
            return found
    return Identity(0, 1)
