"""Arrays of three libraries for gpu_check.py, by one set of methods: ours, torch's and CuPy's.

Invariants: every method but ``read`` only queues, on the current stream of the calling thread.
``slow`` is a kernel that takes far longer than anything the host does meanwhile.
"""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from gpu_checks.driver import LEGACY, PER_THREAD, PTX, Array, Driver

KINDS = ("default", "side", "per-thread")
SLOW_S, CYCLES_PER_S = 0.02, 2e9  # of the fastest GPUs; of others it is longer


class Library(Protocol):
    """What a library of arrays can do. A ``kind`` is one of KINDS."""

    name: str

    def stream(self, kind: str) -> Any:
        """A context manager: the thread's current stream."""

    def full(self, count: int, value: float) -> Any:
        """float32 of one value."""

    def slow(self) -> None:
        """Keeps the stream busy."""

    def double(self, x: Any) -> None:
        """x *= 2"""

    def read(self, x: Any) -> np.ndarray[Any, Any]:
        """The values, after what the current stream has to do."""

    def capture(self) -> Any:
        """A context manager: the current stream, a side one, is captured."""


class Ours:
    """Arrays of driver.py, and the kernel ringcomm_scale."""

    name = "plain arrays"

    def __init__(self) -> None:
        self._driver = Driver()
        self._driver.load(PTX.read_bytes() + b"\0")
        self._current = threading.local()
        elements = 1 << 12 if self._driver.is_fake else 1 << 26
        self._load = Array(self._driver, (elements,), np.float32)
        self._driver.put(self._load.address, np.ones(elements, np.float32))

    @contextlib.contextmanager
    def stream(self, kind: str) -> Iterator[None]:
        side = {"default": LEGACY, "per-thread": PER_THREAD}
        self._current.handle = side.get(kind) or self._driver.stream()
        yield

    def full(self, count: int, value: float) -> Array:
        stream = self._current.handle
        made = Array(self._driver, (count,), np.float32, stream)
        self._driver.put(made.address, np.full(count, value, np.float32), stream)
        return made

    def slow(self) -> None:
        for _ in range(2 if self._driver.is_fake else 200):
            self._scale(self._load.address, 1.0, int(self._load.shape[0]))

    def double(self, x: Array) -> None:
        self._scale(x.address, 2.0, int(x.shape[0]))

    def _scale(self, address: int, factor: float, n: int) -> None:
        self._driver.launch("scale", [address, address, factor, n], stream=self._current.handle)

    def read(self, x: Array) -> np.ndarray[Any, Any]:
        return x.read()

    def capture(self) -> Any:
        return self._driver.capturing(self._current.handle)


class Torch:
    name = "torch"

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch
        self._cuda: Any = torch.cuda
        self._cycles = int(SLOW_S * CYCLES_PER_S)

    def stream(self, kind: str) -> Any:
        makers = {
            "default": self._cuda.default_stream,
            "side": self._cuda.Stream,
            "per-thread": lambda: self._cuda.ExternalStream(PER_THREAD),
        }
        return self._cuda.stream(makers[kind]())

    def full(self, count: int, value: float) -> Any:
        return self._torch.full((count,), value, device="cuda")

    def slow(self) -> None:
        self._cuda._sleep(self._cycles)

    def double(self, x: Any) -> None:
        x.mul_(2)

    def read(self, x: Any) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = x.cpu().numpy()
        return found

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        graph = self._cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="relaxed")
        try:
            yield
        finally:
            graph.capture_end()


class Cupy:
    name = "CuPy"

    def __init__(self) -> None:
        import cupy

        self._cupy: Any = cupy
        self._load = cupy.ones(1 << 26, cupy.float32)
        self._load *= 1  # compiles it
        cupy.cuda.Device().synchronize()

    def stream(self, kind: str) -> Any:
        streams = self._cupy.cuda.Stream
        return {"default": streams.null, "per-thread": streams.ptds}.get(kind) or streams(
            non_blocking=True
        )

    def full(self, count: int, value: float) -> Any:
        return self._cupy.full(count, value, self._cupy.float32)

    def slow(self) -> None:
        for _ in range(200):
            self._load *= 1

    def double(self, x: Any) -> None:
        x *= 2

    def read(self, x: Any) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = self._cupy.asnumpy(x)
        return found

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        stream = self._cupy.cuda.get_current_stream()
        stream.begin_capture(2)  # relaxed
        try:
            yield
        finally:
            stream.end_capture()


def why_no_torch() -> str | None:
    """None where torch has CUDA; else why not."""
    if importlib.util.find_spec("torch") is None:
        return "no torch with CUDA"
    import torch

    return None if torch.cuda.is_available() else "no torch with CUDA"


def why_no_cupy() -> str | None:
    """None where CuPy has a GPU; else why not."""
    if importlib.util.find_spec("cupy") is None:
        return "no CuPy"
    try:
        import cupy

        return None if cupy.cuda.runtime.getDeviceCount() else "CuPy sees no GPU"
    except Exception as error:  # its own kinds, and those of libraries that it loads
        return f"CuPy does not start: {error}"
