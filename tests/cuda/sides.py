"""What the tests of the CUDA kernels share: the emulated kernels and the core's own, places in
memory, and classes of values.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import emulation
import numpy as np
import pytest

CSRC = emulation.HERE.parent.parent / "csrc"
F32, U16, U8, U32 = np.float32, np.uint16, np.uint8, np.uint32
Array = np.ndarray[Any, Any]


# ---- both sides ----


@dataclass
class Sides:
    """The emulated kernels and the core's own."""

    gpu: ctypes.CDLL
    core: ctypes.CDLL

    def launch(self, name: str, launch: tuple[int, int], *arguments: Any) -> int:
        """Arrays and None are pointers, floats are f32, integers are u64; or as ctypes has them."""
        kept: list[Any] = [as_argument(one) for one in arguments]
        places = (ctypes.c_void_p * len(kept))(*map(ctypes.addressof, kept))
        return int(self.gpu.emulated_launch(name.encode(), *launch, places))

    def run(self, name: str, launch: tuple[int, int], *arguments: Any) -> None:
        assert self.launch("ringcomm_" + name, launch, *arguments) == 0


def as_argument(one: Any) -> Any:
    if one is None:
        return ctypes.c_void_p(None)
    if isinstance(one, np.ndarray):
        return ctypes.c_void_p(one.ctypes.data)
    if isinstance(one, float | int):
        return ctypes.c_float(one) if isinstance(one, float) else ctypes.c_uint64(one)
    return one


def pointer(array: Array | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


@functools.cache
def both_sides() -> Sides:
    """Compiles them, once."""
    core = [
        CSRC / "kernels" / "scalar.c",
        *(CSRC / "codec").glob("*.c"),
        CSRC / "base" / "copy.c",
        emulation.HERE / "core.c",
    ]
    try:
        gpu = ctypes.CDLL(str(emulation.copy("sides")))
        host = ctypes.CDLL(str(emulation.compiled(emulation.folder() / "core.so", core)))
    except OSError as error:
        pytest.skip(f"no C compiler: {error}")
    host.core_payload.restype = ctypes.c_size_t
    return Sides(gpu, host)


# ---- memory ----

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None)


def placed(array: Array, offset: int | None) -> Array:
    """A copy that lies so many bytes behind a multiple of 64; None: as far back as it can before
    memory that must not be touched."""
    space = (array.nbytes + 127) // PAGE * PAGE + 2 * PAGE
    room = mmap.mmap(-1, space)
    start = np.frombuffer(room, U8).ctypes.data
    assert LIBC.mprotect(ctypes.c_void_p(start + space - PAGE), PAGE, 0) == 0
    at = space - PAGE - array.nbytes
    if offset is not None:
        at = at // 64 * 64 - 64 + offset
    copy = np.frombuffer(room, array.dtype, array.size, at)
    copy[:] = array.reshape(-1)
    return copy


def same(got: Array, want: Array) -> None:
    """Bit for bit."""
    a, b = (x.view({2: U16, 4: U32, 1: U8}[x.itemsize]) for x in (got, want))
    if not np.array_equal(a, b):
        differ = np.flatnonzero(a != b)
        at = differ[0]
        pytest.fail(f"{differ.size} of {a.size} differ, first {at}: {a[at]:#x} for {b[at]:#x}")


# ---- values ----


def floats_of_all_classes() -> Array:
    """Every sign and exponent, NaNs and subnormals too, with mantissas in which every bit that
    rounding looks at is 0 and 1, and next to that."""
    low = {0, 1, 2, 0xFFFF, 0x5555, 0xAAAA, 0xE000, 0xEFFF, 0xF000}
    for bit in (0x8000, 0x2000, 0x1000, 0x800):  # of halves and last places of bf16 and fp16
        low |= {middle + by & 0xFFFF for middle in (bit, 3 * bit) for by in (-1, 0, 1)}
    high = np.arange(1 << 16, dtype=U32) << np.uint32(16)
    return (high[:, None] | np.array(sorted(low), U32)[None, :]).reshape(-1).view(F32)


def exponents(random: np.random.Generator, n: int, low: int, high: int) -> Array:
    bits = random.integers(0, 1 << 32, n, np.uint64).astype(U32) & np.uint32(0x807FFFFF)
    return (bits | random.integers(low, high + 1, n).astype(U32) << np.uint32(23)).view(F32)


def ordinary(random: np.random.Generator, n: int, limit: int) -> Array:
    return random.standard_normal(n).astype(F32)


def sparse(random: np.random.Generator, n: int, limit: int) -> Array:
    return np.where(random.random(n) < 0.9, F32(0), exponents(random, n, 120, 130)).astype(F32)


def zeros(random: np.random.Generator, n: int, limit: int) -> Array:
    return np.where(random.random(n) < 0.5, F32(-0.0), F32(0.0))


def tiny(random: np.random.Generator, n: int, limit: int) -> Array:
    return exponents(random, n, 0, int(random.integers(0, 13)))


def small(random: np.random.Generator, n: int, limit: int) -> Array:
    return exponents(random, n, 50, 70)


def large(random: np.random.Generator, n: int, limit: int) -> Array:
    return exponents(random, n, 180, int(random.integers(185, 255)))


def any_number(random: np.random.Generator, n: int, limit: int) -> Array:
    return exponents(random, n, 0, 254)


def ties(random: np.random.Generator, n: int, limit: int) -> Array:
    """Halves of a block's scale, which is any bfloat16: times the inverse, some are no halves."""
    halves = random.integers(-2 * limit, 2 * limit + 1, n).astype(F32) / F32(2)
    halves[::64] = limit
    scales = (F32(1) + random.integers(0, 128, -(-n // 256)).astype(F32) / F32(128)).astype(F32)
    return halves * np.repeat(scales, 256)[:n]


def edges(random: np.random.Generator, n: int, limit: int) -> Array:
    """The largest next to the limit times a bfloat16."""
    scale = (exponents(random, n, 60, 190).view(U32) & np.uint32(0x7FFF0000)).view(F32)
    near = (F32(limit) * scale).view(U32) + random.integers(-2, 3, n).astype(U32)
    return np.where(np.arange(n) % 64 == 0, near.astype(U32).view(F32), F32(0)).astype(F32)


def broken(random: np.random.Generator, n: int, limit: int) -> Array:
    x = exponents(random, n, 100, 130)
    bad = np.array([np.inf, -np.inf, np.nan, -np.nan], F32)
    return np.where(random.random(n) < 0.004, bad[random.integers(0, 4, n)], x).astype(F32)


def near_ties(random: np.random.Generator, n: int, limit: int) -> Array:
    """Blocks whose root mean square, or 1.75 times whose mean size, is as near as floats get to the
    middle between two bfloat16: there, what a sum is depends on its order."""
    x = random.standard_normal((-(-n // 256), 256))
    x[::2] = x[::2] ** 5
    means = np.sqrt((x * x).mean(axis=1)), 1.75 * np.abs(x).mean(axis=1)
    scale = np.minimum(*means)
    middle = (scale.astype(F32).view(U32) & np.uint32(0xFFFF0000) | np.uint32(0x8000)).view(F32)
    return (x * (middle / scale)[:, None]).astype(F32).reshape(-1)[:n]


CLASSES: list[Callable[[np.random.Generator, int, int], Array]] = [
    ordinary,
    sparse,
    zeros,
    tiny,
    small,
    large,
    any_number,
    ties,
    edges,
    broken,
    near_ties,
]
