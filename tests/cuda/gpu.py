"""A GPU for tests: the fake driver (fake_libcuda.h), and arrays in its memory.

    gpu = Gpu(library)                      opens it, for this process
    array = gpu.array(values, stream)       an object with __cuda_array_interface__ v3
    gpu.add(array, 1.0)                     a kernel on the array's stream
    array.read()                            as a program sees it that waits for its stream

Everything happens as late as streams and events allow, so a wait that is missing shows.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

LEGACY, PER_THREAD = 1, 2
KERNELS = 16  # of a pipe; each is launched once when it is loaded
_STRUCT = {"<V2": np.uint16}


class Gpu:
    """The driver as the rest of a program uses it, on one of its GPUs."""

    def __init__(self, library: Path) -> None:
        self.driver = ctypes.CDLL(str(library))
        # ctypes keeps each function as an attribute when it is first used, here by several ranks
        # at once. CPython 3.11 crashes where an object's dict is made (with its 30th attribute, or
        # by vars) while a finalizer or another thread sets an attribute: so it is made now.
        vars(self.driver)
        for name in ("fake_cuda_misuse",):
            getattr(self.driver, name).restype = ctypes.c_char_p
        self.driver.fake_cuda_memory.restype = ctypes.c_uint64
        self.driver.fake_cuda_foreign_stream.restype = ctypes.c_void_p
        self.driver.fake_cuda_add.argtypes = [
            ctypes.c_void_p,
            ctypes.c_uint64,
            ctypes.c_float,
            ctypes.c_size_t,
        ]
        self.reset()

    def reset(self) -> None:
        """As when the process began."""
        self.driver.fake_cuda_reset()
        self._contexts: dict[int, Any] = {}
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        """A function of the driver, which must succeed."""
        result = getattr(self.driver, name)(*arguments)
        assert result == 0, f"{name} returns {result}"

    def enter(self, ordinal: int = 0) -> None:
        """Makes a GPU the calling thread's."""
        if ordinal not in self._contexts:
            context = ctypes.c_void_p()
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
            self._contexts[ordinal] = context
        self.call("cuCtxSetCurrent", self._contexts[ordinal])

    def stream(self, ordinal: int = 0) -> int:
        """A stream, which does not wait for the default one."""
        self.enter(ordinal)
        made = ctypes.c_void_p()
        self.call("cuStreamCreateWithPriority", ctypes.byref(made), 1, 0)
        assert made.value is not None
        return made.value

    def array(
        self, values: np.ndarray[Any, Any], stream: int | None = LEGACY, ordinal: int = 0
    ) -> Array:
        """A copy of the values on the GPU."""
        array = self.empty(values.shape, values.dtype, stream, ordinal)
        array.write(values)
        return array

    def empty(
        self, shape: tuple[int, ...], dtype: Any, stream: int | None = LEGACY, ordinal: int = 0
    ) -> Array:
        """Memory that was never written."""
        self.enter(ordinal)
        address = ctypes.c_uint64()
        count = int(np.prod(shape))
        nbytes = max(1, count * np.dtype(dtype).itemsize)
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return Array(self, address.value, shape, np.dtype(dtype), stream, ordinal)

    def leaks(self, *kinds: str) -> int:
        """What has been made and not given back, of kinds or of all."""
        if not kinds:
            return int(self.driver.fake_cuda_leaks(None))
        return sum(int(self.driver.fake_cuda_leaks(kind.encode())) for kind in kinds)

    def calls(self, name: str) -> int:
        """How often a function was called."""
        return int(self.driver.fake_cuda_calls(name.encode()))

    def misuse(self) -> str | None:
        """The first thing done that CUDA forbids."""
        said = self.driver.fake_cuda_misuse()
        return said.decode() if said else None

    def fail(self, name: str, k: int, error: int = 999) -> None:
        """The k-th call from now on of a function, "*" for any, fails."""
        self.driver.fake_cuda_fail(name.encode(), k, error)

    def capture(self, stream: int, on: bool) -> None:
        """Begins or ends the capture of a stream into a graph."""
        self.driver.fake_cuda_capture(ctypes.c_void_p(stream), int(on))


class Array:
    """An array on the GPU.

    Attributes:
        dtype: of its elements; for bfloat16 numpy's uint16, and ``bfloat16`` is True.
        stream: what its interface names.
    """

    def __init__(
        self,
        gpu: Gpu,
        address: int,
        shape: tuple[int, ...],
        dtype: Any,
        stream: int | None,
        ordinal: int,
    ) -> None:
        self.gpu, self.address, self.shape = gpu, address, shape
        self.numpy_dtype, self.stream, self.ordinal = dtype, stream, ordinal
        self.dtype: Any = dtype
        self.more: dict[str, Any] = {}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.numpy_dtype.str,
            "data": (self.address, False),
            "version": 3,
            "stream": self.stream,
            **self.more,
        }

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * int(self.numpy_dtype.itemsize)

    def write(self, values: np.ndarray[Any, Any]) -> None:
        """At once, past all streams."""
        data = np.ascontiguousarray(values)
        if data.nbytes:
            self.gpu.call(
                "fake_cuda_write",
                ctypes.c_uint64(self.address),
                data.ctypes.data_as(_POINTER),
                ctypes.c_size_t(data.nbytes),
            )

    def peek(self) -> np.ndarray[Any, Any]:
        """Its values, past all streams."""
        out = np.empty(self.shape, self.numpy_dtype)
        if out.nbytes:
            self.gpu.call(
                "fake_cuda_read",
                out.ctypes.data_as(_POINTER),
                ctypes.c_uint64(self.address),
                ctypes.c_size_t(out.nbytes),
            )
        return out

    def read(self, stream: int | None = None) -> np.ndarray[Any, Any]:
        """Its values when the stream has done all that it has to do."""
        self.gpu.enter(self.ordinal)
        handle = self.stream if stream is None else stream
        if handle is not None:
            self.gpu.call("cuStreamSynchronize", ctypes.c_void_p(handle))
        return self.peek()

    def add(self, value: float, stream: int | None = None) -> None:
        """A kernel on its stream, which adds a number to its float32 elements."""
        self.gpu.enter(self.ordinal)
        handle = self.stream if stream is None else stream
        count = int(np.prod(self.shape))
        self.gpu.call("fake_cuda_add", handle, self.address, value, count)

    def free(self) -> None:
        """Gives its memory back."""
        self.gpu.enter(self.ordinal)
        self.gpu.call("cuMemFree_v2", ctypes.c_uint64(self.address))


_POINTER = ctypes.c_void_p
