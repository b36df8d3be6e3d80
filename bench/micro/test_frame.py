"""The frame: its checksum by each method this CPU has, and its header, encoded and checked."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
from conftest import FAR, NEAR, pages

# As in csrc/base/crc32c.c.
METHODS = ("tables", "instructions", "instructions and folding", "wide folding")


@pytest.mark.parametrize("size", [4 << 10, 64 << 10, NEAR, 1 << 20, FAR])
@pytest.mark.parametrize("method", range(len(METHODS)))
def test_crc32c(face: ctypes.CDLL, measure: Callable[..., Any], method: int, size: int) -> None:
    if method >= face.face_crc_methods():
        pytest.skip(f"this CPU has no CRC-32C by {METHODS[method]}")
    data = pages(size)
    at, repeats = ctypes.c_void_p(data.ctypes.data), max(1, (1 << 20) // size)
    measure(
        f"crc32c by {METHODS[method]}, {size >> 10} KiB",
        lambda: face.face_crc(method, at, ctypes.c_size_t(size), repeats),
        repeats,
        size,
    )


@pytest.mark.parametrize("length", [0, 4096, NEAR])
def test_encode(face: ctypes.CDLL, measure: Callable[..., Any], length: int) -> None:
    header, data = (ctypes.c_uint8 * 64)(), pages(NEAR)
    at, repeats = ctypes.c_void_p(data.ctypes.data), 10 if length == NEAR else 1000
    measure(
        f"frame encode, payload {length} B",
        lambda: face.face_frame_encode(header, at, length, repeats),
        repeats,
        length,
    )


@pytest.mark.parametrize("length", [0, 4096, NEAR])
def test_decode(face: ctypes.CDLL, measure: Callable[..., Any], length: int) -> None:
    header, data = (ctypes.c_uint8 * 64)(), pages(NEAR)
    at, repeats = ctypes.c_void_p(data.ctypes.data), 10 if length == NEAR else 1000
    face.face_frame_encode(header, at, length, 1)
    assert (
        measure(
            f"frame decode and check, payload {length} B",
            lambda: face.face_frame_decode(header, at, repeats),
            repeats,
            length,
        )
        == 1
    )
