"""Face of CuPy, and of all objects with __cuda_array_interface__. CuPy is used only if the caller
has imported it already.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ...errors import TensorError
from .. import cuda
from ..views import (
    ITEM_BYTES,
    LEGACY_STREAM,
    DeviceView,
    class_name,
    dtype_named,
    is_dense,
)
from .numpy import shown_dtype


def takes(obj: Any) -> bool:
    """True for an object with __cuda_array_interface__."""
    return hasattr(obj, "__cuda_array_interface__")


def view(obj: Any, writable: bool) -> DeviceView:
    """Makes a DeviceView of it; core.faces.view documents it."""
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
    _stream_of(about, obj)  # raises now if the stream is invalid
    dense = is_dense(shape, about.get("strides"), ITEM_BYTES[dtype])
    return device_view(
        obj,
        obj,
        address,
        dtype,
        shape,
        dense,
        lambda: _stream_of(obj.__cuda_array_interface__, obj),
    )


def device_view(
    obj: Any,
    keep: Any,
    address: int,
    dtype: str,
    shape: tuple[int, ...],
    dense: bool,
    current: Callable[[], int],
) -> DeviceView:
    """Makes a DeviceView of memory that an object describes. Raises TensorError if it is not dense,
    or lies in host memory."""
    if not dense:
        raise TensorError(f"{class_name(obj)} is not contiguous; pass a contiguous copy")
    device = -1
    if 0 not in shape:
        cuda.require()
        device = cuda.ordinal_of(address)
    return DeviceView(obj, keep, address, dtype, shape, device, current, _maker(obj, device))


def _dtype_of(obj: Any, about: dict[str, Any]) -> str:
    name = str(getattr(obj, "dtype", ""))
    if not name.endswith("bfloat16"):  # the interface has no name for bfloat16
        name = shown_dtype(np.dtype(about["typestr"]))
    return dtype_named(name)


def _stream_of(about: dict[str, Any], obj: Any) -> int:
    if about.get("version", 0) < 3:
        return LEGACY_STREAM
    handle = about.get("stream")
    if handle is None:
        return cuda.NO_STREAM
    if handle == 0:
        raise TensorError(
            f"{class_name(obj)} names stream 0, which __cuda_array_interface__ forbids"
        )
    return int(handle)


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
