"""Ranges of torch.profiler: ``ringcomm:all_reduce`` and so on, from the call to the completion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import record_function

from .works import RingWork

_profiler_enabled: Any = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def is_on() -> bool:
    """Whether somebody profiles."""
    return bool(_profiler_enabled())


def recorded(name: str, submit: Callable[[], RingWork]) -> RingWork:
    """Submits within a range of this name, which ends with the work."""
    with record_function(f"ringcomm:{name}") as record:
        work = submit()
        if not work.was_waited_for():
            work.record(record._call_end_callbacks_on_future)
    return work
