"""OneBitLamb: LAMB that sends its momentum at 1 bit.

LAMB multiplies Adam's update of each tensor by c = ||p|| / ||u||, which 1 bit's noise would spoil.
So c is learned in the dense stage, as a running mean c_avg, and used from there on:

    dense   u = m / (sqrt(v) + eps) + wd p;  c = ||p|| / ||u|| within limits;  p -= lr c u
    then    u as OneBitAdam's, renewals of v included;  p -= lr c u,
            c = min(c_avg ||p|| / ||p at the freeze||, 2 ||p|| / ||u||) within limits

A tensor that has grown takes longer steps, as LAMB would have it. None is longer than twice LAMB's,
which is lr ||p||: 1 bit's noise makes u longer, and longer steps bring more noise.

As published (deepspeed_compat): v is biased and stays; what it has become is guessed at from the
1-bit momenta, r = (m' - b1 m) / (1 - b1), in w = EMA(r^2), and c_avg is multiplied by the largest
(sqrt(v) + eps) / (sqrt(w) + eps) of the tensor, within limits: one element without gradients takes
it to the limit. All tensors share one scale, for which their momenta are brought to one size.

Invariants: norms are sums that do not depend on the order, so c is the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from typing_extensions import Unpack

from ...codecs import Compression
from ...communicator import Communicator
from ..settings import require, takes
from .adam import Renewed, TwoStages
from .arithmetic import average_in, root, root_of, square_in, with_decay
from .checks import at_least, codec_name, require_adam
from .freezing import Freeze, FreezePoint, freeze_point
from .span import Place, Span
from .sums import norm
from .wire import WireOptimizer, WireSettings

_BETA = 0.9  # of c_avg
_LONGEST = 2.0  # times LAMB's step
_LEAST_FACTOR, _MOST_FACTOR, _FACTOR_STEP = 0.5, 4.0, 0.1  # as published


class OneBitLamb(WireOptimizer):
    """LAMB, whose preconditioned momentum travels at 1 bit; see WireOptimizer for what is common.

    Args:
        lr, betas, eps, weight_decay: of LAMB.
        max_coeff, min_coeff: limits of c.
        freeze, total_steps, compression, dense: as of OneBitAdam.
        deepspeed_compat: the update as published and DeepSpeed's compression, all tensors of a
            group in one.

    Attributes:
        frozen_at: the last dense step; None: not known yet.
    """

    _rule: TwoStages

    @takes(WireSettings)
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        freeze: Freeze = "stable",
        total_steps: int | None = None,
        compression: Compression | None = "onebit",
        dense: Compression | None = "bf16",
        deepspeed_compat: bool = False,
        comm: Communicator | None = None,
        **settings: Unpack[WireSettings],
    ) -> None:
        require_adam(lr, betas, eps, weight_decay)
        require("max_coeff value", max_coeff, at_least(max_coeff, 0) and max_coeff > 0)
        require("min_coeff value", min_coeff, at_least(min_coeff, 0) and min_coeff <= max_coeff)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                    "max_coeff": max_coeff, "min_coeff": min_coeff}  # fmt: skip
        densely = codec_name(dense, "dense=")
        point = freeze_point(freeze, total_steps, betas[1], renews=not deepspeed_compat)
        rule: TwoStages
        codec = "onebit-deepspeed" if deepspeed_compat else codec_name(compression)
        if deepspeed_compat:
            rule = _Published(point, codec, densely)
        else:
            rule = _Lamb(point, codec, densely, betas[1])
        fixed = {"freeze": freeze, "total_steps": total_steps, "compression": codec,
                 "dense": densely, "deepspeed_compat": deepspeed_compat}  # fmt: skip
        super().__init__(params, defaults, rule, comm, fixed=fixed, **settings)

    @property
    def frozen_at(self) -> int | None:
        """See above."""
        return self._rule.point.step


class _Coefficients:
    """c_avg by the number of the parameter."""

    def __init__(self, is_biased: bool) -> None:
        self._is_biased = is_biased
        self._mean: dict[int, float] = {}
        self._weight: dict[int, float] = {}

    def learn(self, span: Span, place: Place, size: float, update: float) -> float:
        """c of a dense step; it goes into the mean unless it is 1."""
        if size == 0 or update == 0:
            return 1.0
        coeff: float = min(max(size / update, span.group["min_coeff"]), span.group["max_coeff"])
        if coeff != 1.0:
            for held, value in ((self._mean, coeff), (self._weight, 1.0)):
                held[place.index] = _BETA * held.get(place.index, 0.0) + (1 - _BETA) * value
        return coeff

    def get(self, place: Place) -> float:
        """c_avg; of a tensor for which c has always been 1, or biased from 0."""
        weight = self._weight.get(place.index)
        if weight is None:
            return 0.0 if self._is_biased else 1.0
        return self._mean[place.index] / (1.0 if self._is_biased else weight)

    def state_dict(self) -> dict[str, Any]:
        """All that it has learned."""
        return {"mean": dict(self._mean), "weight": dict(self._weight)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from it."""
        self._mean, self._weight = dict(state["mean"]), dict(state["weight"])


class _Lamb(Renewed):
    """OneBitAdam's update, each tensor's by its own coefficient."""

    method = "OneBitLamb"

    def __init__(self, point: FreezePoint, compression: str, dense: str, beta2: float) -> None:
        super().__init__(point, compression, dense, "bounded", beta2)
        self._coefficients = _Coefficients(is_biased=False)
        self._sizes: dict[int, float] = {}  # ||p|| at the freeze

    def apply(self, span: Span, update: torch.Tensor) -> None:
        moved = zip(span.present_places(), span.parameters, with_decay(span, update), strict=True)
        for place, parameter, one in moved:
            size, length = norm(parameter), norm(one)
            if self._frozen:
                coeff = self._remembered(span, place, size, length)
            else:
                coeff = self._coefficients.learn(span, place, size, length)
            parameter.sub_(one.mul_(span.group["lr"] * coeff))

    def _remembered(self, span: Span, place: Place, size: float, length: float) -> float:
        """c behind the freeze, of a tensor and its update."""
        before = self._sizes.setdefault(place.index, size)
        coeff = self._coefficients.get(place)
        if before > 0:
            coeff *= size / before
        if length > 0:
            coeff = min(coeff, _LONGEST * size / length)
        least, most = span.group["min_coeff"], span.group["max_coeff"]
        within: float = min(max(coeff, least), most)
        return within

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "coefficients": self._coefficients.state_dict(),
                "sizes": dict(self._sizes)}  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._coefficients.load_state_dict(state["coefficients"])
        self._sizes = dict(state["sizes"])


class _Published(TwoStages):
    """1-bit LAMB as in its paper and in DeepSpeed, but for tensors without a momentum, which their
    scale would divide by 0."""

    method = "OneBitLamb(deepspeed_compat)"
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "fresh_sq")
    layout = "joined"

    def __init__(self, point: FreezePoint, compression: str, dense: str) -> None:
        super().__init__(point, compression, dense)
        self._coefficients = _Coefficients(is_biased=True)
        self._scales: dict[int, float] = {}
        self._factors: dict[int, float] = {}

    def outgoing(self, what: str, span: Span, out: torch.Tensor) -> None:
        super().outgoing(what, span, out)
        if what == "momentum":
            for place in span.places:
                span.view(out, place).mul_(self._scales.get(place.index, 1.0))

    def update(self, span: Span, means: Mapping[str, torch.Tensor]) -> None:
        if "gradient" in means:
            average_in(span, means["gradient"])
        else:
            self._take_momentum(span, means["momentum"])
        plain = span.state["exp_avg"] / root_of(span)
        before = [norm(one) for one in span.views(plain)] if self._frozen else []
        updates = with_decay(span, plain)
        moved = zip(span.present_places(), span.parameters, updates, strict=True)
        for number, (place, parameter, one) in enumerate(moved):
            if self._frozen:
                coeff = self._coefficients.get(place) * self._factor(span, place, before[number],
                                                                     norm(one))  # fmt: skip
            else:
                coeff = self._coefficients.learn(span, place, norm(parameter), norm(one))
            parameter.sub_(one.mul_(span.group["lr"] * coeff))

    def _take_momentum(self, span: Span, mean: torch.Tensor) -> None:
        beta1, beta2 = span.group["betas"]
        for place in span.places:
            span.view(mean, place).mul_(1 / self._scales.get(place.index, 1.0))
        rebuilt = (mean - span.state["exp_avg"] * beta1).mul_(1 / (1 - beta1))
        span.state["exp_avg"].copy_(mean)
        square_in(span.state["fresh_sq"], rebuilt, beta2)

    def _factor(self, span: Span, place: Place, plain: float, update: float) -> float:
        old, fresh = (
            root(span.view(span.state[name], place)).add_(span.group["eps"])
            for name in ("exp_avg_sq", "fresh_sq")
        )
        factor = float((old / fresh).max())
        if span.group["weight_decay"] != 0 and update > 0:
            share = min(1.0, plain / update)
            factor = factor * share + (1 - share)
        factor = min(max(factor, _LEAST_FACTOR), _MOST_FACTOR)
        last = self._factors.get(place.index, 1.0)
        factor = min(max(factor, last * (1 - _FACTOR_STEP)), last * (1 + _FACTOR_STEP))
        self._factors[place.index] = factor
        return factor

    def freeze(self, spans: Sequence[Span], step: int) -> None:
        sizes = {}
        for span in spans:
            span.state["fresh_sq"].copy_(span.state["exp_avg_sq"])
            for place in span.places:
                moment = span.view(span.state["exp_avg"], place)
                sizes[place.index] = norm(moment) / math.sqrt(moment.numel())
        moving = [size for size in sizes.values() if size > 0]
        united = math.fsum(moving) / max(1, len(moving))
        self._scales = {index: united / size for index, size in sizes.items() if size > 0}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "coefficients": self._coefficients.state_dict(),
                "scales": dict(self._scales), "factors": dict(self._factors)}  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._coefficients.load_state_dict(state["coefficients"])
        self._scales, self._factors = dict(state["scales"]), dict(state["factors"])
