"""Streams of a GPU, for threads that wait or call back.

Invariant: only ``to_its_end`` and ``Fetched.value`` make the host wait for the GPU; ``value`` is
called when the copy is long over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch


@contextlib.contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Makes a stream this thread's current one; None changes nothing.

    Its GPU becomes the current one, too: a thread begins with GPU 0, and returning to a stream of
    that GPU would open a context there.
    """
    if stream is None:
        yield
        return
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def side_streams(devices: Iterable[torch.device]) -> list[Any]:
    """Makes a stream on each GPU for another thread; it waits for the current stream's queued
    work."""
    streams = []
    for device in devices:
        if device.type == "cuda":
            streams.append(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
            streams[-1].wait_stream(torch.cuda.current_stream(device))
    return streams


def future_on(devices: Iterable[torch.device]) -> Any:
    """Makes a torch Future whose value may lie on these devices. When it is completed it records
    the current stream of each GPU."""
    make: Any = torch.futures.Future  # the generic class cannot be called on every supported torch
    return make(devices=[device for device in devices if device.type == "cuda"])


@contextlib.contextmanager
def to_its_end(streams: Iterable[Any]) -> Iterator[None]:
    """Makes the streams this thread's current ones, and in the end waits for the work queued on
    them."""
    with contextlib.ExitStack() as entered:
        for stream in streams:
            entered.enter_context(on_stream(stream))
            entered.callback(stream.synchronize)
        yield


class Fetched:
    """A number from a tensor without dimensions, copied to the host after the work queued on the
    current stream of its GPU."""

    def __init__(self, scalar: torch.Tensor) -> None:
        self._arrived: Any = None
        self._scalar = scalar
        if scalar.device.type == "cuda":
            self._scalar = torch.empty((), dtype=scalar.dtype, pin_memory=True)
            self._scalar.copy_(scalar, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(scalar.device))

    def value(self) -> float:
        """Returns the number; waits for the GPU if the copy is not over."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._scalar.item()


class NonFiniteFlag:
    """Flag: whether any of some tensors has a value that is not finite.

    Making it starts the check, on a GPU on its current stream, without waiting: the answer is
    copied to pinned memory, and read later.

    Args:
        tensors: of one dtype and device, and equal but for their last dimension.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._finite: Fetched | None = None
        if tensors:
            self._finite = Fetched(torch.cat(list(tensors), dim=-1).isfinite().all())

    def wait(self) -> bool:
        """Returns the flag; waits for the GPU if the check is not over."""
        return self._finite is not None and not self._finite.value()
