"""SGD with its momentum on the wire.

    m = mean over the ranks of (momentum * m + (1 - dampening) * g)          sent
    p = p - lr * m

The mean replaces the momentum, so that every rank has the same. The error of 1 bit in the momentum
is small beside the gradients of the steps before in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import Unpack

from ...codecs import Compression, parse
from ...communicator import Communicator
from ...core.calls import is_number
from ..argument_checks import require, takes
from .checks import require_at_least
from .rule import Exchange, Rule
from .span import Span
from .wire import WireOptimizer, WireSettings


class SGD(WireOptimizer):
    """torch.optim.SGD, whose momentum the ranks average; other arguments are WireOptimizer's.

    Args:
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.optim.SGD. The
            weight decay is added after the exchange, which changes last bits only. The dampening
            spares the optimizer's first step, in torch the first one of each parameter.
        compression: codec of the momentum; with momentum 0, of the gradient.
        warmup_steps: number of first steps in which it travels at bf16.
    """

    @takes(WireSettings)
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        compression: Compression | None = "onebit",
        warmup_steps: int = 0,
        comm: Communicator | None = None,
        **settings: Unpack[WireSettings],
    ) -> None:
        require_at_least(
            0.0,
            {
                "learning rate": lr,
                "momentum value": momentum,
                "weight_decay value": weight_decay,
                "warmup_steps value": warmup_steps,
            },
        )
        require("dampening value", dampening, is_number(dampening))
        fits = not nesterov or (momentum > 0 and dampening == 0)
        require("Nesterov momentum requires a momentum and zero dampening", None, fits)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        codec = parse(compression).name
        fixed = {"compression": codec, "warmup_steps": warmup_steps}
        super().__init__(
            params, defaults, _MomentumRule(codec, warmup_steps), comm, fixed=fixed, **settings
        )


class _MomentumRule(Rule):
    method = "SGD"
    states = ("momentum_buffer",)

    def __init__(self, compression: str, warmup_steps: int) -> None:
        self._usual = (Exchange("momentum", compression),)
        self._first = (Exchange("momentum", "bf16"),)
        self._warmup_steps = warmup_steps

    def exchanges(self, step: int) -> Sequence[Exchange]:
        return self._first if step <= self._warmup_steps else self._usual

    def usual(self, step: int) -> Sequence[Exchange]:
        return self._usual

    def outgoing(self, what: str, span: Span, out: torch.Tensor) -> None:
        sign = -1.0 if span.group["maximize"] else 1.0
        torch.mul(span.state["momentum_buffer"], span.group["momentum"], out=out)
        out.add_(span.gradient, alpha=sign * self._share(span))

    def update(self, span: Span, means: Mapping[str, torch.Tensor]) -> None:
        group, buffer, mean = span.group, span.state["momentum_buffer"], means["momentum"]
        parameters, moments = span.parameters, span.views(mean)
        if group["weight_decay"]:
            decay = group["weight_decay"] * self._share(span)
            torch._foreach_add_(moments, torch._foreach_mul(parameters, decay))
        moved = moments
        if group["nesterov"]:  # g + momentum m, with g = m - momentum buffer
            before = torch._foreach_mul(span.views(buffer), -group["momentum"])
            moved = list(torch._foreach_mul(moments, 1.0 + group["momentum"]))
            torch._foreach_add_(moved, before)
        buffer.copy_(mean)
        torch._foreach_mul_(moved, group["lr"])
        torch._foreach_sub_(parameters, moved)

    def _share(self, span: Span) -> float:
        """Returns the gradient's weight in the momentum, as in torch: 1 without momentum, and in
        the first step."""
        is_whole = span.step == 1 or span.group["momentum"] == 0
        return 1.0 if is_whole else float(1.0 - span.group["dampening"])
