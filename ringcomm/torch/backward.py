"""Callbacks at the end of a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_engine: Any = torch.autograd.Variable._execution_engine


def after_backward(call: Callable[[], None]) -> bool:
    """Queues a call for the end of the backward that this thread runs, after calls queued before.
    Returns False, and never calls, if this thread runs no backward."""
    try:
        _engine.queue_callback(call)
    except RuntimeError:
        return False
    return True
