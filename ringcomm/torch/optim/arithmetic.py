"""What the update rules compute alike, of a span's flat states.

Invariants: every rank does the same operations in the same order on the same tensors, and each of
them rounds once, as IEEE 754 has it: sums, differences, products, quotients and square roots of two
numbers. So equal means lead to parameters that are equal to the bit, whatever the CPUs are. torch's
add with alpha, addcmul and lerp round once or twice, by the CPU's instructions, and its sqrt and
sums are MKL's or the compiler's: they are for what a rank contributes alone (``momentum_in``).
"""

from __future__ import annotations

import numpy as np
import torch

from .span import Span, Tile


def parts(span: Span, name: str) -> list[torch.Tensor]:
    """Views of a flat state, one per parameter."""
    return [span.view(span.state[name], place) for place in span.places]


# ---- operations that torch has, of one rounding each ----


def root(values: torch.Tensor) -> torch.Tensor:
    """Square roots; a new tensor."""
    if values.device.type != "cpu":
        return values.sqrt()
    out = torch.empty_like(values)
    np.sqrt(values.numpy(), out=out.numpy())
    return out


def power(base: float, exponent: int) -> float:
    """base ** exponent, of 0 or more, by products: hosts' pow differs in last digits."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def blend_in(mean: torch.Tensor, value: torch.Tensor, weight: float) -> None:
    """mean + weight (value - mean), in place."""
    mean.add_(torch.sub(value, mean).mul_(weight))


def square_in(mean: torch.Tensor, value: torch.Tensor, beta: float) -> None:
    """beta mean + (1 - beta) value^2, in place."""
    mean.mul_(beta).add_(torch.mul(value, value).mul_(1 - beta))


# ---- Adam's ----


def average_in(span: Span | Tile, gradient: torch.Tensor) -> None:
    """A gradient into m and v."""
    beta1, beta2 = span.group["betas"]
    blend_in(span.state["exp_avg"], gradient, 1 - beta1)
    square_in(span.state["exp_avg_sq"], gradient, beta2)


def momentum_in(span: Span | Tile, out: torch.Tensor) -> None:
    """b1 m + (1-b1) g, the momentum with this rank's gradient."""
    beta = span.group["betas"][0]
    torch.mul(span.state["exp_avg"], beta, out=out)
    out.add_(span.gradient, alpha=1 - beta)


def root_of(span: Span | Tile) -> torch.Tensor:
    """r: what Adam divides by."""
    return root(span.state["exp_avg_sq"]).add_(span.group["eps"])


def mask(span: Span | Tile, values: torch.Tensor) -> torch.Tensor:
    """The values, made 0 where the span has no variance."""
    return values.masked_fill_(span.state["exp_avg_sq"] == 0, 0.0)


# ---- the parameters ----


def with_decay(span: Span, update: torch.Tensor) -> list[torch.Tensor]:
    """u + wd p of each parameter: views of the update, to which the decay is added in place."""
    updates = span.views(update)
    if span.group["weight_decay"] != 0:
        torch._foreach_add_(
            updates, torch._foreach_mul(span.parameters, span.group["weight_decay"])
        )
    return updates


def move(span: Span, update: torch.Tensor) -> None:
    """p -= lr (u + wd p): AdamW's step, whose decay is beside the update, which is overwritten."""
    group, parameters = span.group, span.parameters
    if group["weight_decay"] != 0:
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
    torch._foreach_sub_(parameters, span.views(update.mul_(group["lr"])))
