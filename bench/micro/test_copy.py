"""Results collected from shared memory: 64 MiB out of slots that stay in a cache. ``above``: where
the target begins in its page, in bytes; large numpy arrays begin at 16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
from conftest import FAR, NEAR, pages

WAYS = ("memcpy", "copy_bytes", "copy_past_cache")  # as in face.c


@pytest.mark.parametrize("above", [0, 16])
@pytest.mark.parametrize("way", WAYS)
def test_collect(face: ctypes.CDLL, measure: Callable[..., Any], way: str, above: int) -> None:
    target, slots = pages(FAR + 4096), pages(NEAR)
    to, source = (ctypes.c_void_p(at) for at in (target.ctypes.data + above, slots.ctypes.data))

    def call() -> None:
        face.face_collect(WAYS.index(way), to, source, ctypes.c_size_t(FAR))

    measure(f"collected by {way}, {above} above", call, 1, FAR)
