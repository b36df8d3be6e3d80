"""Faces: how an object of a library becomes memory that the core reads or writes.

    numpy     arrays, and objects with __array_interface__, the buffer protocol or DLPack on a CPU
    torch     torch's tensors, on a CPU or a CUDA device
    cupy      CuPy's arrays, and objects with __cuda_array_interface__
    dlpack    other objects that lie on a GPU by DLPack

``view`` is the one way to any tensor's memory; it asks the faces in turn. A face has two functions:
``takes`` tells whether an object is its own, and ``view`` makes the View. numpy and torch also
enter in views.PLAIN a function that finds a plain tensor's memory without a View. Libraries are
used only if the caller has imported them already.

Invariants: no CUDA call is made for a tensor without elements. Tensors that a library makes for a
call are made on the stream that the call follows.
"""

from __future__ import annotations

from typing import Any

from ...errors import TensorError
from ..views import DeviceView, View, class_name
from . import cupy, dlpack, numpy, torch

_FACES = (torch, numpy, cupy, dlpack)


def view(obj: Any, *, writable: bool) -> View:
    """Makes a View of a tensor, a DeviceView if it lies on a GPU.

    Args:
        obj: the tensor; it may be 0-d or empty.
        writable: True if the collective writes to it.

    Raises:
        TensorError: not a tensor, an unsupported dtype or device, or memory that would have to be
            written and is read-only, shared by several elements or, on a GPU, not contiguous.
        DeviceError: it is on a GPU, and there is no driver.
    """
    face = next((face for face in _FACES if face.takes(obj)), numpy)  # which also refuses
    return face.view(obj, writable)  # type: ignore[no-any-return]


def host_view(obj: Any, *, writable: bool) -> View:
    """Makes a View of a tensor in host memory. Raises TensorError as ``view``, and for one on a
    GPU."""
    found = view(obj, writable=writable)
    if isinstance(found, DeviceView):
        raise TensorError(f"{class_name(obj)} lies on a GPU; give a copy in host memory")
    return found
