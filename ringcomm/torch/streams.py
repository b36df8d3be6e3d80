"""Streams of a GPU, for threads that wait or call back.

Invariant: nothing here has the host wait for the GPU, save ``Poison.is_there`` for what is long
over when it is asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch


@contextlib.contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Makes it this thread's current stream; None changes nothing.

    Its GPU is made the current one, too: a thread begins with GPU 0, and to return to a stream of
    that one would open a context there.
    """
    if stream is None:
        yield
        return
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


class Poison:
    """Whether any of some tensors has a value that is not finite.

    It is asked when it is made, of a GPU by its current stream, and not waited for: the answer goes
    to pinned memory behind all else, and is read later.

    Args:
        tensors: of one dtype and device, and equal but for their last dimension.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._answered: Any = None
        self._finite: Any = True
        if not tensors:
            return
        finite = torch.cat(list(tensors), dim=-1).isfinite().all()
        if finite.device.type == "cuda":
            answer = torch.empty((), dtype=torch.bool, pin_memory=True)
            answer.copy_(finite, non_blocking=True)
            self._answered = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._answered.record(torch.cuda.current_stream(finite.device))
            finite = answer
        self._finite = finite

    def is_there(self) -> bool:
        """Waits for the GPU if it has not got so far."""
        if self._answered is not None:
            self._answered.synchronize()
        return not bool(self._finite)
