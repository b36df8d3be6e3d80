"""Tensors on a GPU: the core gets a copy of them in pinned host memory.

Inputs are copied to the host when the collective is called, after the work queued on the current
stream; the thread that completes the collective copies the result back.

Invariants: the caller waits for the copy to the host, and the thread that completes the collective
for the copy back, so that a Work that is over has its result on the device, for every stream.
Copies use a stream of their own, which waits for the current one.
"""

from __future__ import annotations

import torch

from ..core.faces import view
from ..core.views import View
from .streams import side_streams, to_its_end


def staged(tensor: torch.Tensor, *, writable: bool, reads: bool = True) -> View:
    """Returns the view of a host copy of a tensor, whose ``finish`` copies the result back.

    Args:
        tensor: on any device, of a dtype of the core.
        writable: whether it receives a result.
        reads: whether the collective reads its values; else it only receives.
    """
    source = tensor.detach()
    pinned = source.device.type == "cuda"
    host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=pinned)
    streams = side_streams([source.device])

    def bring(target: torch.Tensor, source: torch.Tensor) -> None:
        with to_its_end(streams):
            target.copy_(source, non_blocking=bool(streams))

    if reads:
        bring(host, source)
    found = view(host, writable=writable)

    def finish() -> None:
        bring(source, host)

    return View(
        tensor,
        (found, source, host),
        found.address,
        found.dtype,
        found.shape,
        found.count,
        source.new_empty,
        finish if writable else None,
        is_copy=writable,
    )
