"""Sums that do not depend on the order in which they are made.

What is decided from a sum, as a layer's rate or when a variance is stable, must be alike on all
ranks to the bit. A float sum is not: its order is the processor's. So values are turned into whole
numbers by a power of two, whose sum is exact.
"""

from __future__ import annotations

import math

import torch

_BITS = 62  # of an int64, which the sum must not exceed


def total(values: torch.Tensor) -> float:
    """The sum of values that are not negative; equal wherever these are. To a relative 2**-30 for
    2**32 elements. NaN or infinity where there are such values."""
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
    """The Euclidean norm, equal wherever the values are."""
    wide = values.to(torch.float64)
    return math.sqrt(total(wide * wide))
