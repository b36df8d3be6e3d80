"""A GPU through CUDA's driver and ctypes, for gpu_check.py: memory, streams, our kernels, arrays.

Neither torch nor CuPy is needed, and the fake driver of tests/cuda will do: what is checked without
a GPU is the code that runs on one. The library is that of RINGCOMM_LIBCUDA, else libcuda.so.1.

Invariants: only the primary context is used. Every method may be called on any thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PTX = Path(__file__).resolve().parents[2] / "ringcomm" / "kernels.ptx"
LEGACY, PER_THREAD = 1, 2
L2_BYTES, SM_COUNT, MAJOR, MINOR, ENGINES = 38, 16, 75, 76, 40  # CUdevice_attribute
THREADS = 256

Values = np.ndarray[Any, Any]
_VERSIONED = {
    "cuMemAlloc",
    "cuMemFree",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuMemcpyDtoDAsync",
    "cuStreamDestroy",
    "cuStreamBeginCapture",
    "cuDeviceTotalMem",
}


class DriverError(Exception):
    """A function of the driver failed, or is missing."""


class Driver:
    """One GPU. Raises DriverError where there is none."""

    def __init__(self, ordinal: int = 0) -> None:
        try:
            self.functions = ctypes.CDLL(os.environ.get("RINGCOMM_LIBCUDA", "libcuda.so.1"))
        except OSError as error:
            raise DriverError(f"no CUDA driver: {error}") from None
        self.is_fake = hasattr(self.functions, "fake_cuda_reset")
        self.call("cuInit", 0)
        self.device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(self.device), ordinal)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self.device)
        self.enter()

    def call(self, name: str, *arguments: Any) -> None:
        """A function by its documented name. Raises DriverError unless it succeeds."""
        function = getattr(self.functions, name + ("_v2" if name in _VERSIONED else ""), None)
        if function is None:
            raise DriverError(f"the driver has no {name}")
        result = function(*arguments)
        if result:
            said = ctypes.c_char_p()
            self.functions.cuGetErrorName(result, ctypes.byref(said))
            raise DriverError(f"{name}: {(said.value or b'?').decode()} ({result})")

    def enter(self) -> None:
        """Makes the GPU the calling thread's."""
        self.call("cuCtxSetCurrent", self._context)

    # ---- what it is ----

    def name(self) -> str:
        text = ctypes.create_string_buffer(128)
        self.call("cuDeviceGetName", text, 128, self.device)
        return text.value.decode()

    def version(self) -> int:
        """Of CUDA: 12040 is CUDA 12.4."""
        found = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(found))
        return found.value

    def attribute(self, number: int, otherwise: int = 0) -> int:
        found = ctypes.c_int(otherwise)
        with contextlib.suppress(DriverError):
            self.call("cuDeviceGetAttribute", ctypes.byref(found), number, self.device)
        return found.value

    def memory_bytes(self) -> int:
        """0 where the driver does not tell."""
        found = ctypes.c_size_t()
        with contextlib.suppress(DriverError):
            self.call("cuDeviceTotalMem", ctypes.byref(found), self.device)
        return found.value

    # ---- memory ----

    def alloc(self, nbytes: int) -> int:
        self.enter()
        address = ctypes.c_uint64()
        self.call("cuMemAlloc", ctypes.byref(address), ctypes.c_size_t(max(1, nbytes)))
        return address.value

    def free(self, address: int) -> None:
        self.enter()
        self.call("cuMemFree", ctypes.c_uint64(address))

    def pinned(self, nbytes: int) -> int:
        """Address of pinned host memory."""
        self.enter()
        at = ctypes.c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(at), ctypes.c_size_t(nbytes), 0)
        assert at.value is not None
        return at.value

    def put(self, address: int, values: Values, stream: int = LEGACY) -> None:
        """Copies to the GPU, and waits for it."""
        data = np.ascontiguousarray(values)
        self.copy("HtoD", address, data.ctypes.data, data.nbytes, stream)
        self.wait(stream)

    def get(self, address: int, into: Values, stream: int = LEGACY) -> Values:
        """Copies from the GPU into a contiguous array, and waits for it."""
        self.copy("DtoH", into.ctypes.data, address, into.nbytes, stream)
        self.wait(stream)
        return into

    def copy(self, way: str, to: int, source: int, nbytes: int, stream: int = LEGACY) -> None:
        """Queues a copy; way: HtoD, DtoH or DtoD."""
        self.enter()
        if nbytes:
            self.call(
                f"cuMemcpy{way}Async",
                ctypes.c_uint64(to),
                ctypes.c_uint64(source),
                ctypes.c_size_t(nbytes),
                ctypes.c_void_p(stream),
            )

    # ---- streams ----

    def stream(self) -> int:
        """A stream that does not wait for the default one."""
        self.enter()
        made = ctypes.c_void_p()
        self.call("cuStreamCreateWithPriority", ctypes.byref(made), 1, 0)
        assert made.value is not None
        return made.value

    def wait(self, stream: int = LEGACY) -> None:
        self.enter()
        self.call("cuStreamSynchronize", ctypes.c_void_p(stream))

    @contextlib.contextmanager
    def capturing(self, stream: int) -> Any:
        """A stream under capture into a graph, which is thrown away."""
        handle = ctypes.c_void_p(stream)
        if self.is_fake:
            self.functions.fake_cuda_capture(handle, 1)
        else:
            self.call("cuStreamBeginCapture", handle, 2)  # relaxed
        try:
            yield
        finally:
            if self.is_fake:
                self.functions.fake_cuda_capture(handle, 0)
            else:
                graph = ctypes.c_void_p()
                self.call("cuStreamEndCapture", handle, ctypes.byref(graph))
                self.call("cuGraphDestroy", graph)

    # ---- kernels ----

    def load(self, image: bytes) -> float:
        """Loads kernels (PTX as a string); the seconds that it took, with one to use, which a
        driver may put it off to."""
        self.enter()
        self._module, function = ctypes.c_void_p(), ctypes.c_void_p()
        began = time.perf_counter()
        self.call("cuModuleLoadDataEx", ctypes.byref(self._module), image, 0, None, None)
        self.call("cuModuleGetFunction", ctypes.byref(function), self._module, b"ringcomm_scale")
        return time.perf_counter() - began

    def launch(
        self, name: str, arguments: Sequence[Any], *, blocks: int = 64, stream: int = LEGACY
    ) -> None:
        """Queues ringcomm_<name>. Arguments: None is NULL, int 64 bits, float a float, or as
        ctypes has them."""
        self.enter()
        self.prepared(name, arguments, blocks=blocks, stream=stream)()

    def prepared(
        self, name: str, arguments: Sequence[Any], *, blocks: int = 64, stream: int = LEGACY
    ) -> Callable[[], None]:
        """What does that, on a thread that has entered, with as little of Python as can be."""
        function = ctypes.c_void_p()
        self.call(
            "cuModuleGetFunction",
            ctypes.byref(function),
            self._module,
            b"ringcomm_" + name.encode(),
        )
        kept = [_argument(one) for one in arguments]
        places = (ctypes.c_void_p * 24)(*map(ctypes.addressof, kept))
        handle = ctypes.c_void_p(stream)

        def go(kept: Any = kept) -> None:  # places point into it
            self.call(
                "cuLaunchKernel", function, blocks, 1, 1, THREADS, 1, 1, 0, handle, places, None
            )

        return go


class Array:
    """An array on the GPU, with __cuda_array_interface__ v3; its memory goes with it.

    Attributes:
        dtype: of its elements, or "bfloat16", whose bits are numpy's uint16.
        stream: what its interface names.
    """

    def __init__(
        self, driver: Driver, shape: tuple[int, ...], dtype: Any, stream: int = LEGACY
    ) -> None:
        self.driver, self.shape, self.stream = driver, shape, stream
        self.numpy_dtype = np.dtype(dtype)
        self.dtype: Any = self.numpy_dtype
        self.nbytes = int(np.prod(shape)) * self.numpy_dtype.itemsize
        self.address = driver.alloc(self.nbytes)

    @classmethod
    def of(cls, driver: Driver, values: Values, dtype: str = "", stream: int = LEGACY) -> Array:
        """A copy of values; dtype "bf16": they are bits of that."""
        made = cls(driver, values.shape, values.dtype, stream)
        if dtype == "bf16":
            made.dtype = "bfloat16"
        driver.put(made.address, values, stream)
        return made

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.numpy_dtype.str,
            "version": 3,
            "data": (self.address, False),
            "stream": self.stream,
        }

    def read(self) -> Values:
        """Its values, after what its stream has to do."""
        return self.driver.get(self.address, np.empty(self.shape, self.numpy_dtype), self.stream)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the process may be ending
            self.driver.free(self.address)


def _argument(one: Any) -> Any:
    if one is None:
        return ctypes.c_void_p(None)
    if isinstance(one, float):
        return ctypes.c_float(one)
    return ctypes.c_uint64(one) if isinstance(one, int) else one
