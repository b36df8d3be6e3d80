"""Test data: deterministic elements of every dtype, and tensors of them that ringcomm takes.

bfloat16 elements are np.uint16 bits, as in reference.py; tensor() hands them over as a torch
tensor on the same memory, since numpy has no such dtype.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import reference
from reference import NUMPY, Array

_POOL = (1 << 20) + 10007
_FLOATS = ("f16", "bf16", "f32", "f64")


@functools.cache
def _pool(dtype: str) -> Array:
    """Random elements: floats over seven decades, integers over their whole range."""
    rng = np.random.default_rng(abs(hash_of(dtype)))
    if dtype not in _FLOATS:
        info = np.iinfo(NUMPY[dtype])
        return rng.integers(info.min, info.max, _POOL, dtype=NUMPY[dtype], endpoint=True)
    values = rng.standard_normal(_POOL) * 10.0 ** rng.uniform(-4, 3, _POOL)
    if dtype == "bf16":
        return reference.bf16_bits(values.astype(np.float32))
    return values.astype(NUMPY[dtype])


def hash_of(text: str) -> int:
    """The same number for a text in every process."""
    return int.from_bytes(text.encode(), "little") % (2**31)


def elements(dtype: str, count: int, rank: int, salt: int = 0) -> Array:
    """Elements of one rank: a copy that the test may write to."""
    start = (rank * 1217 + salt * 331) % (_POOL - count)
    return _pool(dtype)[start : start + count].copy()


def inputs(dtype: str, count: int, n: int) -> list[Array]:
    """The elements of all ranks."""
    return [elements(dtype, count, rank) for rank in range(n)]


@contextlib.contextmanager
def subnormals_are_zeros() -> Iterator[None]:
    """Has this thread take subnormals for zeros meanwhile. Skips the test where none can."""
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU keeps subnormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def special(dtype: str, count: int, rank: int) -> Array:
    """Infinities, NaN, zeros of both signs, subnormals and the ends of the range, in an order that
    differs between ranks, so that they meet each other."""
    if dtype not in _FLOATS:
        info = np.iinfo(NUMPY[dtype])
        edges = np.array([info.min, info.min + 1, 0, 1, info.max - 1, info.max], NUMPY[dtype])
    elif dtype in ("f16", "bf16"):
        bits = [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x007F, 0x0080, 0x3C00, 0x3F80]
        bits += [0x7BFF, 0x7F7F, 0x7C00, 0x7F80, 0xFC00, 0xFF80, 0x7E00, 0x7FC0, 0xFE12, 0x7C01]
        edges = np.array(bits, np.uint16).view(NUMPY[dtype])
    else:
        info = np.finfo(NUMPY[dtype])
        edges = np.array(
            [
                0.0,
                -0.0,
                1.0,
                -1.0,
                np.inf,
                -np.inf,
                np.nan,
                info.max,
                info.min,
                info.tiny,
                info.smallest_subnormal,
                -info.smallest_subnormal,
                65504,
                65519.996,
                65520,
                2.0**-24,
                2.0**-25,
                1.5 * 2.0**-25,
                6e-8,
                3.3895314e38,
                1.17549435e-38,
                1e-40,
                1 + 2.0**-8,
                1 + 2.0**-11,
                1 + 3 * 2.0**-8,
            ],
            NUMPY[dtype],
        )
    step = (1, 3, 7, 9)[rank % 4]
    return edges[(np.arange(count) * step + rank * rank) % len(edges)]


def tensor(array: Array, dtype: str) -> Any:
    """What a caller would pass: the array itself, or a torch.bfloat16 tensor on its memory."""
    if dtype != "bf16":
        return array
    import torch

    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def stored(state: Any) -> Any:
    """The state as it comes back from a file of torch's, with weights only."""
    import torch

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def bits(array: Array) -> bytes:
    """The array's bytes."""
    return np.ascontiguousarray(array).tobytes()


def same(ours: Any, expected: Array) -> bool:
    """Equal bit for bit; shapes are not compared."""
    return bits(np.asarray(ours)) == bits(expected)


def same_but_for_nans(ours: Array, expected: Array) -> bool:
    """Equal bit for bit, where any NaN equals any NaN."""
    integers = np.dtype(f"u{ours.dtype.itemsize}")
    equal = ours.view(integers) == expected.view(integers)
    return bool(np.all(equal | (np.isnan(ours) & np.isnan(expected))))
