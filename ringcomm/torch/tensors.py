"""Torch tensors as the core takes them: dtypes that it does not know, and lists of tensors.

What only moves is seen as another dtype of the same size, which changes no bit. What is reduced is
seen as another dtype only where the result is exact: truth values as bytes, complex numbers as
pairs of real ones (where the op treats these alike).

Invariants: a view shares the tensor's memory, or a copy of it is scattered back when the
collective is over (buffers.View). Errors are TensorError, a TypeError and a RuntimeError.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import cuda
from ..buffers import View
from ..devices import view
from ..errors import TensorError
from .staging import staged

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
    """Stands for a tensor on device "meta". It has no memory, so there is nothing to send."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor, tensor, 0, "u8", tensor.shape, tensor.numel(), tensor.new_empty)


def require_dense(tensor: torch.Tensor) -> None:
    """Raises TensorError for what is no dense tensor on the CPU, a GPU or "meta"."""
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
    """The tensor's memory in a dtype of the core, for collectives that do not reduce."""
    require_dense(tensor)
    if tensor.dtype in KNOWN:
        return tensor
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach().resolve_conj())
        return tensor if tensor.dtype in KNOWN else as_moved(tensor)
    return tensor.detach().view(_MOVES_AS[tensor.element_size()])


def moved(tensor: torch.Tensor, *, writable: bool, reads: bool = True) -> View:
    """The view of a tensor for collectives that do not reduce; reads: its values matter."""
    return memory_of(as_moved(tensor), writable=writable, reads=reads)


def memory_of(tensor: torch.Tensor, *, writable: bool, reads: bool = True) -> View:
    """The view of a tensor of a dtype of the core: its memory, or where the pipe to a GPU does not
    take it, host memory that stands for it (staging.py)."""
    if tensor.device.type == "cpu":
        return view(tensor, writable=writable)
    if tensor.is_meta:
        return MetaView(tensor)
    if is_piped(tensor, writable=writable):
        return view(tensor, writable=writable)
    return staged(tensor, writable=writable, reads=reads)


def is_piped(tensor: torch.Tensor, *, writable: bool) -> bool:
    """Whether the tensor goes by the pipe to its GPU."""
    dense = tensor.is_contiguous() and not tensor.is_neg()
    return tensor.device.type == "cuda" and (dense or not writable) and cuda.is_available()


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One flat tensor over the memory of all of them, where they lie in it one after the other, as
    the parts of a larger one do; else None."""
    first = tensors[0]
    storage, at = first.untyped_storage().data_ptr(), first.storage_offset()
    for tensor in tensors:
        same = tensor.dtype == first.dtype and tensor.untyped_storage().data_ptr() == storage
        if not (same and tensor.is_contiguous() and tensor.storage_offset() == at):
            return None
        at += tensor.numel()
    count = at - first.storage_offset()
    return first.detach().as_strided((count,), (1,), first.storage_offset())


def packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The same, or a copy of them."""
    found = joined(tensors)
    return torch.cat([t.detach().reshape(-1) for t in tensors]) if found is None else found


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies the values of a tensor into another of as many elements.

    Raises ValueError if the target's storage has been resized to less than it needs, to which torch
    would write nevertheless.
    """
    last = sum((n - 1) * step for n, step in zip(target.shape, target.stride(), strict=True))
    needed = (target.storage_offset() + last + 1) * target.element_size()
    if target.numel() and target.untyped_storage().nbytes() < needed:
        raise ValueError("its storage was resized in flight")
    target.detach().copy_(source.detach().reshape(target.shape))


def unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copies a flat tensor into several, in order."""
    at = 0
    for tensor in tensors:
        copy(tensor, flat[at : at + tensor.numel()])
        at += tensor.numel()


def all_finite(values: torch.Tensor) -> bool:
    """Whether no element of a tensor of real numbers is NaN or infinite: in one pass that writes
    nothing, 40 times as fast on a processor as ``isfinite().all()``."""
    return values.numel() == 0 or bool(torch.stack(values.detach().aminmax()).isfinite().all())


def repeat_last(flat: torch.Tensor, start: int, end: int, stop: int) -> None:
    """Fills a flat tensor from ``end`` to ``stop`` with its last elements of ``start`` to ``end``,
    repeated: a codec that scales by a mean then sees a block of the same kind."""
    lacking = stop - end
    if lacking and end > start:
        own = flat[max(start, end - lacking) : end]
        flat[end:stop] = own.repeat(-(-lacking // len(own)))[:lacking]


def require_alike(tensors: Sequence[torch.Tensor], like: torch.Tensor, what: str) -> None:
    """Raises ValueError, as torch does, unless all have the dtype and number of elements."""
    for index, tensor in enumerate(tensors):
        if tensor.dtype != like.dtype or tensor.numel() != like.numel():
            raise ValueError(
                f"{what}: tensor {index} is {tensor.dtype}{list(tensor.shape)}, and must have the "
                f"dtype and number of elements of {like.dtype}{list(like.shape)}"
            )
