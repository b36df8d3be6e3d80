"""Lion at one bit per parameter, and without a warm-up. By its momentum, or by the ranks' signs:

    c = beta1 * m + (1 - beta1) * g                    the momentum travels: C, the mean of all c
    m = m + (C - m) * (1 - beta2) / (1 - beta1)        which is Lion's, of the mean gradient in C
    p = p - lr * (sign(C) + weight_decay * p)

    d = sign(beta1 * m + (1 - beta1) * g)              signs travel
    m = beta2 * m + (1 - beta2) * g                    stays here, but every momentum_sync steps
    p = p - lr * (D + weight_decay * p)                D of all ranks' d: their mean, or their vote

The first is Lion with error feedback: what 1 bit leaves of c goes with the next steps', up and
down. A mean of signs is not the sign of the mean: where ranks' signs differ it is short.

Signs go up to the ranks that sum them without any loss: a block of them has the scale 1. What comes
down has 1 bit again, so of the mean it has the sign, times one size for each block; what that lacks
is kept there, and goes down with the next steps' (error feedback). A vote is the sign of the sum,
and needs no more than its bit.

A sign of 0 has no bit. It is sent as +1 in steps of odd number and as -1 in the others, so what no
rank has any gradient of moves to and fro by one lr. Of an even number of ranks a vote may be a tie:
one rank after the other has a vote and a half, so that ties favour nobody. (Of two ranks the sum
comes down as it is, and a tie is 0.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import Unpack

from ...codecs import Compression
from ...communicator import Communicator
from ..settings import require, takes
from .arithmetic import blend_in, move
from .checks import at_least, codec_name, require_betas
from .rule import Exchange, Rule
from .span import Span
from .wire import WireOptimizer, WireSettings

_OUTCOMES = ("momentum", "average", "vote")


class Lion(WireOptimizer):
    """Lion (Chen et al., 2023), distributed as by Liu et al. (2024); see WireOptimizer for what is
    common.

    Args:
        lr, betas, weight_decay: Lion's. The weight decay is decoupled, times lr.
        outcome: what all ranks apply: the sign of the mean "momentum"; the "average" of the ranks'
            signs; or a "vote" for each.
        momentum_sync: of signs: every so many steps the ranks average their momenta; 0: never.
        compression: how momentum or signs travel. With other codecs than onebit signs of 0 stay 0
            as far as these have one, and the mean comes down as precise as they are.
        sync_compression: how the momenta travel beside signs.

    Raises ValueError as torch.optim does; and for "momentum" with betas[1] < betas[0], which would
    make more of the codec's noise than there is of the momentum.
    """

    @takes(WireSettings)
    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        outcome: str = "momentum",
        momentum_sync: int = 100,
        compression: Compression | None = "onebit",
        sync_compression: Compression | None = "int8",
        comm: Communicator | None = None,
        **settings: Unpack[WireSettings],
    ) -> None:
        require("learning rate", lr, at_least(lr, 0.0))
        require_betas(betas)
        require("weight_decay value", weight_decay, at_least(weight_decay, 0.0))
        require(f"outcome, give one of {_OUTCOMES}", outcome, outcome in _OUTCOMES)
        require("momentum_sync", momentum_sync, at_least(momentum_sync, 0))
        carried = codec_name(compression)
        synced = codec_name(sync_compression, "sync_compression=")
        rule: Rule
        if outcome == "momentum":
            require("betas, for outcome='momentum' give betas[1] >= betas[0]", betas,
                    betas[1] >= betas[0])  # fmt: skip
            rule = _MomentumRule(carried)
        else:
            rule = _SignRule(carried, outcome == "vote", momentum_sync, synced)
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay}
        fixed = {"outcome": outcome, "momentum_sync": momentum_sync, "compression": carried,
                 "sync_compression": synced}  # fmt: skip
        super().__init__(params, defaults, rule, comm, fixed=fixed, **settings)


class _MomentumRule(Rule):
    method = "Lion(momentum)"
    states = ("exp_avg",)

    def __init__(self, compression: str) -> None:
        self._exchanges = (Exchange("momentum", compression),)

    def exchanges(self, step: int) -> Sequence[Exchange]:
        return self._exchanges

    def outgoing(self, what: str, span: Span, out: torch.Tensor) -> None:
        _follow(span, span.group["betas"][0], out)

    def update(self, span: Span, means: Mapping[str, torch.Tensor]) -> None:
        beta1, beta2 = span.group["betas"]
        mean = means["momentum"]
        for tile in span.tiles():
            part = tile.of(mean)
            blend_in(tile.state["exp_avg"], part, (1 - beta2) / (1 - beta1))
            part.sign_()
        move(span, mean)


class _SignRule(Rule):
    method = "Lion"
    states = ("exp_avg",)
    local = frozenset(states)

    def __init__(
        self, compression: str, votes: bool, momentum_sync: int, sync_compression: str
    ) -> None:
        # Residuals of votes would be of a mean that nobody applies.
        self._sign = Exchange("sign", compression, feedback=False if votes else None)
        self._momentum = Exchange("momentum", sync_compression, feedback=False)
        self._one_bit = compression == "onebit"
        self._votes = votes
        self._every = momentum_sync

    def exchanges(self, step: int) -> Sequence[Exchange]:
        if self._every and step % self._every == 0:
            return (self._sign, self._momentum)
        return (self._sign,)

    def outgoing(self, what: str, span: Span, out: torch.Tensor) -> None:
        beta1, beta2 = span.group["betas"]
        if what == "momentum":
            _follow(span, beta2, out)
            return
        _follow(span, beta1, out)
        out.sign_()
        if self._one_bit and not span.is_small and span.world_size > 1:
            out[out == 0] = 1.0 if span.step % 2 else -1.0
        if self._votes and self._has_casting_vote(span):
            out.mul_(1.5)

    def update(self, span: Span, means: Mapping[str, torch.Tensor]) -> None:
        buffer, mean = span.state["exp_avg"], means["sign"]
        if "momentum" in means:
            buffer.copy_(means["momentum"])
        else:
            _follow(span, span.group["betas"][1], buffer)
        if self._votes:
            mean.sign_()
        move(span, mean)

    def _has_casting_vote(self, span: Span) -> bool:
        even = span.world_size % 2 == 0 and span.world_size > 2
        return even and span.step % span.world_size == span.rank


def _follow(span: Span, beta: float, out: torch.Tensor) -> None:
    """Moves what the momentum is towards the gradient."""
    torch.lerp(span.state["exp_avg"], span.gradient, 1.0 - beta, out=out)
