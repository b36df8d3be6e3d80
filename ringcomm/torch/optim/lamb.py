"""OneBitLamb: LAMB that sends its momentum at 1 bit.

LAMB multiplies Adam's update of each tensor by c = ||p|| / ||u||, which 1 bit's noise would spoil.
So c is learned in the dense stage, as a running mean c_avg, and used from there on:

    dense   u = m / (sqrt(v) + eps) + wd p;  c = ||p|| / ||u|| within limits;  p -= lr c u
    then    u as OneBitAdam's, renewals of v included;  p -= lr c u,
            c = min(c_avg ||p|| / ||p at the freeze||, 2 ||p|| / ||u||) within limits

A tensor that has grown takes longer steps, as in LAMB. No step is longer than twice LAMB's, which
is lr ||p||: 1 bit's noise makes u longer, and longer steps bring more noise.

Invariants: norms are sums that do not depend on the order, so c is the same on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import Unpack

from ...codecs import Compression, parse
from ...communicator import Communicator
from ..argument_checks import require, takes
from ..sync.kept import Kept
from .adam import Freeze, Renewed
from .arithmetic import norm, with_decay
from .checks import REMOVED, at_least, require_adam
from .span import Place, Span
from .wire import WireOptimizer, WireSettings

_BETA = 0.9  # decay of c_avg
_LONGEST = 2.0  # longest step, in LAMB's steps


class OneBitLamb(WireOptimizer):
    """LAMB, whose preconditioned momentum travels at 1 bit; other arguments are WireOptimizer's.

    Args:
        lr, betas, eps, weight_decay: as in LAMB.
        max_coeff, min_coeff: limits of c.
        freeze, compression, dense: as in OneBitAdam.

    Attributes:
        frozen_at: the last dense step; None: not known yet.
    """

    _rule: _Lamb

    @takes(WireSettings, removed=REMOVED)
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
        compression: Compression | None = "onebit",
        dense: Compression | None = "bf16",
        comm: Communicator | None = None,
        **settings: Unpack[WireSettings],
    ) -> None:
        require_adam(lr, betas, eps, weight_decay)
        require("max_coeff value", max_coeff, at_least(max_coeff, 0) and max_coeff > 0)
        require("min_coeff value", min_coeff, at_least(min_coeff, 0) and min_coeff <= max_coeff)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        codec, densely = parse(compression).name, parse(dense, "dense=").name
        rule = _Lamb(freeze, betas[1], codec, densely)
        fixed = {"freeze": freeze, "compression": codec, "dense": densely}
        super().__init__(params, defaults, rule, comm, fixed=fixed, **settings)

    @property
    def frozen_at(self) -> int | None:
        """Number of the last dense step; None if not known yet."""
        return self._rule.freeze.step


class _Coefficients(Kept):
    """Running mean c_avg for each parameter's number."""

    kept = ("_mean", "_weight")

    def __init__(self) -> None:
        self._mean: dict[int, float] = {}
        self._weight: dict[int, float] = {}

    def learn(self, span: Span, place: Place, size: float, update: float) -> float:
        """Returns c of a dense step, and adds it to the mean unless it is 1."""
        if size == 0 or update == 0:
            return 1.0
        coeff: float = min(max(size / update, span.group["min_coeff"]), span.group["max_coeff"])
        if coeff != 1.0:
            for held, value in ((self._mean, coeff), (self._weight, 1.0)):
                held[place.index] = _BETA * held.get(place.index, 0.0) + (1 - _BETA) * value
        return coeff

    def get(self, place: Place) -> float:
        """Returns c_avg; 1 for a tensor whose c has always been 1."""
        weight = self._weight.get(place.index)
        return 1.0 if weight is None else self._mean[place.index] / weight


class _Lamb(Renewed):
    """Applies OneBitAdam's update times each tensor's own coefficient."""

    method = "OneBitLamb"
    kept = (*Renewed.kept, "_coefficients", "_sizes")

    def __init__(self, freeze: Freeze, beta2: float, compression: str, dense: str) -> None:
        super().__init__(freeze, beta2, compression, dense)
        self._coefficients = _Coefficients()
        self._sizes: dict[int, float] = {}  # ||p|| at the freeze

    def apply(self, span: Span, update: torch.Tensor) -> None:
        moved = zip(span.present_places(), span.parameters, with_decay(span, update), strict=True)
        for place, parameter, one in moved:
            size, length = norm(parameter), norm(one)
            coeff_of = self._remembered if self._frozen else self._coefficients.learn
            coeff = coeff_of(span, place, size, length)
            parameter.sub_(one.mul_(span.group["lr"] * coeff))

    def _remembered(self, span: Span, place: Place, size: float, length: float) -> float:
        """Returns c of a tensor after the freeze, given the norms of the tensor and its update."""
        before = self._sizes.setdefault(place.index, size)
        coeff = self._coefficients.get(place)
        if before > 0:
            coeff *= size / before
        if length > 0:
            coeff = min(coeff, _LONGEST * size / length)
        return float(min(max(coeff, span.group["min_coeff"]), span.group["max_coeff"]))
