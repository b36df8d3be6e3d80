"""Face of numpy: arrays, and objects with __array_interface__, DLPack or the buffer protocol."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...errors import TensorError
from ..native import address_of, ffi
from ..views import NOT_WRITABLE, PLAIN, Plain, View, class_name, dtype_named, shares_memory

_from_buffer = ffi.from_buffer


def takes(obj: Any) -> bool:
    """True for an array."""
    return isinstance(obj, np.ndarray)


def view(obj: Any, writable: bool) -> View:
    """Makes a View of an array, or of an object that numpy can wrap; core.faces.view documents
    it."""
    array = _as_array(obj)
    dtype = _dtype_name(array.dtype)
    if writable and array is not obj and isinstance(obj, np.generic):
        raise TensorError(
            f"{class_name(obj)} is a number, which the result cannot be written to; pass "
            "np.array([x]), or out="
        )
    if isinstance(array, np.ma.MaskedArray):
        raise TensorError("the array has a mask, which is not sent; pass its .data, or .filled(0)")
    if writable and not array.flags.writeable:
        raise TensorError(
            f"{class_name(obj)} is read-only, and the result would be written to it; pass out= or "
            "a copy"
        )
    dense = array
    finish = None
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned):
        dense = np.array(array, order="C", copy=True)
        if writable:
            if shares_memory(array.shape, array.strides, array.itemsize):
                raise TensorError(NOT_WRITABLE)
            target = array.view()  # the caller may change the flags or shape of its own array

            def finish() -> None:
                target[...] = dense

    try:
        address = address_of(_from_buffer(dense))
    except (TypeError, ValueError, BufferError):  # a dtype that the buffer protocol lacks
        address = dense.__array_interface__["data"][0]
    return View(
        obj,
        (array, dense),
        address,
        dtype,
        array.shape,
        array.size,
        lambda shape: np.empty(shape, array.dtype),
        finish,
        is_copy=finish is not None,
    )


def _plain(array: np.ndarray[Any, Any]) -> Plain | None:
    if not array.flags.carray:
        return None
    try:
        address = _from_buffer(array)  # it keeps the array alive
    except (TypeError, ValueError, BufferError):  # a dtype that the buffer protocol lacks
        return None
    return array.dtype, address, array.size, address


PLAIN[np.ndarray] = _plain


def _as_array(obj: Any) -> np.ndarray[Any, Any]:
    if isinstance(obj, np.ndarray):
        return obj
    if isinstance(obj, np.generic):
        copy = np.asarray(obj)
        copy.flags.writeable = False  # a result written to it would be lost
        return copy
    if isinstance(obj, _NO_TENSORS):
        raise _no_tensor(obj)
    try:
        if hasattr(obj, "__array_interface__"):
            return np.asarray(obj)
        if hasattr(obj, "__dlpack__"):
            return np.from_dlpack(obj)
        return np.asarray(memoryview(obj))
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise _no_tensor(obj, "" if "bytes-like" in str(error) else f" ({error})") from None


#: Types that new users pass and that have no memory to put a result into.
_NO_TENSORS = (str, int, float, complex, list, tuple, dict, set, Iterator, type(None))


def _no_tensor(obj: Any, why: str = "") -> TensorError:
    hint = ""
    if isinstance(obj, (int, float, complex)):
        hint = f"; of a number make one by np.array([{obj!r}])"
    elif isinstance(obj, (list, tuple)) and obj and all(isinstance(x, (int, float)) for x in obj):
        hint = "; of numbers make one by np.array(...)"
    elif isinstance(obj, (list, tuple, dict, set, Iterator)):
        hint = "; several tensors make one by numpy.stack or torch.stack, or use allreduce_many"
    elif hasattr(obj, "parameters"):
        hint = "; of a module pass its tensors, as those of its parameters() or their .grad"
    return TensorError(
        f"{class_name(obj)} is not a tensor: give a numpy array, a torch tensor, or an object with "
        f"the buffer protocol, __array_interface__ or DLPack{hint}{why}"
    )


@functools.cache
def _dtype_name(dtype: np.dtype[Any]) -> str:
    return dtype_named(shown_dtype(dtype))


def shown_dtype(dtype: np.dtype[Any]) -> str:
    """Returns the name of a numpy dtype for messages."""
    other = "big" if sys.byteorder == "little" else "little"
    native = dtype.names or not dtype.itemsize or dtype.isnative
    return dtype.name if native else f"{other}-endian {dtype.name}"
