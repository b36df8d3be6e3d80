"""Inputs whose reduction is known without reducing: small integers, exact in every wire format.

Rank r's element i is f(r, i mod PERIOD). The period is a prime, so a segment that lands in the
wrong place (these are powers of two) shows. Magnitudes are kept so small that every partial sum of
up to 16 ranks is exact in bf16, fp16 and int8: one wrong bit is a wrong element.

Invariant: expected() is computed from f alone, never from a library's result.
"""

from __future__ import annotations

import numpy as np

PERIOD = 65537
MAX_WORLD = 16


def pattern(rank: int, world: int, op: str, dtype: str) -> np.ndarray:
    """One period of a rank's input, shape (PERIOD,), in float64.

    sum, min, max: integers from -2 to 2. avg: multiples of world for floating point, so that
    dividing first is exact too; for integers an average plus deviations that cancel. prod: 1 and
    2 on the first four ranks, 1 and -1 on the others. u8 gets no negative numbers.
    """
    unsigned = dtype == "u8"
    if op == "prod":
        low = _hash(rank) % 2
        return np.asarray(1.0 + low if rank < 4 else 1.0 - 2.0 * low * (not unsigned))
    if op == "avg" and dtype[0] in "iu":
        paired = (rank ^ 1) < world
        return _hash(-1) % 5 + (1.0 if unsigned else -2.0) + (-1 if rank % 2 else 1) * paired
    if op == "avg":
        return world * (_hash(rank) % 3 - 1.0)
    return _hash(rank) % 5 - (0.0 if unsigned else 2.0)


def expected(world: int, op: str, dtype: str) -> np.ndarray:
    """One period of the reduction over all ranks, shape (PERIOD,), in float64."""
    inputs = (pattern(rank, world, op, dtype) for rank in range(world))
    total = next(inputs).copy()
    combine = {"min": np.minimum, "max": np.maximum, "prod": np.multiply}.get(op, np.add)
    for values in inputs:
        combine(total, values, out=total)
    return np.asarray(total / world if op == "avg" else total)


def tile(period: np.ndarray, count: int, dtype: str) -> np.ndarray:
    """The first ``count`` elements of the endless pattern, as numpy holds them (bf16 as f32)."""
    names = {
        "f16": np.float16,
        "f64": np.float64,
        "i8": np.int8,
        "u8": np.uint8,
        "i32": np.int32,
        "i64": np.int64,
    }
    return np.resize(period.astype(names.get(dtype, np.float32)), count)


def count_wrong(
    result: np.ndarray, period: np.ndarray, start: int, op: str, slack: float = 0.0
) -> int:
    """Elements of ``result`` that differ from the endless pattern from index ``start`` on, by more
    than ``slack``.

    An average may differ besides by the rounding of one division, as 1/world is not exact.
    """
    want = np.roll(period, -(start % PERIOD))
    share = 1e-6 if op == "avg" else 0.0
    wrong = 0
    for begin in range(0, result.size, PERIOD):
        part = result[begin : begin + PERIOD].astype(np.float64)
        good = np.abs(part - want[: part.size]) <= slack + share * np.abs(want[: part.size])
        wrong += int(part.size - np.count_nonzero(good))  # NaN counts as wrong
    return wrong


def _hash(seed: int) -> np.ndarray:
    """PERIOD well-mixed integers from 0 to 65520 as float64; the same for the same seed."""
    index = np.arange(PERIOD, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = (index + np.uint64((seed + 2) * PERIOD)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.asarray((mixed >> np.uint64(40)) % np.uint64(65521), np.float64)
