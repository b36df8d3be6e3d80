"""DeepSpeed's compressed all-reduce in numpy, written from its formula alone.

All in float32, one rounding for each operation, but for the sum of squares. Every rank's part in
one process. Nothing here is shared with bench/training/published.py, which has no loops over
elements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from reference import Array

F = np.float32


@dataclasses.dataclass
class Errors:
    """What one rank has left: worker[P], server[P / N]."""

    worker: Array
    server: Array


def padded(count: int, n: int) -> int:
    """P: the least multiple of N lcm(N, 8) that is not below the count."""
    step = n * math.lcm(n, 8)
    size = 0
    while size < count:
        size += step
    return size


def no_errors(count: int, n: int) -> list[Errors]:
    """Before the first step."""
    size = padded(count, n)
    return [Errors(np.zeros(size, F), np.zeros(size // n, F)) for _ in range(n)]


def sum_of_squares(x: Array) -> float:
    """In float64: 32 lanes, element i in lane i modulo 32, which are then added half to half."""

    def fold(lanes: list[float]) -> float:
        half = len(lanes) // 2
        if half == 0:
            return lanes[0]
        return fold([low + high for low, high in zip(lanes[:half], lanes[half:], strict=True)])

    lanes = [0.0] * 32
    for i, value in enumerate(x.tolist()):
        lanes[i % 32] += value * value
    return fold(lanes)


def rms(x: Array) -> np.float32:
    """||x|| / sqrt(elements)."""
    return F(F(math.sqrt(sum_of_squares(x))) / F(math.sqrt(len(x))))


def sgn(x: Array) -> Array:
    """1 or -1; of both zeros 1."""
    return np.array([-1 if value < 0 else 1 for value in x], F)


def step(inputs: Sequence[Array], errors: Sequence[Errors]) -> tuple[Array, list[Errors]]:
    """One all-reduce: the result, the same on all ranks, and every rank's errors after it."""
    n, count = len(inputs), len(inputs[0])
    chunk = padded(count, n) // n
    scales, signs, workers = [], [], []
    for x, before in zip(inputs, errors, strict=True):
        c = np.concatenate([x.astype(F), np.zeros(n * chunk - count, F)]) + before.worker
        scales.append(rms(c))
        signs.append(sgn(c))
        workers.append(c - scales[-1] * signs[-1])
    results, after = [], []
    for owner in range(n):
        part = slice(owner * chunk, (owner + 1) * chunk)
        m = signs[0][part] * (scales[0] * F(1 / n))
        for rank in range(1, n):
            m = m + signs[rank][part] * (scales[rank] * F(1 / n))
        m = m + errors[owner].server
        scale = rms(m)
        results.append(scale * sgn(m))
        after.append(Errors(workers[owner], m - results[-1]))
    return np.concatenate(results)[:count], after
