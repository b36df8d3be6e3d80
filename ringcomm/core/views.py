"""Views: the memory of tensors as calls of the core take it, whatever library they are of.

    View          memory of the host
    DeviceView    memory of a GPU, and the stream that its library works on
    PackedView    several tensors of a GPU as one

A plain tensor, for which a View would take too long, is found by PLAIN.

The package ``faces`` makes them, a module for each kind of library.

Invariants: a View keeps its object alive, and the memory it names does not move. An object whose
elements do not lie densely in row-major order is gathered into a copy, which ``finish`` scatters
back. Nothing is written to an object that says it is read-only. A DeviceView never touches its
elements, as only the GPU's streams may. A tensor of a GPU that is not contiguous and receives a
result is refused: a copy back would have to follow the result on every stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import TensorError
from . import cuda

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


def dtype_named(name: str) -> str:
    """Returns the dtype that a library names so, with or without its module. Raises TensorError for
    one that no collective takes."""
    dtype = NUMPY_NAMES.get(name.rpartition(".")[2])
    if dtype is None:
        raise unsupported(name)
    return dtype


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


def class_name(obj: Any) -> str:
    """Returns the name of an object's class, with its module, for messages."""
    return f"{type(obj).__module__}.{type(obj).__qualname__}"


class View:
    """Memory, dtype and shape of a tensor, as the core takes them.

    Attributes:
        owner: the caller's object, returned as the result of in-place calls.
        address: address of the first element; 0 if there are none.
        count: number of elements.
        dtype: a name of DTYPES.
        shape: shape of the caller's object.
        new: makes an uninitialised tensor of a shape, of the same library and dtype.
        finish: call once after the collective: scatters a gathered copy back. Raises ValueError if
            that fails, or if the memory was given up meanwhile.
        is_copy: True if the result is in the object only after ``finish``.
    """

    __slots__ = (
        "_keep",
        "address",
        "count",
        "dtype",
        "finish",
        "is_copy",
        "new",
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
        self.new = make

    @property
    def nbytes(self) -> int:
        """Number of bytes of all elements."""
        return self.count * ITEM_BYTES[self.dtype]

    def overlaps(self, start: int, stop: int) -> bool:
        """True if the View's memory, or a torch storage that it keeps, meets addresses from start
        to stop."""
        if start < self.address + self.nbytes and self.address < stop:
            return True
        return _overlaps(self._keep, start, stop)


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


#: Stream of a tensor whose library names none: the legacy default stream, which waits for all
#: others.
LEGACY_STREAM = 1


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
        super().__init__(owner, keep, address, dtype, shape, math.prod(shape), make)
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
        starts, total = laid_out(parts, align)
        self.pieces = list(zip(starts, parts, strict=True))
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


def laid_out(parts: Sequence[View], align: int) -> tuple[list[int], int]:
    """Returns the byte offset of each part of one tensor, where each begins at a multiple of
    ``align`` elements, and the tensor's count of elements."""
    item, starts, total = ITEM_BYTES[parts[0].dtype], [], 0
    for part in parts:
        starts.append(total * item)
        total += -(-part.count // align) * align
    return starts, total


def common_device(views: Sequence[View]) -> DeviceView | None:
    """Returns the first view with elements if all views lie on one GPU; None if all lie on the
    host or none has elements. Raises TensorError for a mixture."""
    found = [view for view in views if isinstance(view, DeviceView)]
    if not found:
        return None
    if len(found) < len(views):
        raise TensorError("one tensor of the call lies on a GPU and another in host memory")
    devices = sorted({view.device for view in found if view.count})
    if len(devices) > 1:
        raise TensorError(f"the call's tensors lie on GPUs {devices}; all must be on one")
    return next((view for view in found if view.count), None)


def streams_of(views: Sequence[object]) -> list[int]:
    """Returns the streams, each once, that a call on these views follows now: a single one, unless
    the tensors are of several libraries, or an array names its own."""
    found = [view.streams for view in views if isinstance(view, DeviceView) and view.count]
    return list(dict.fromkeys(stream for streams in found for stream in streams))


# ---- how elements lie ----


def is_dense(shape: Sequence[int], strides: Sequence[int] | None, item: int) -> bool:
    """True if elements, item units apart, lie densely in row-major order; None: they do."""
    step = item
    for size, stride in zip(reversed(shape), reversed(strides or ()), strict=False):
        if size > 1 and stride != step:
            return 0 in shape
        step *= size
    return True


def shares_memory(shape: Sequence[int], strides: Sequence[int], item: int) -> bool:
    """True if elements may share memory, so that results cannot be written to them."""
    reach = item
    for stride, size in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < reach:
            return 0 not in shape
        reach += stride * (size - 1)
    return False


NOT_WRITABLE = "elements of the tensor share memory, so it cannot be written to; pass a copy"


# ---- plain tensors ----

Plain = tuple[Any, Any, int, Any]
"""Memory of a tensor: its library's dtype object (of any dtype), pointer, count of elements, and
the object that keeps the memory valid."""

#: By exact class: finds the memory of a tensor that is dense, in host memory and writable, as the
#: commonest are; None for any other. The faces of numpy and torch enter theirs.
PLAIN: dict[type, Callable[[Any], Plain | None]] = {}
