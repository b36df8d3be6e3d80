"""Streams of a GPU, for threads that wait or call back.

Invariant: nothing here has the host wait for the GPU, save ``to_its_end``, and ``Fetched.value``
for what is long over when it is asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
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


def side_streams(devices: Iterable[torch.device]) -> list[Any]:
    """For each GPU a stream for another thread, behind what this thread's current one has to do."""
    streams = []
    for device in devices:
        if device.type == "cuda":
            streams.append(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
            streams[-1].wait_stream(torch.cuda.current_stream(device))
    return streams


def future_on(devices: Iterable[torch.device]) -> Any:
    """A Future of torch whose value may lie on these devices; of GPUs it takes note of the current
    stream when it is completed."""
    make: Any = torch.futures.Future  # the generic class cannot be called on every supported torch
    return make(devices=[device for device in devices if device.type == "cuda"])


@contextlib.contextmanager
def to_its_end(streams: Iterable[Any]) -> Iterator[None]:
    """Makes them this thread's current streams, and waits for what they were given."""
    with contextlib.ExitStack() as entered:
        for stream in streams:
            entered.enter_context(on_stream(stream))
            entered.callback(stream.synchronize)
        yield


class Fetched:
    """A number that a tensor without dimensions holds, on its way to the host behind all that its
    GPU's current stream has to do."""

    def __init__(self, scalar: torch.Tensor) -> None:
        self._arrived: Any = None
        self._scalar = scalar
        if scalar.device.type == "cuda":
            self._scalar = torch.empty((), dtype=scalar.dtype, pin_memory=True)
            self._scalar.copy_(scalar, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(scalar.device))

    def value(self) -> float:
        """Waits for the GPU if it has not got so far."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._scalar.item()


class Poison:
    """Whether any of some tensors has a value that is not finite.

    It is asked when it is made, of a GPU by its current stream, and not waited for: the answer goes
    to pinned memory behind all else, and is read later.

    Args:
        tensors: of one dtype and device, and equal but for their last dimension.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._finite: Fetched | None = None
        if tensors:
            self._finite = Fetched(torch.cat(list(tensors), dim=-1).isfinite().all())

    def is_there(self) -> bool:
        """Waits for the GPU if it has not got so far."""
        return self._finite is not None and not self._finite.value()
