"""OneBitAdam: Adam that sends its momentum at 1 bit, beside a variance that stands still.

    dense    g = mean g_i               Adam's m and v; AdamW's step
    then     z_i = (b1 m + (1-b1) g_i) / q, 0 where v is 0                      sent
             z   = mean z_i at 1 bit, with error feedback; 0 where v is 0
             u   = z q / r,  r = sqrt(v) + eps;    p -= lr (u + wd p);    m = z q

1 bit under Adam itself fails, as Adam divides by mean squares that it learns from the signs. Beside
a fixed v the update is linear in z, so a later step delivers the error of an earlier one. v is made
unbiased when it is frozen: else all later steps are too long by a constant factor. Where v is 0, as
for a symbol that has not occurred, nothing moves, instead of a scale over 0.

q is the unit of the momentum on the wire. A block has one scale. In units of gradients (q = 1) it
is far too large for elements with small gradients: they get noise of many times their update. In
units of the update (q = r) it suits all elements, but the error of the large ones then costs more.
Between the two, q = min(R, 5 r), R the root of the mean r^2 of the block, bounds that noise.

Freezing causes most of the loss in accuracy, so v is renewed at growing intervals. Each rank keeps
the mean square of its own gradients; a renewal averages these, w = mean w_i, in one exchange:

    v = w / N + (1 - 1/N) min(m^2, w)     N ranks

which is the mean square of the mean gradient, as its noise is 1/N of a rank's own. So each renewal
has as long a memory as Adam's v, however rare it is. Gradients that oscillate on all ranks together
count as noise, as m averages them away: v is then 1/N of Adam's, the least possible, and steps are
sqrt(N) times Adam's. A renewal keeps m; it multiplies the residuals, which are in the units of z,
by old over new q.

Invariants: from the freeze on, v in the padding repeats the parameter's last elements of v. R of a
block counts the padding, which a load fills again, as no checkpoint has it. q follows from v and
eps, and is the same on all ranks to the bit, as a block's elements are summed in one order. When to
freeze and to renew follows from the number of the step, from settings, and from sums that are equal
on all ranks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from typing_extensions import Unpack

from ...codecs import BLOCK, Compression, parse
from ...communicator import Communicator
from ...core.calls import is_integer
from ...errors import ConfigError
from ...feedback import FeedbackStore
from ..argument_checks import require, takes
from ..sync.kept import Kept
from . import saved
from .arithmetic import (
    blend_in,
    mask,
    move,
    power,
    root,
    root_of,
    square_in,
    total,
)
from .checks import REMOVED, require_adam
from .rule import Exchange, Rule
from .span import Span, Tile, lay_out
from .wire import WireOptimizer, WireSettings

Freeze = int | Literal["stable"]
Refresh = Literal["exponential"] | None
_USES = 4  # renewals at one interval before it doubles
_MOST = 128  # longest interval of renewals, in steps; or the variance's memory if that is longer
_RATIO = 0.96  # 1-bit Adam's: least ratio of a stable variance at both ends of its memory
_LOOKS_BACK = 100  # longest memory, in steps, if the variance will be renewed
_LOOKS = 16  # looks at the sum of the variance in the length of its memory
_BOUND = 5.0  # most noise that an element gets from its block, in units of its own update


class OneBitAdam(WireOptimizer):
    """AdamW, whose preconditioned momentum travels at 1 bit; other arguments are WireOptimizer's.

    Args:
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        freeze: the number of the last dense step; or "stable": when no group's learning rate
            rises, and the sum of the variance has changed by less than 4 % in M = 1 / (1 - beta2)
            steps, or no rate has risen for 5 M. With ``refresh`` M is at most 100, and 5 M is 2 M.
        refresh: "exponential": the variance is renewed after 1, 1, 1, 1, 2, 2, 2, 2, 4, ... steps,
            which takes one more float32 per element. None: it is never renewed. If the gradients
            of N ranks oscillate together, a renewed one makes steps of up to sqrt(N) times Adam's.
        compression: codec of the momentum.
        dense: codec of dense gradients and of renewals.

    Attributes:
        frozen_at: the last dense step; None: not known yet.
        renewals: number of renewals of the variance.

    An element without any gradient before the freeze has no variance, and does not move until a
    renewal. Without renewals parameters that are added after the freeze are refused.
    """

    _rule: Frozen

    @takes(WireSettings, removed=REMOVED)
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        freeze: Freeze = "stable",
        refresh: Refresh = "exponential",
        compression: Compression | None = "onebit",
        dense: Compression | None = "bf16",
        comm: Communicator | None = None,
        **settings: Unpack[WireSettings],
    ) -> None:
        require_adam(lr, betas, eps, weight_decay)
        require("refresh value", repr(refresh), refresh in ("exponential", None))
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        codec, densely = parse(compression).name, parse(dense, "dense=").name
        rule = (Frozen if refresh is None else Renewed)(freeze, betas[1], codec, densely)
        fixed = {"freeze": freeze, "refresh": refresh, "compression": codec, "dense": densely}
        self._at_first = rule.saved()
        super().__init__(params, defaults, rule, comm, fixed=fixed, **settings)

    # ---- states, which torch's AdamW can load, too ----

    def saved(self, *, own: bool) -> dict[str, Any]:
        state = super().saved(own=own)
        for span in self._spans:
            for place in span.slices:
                state["state"][place.index]["step"] = torch.tensor(
                    float(self._rule.step_of(span)), device="cpu"
                )
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a state as WireOptimizer does. From a state of torch.optim.AdamW or Adam, the
        same on all ranks, it takes moments and hyperparameters, and begins in the dense stage.
        (torch.optim.AdamW can load the states of this optimizer, too.)

        Raises ConfigError as WireOptimizer does, or for an Adam with amsgrad, maximize, or a weight
        decay in the gradient.
        """
        if saved.KEY not in state_dict:
            state_dict = self._from_adam(state_dict)
        super().load_state_dict(state_dict)

    def _from_adam(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the state of this optimizer after the dense steps of an Adam. The mean square of
        this rank's own gradients, which is unknown, is at its upper bound, N times v: with less,
        the first renewals would make steps too long."""
        indexed = self._indexed()
        kept, groups = saved.read_adam(state_dict, indexed, self._method)
        ages = {index: int(one["step"]) for index, one in kept.items()}
        spans = [
            span
            for age in sorted(set(ages.values()), reverse=True)
            for span in lay_out(
                [one for one in indexed if ages.get(one.index) == age],
                self._threshold,
                (),  # the layout alone counts
                self._span_bytes,
            )
        ]
        for span in spans if "own_sq" in self._rule.states else ():
            for place in span.slices:
                square = saved.value_of(kept, place, "exp_avg_sq").to(span.dtype)
                kept[place.index]["own_sq"] = square * self._comm.world_size
        ages_of = {span.name: ages[span.slices[0].index] for span in spans}
        own = {
            "format": saved.FORMAT,
            "method": self._method,
            "steps": max(ages.values()),
            "skipped": 0,
            "spans": saved.saved_layout(spans),
            "rule": {**self._at_first, "ages": ages_of},
            "feedback": FeedbackStore().state_dict(self._comm),
        }
        return {"state": kept, "param_groups": groups, saved.KEY: own}

    @property
    def frozen_at(self) -> int | None:
        """Number of the last dense step; None if not known yet."""
        return self._rule.freeze.step

    @property
    def renewals(self) -> int:
        """Number of renewals of the variance."""
        return self._rule.renewals.count


# ---- two stages ----


class Frozen(Rule):
    """Sends gradients until the freeze point, then the momentum, beside a variance that stays
    fixed, or is renewed from the ranks' own mean squares where there are ``renewals``."""

    method = "OneBitAdam"
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    kept: tuple[str, ...] = ("freeze", "_frozen", "_ages")
    renews: ClassVar[bool] = False

    def __init__(self, freeze: Freeze, beta2: float, compression: str, dense: str) -> None:
        self.freeze = FreezePoint(freeze, beta2, renews=self.renews)
        self.renewals = Renewals(_USES, max(_MOST, _steps_remembered(beta2)))
        self._first = (Exchange("gradient", dense),)
        self._then = (Exchange("momentum", compression),)
        self._renewal = (*self._then, Exchange("variance", dense))
        self._frozen = False
        self._units = Units()
        self._ages: dict[str, int] = {}  # by span, number of its steps

    def exchanges(self, step: int) -> Sequence[Exchange]:
        if not self._frozen:
            return self._first
        return self._renewal if self._renews_in(step) else self._then

    def usual(self, step: int) -> Sequence[Exchange]:
        return self._then

    def check(self, spans: Sequence[Span]) -> None:
        if self._frozen and not self.renews and any(one.name not in self._ages for one in spans):
            raise ConfigError(
                "parameters were added after the freeze, and their variance is unknown: use "
                "refresh='exponential', or a new optimizer"
            )

    def outgoing(self, what: str, span: Span, out: torch.Tensor) -> None:
        if what == "gradient":
            out.copy_(span.gradient)
        elif what == "variance":
            out.copy_(span.state["own_sq"])
            _add_own_square(span, out)
        else:
            beta = span.group["betas"][0]
            for tile in span.tiles():
                part = torch.mul(tile.state["exp_avg"], beta, out=tile.of(out))
                part.add_(tile.gradient, alpha=1 - beta)
                mask(tile, part.div_(self._units.of(tile)))

    def finish(self, spans: Sequence[Span]) -> Collection[str]:
        if not spans:
            return ()
        step = max(span.step for span in spans)
        if self.freeze.is_due(step):
            begun = [span for span in spans if span.name in self._ages]
            size = sum(
                sum(map(total, span.parts(span.state["exp_avg_sq"]))) / self._gains(span)[1]
                for span in begun
            )
            rates = {span.group_index: float(span.group["lr"]) for span in spans}
            self.freeze.look(step, size, list(rates.values()))
        if not self._frozen and self.freeze.step is not None and step >= self.freeze.step:
            self._frozen = True
            self._unbias(spans)
            self.renewals.begin(step)
        elif self._frozen and self._renews_in(step):
            self.renewals.advance(step)
        return ()

    def _renews_in(self, step: int) -> bool:
        return self.renews and self.renewals.is_due(step)

    def update(
        self, span: Span, means: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor] | None:
        self._ages[span.name] = self._ages.get(span.name, 0) + 1
        if "gradient" in means:
            self._dense_step(span, means["gradient"])
        else:
            self._momentum_step(span, means["momentum"])
        if self.renews:
            _add_own_square(span, span.state["own_sq"])
        return self._renew(span, means["variance"]) if "variance" in means else None

    def _momentum_step(self, span: Span, mean: torch.Tensor) -> None:
        for tile in span.tiles():
            part, units = mask(tile, tile.of(mean)), self._units.of(tile)
            torch.mul(part, units, out=tile.state["exp_avg"])
            part.mul_(units.div_(root_of(tile)))
            if span.group["eps"] == 0:  # q / r is 0 / 0 where v is 0
                mask(tile, part)
        self.apply(span, mean)

    def apply(self, span: Span, update: torch.Tensor) -> None:
        """Moves the parameters by u and by their decay."""
        move(span, update)

    def _dense_step(self, span: Span, gradient: torch.Tensor) -> None:
        beta1, beta2 = span.group["betas"]
        first, second = self._gains(span)
        for tile in span.tiles():
            part = tile.of(gradient)
            blend_in(tile.state["exp_avg"], part, 1 - beta1)
            square_in(tile.state["exp_avg_sq"], part, beta2)
            scale = root(tile.state["exp_avg_sq"]).div_(math.sqrt(second)).add_(span.group["eps"])
            mask(tile, torch.div(tile.state["exp_avg"], first, out=part).div_(scale))
        self.apply(span, gradient)

    def _gains(self, span: Span) -> tuple[float, float]:
        """Returns the sums of the weights in m and v, which remove the bias."""
        age = self._ages[span.name]
        beta1, beta2 = span.group["betas"]
        return 1 - power(beta1, age), 1 - power(beta2, age)

    def _renew(self, span: Span, square: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Computes the variance from the mean of the ranks' own squares. Returns the residuals'
        factors."""
        factor, share = torch.empty_like(square), 1 / span.world_size
        for tile in span.tiles():
            tile.of(factor).copy_(self._units.of(tile))
        square.div_(self._gains(span)[1])
        moment = span.state["exp_avg"]
        common = torch.minimum(moment * moment, square)
        span.state["exp_avg_sq"].copy_(square.mul_(share).add_(common.mul_(1 - share)))
        span.fill_padding(span.state["exp_avg_sq"])
        for tile in span.tiles():
            mask(tile, tile.of(factor).div_(self._units.of(tile)))
        return {"momentum": factor}

    def step_of(self, span: Span) -> int:
        """Returns the number of steps for torch's Adam to correct the bias of the present moments.
        After the freeze they have no bias: then it is so large that the correction is 1."""
        if self._frozen:  # so many that a mean's initial value is below float32's precision
            return max(
                math.ceil(-24 * math.log(2) / math.log(beta)) if beta > 0 else 1
                for beta in span.group["betas"]
            )
        return self._ages.get(span.name, 0)

    def _unbias(self, spans: Sequence[Span]) -> None:
        """Makes the moments unbiased, after the last dense step."""
        for span in spans:
            if span.name in self._ages:
                first, second = self._gains(span)
                span.state["exp_avg"].div_(first)
                span.state["exp_avg_sq"].div_(second)
                span.fill_padding(span.state["exp_avg_sq"])

    def check_state(self, state: Mapping[str, Any]) -> None:
        units = state.get("units", "bounded")  # a setting of earlier versions
        require(
            f"the state is of units={units!r}, in which its residuals are, and which has been "
            "removed: make a new optimizer, with the weights that were saved",
            None,
            units == "bounded",
        )
        require(
            "the state is of refresh=None, and lacks what refresh='exponential' needs: give "
            "refresh=None, or make a new optimizer, with the weights that were saved",
            None,
            not self.renews or "renewals" in state,
        )


class Renewed(Frozen):
    """Renews the variance from the ranks' own mean squares; otherwise like Frozen."""

    states = ("exp_avg", "exp_avg_sq", "own_sq")
    local = frozenset({"own_sq"})
    kept: tuple[str, ...] = (*Frozen.kept, "renewals")
    renews = True


# ---- when the variance is frozen, and when it is renewed ----


class FreezePoint(Kept):
    """Finds the step after which the variance stays fixed.

    Args:
        freeze: the number of the step; or "stable": when the sum of the variance has changed by
            less than 4 % in the steps that it remembers, and no group's learning rate rises; at
            the latest when none has risen for five times as many.
        beta2: the variance's.
        renews: whether it will be renewed: then an early freeze costs little, and it looks back
            and waits less long.

    Attributes:
        step: the step; None: not known yet.
    """

    kept = ("step", "_seen", "_rate", "_steady")

    def __init__(self, freeze: Freeze, beta2: float, *, renews: bool) -> None:
        fits = freeze == "stable" if isinstance(freeze, str) else is_integer(freeze) and freeze >= 1
        require("freeze value, give the number of a step, or 'stable'", repr(freeze), fits)
        self._memory, self._patience = _steps_remembered(beta2), 5
        if renews:
            self._memory, self._patience = min(self._memory, _LOOKS_BACK), 2
        self._stride = max(1, self._memory // _LOOKS)
        self._seen: list[float] = []
        self._rate: list[float] | None = None  # of each group, at the latest look
        self._steady = 0
        self.step = None if isinstance(freeze, str) else int(freeze)

    def is_due(self, step: int) -> bool:
        """Returns whether ``look`` needs the sum of the variance after this step."""
        return self.step is None and step % self._stride == 0

    def look(self, step: int, size: float, rates: list[float]) -> None:
        """Decides, given the sum of the unbiased variance and the groups' learning rates, in the
        order of the spans, so that those of new groups come last."""
        rises, self._rate = any(map(operator.gt, rates, self._rate or ())), rates
        self._steady = 0 if rises else self._steady + 1
        self._seen.append(size)
        back = self._memory // self._stride
        if len(self._seen) <= back:
            return
        before = self._seen[-1 - back]
        del self._seen[: -1 - back]
        stable = size > 0 and min(size, before) >= _RATIO * max(size, before)
        if not rises and (stable or self._steady > self._patience * back):
            self.step = step

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        if isinstance(self._rate, float):  # of the first span's group, from an earlier version
            self._rate = [self._rate]


class Renewals(Kept):
    """Steps at growing intervals, as in 0/1 Adam: an interval doubles when it was used ``uses``
    times. Each step is a multiple of its interval after the step given to ``begin``.

    Args:
        uses: number of uses of an interval.
        most: the longest interval.
    """

    kept = ("interval", "_used", "_start", "_next", "count")

    def __init__(self, uses: int, most: int) -> None:
        self._uses, self._most = uses, most
        self.interval, self._used = 1, 0
        self._start, self._next = 0, 1
        self.count = 0

    def begin(self, step: int) -> None:
        """Counts steps from this one on."""
        self._start, self._next = step, step + self.interval

    def is_due(self, step: int) -> bool:
        """Returns whether a renewal is due at that step, or was due and has not been made."""
        return step >= self._next

    def advance(self, step: int) -> None:
        """Notes that a renewal was made at that step."""
        self.count += 1
        self._used += 1
        if self._used == self._uses:
            self._used, self.interval = 0, min(2 * self.interval, self._most)
        passed = step - self._start
        self._next = step + self.interval - passed % self.interval


def _steps_remembered(beta2: float) -> int:
    """Returns the number of steps that a mean with this beta remembers."""
    return max(1, round(1 / (1 - beta2)))


# ---- units and means ----


class Units:
    """Computes q of the elements of spans. R is remembered, as v is fixed between renewals: a
    float32 for every block. Small spans have q = r: their codec has no blocks."""

    def __init__(self) -> None:
        #: By span, R of each block, behind the v, its version and the eps that it follows from.
        self._typical: dict[str, tuple[torch.Tensor, int, float, torch.Tensor]] = {}

    def of(self, tile: Tile) -> torch.Tensor:
        """Returns q of each element; the caller may overwrite it."""
        root = root_of(tile)
        if tile.span.is_small:
            return root
        typical = self._typical_of(tile.span)[tile.start // BLOCK : tile.stop // BLOCK]
        return torch.minimum(typical, root.mul_(_BOUND).view(-1, BLOCK)).view(-1)

    def _typical_of(self, span: Span) -> torch.Tensor:
        square, eps = span.state["exp_avg_sq"], span.group["eps"]
        known = self._typical.get(span.name)
        if known is None or known[0] is not square or known[1:3] != (square._version, eps):
            blocks = torch.cat([_typical(tile) for tile in span.tiles()])
            known = self._typical[span.name] = (square, square._version, eps, blocks)
        return known[3]


def _typical(tile: Tile) -> torch.Tensor:
    """Returns R, of shape [blocks, 1]."""
    scale = root_of(tile)
    squares = scale.mul_(scale).view(-1, BLOCK)
    while squares.shape[1] > 1:
        half = squares.shape[1] // 2
        squares = squares[:, :half] + squares[:, half:]
    return root(squares.div_(BLOCK))


def _add_own_square(span: Span, square: torch.Tensor) -> None:
    """Adds this rank's gradient to the mean square of its own gradients."""
    beta = span.group["betas"][1]
    for tile in span.tiles():
        gradient = tile.gradient
        tile.of(square).mul_(beta).addcmul_(gradient, gradient, value=1 - beta)
