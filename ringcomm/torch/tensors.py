"""Torch tensors as the core takes them: dtypes that it does not know, lists of tensors, and tensors
on a GPU without its device pipeline.

Collectives that only move see a tensor as another dtype of the same size, which changes no bit.
Those that reduce do so only if the result is exact: bool as bytes, complex numbers as pairs of real
ones (if the op treats these alike).

A tensor on a GPU that the pipeline does not take is staged: the core gets a copy in pinned host
memory. It is made when the collective is called, after the work queued on the current stream; the
thread that completes the collective copies the result back.

Invariants: a view shares the tensor's memory, or a copy of it is scattered back when the
collective is over (core.views.View). The caller waits for a copy to the host, and the thread that
completes the collective for the copy back, so that a Work that is over has its result on the
device, for every stream; copies use a stream of their own, which waits for the current one. Errors
are TensorError, a TypeError and a RuntimeError.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..core import cuda
from ..core.faces.torch import view
from ..core.views import View
from ..errors import TensorError
from .streams import side_streams, to_its_end

_MOVES_AS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
KNOWN = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
}


class MetaView(View):
    """Placeholder view of a tensor on device "meta", which has no memory and is not sent."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor, tensor, 0, "u8", tensor.shape, tensor.numel(), tensor.new_empty)


def require_dense(tensor: torch.Tensor) -> None:
    """Raises TensorError unless it is a dense tensor on the CPU, a GPU or "meta"."""
    if tensor.layout != torch.strided or tensor.is_nested:
        raise TensorError(
            f"ringcomm takes dense tensors, not {tensor.layout}"
            + (" (nested)" if tensor.is_nested else "")
        )
    if tensor.device.type not in ("cpu", "cuda", "meta"):
        raise TensorError(f"a tensor on device '{tensor.device}' is not supported")
    if tensor.is_quantized:
        raise TensorError(f"a tensor of dtype {tensor.dtype} is not supported")


def as_moved(tensor: torch.Tensor) -> torch.Tensor:
    """Views the tensor's memory in a dtype of the core, for collectives that do not reduce."""
    require_dense(tensor)
    if tensor.dtype in KNOWN:
        return tensor
    if tensor.is_complex():
        return as_moved(torch.view_as_real(tensor.detach().resolve_conj()))
    return tensor.detach().view(_MOVES_AS[tensor.element_size()])


def moved(tensor: torch.Tensor, *, writable: bool, reads: bool = True) -> View:
    """Returns the view of a tensor for collectives that do not reduce; ``reads``: whether its
    values are read. Raises TensorError for a conjugated view that receives a result."""
    if writable and tensor.is_conj():
        raise TensorError(
            "the tensor is conjugated lazily, so a result cannot be written to it; pass "
            "tensor.resolve_conj(), or the tensor that it is a view of"
        )
    return memory_of(as_moved(tensor), writable=writable, reads=reads)


def memory_of(tensor: torch.Tensor, *, writable: bool, reads: bool = True) -> View:
    """Returns the view of a tensor of a dtype of the core: its memory, or a staged host copy if the
    device pipeline does not take it."""
    if tensor.is_meta:
        return MetaView(tensor)
    if tensor.device.type == "cpu" or is_piped(tensor, writable=writable):
        return view(tensor, writable)
    return staged(tensor, writable=writable, reads=reads)


def is_piped(tensor: torch.Tensor, *, writable: bool) -> bool:
    """Returns whether the tensor takes the device pipeline of its GPU."""
    dense = tensor.is_contiguous() and not tensor.is_neg()
    return tensor.device.type == "cuda" and (dense or not writable) and cuda.is_available()


def staged(tensor: torch.Tensor, *, writable: bool, reads: bool = True) -> View:
    """Returns the view of a host copy of a tensor, whose ``finish`` copies the result back.

    Args:
        tensor: on any device, of a dtype of the core.
        writable: whether it receives a result.
        reads: whether the collective reads its values; else it only receives.
    """
    source = tensor.detach()
    host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=source.is_cuda)
    streams = side_streams([source.device])

    def bring(target: torch.Tensor, source: torch.Tensor) -> None:
        with to_its_end(streams):
            target.copy_(source, non_blocking=bool(streams))

    if reads:
        bring(host, source)
    found = view(host, writable)
    return View(
        tensor,
        (found, source, host),
        found.address,
        found.dtype,
        found.shape,
        found.count,
        source.new_empty,
        (lambda: bring(source, host)) if writable else None,
        is_copy=writable,
    )


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Returns one flat tensor over the memory of all, if they are contiguous in one storage, as the
    parts of a larger one are; else None."""
    first = tensors[0]
    storage, at = first.untyped_storage().data_ptr(), first.storage_offset()
    for tensor in tensors:
        same = tensor.dtype == first.dtype and tensor.untyped_storage().data_ptr() == storage
        plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        if not (same and plain and tensor.storage_offset() == at):
            return None
        at += tensor.numel()
    count = at - first.storage_offset()
    return first.detach().as_strided((count,), (1,), first.storage_offset())


def packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns one flat tensor of all: over their memory if they are contiguous in it, else a
    copy."""
    found = joined(tensors)
    return torch.cat([t.detach().reshape(-1) for t in tensors]) if found is None else found


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies the values of a tensor into another of as many elements.

    Raises ValueError if the target's storage has been resized to less than it needs; torch would
    write past its end.
    """
    needed = target.storage_offset() * target.element_size() + _extent(target)
    if target.numel() and target.untyped_storage().nbytes() < needed:
        raise ValueError("its storage was resized in flight")
    target.detach().copy_(source.detach().reshape(target.shape))


def apart(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the inputs; copies of all, if one may share memory with an output."""
    ends = [0, 0]  # the addresses where the inputs, and the outputs, so far end
    places = [(t.data_ptr(), _extent(t), i) for i, ts in enumerate((inputs, outputs)) for t in ts]
    for start, extent, side in sorted(places):
        if start < ends[1 - side]:
            return [one.detach().clone() for one in inputs]
        ends[side] = max(ends[side], start + extent)
    return list(inputs)


def _extent(tensor: torch.Tensor) -> int:
    """Returns how many bytes lie from a tensor's first element to the end of its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copies a flat tensor into several, in order."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        copy(tensor, part)


def require_alike(tensors: Sequence[torch.Tensor], like: torch.Tensor, what: str) -> None:
    """Raises ValueError, as torch does, unless all have the dtype and number of elements."""
    for index, tensor in enumerate(tensors):
        if tensor.dtype != like.dtype or tensor.numel() != like.numel():
            raise ValueError(
                f"{what}: tensor {index} is {tensor.dtype}{list(tensor.shape)}, and must have the "
                f"dtype and number of elements of {like.dtype}{list(like.shape)}"
            )
