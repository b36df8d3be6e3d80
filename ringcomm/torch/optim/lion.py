"""Lion whose momentum travels at one bit per parameter, without a warm-up:

    c = beta1 * m + (1 - beta1) * g                    sent: C, the mean of all c
    m = m + (C - m) * (1 - beta2) / (1 - beta1)        equals Lion's m for the mean gradient in C
    p = p - lr * (sign(C) + weight_decay * p)

It is Lion with error feedback: the error of 1 bit in c is added to the c of the next step, on the
ranks and on the owner of a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import Unpack

from ...codecs import Compression, parse
from ...communicator import Communicator
from ..argument_checks import require, takes
from .arithmetic import blend_in, move
from .checks import require_at_least, require_betas
from .rule import Exchange, Rule
from .span import Span
from .wire import WireOptimizer, WireSettings

_SIGNS = (
    "has been removed: averages and votes of the ranks' signs ended at a higher loss than Lion. "
    "Leave it out: the momentum travels"
)


class Lion(WireOptimizer):
    """Lion (Chen et al., 2023, arXiv 2302.06675); other arguments are WireOptimizer's.

    Args:
        lr, betas, weight_decay: Lion's. The weight decay is decoupled, times lr.
        compression: codec of the momentum.

    Raises ValueError as torch.optim does; and for betas[1] < betas[0], which would amplify the
    codec's noise in the momentum.
    """

    @takes(
        WireSettings,
        removed=dict.fromkeys(("outcome", "momentum_sync", "sync_compression"), _SIGNS),
    )
    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        compression: Compression | None = "onebit",
        comm: Communicator | None = None,
        **settings: Unpack[WireSettings],
    ) -> None:
        require_at_least(0.0, {"learning rate": lr, "weight_decay value": weight_decay})
        require_betas(betas)
        require("betas, give betas[1] >= betas[0]", betas, betas[1] >= betas[0])
        carried = parse(compression).name
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay}
        super().__init__(
            params, defaults, _Lion(carried), comm, fixed={"compression": carried}, **settings
        )


class _Lion(Rule):
    method = "Lion(momentum)"
    states = ("exp_avg",)

    def __init__(self, compression: str) -> None:
        self._exchanges = (Exchange("momentum", compression),)

    def exchanges(self, step: int) -> Sequence[Exchange]:
        return self._exchanges

    def outgoing(self, what: str, span: Span, out: torch.Tensor) -> None:
        beta1 = span.group["betas"][0]
        torch.lerp(span.state["exp_avg"], span.gradient, 1.0 - beta1, out=out)

    def update(self, span: Span, means: Mapping[str, torch.Tensor]) -> None:
        beta1, beta2 = span.group["betas"]
        for tile in span.tiles():
            part = tile.of(means["momentum"])
            blend_in(tile.state["exp_avg"], part, (1 - beta2) / (1 - beta1))
            part.sign_()
        move(span, means["momentum"])
