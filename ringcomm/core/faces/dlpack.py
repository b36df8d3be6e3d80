"""Face of DLPack, for objects on a GPU that describe themselves in no other way.

Invariants: a capsule is read and not consumed: its own destructor frees the memory, so
keeping the capsule keeps the memory. If no version was asked for, it holds a DLManagedTensor.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from ...errors import TensorError
from .. import cuda
from ..views import LEGACY_STREAM, DeviceView, class_name, dtype_named, is_dense
from .cupy import device_view

_GPU = (2, 13)  # kDLCUDA, kDLCUDAManaged
#: DLDataTypeCode -> numpy's name without the bits
_CODES = {0: "int", 1: "uint", 2: "float", 3: "opaque", 4: "bfloat", 5: "complex", 6: "bool"}


class _Tensor(ctypes.Structure):
    """DLTensor, the first field of a DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Found(NamedTuple):
    """Description of a tensor. ``dtype``: numpy's name; ``strides``: in elements, None: dense."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None


# A function of its own, as the argument types of ctypes.pythonapi's attribute are shared by all.
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def takes(obj: Any) -> bool:
    """True for an object that says by DLPack alone that it lies on a GPU."""
    return (
        not hasattr(obj, "__array_interface__")
        and hasattr(obj, "__dlpack__")
        and hasattr(obj, "__dlpack_device__")
        and int(obj.__dlpack_device__()[0]) in _GPU
    )


def read_capsule(capsule: Any) -> Found:
    """Reads a capsule. Raises TypeError or ValueError if it holds no DLManagedTensor."""
    tensor = _Tensor.from_address(_pointer_of(capsule, b"dltensor"))
    kind = _CODES.get(tensor.code)
    dtype = f"{kind}{tensor.bits}" if kind else f"of code {tensor.code}, {tensor.bits} bits"
    if tensor.lanes != 1:
        dtype += f"x{tensor.lanes}"
    return Found(
        (tensor.data or 0) + tensor.byte_offset,
        dtype,
        tuple(tensor.shape[: tensor.ndim]),
        tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None,
    )


def view(obj: Any, _writable: bool) -> DeviceView:
    """Makes a DeviceView of it; core.faces.view documents it. DLPack has no read-only flag, and
    producers export no such tensors."""
    try:  # DLPack has no stream 0
        capsule = obj.__dlpack__(stream=cuda.chosen_stream() or LEGACY_STREAM)
        found = read_capsule(capsule)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise TensorError(
            f"{class_name(obj)} lies on a GPU, and does not give its memory by DLPack; give a "
            f"copy, or a tensor of torch or CuPy ({error})"
        ) from None
    return device_view(
        obj,
        (obj, capsule),
        found.address,
        dtype_named(found.dtype),
        found.shape,
        is_dense(found.shape, found.strides, 1),
        lambda: LEGACY_STREAM,
    )
