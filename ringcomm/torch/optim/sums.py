"""Sums that do not depend on the order of addition.

A decision from a sum, such as a layer's rate or whether a variance is stable, must be the same on
all ranks to the bit. A float sum is not: its order depends on the CPU. So values are scaled by a
power of two to integers, whose sum is exact.
"""

from __future__ import annotations

import math

import torch

_BITS = 62  # most bits of the sum in an int64


def total(values: torch.Tensor) -> float:
    """Returns the sum of values that are not negative, the same for equal values on any CPU. Its
    relative error is 2**-30 for 2**32 elements. NaN or infinity if there are such values."""
    if values.numel() == 0:
        return 0.0
    largest = float(values.max())
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    headroom = _BITS - math.ceil(math.log2(values.numel() + 1))
    factor = 2.0 ** (headroom - math.frexp(largest)[1])
    whole = (values.to(torch.float64) * factor).to(torch.int64)
    return float(int(whole.sum())) / factor


def norm(values: torch.Tensor) -> float:
    """Returns the Euclidean norm, the same for equal values on any CPU."""
    wide = values.to(torch.float64)
    return math.sqrt(total(wide * wide))
