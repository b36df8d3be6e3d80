"""GPU tensors: their availability on this machine, and the stream that a call follows.

    ringcomm.cuda.is_available()              a CUDA driver and a GPU
    with ringcomm.cuda.stream(side):          calls and waits of this thread follow `side`
        ringcomm.allreduce(x)

Neither CUDA's toolkit nor its runtime is needed, at build time or later: the driver's library is
opened when it is first needed. ``RINGCOMM_LIBCUDA`` names another one than ``libcuda.so.1``.

Invariants: importing this opens nothing. why_not alone tells why GPUs cannot be used.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from ..errors import ConfigError, DeviceError, TensorError
from .native import OK, check, ffi, lib, text

LIBRARY = "libcuda.so.1"

#: Stands for a tensor without pending work on any stream (RC_NO_STREAM).
NO_STREAM = int(lib.RC_NO_STREAM)

_chosen = threading.local()


def library() -> bytes:
    """Returns the name or path of the driver's library."""
    return os.environ.get("RINGCOMM_LIBCUDA", LIBRARY).encode()


def is_available() -> bool:
    """True where GPU tensors can be used: there is a driver, and it sees a GPU."""
    return device_count() > 0


def why_not() -> str | None:
    """Returns a sentence that tells why GPU tensors cannot be used; None if they can."""
    error, _ = _devices()
    return text(error.message) if error.code != OK else None


def device_count() -> int:
    """Returns the number of GPUs that the driver sees; 0 if there is no driver."""
    return _devices()[1]


def _devices() -> tuple[Any, int]:
    """Returns the driver's rc_error, and the number of GPUs."""
    count, error = ffi.new("int *"), ffi.new("rc_error *")
    lib.rc_cuda_devices(library(), count, error)
    return error, int(count[0])


def ordinal_of(address: int) -> int:
    """Returns the number of the GPU that memory lies on. Raises TensorError for host memory,
    DeviceError."""
    ordinal, error = ffi.new("int *"), ffi.new("rc_error *")
    check(lib.rc_cuda_locate(library(), address, ordinal, error), "", error)
    if ordinal[0] < 0:
        raise TensorError(
            "the tensor says that it is on a GPU, and lies in host memory; give its numpy array"
        )
    return int(ordinal[0])


def require() -> None:
    """Raises DeviceError where GPU tensors cannot be used."""
    reason = why_not()
    if reason is not None:
        raise DeviceError(f"a GPU tensor cannot be used here: {reason}")


def stream(handle: Any) -> AbstractContextManager[None]:
    """Makes the calls and waits of this thread follow a stream instead of the current one.

    Args:
        handle: an object of torch or CuPy, or a cudaStream_t as an integer: 1 is the legacy
            default stream, 2 the thread's own.

    Raises ConfigError if handle is no stream.
    """
    return _choose(_handle_of(handle))


def current_stream() -> AbstractContextManager[None]:
    """Undoes ``stream`` within: calls and waits follow the current stream of the tensor's library.
    For callbacks that a library runs with a current stream of its own."""
    return _choose(None)


@contextlib.contextmanager
def _choose(handle: int | None) -> Iterator[None]:
    before = getattr(_chosen, "handle", None)
    _chosen.handle = handle
    try:
        yield
    finally:
        _chosen.handle = before


def chosen_stream() -> int | None:
    """Returns the handle of the innermost ``with stream(...)``; None outside."""
    return getattr(_chosen, "handle", None)


def _handle_of(given: Any) -> int:
    for name in ("cuda_stream", "ptr"):  # attributes of torch's and CuPy's streams
        given = getattr(given, name, given)
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < 2**63:
        raise ConfigError(f"{given!r} is no stream: give one of torch or CuPy, or its handle")
    return given


__all__ = ["chosen_stream", "device_count", "is_available", "stream", "why_not"]
