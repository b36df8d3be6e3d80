"""What is to be done when the backward in progress is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_engine: Any = torch.autograd.Variable._execution_engine


def after_backward(call: Callable[[], None]) -> bool:
    """Calls when all of the backward that this thread works on is done, behind what was queued
    before. Whether there is one; else it calls never."""
    try:
        _engine.queue_callback(call)
    except RuntimeError:
        return False
    return True
