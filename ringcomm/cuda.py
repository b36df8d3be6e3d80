"""GPU tensors: whether this machine and process can have them, and which stream a call follows.

    ringcomm.cuda.is_available()              a CUDA driver and a GPU
    with ringcomm.cuda.stream(side):          calls and waits of this thread follow `side`
        ringcomm.allreduce(x)

Neither CUDA's toolkit nor its runtime is needed, at build time or later: the driver's library is
opened when it is first asked for. ``RINGCOMM_LIBCUDA`` names another one than ``libcuda.so.1``.

Invariants: importing this opens nothing. What cannot be used is said once, in one place: why_not.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

from ._native import OK, error_class, ffi, lib, text
from .errors import ConfigError, DeviceError, TensorError

LIBRARY = "libcuda.so.1"

#: A stream that has nothing left to do to the tensor (RC_NO_STREAM).
NO_STREAM = int(lib.RC_NO_STREAM)

_chosen = threading.local()


def library() -> bytes:
    """The driver's library: its name, or a path."""
    return os.environ.get("RINGCOMM_LIBCUDA", LIBRARY).encode()


def is_available() -> bool:
    """True where GPU tensors can be used: there is a driver, and it sees a GPU."""
    return device_count() > 0


def why_not() -> str | None:
    """Why GPU tensors cannot be used, as a sentence; None where they can."""
    count, error = ffi.new("int *"), ffi.new("rc_error *")
    code = lib.rc_cuda_devices(library(), count, error)
    return None if code == OK else text(error.message)


def device_count() -> int:
    """GPUs that the driver sees; 0 where there is no driver."""
    count, error = ffi.new("int *"), ffi.new("rc_error *")
    lib.rc_cuda_devices(library(), count, error)
    return int(count[0])


def ordinal_of(address: int) -> int:
    """The GPU that memory lies on. Raises TensorError where it is no GPU's, DeviceError."""
    ordinal, error = ffi.new("int *"), ffi.new("rc_error *")
    code = lib.rc_cuda_locate(library(), address, ordinal, error)
    if code != OK:
        raise error_class(code)(text(error.message))
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


@contextlib.contextmanager
def stream(handle: Any) -> Iterator[None]:
    """Makes the calls and waits of this thread follow a stream, whatever the current one is.

    Args:
        handle: an object of torch or CuPy, or a cudaStream_t as an integer: 1 is the legacy
            default stream, 2 the thread's own.

    Raises ConfigError for what is no stream.
    """
    with _choose(_handle_of(handle)):
        yield


@contextlib.contextmanager
def current_stream() -> Iterator[None]:
    """Undoes ``stream`` within: calls and waits follow the current stream of the tensor's library.
    For what a library calls back with a stream of its own."""
    with _choose(None):
        yield


@contextlib.contextmanager
def _choose(handle: int | None) -> Iterator[None]:
    before = getattr(_chosen, "handle", None)
    _chosen.handle = handle
    try:
        yield
    finally:
        _chosen.handle = before


def chosen_stream() -> int | None:
    """The handle of the innermost ``with stream(...)``; None outside."""
    handle: int | None = getattr(_chosen, "handle", None)
    return handle


def _handle_of(given: Any) -> int:
    for name in ("cuda_stream", "ptr"):  # torch's and CuPy's
        given = getattr(given, name, given)
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < 2**63:
        raise ConfigError(f"{given!r} is no stream: give one of torch or CuPy, or its handle")
    return given


__all__ = ["chosen_stream", "device_count", "is_available", "stream", "why_not"]
