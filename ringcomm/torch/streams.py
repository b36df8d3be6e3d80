"""Streams of a GPU, for threads that wait or call back.

Invariant: only ``to_its_end`` and ``NonFiniteFlag.wait`` make the host wait for the GPU; ``wait``
is called when the copy is long over.
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


class NonFiniteFlag:
    """Flag: whether any of some tensors has a value that is not finite.

    Making it starts the check, on a GPU on its current stream, without waiting: the answer is
    copied to pinned memory, and read later.

    Args:
        tensors: of one dtype and device, and equal but for their last dimension.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._finite: torch.Tensor | None = None
        self._arrived: Any = None
        if not tensors:
            return
        self._finite = finite = torch.cat(list(tensors), dim=-1).isfinite().all()
        if finite.is_cuda:
            self._finite = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
            self._finite.copy_(finite, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(finite.device))

    def wait(self) -> bool:
        """Returns the flag; waits for the GPU if the check is not over."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._finite is not None and not self._finite.item()
