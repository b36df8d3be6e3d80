"""The plan: choosing an algorithm, laying out an all-reduce, and asking about each segment."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

WORLDS = (2, 8)
COUNT = ctypes.c_uint64(16 << 18)  # 16 MiB of f32


@pytest.mark.parametrize("world", WORLDS)
def test_choose(face: ctypes.CDLL, measure: Callable[..., Any], world: int) -> None:
    assert (
        measure(f"plan_choose, {world} ranks", lambda: face.face_choose(COUNT, world, 1000), 1000)
        > 0
    )


@pytest.mark.parametrize("world", WORLDS)
def test_init(face: ctypes.CDLL, measure: Callable[..., Any], world: int) -> None:
    assert (
        measure(f"plan_init, {world} ranks", lambda: face.face_plan_init(COUNT, world, 1000), 1000)
        > 0
    )


@pytest.mark.parametrize("world", WORLDS)
def test_walk(face: ctypes.CDLL, measure: Callable[..., Any], world: int) -> None:
    total = ctypes.c_uint64()
    asked = face.face_plan_walk(COUNT, world, ctypes.byref(total))
    assert asked > 0
    measure(
        f"plan, all about one segment, {world} ranks",
        lambda: face.face_plan_walk(COUNT, world, ctypes.byref(total)),
        asked,
    )
