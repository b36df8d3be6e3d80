"""Elementwise kernels of every set this CPU runs. GB/s of fp32 elements, whatever the wire."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
from conftest import FAR, NEAR, WHICH, pages

SETS = ("scalar", "avx2", "avx512", "neon")


def run_kernel(
    face: ctypes.CDLL, measure: Callable[..., Any], name: str, which: str, size: int
) -> None:
    names = [face.face_set(i).decode() for i in range(len(SETS)) if face.face_set(i)]
    if name not in names:
        pytest.skip(f"this CPU does not run {name}")
    target, source, half = pages(size), pages(size), pages(size)
    face.face_kernel(name.encode(), WHICH.index("bf16 encode"), *_at(target, source, half), 1)
    repeats = max(1, (4 << 20) // size)

    def call() -> int:
        return int(
            face.face_kernel(name.encode(), WHICH.index(which), *_at(target, source, half), repeats)
        )

    label = "copy" if which == "copy" else f"{name} {which}"
    assert measure(f"{label}, {size >> 10} KiB", call, repeats, size) == 1


def _at(target: Any, source: Any, half: Any) -> tuple[Any, ...]:
    return (
        ctypes.c_void_p(target.ctypes.data),
        ctypes.c_void_p(source.ctypes.data),
        ctypes.c_void_p(half.ctypes.data),
        ctypes.c_size_t(target.size),
    )


@pytest.mark.parametrize("size", [NEAR, FAR])
def test_copy(face: ctypes.CDLL, measure: Callable[..., Any], size: int) -> None:
    run_kernel(face, measure, "scalar", "copy", size)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("size", [NEAR, FAR])
@pytest.mark.parametrize("which", WHICH[:-1])
def test_kernel(
    face: ctypes.CDLL, measure: Callable[..., Any], name: str, size: int, which: str
) -> None:
    run_kernel(face, measure, name, which, size)
