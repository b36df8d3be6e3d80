"""Views of tensors on a GPU: of torch's CUDA tensors, and of objects with __cuda_array_interface__
or, if they have nothing else, DLPack.

``view`` is the one way to any tensor's memory, on a GPU or not. torch and CuPy are used only if
the caller has imported them already.

Invariants: a DeviceView keeps its object alive and never touches its elements, as only the GPU's
streams may. No CUDA call is made for a tensor without elements. A tensor that is not contiguous and
receives a result is refused: a copy back would have to follow the result on every stream. Tensors
that a library makes for a call are made on the stream that the call follows.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from . import buffers, cuda, dlpack, storages
from .buffers import NUMPY_NAMES, View, class_name, torch_dtype
from .errors import TensorError

#: Stream of a tensor whose library names none: the legacy default stream, which waits for all
#: others.
_LEGACY_STREAM = 1


class DeviceView(View):
    """View of a tensor on a GPU; ``address`` is a device address.

    Attributes:
        device: the GPU's number; -1 for a tensor without elements.
    """

    __slots__ = ("_current", "device")

    def __init__(
        self,
        owner: Any,
        keep: Any,
        address: int,
        dtype: str,
        shape: Sequence[int],
        device: int,
        current: Callable[[], int],
        make: Callable[[tuple[int, ...]], Any],
    ) -> None:
        count = 1
        for size in shape:
            count *= size
        super().__init__(owner, keep, address, dtype, shape, count, make)
        self.device = device
        self._current = current

    @property
    def stream(self) -> int:
        """Handle of the stream that this thread's calls follow now: that of ``cuda.stream``, or
        the current one of the tensor's library; cuda.NO_STREAM if there is nothing to wait for."""
        chosen = cuda.chosen_stream()
        return self._current() if chosen is None else chosen

    @property
    def streams(self) -> list[int]:
        """Streams of all tensors that this view stands for."""
        return [self.stream]


class PackedView(DeviceView):
    """View of several GPU tensors as one: each at a multiple of ``align`` elements, zeros between.

    Attributes:
        pieces: (byte offset, tensor), in order.
    """

    __slots__ = ("pieces",)

    def __init__(self, parts: Sequence[DeviceView], align: int) -> None:
        item = buffers.ITEM_BYTES[parts[0].dtype]
        self.pieces: list[tuple[int, DeviceView]] = []
        total = 0
        for part in parts:
            self.pieces.append((total * item, part))
            total += -(-part.count // align) * align
        some = next((part for part in parts if part.count), parts[0])
        super().__init__(
            [part.owner for part in parts],
            parts,
            0,
            some.dtype,
            (total,),
            some.device,
            some._current,
            some.new,
        )

    @property
    def streams(self) -> list[int]:
        return [part.stream for _, part in self.pieces]


def view(obj: Any, *, writable: bool) -> View:
    """Makes a View of a tensor: a DeviceView on a GPU, else that of buffers.view.

    Raises:
        TensorError: as buffers.view; on a GPU, too, for one that is not contiguous and would
            receive a result.
        DeviceError: it is on a GPU, and there is no driver.
    """
    torch = storages.torch_of_caller()
    if torch is not None and isinstance(obj, torch.Tensor):
        if obj.device.type != "cuda":
            return buffers.view(obj, writable=writable)
        return _torch_view(torch, obj, writable)
    if isinstance(obj, np.ndarray):
        return buffers.view(obj, writable=writable)
    if hasattr(obj, "__cuda_array_interface__"):
        return _array_view(obj, writable)
    if not hasattr(obj, "__array_interface__") and dlpack.names_gpu(obj):
        return _dlpack_view(obj)
    return buffers.view(obj, writable=writable)


def check_autograd(obj: Any) -> None:
    """Prepares autograd for a result that is about to be written to a torch tensor.

    Raises TensorError for a tensor that was computed from others: its gradient would be that of
    the old values. For a leaf that requires grad, such as a parameter, it increments the version
    counter, so that a backward pass which needs its old values raises.
    """
    if type(obj) is np.ndarray:
        return
    torch = storages.torch_of_caller()
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


def common_device(views: Sequence[View]) -> DeviceView | None:
    """Returns the first view with elements if all views lie on one GPU; None if all lie on the
    host. Raises TensorError for a mixture."""
    found = [view for view in views if isinstance(view, DeviceView)]
    if not found:
        return None
    if len(found) < len(views):
        raise TensorError("one tensor of the call lies on a GPU and another in host memory")
    devices = sorted({view.device for view in found if view.count})
    if len(devices) > 1:
        raise TensorError(f"the call's tensors lie on GPUs {devices}; all must be on one")
    return next((view for view in found if view.count), found[0])


def streams_of(views: Sequence[View]) -> list[int]:
    """Returns the streams, each once, that a call on these views follows now: a single one, unless
    the tensors are of several libraries, or an array names its own."""
    found = [view.streams for view in views if isinstance(view, DeviceView) and view.count]
    return list(dict.fromkeys(stream for streams in found for stream in streams))


# ---- torch ----


def torch_stream(torch: Any, handle: int, device: Any) -> Any:
    """Returns torch's object for a cudaStream_t. The default stream's two numbers need a case of
    their own: ExternalStream takes one for a stream of its own, and the other for no stream."""
    if handle in (0, _LEGACY_STREAM):
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


def _torch_view(torch: Any, tensor: Any, writable: bool) -> DeviceView:
    storages.guard(torch)
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

    def current() -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)

    return DeviceView(
        tensor, dense, int(dense.data_ptr()), dtype, tensor.shape, int(device.index), current, make
    )


# ---- __cuda_array_interface__ ----


def _array_view(obj: Any, writable: bool) -> DeviceView:
    about = obj.__cuda_array_interface__
    shape = tuple(int(size) for size in about["shape"])
    dtype = _dtype_of(obj, about)
    address, read_only = about["data"]
    if about.get("mask") is not None:
        raise TensorError(f"{class_name(obj)} has a mask, which is not supported")
    if writable and read_only:
        raise TensorError(
            f"{class_name(obj)} is read-only, and the result would be written to it; pass out= or "
            "a copy"
        )
    if not _is_dense(shape, about.get("strides"), buffers.ITEM_BYTES[dtype]):
        raise TensorError(f"{class_name(obj)} is not contiguous; pass a contiguous copy")
    device = -1
    if 0 not in shape:
        cuda.require()
        device = cuda.ordinal_of(address)
    _stream_of(about, obj)  # raises now if the stream is invalid
    return DeviceView(
        obj,
        obj,
        address,
        dtype,
        shape,
        device,
        lambda: _stream_of(obj.__cuda_array_interface__, obj),
        _maker(obj, device),
    )


def _dtype_of(obj: Any, about: dict[str, Any]) -> str:
    name = str(getattr(obj, "dtype", ""))
    if not name.endswith("bfloat16"):  # the interface has no name for bfloat16
        found = np.dtype(about["typestr"])
        name = buffers.shown_dtype(found)
    dtype = NUMPY_NAMES.get(name.rpartition(".")[2])
    if dtype is None:
        raise buffers.unsupported(name)
    return dtype


def _is_dense(shape: Sequence[int], strides: Sequence[int] | None, item: int) -> bool:
    step = item
    for size, stride in zip(reversed(shape), reversed(strides or ()), strict=False):
        if size > 1 and stride != step:
            return 0 in shape
        step *= size
    return True


def _stream_of(about: dict[str, Any], obj: Any) -> int:
    if about.get("version", 0) < 3:
        return _LEGACY_STREAM
    handle = about.get("stream")
    if handle is None:
        return cuda.NO_STREAM
    if handle == 0:
        raise TensorError(
            f"{class_name(obj)} names stream 0, which __cuda_array_interface__ forbids"
        )
    return int(handle)


# ---- DLPack ----


def _dlpack_view(obj: Any) -> DeviceView:
    """Makes a DeviceView by DLPack, which has no read-only flag: producers export no such ones."""
    try:  # DLPack has no stream 0
        capsule = obj.__dlpack__(stream=cuda.chosen_stream() or _LEGACY_STREAM)
        found = dlpack.read_capsule(capsule)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise TensorError(
            f"{class_name(obj)} lies on a GPU, and does not give its memory by DLPack; give a "
            f"copy, or a tensor of torch or CuPy ({error})"
        ) from None
    dtype = NUMPY_NAMES.get(found.dtype)
    if dtype is None:
        raise buffers.unsupported(found.dtype)
    if not _is_dense(found.shape, found.strides, 1):
        raise TensorError(f"{class_name(obj)} is not contiguous; pass a contiguous copy")
    device = -1
    if 0 not in found.shape:
        cuda.require()
        device = cuda.ordinal_of(found.address)
    return DeviceView(
        obj,
        (obj, capsule),
        found.address,
        dtype,
        found.shape,
        device,
        lambda: _LEGACY_STREAM,
        _maker(obj, device),
    )


# ---- results ----


def _maker(obj: Any, device: int) -> Callable[[tuple[int, ...]], Any]:
    def make(shape: tuple[int, ...]) -> Any:
        cupy = sys.modules.get("cupy")
        if cupy is None or not isinstance(obj, cupy.ndarray):
            raise TensorError(f"a result like {class_name(obj)} cannot be made here; give out=")
        chosen = cuda.chosen_stream()
        follows = contextlib.nullcontext() if chosen is None else cupy.cuda.ExternalStream(chosen)
        with cupy.cuda.Device(None if device < 0 else device), follows:
            return cupy.empty(shape, obj.dtype)

    return make
