"""What the update rules compute alike, of a span's flat states.

Invariants: every rank does the same operations in the same order on the same tensors, so that equal
means lead to parameters that are equal to the bit.
"""

from __future__ import annotations

import torch

from .span import Span, Tile


def parts(span: Span, name: str) -> list[torch.Tensor]:
    """Views of a flat state, one per parameter."""
    return [span.view(span.state[name], place) for place in span.places]


def average_in(span: Span | Tile, gradient: torch.Tensor) -> None:
    """A gradient into m and v."""
    beta1, beta2 = span.group["betas"]
    span.state["exp_avg"].lerp_(gradient, 1 - beta1)
    span.state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)


def momentum_in(span: Span | Tile, out: torch.Tensor) -> None:
    """b1 m + (1-b1) g, the momentum with this rank's gradient."""
    beta = span.group["betas"][0]
    torch.mul(span.state["exp_avg"], beta, out=out)
    out.add_(span.gradient, alpha=1 - beta)


def root_of(span: Span | Tile) -> torch.Tensor:
    """r: what Adam divides by."""
    return span.state["exp_avg_sq"].sqrt().add_(span.group["eps"])


def mask(span: Span | Tile, values: torch.Tensor) -> torch.Tensor:
    """The values, made 0 where the span has no variance."""
    return values.masked_fill_(span.state["exp_avg_sq"] == 0, 0.0)


def with_decay(span: Span, update: torch.Tensor) -> list[torch.Tensor]:
    """u + wd p of each parameter: views of the update, to which the decay is added in place."""
    updates = span.views(update)
    if span.group["weight_decay"] != 0:
        torch._foreach_add_(updates, span.parameters, alpha=span.group["weight_decay"])
    return updates


def move(span: Span, update: torch.Tensor) -> None:
    """p -= lr (u + wd p): AdamW's step, whose decay is beside the update."""
    group, parameters = span.group, span.parameters
    if group["weight_decay"] != 0:
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
    torch._foreach_add_(parameters, span.views(update), alpha=-group["lr"])
