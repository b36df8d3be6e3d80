"""Arithmetic of the update rules, on a span's flat states.

Invariants: every rank does the same operations in the same order on the same tensors, and each of
them rounds once, as IEEE 754 defines: sums, differences, products, quotients and square roots. So
equal means lead to parameters that are equal to the bit, whatever the CPUs are. torch's add with
alpha, addcmul and lerp round once or twice, depending on the CPU's instructions, and its sqrt and
sums are MKL's or the compiler's: only a rank's own contribution may use them.

A decision from a sum, such as a layer's rate or whether a variance is stable, must be the same on
all ranks to the bit, too. So values are scaled by a power of two to integers, whose sum does not
depend on the order of addition (``total``, ``norm``).
"""

from __future__ import annotations

import math

import numpy as np
import torch

from .span import Span, Tile

_SUM_BITS = 62  # most bits of a sum in an int64


def orthogonalized(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Returns U V^T of a matrix U S V^T, but with .7 to 1.2 in place of ones, in bfloat16: so many
    steps x = a x + (b x x^T + c (x x^T)^2) x of Newton-Schulz's iteration, as Muon has it."""
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).bfloat16()
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


# ---- operations of torch's, of one rounding each ----


def root(values: torch.Tensor) -> torch.Tensor:
    """Returns the square roots in a new tensor."""
    if values.device.type != "cpu":
        return values.sqrt()
    out = torch.empty_like(values)
    np.sqrt(values.numpy(), out=out.numpy())
    return out


def power(base: float, exponent: int) -> float:
    """Returns base ** exponent, of 0 or more, by products: hosts' pow differs in last digits."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def blend_in(mean: torch.Tensor, value: torch.Tensor, weight: float) -> None:
    """Computes mean + weight (value - mean), in place."""
    mean.add_(torch.sub(value, mean).mul_(weight))


def square_in(mean: torch.Tensor, value: torch.Tensor, beta: float) -> None:
    """Computes beta mean + (1 - beta) value^2, in place."""
    mean.mul_(beta).add_(torch.mul(value, value).mul_(1 - beta))


# ---- sums that do not depend on the order ----


def total(values: torch.Tensor) -> float:
    """Returns the sum of values that are not negative, the same for equal values on any CPU. Its
    relative error is 2**-30 for 2**32 elements. NaN or infinity if there are such values."""
    if values.numel() == 0:
        return 0.0
    largest = float(values.max())
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    headroom = _SUM_BITS - math.ceil(math.log2(values.numel() + 1))
    factor = 2.0 ** (headroom - math.frexp(largest)[1])
    whole = (values.to(torch.float64) * factor).to(torch.int64)
    return float(int(whole.sum())) / factor


def norm(values: torch.Tensor) -> float:
    """Returns the Euclidean norm, the same for equal values on any CPU."""
    wide = values.to(torch.float64)
    return math.sqrt(total(wide * wide))


# ---- Adam's ----


def root_of(span: Span | Tile) -> torch.Tensor:
    """Returns r, which Adam divides by."""
    return root(span.state["exp_avg_sq"]).add_(span.group["eps"])


def mask(span: Span | Tile, values: torch.Tensor) -> torch.Tensor:
    """Sets the values to 0 where the span has no variance, and returns them."""
    return values.masked_fill_(span.state["exp_avg_sq"] == 0, 0.0)


# ---- the parameters ----


def with_decay(span: Span, update: torch.Tensor) -> list[torch.Tensor]:
    """Returns u + wd p of each parameter: views of the update, to which the decay is added in
    place."""
    updates = span.views(update)
    if span.group["weight_decay"] != 0:
        torch._foreach_add_(
            updates, torch._foreach_mul(span.parameters, span.group["weight_decay"])
        )
    return updates


def move(span: Span, update: torch.Tensor) -> None:
    """Computes p -= lr (u + wd p), AdamW's step with decoupled decay; overwrites the update."""
    group, parameters = span.group, span.parameters
    if group["weight_decay"] != 0:
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
    torch._foreach_sub_(parameters, span.views(update.mul_(group["lr"])))
