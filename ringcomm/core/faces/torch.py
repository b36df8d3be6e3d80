"""Face of torch: tensors on the CPU and on CUDA devices. torch is used only if the caller has
imported it already.

Keeps torch from moving a storage while a collective uses its memory. Holding a storage keeps the
object, not its memory: ``resize_``, and methods that move a tensor to shared memory, free it under
every holder. So these methods of torch's classes, once a torch tensor was given to a collective,
first check whether one in flight uses the memory, and raise if so.

Limit: a resize that torch's C++ makes by itself, as for ``out=`` of another shape, is not checked.
Where it is detected afterwards, the collective raises TensorError.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...errors import TensorError
from .. import cuda
from ..native import ffi
from ..views import (
    LEGACY_STREAM,
    NOT_WRITABLE,
    PLAIN,
    DeviceView,
    Plain,
    View,
    dtype_named,
    shares_memory,
)

_VOID, _cast = ffi.typeof("void *"), ffi.cast


def torch_of_caller() -> Any:
    """Returns the module torch; None if the program has not imported it, or another thread is
    importing it: then nobody holds a torch tensor."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") else None


def takes(obj: Any) -> bool:
    """True for a tensor of torch."""
    torch = torch_of_caller()
    return torch is not None and isinstance(obj, torch.Tensor)


def view(tensor: Any, writable: bool) -> View:
    """Makes a View of a tensor; core.faces.view documents it."""
    torch = torch_of_caller()
    if torch.Tensor not in PLAIN:
        guard(torch)
        PLAIN[torch.Tensor] = _plain
    make = _device_view if tensor.device.type == "cuda" else _host_view
    return make(torch, tensor, writable)


def _plain(tensor: Any) -> Plain | None:
    torch = sys.modules["torch"]
    strided = tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested
    if not strided or not tensor.is_contiguous() or tensor.is_neg():
        return None
    if tensor.requires_grad and torch.is_grad_enabled():  # check_autograd has to see it
        return None
    # The storage keeps the memory: ``tensor.data = other`` gives the tensor another one.
    address = _cast(_VOID, tensor.data_ptr())
    return tensor.dtype, address, tensor.numel(), tensor.untyped_storage()


def check_autograd(obj: Any) -> None:
    """Prepares autograd for a result that is about to be written to a torch tensor.

    Raises TensorError for a tensor that was computed from others: its gradient would be that of
    the old values. For a leaf that requires grad, such as a parameter, it increments the version
    counter, so that a backward pass which needs its old values raises.
    """
    if type(obj) is np.ndarray:
        return
    torch = torch_of_caller()
    if torch is None or not isinstance(obj, torch.Tensor) or not obj.requires_grad:
        return
    if not torch.is_grad_enabled():
        return
    if not obj.is_leaf:
        raise TensorError(
            "the tensor was computed from others that require grad, and autograd would not know "
            "that the result was written to it; pass x.detach(), or call within torch.no_grad()"
        )
    torch.autograd.graph.increment_version(obj)


def torch_dtype(torch: Any, tensor: Any) -> str:
    """Returns the name in DTYPES of a torch tensor's dtype. Raises TensorError for a dtype or a
    layout that no collective takes."""
    if tensor.layout != torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else tensor.layout
        raise TensorError(f"a tensor of layout {layout} is not supported; pass a dense one")
    return dtype_named(str(tensor.dtype))


def _host_view(torch: Any, tensor: Any, writable: bool) -> View:
    if tensor.device.type == "meta":
        raise TensorError("a tensor on device 'meta' has no memory; make it on the CPU or a GPU")
    if tensor.device.type != "cpu":
        raise TensorError(
            f"a tensor on device '{tensor.device}' is not supported; pass tensor.cpu() and copy "
            "the result back"
        )
    dtype = torch_dtype(torch, tensor)
    target = dense = tensor.detach()
    finish = None
    if not dense.is_contiguous() or dense.is_neg():
        gathered = dense.resolve_neg().contiguous()
        if writable:
            if shares_memory(tensor.shape, tensor.stride(), 1):
                raise TensorError(NOT_WRITABLE)
            storage = dense.untyped_storage()
            nbytes = storage.nbytes()

            def finish() -> None:
                if storage.nbytes() < nbytes:
                    raise ValueError("its storage was resized in flight")
                target.copy_(gathered)

        dense = gathered
    address = dense.data_ptr()
    if finish is None:

        def finish() -> None:
            if dense.data_ptr() != address:  # the core has used memory that was freed
                raise ValueError("its storage was resized in flight")

    return View(
        tensor,
        (dense, target),
        address,
        dtype,
        tensor.shape,
        tensor.numel(),
        lambda shape: torch.empty(shape, dtype=tensor.dtype, device="cpu"),
        finish,
        is_copy=writable and dense is not target,
    )


def torch_stream(torch: Any, handle: int, device: Any) -> Any:
    """Returns torch's object for a cudaStream_t. The default stream's two numbers need a case of
    their own: ExternalStream takes one for a stream of its own, and the other for no stream."""
    if handle in (0, LEGACY_STREAM):
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device)


@contextlib.contextmanager
def _torch_following(torch: Any, device: Any) -> Iterator[None]:
    """Makes the stream of ``cuda.stream``, if there is one, torch's current stream."""
    chosen = cuda.chosen_stream()
    if chosen is None:
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch_stream(torch, chosen, device)):
        yield


def _device_view(torch: Any, tensor: Any, writable: bool) -> DeviceView:
    dtype = torch_dtype(torch, tensor)
    dense = tensor.detach()
    if not dense.is_contiguous() or dense.is_neg():
        if writable:
            raise TensorError(
                "a tensor on a GPU is not contiguous, and the result would be written to it; pass "
                "a contiguous copy, or out="
            )
        with _torch_following(torch, tensor.device):
            dense = dense.resolve_neg().contiguous()
    device = tensor.device
    if tensor.numel():
        cuda.require()

    def make(shape: tuple[int, ...]) -> Any:
        with _torch_following(torch, device):
            return torch.empty(shape, dtype=tensor.dtype, device=device)

    return DeviceView(
        tensor,
        dense,
        int(dense.data_ptr()),
        dtype,
        tensor.shape,
        int(device.index),
        lambda: int(torch.cuda.current_stream(device).cuda_stream),
        make,
    )


# ---- storages that stay where they are ----

_TO_SHARED = ("_share_fd_cpu_", "_share_filename_cpu_")
#: Names the collective in flight that uses memory from one address to another; "" if there is none.
#: Set by communicator.py.
user_of: Callable[[int, int], str] = lambda start, stop: ""  # noqa: E731


def guard(torch: Any) -> None:
    """Wraps the methods of torch that move a storage's memory in a check."""
    storage, tensor = torch.UntypedStorage, torch.Tensor
    for kind, names in ((storage, ("resize_", *_TO_SHARED)), (tensor, ("resize_", "resize_as_"))):
        for name in names:
            setattr(kind, name, _checked(getattr(kind, name)))


def _checked(move: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(move)
    def check_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            storage = self.untyped_storage() if hasattr(self, "untyped_storage") else self
            stays = move.__name__ in _TO_SHARED and storage.is_shared()
            start, nbytes = (0, 0) if stays else (storage.data_ptr(), storage.nbytes())
        except (RuntimeError, NotImplementedError):  # a fake tensor, which has no memory
            return move(self, *args, **kwargs)
        if start and (user := user_of(start, start + nbytes)):
            raise TensorError(
                f"the memory of this tensor is used by {user}, which is in flight: wait for it "
                f"before {move.__name__}()"
            )
        return move(self, *args, **kwargs)

    return check_first
