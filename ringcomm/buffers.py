"""Views of tensors in host memory: of any object whose memory the core can read or write.

Takes numpy arrays, torch CPU tensors and anything with ``__array_interface__``, DLPack or the
buffer protocol. torch is used only if the caller has imported it already.

Invariants: a View keeps its object alive, and the memory it names does not move. An object whose
elements do not lie densely in row-major order is gathered into a copy, which ``finish`` scatters
back. Nothing is written to an object that says it is read-only.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from . import storages
from ._native import ffi
from .errors import TensorError

#: dtype name -> number in the C header (rc_dtype)
DTYPES = {"f16": 0, "bf16": 1, "f32": 2, "f64": 3, "i8": 4, "u8": 5, "i32": 6, "i64": 7}
#: dtype name -> bytes of an element
ITEM_BYTES = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "i8": 1, "u8": 1, "i32": 4, "i64": 8}
#: name in numpy and torch -> dtype name
NUMPY_NAMES = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "int8": "i8",
    "uint8": "u8",
    "int32": "i32",
    "int64": "i64",
}
SUPPORTED = "float16, bfloat16, float32, float64, int8, uint8, int32 and int64"


def full_name(dtype: str) -> str:
    """Returns numpy's and torch's name of a dtype in DTYPES."""
    return next(name for name, short in NUMPY_NAMES.items() if short == dtype)


class View:
    """Memory, dtype and shape of a tensor, as the core takes them.

    Attributes:
        owner: the caller's object, returned as the result of in-place calls.
        address: address of the first element; 0 if there are none.
        count: number of elements.
        dtype: a name of DTYPES.
        shape: shape of the caller's object.
        finish: call once after the collective: scatters a gathered copy back. Raises ValueError if
            that fails, or if the memory was given up meanwhile.
        is_copy: True if the result is in the object only after ``finish``.
    """

    __slots__ = (
        "_keep",
        "_make",
        "address",
        "count",
        "dtype",
        "finish",
        "is_copy",
        "owner",
        "shape",
    )

    def __init__(
        self,
        owner: Any,
        keep: Any,
        address: int,
        dtype: str,
        shape: Sequence[int],
        count: int,
        make: Callable[[tuple[int, ...]], Any],
        finish: Callable[[], None] | None = None,
        is_copy: bool = False,
    ) -> None:
        self.owner = owner
        self.shape = tuple(shape)
        self.count = count
        self.address = address if count else 0
        self.dtype = dtype
        self.finish = finish
        self.is_copy = is_copy
        self._keep = keep
        self._make = make

    @property
    def nbytes(self) -> int:
        """Number of bytes of all elements."""
        return self.count * ITEM_BYTES[self.dtype]

    def overlaps(self, start: int, stop: int) -> bool:
        """True if any memory that the call or ``finish`` uses lies from address start to stop."""
        if start < self.address + self.nbytes and self.address < stop:
            return True
        return _overlaps(self._keep, start, stop)

    def new(self, shape: tuple[int, ...]) -> Any:
        """Makes an uninitialised tensor of the same library and dtype."""
        return self._make(shape)


def _overlaps(kept: Any, start: int, stop: int) -> bool:
    if isinstance(kept, (tuple, list)):
        return any(_overlaps(part, start, stop) for part in kept)
    if isinstance(kept, View):
        return kept.overlaps(start, stop)
    if not hasattr(kept, "untyped_storage"):
        return False
    storage = kept.untyped_storage()
    first = storage.data_ptr()
    return bool(start < first + storage.nbytes() and first < stop)


def view(obj: Any, *, writable: bool) -> View:
    """Makes a View of a tensor.

    Args:
        obj: the tensor; it may be 0-d or empty.
        writable: True if the collective writes to it.

    Raises:
        TensorError: not a tensor, an unsupported dtype, a device other than the CPU, or memory that
            would have to be written and is read-only or shared by several elements.
    """
    torch = storages.torch_of_caller()
    if torch is not None and isinstance(obj, torch.Tensor):
        return _torch_view(torch, obj, writable)
    return _numpy_view(obj, _as_array(obj), writable)


def _shares_memory(shape: Sequence[int], strides: Sequence[int], item: int) -> bool:
    """True if elements may share memory, so that results cannot be written to them."""
    reach = item
    for stride, size in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < reach:
            return 0 not in shape
        reach += stride * (size - 1)
    return False


_SHARED = "elements of the tensor share memory, so it cannot be written to; pass a copy"


def class_name(obj: Any) -> str:
    """Returns the name of an object's class, with its module, for messages."""
    return f"{type(obj).__module__}.{type(obj).__qualname__}"


# ---- torch ----


def torch_dtype(torch: Any, tensor: Any) -> str:
    """Returns the name in DTYPES of a torch tensor's dtype. Raises TensorError for a dtype or a
    layout that no collective takes."""
    if tensor.layout != torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else tensor.layout
        raise TensorError(f"a tensor of layout {layout} is not supported; pass a dense one")
    dtype = NUMPY_NAMES.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise unsupported(str(tensor.dtype))
    return dtype


def _torch_view(torch: Any, tensor: Any, writable: bool) -> View:
    storages.guard(torch)
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
            if _shares_memory(tensor.shape, tensor.stride(), 1):
                raise TensorError(_SHARED)
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

    def make(shape: tuple[int, ...]) -> Any:
        return torch.empty(shape, dtype=tensor.dtype)

    return View(
        tensor,
        (dense, target),
        address,
        dtype,
        tensor.shape,
        tensor.numel(),
        make,
        finish,
        is_copy=writable and dense is not target,
    )


# ---- numpy arrays and objects that numpy can wrap ----


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


def unsupported(dtype: str) -> TensorError:
    """Makes the error for a tensor of this dtype, as its library names it."""
    convert = "convert it"
    if "bool" in dtype:
        convert = "view it as uint8 (with max for any, and min for all)"
    elif "complex" in dtype:
        convert = "view it as real numbers, two for each"
    elif "endian" in dtype:
        convert = "convert it to the machine's byte order"
    return TensorError(f"dtype {dtype} is not supported; {convert}, or use {SUPPORTED}")


@functools.cache
def _dtype_name(dtype: np.dtype[Any]) -> str | None:
    return NUMPY_NAMES.get(dtype.name) if dtype.isnative else None


def shown_dtype(dtype: np.dtype[Any]) -> str:
    """Returns the name of a numpy dtype for messages."""
    other = "big" if sys.byteorder == "little" else "little"
    native = dtype.names or not dtype.itemsize or dtype.isnative
    return dtype.name if native else f"{other}-endian {dtype.name}"


def _numpy_view(obj: Any, array: np.ndarray[Any, Any], writable: bool) -> View:
    dtype = _dtype_name(array.dtype)
    if dtype is None:
        raise unsupported(shown_dtype(array.dtype))
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
            if _shares_memory(array.shape, array.strides, array.itemsize):
                raise TensorError(_SHARED)
            target = array.view()  # the caller may change the flags or shape of its own array

            def finish() -> None:
                target[...] = dense

    def make(shape: tuple[int, ...]) -> Any:
        return np.empty(shape, dtype=array.dtype)

    return View(
        obj,
        (array, dense),
        _address(dense),
        dtype,
        array.shape,
        array.size,
        make,
        finish,
        is_copy=finish is not None,
    )


def _address(dense: np.ndarray[Any, Any]) -> int:
    """Returns the address of a dense array."""
    try:
        return int(ffi.cast("uintptr_t", ffi.from_buffer(dense)))
    except (TypeError, ValueError, BufferError):  # a dtype that the buffer protocol lacks
        address: int = dense.__array_interface__["data"][0]
        return address
