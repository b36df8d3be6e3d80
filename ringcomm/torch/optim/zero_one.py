"""ZeroOneAdam: 0/1 Adam, which renews the variance ever less often, then exchanges ever less often.

    A   in steps that are multiples of k:  g = mean g_i, densely;  m, v = EMA(g), EMA(g^2)
        in others:                         g = mean g_i at 1 bit;  m = EMA(g)
        p -= lr (m / (sqrt(v) + eps) + wd p);  k doubles with every 16 renewals
    B   m_i = EMA(g_i);  s = lr (m_i / (sqrt(v) + eps) + wd p_i);  p_i -= s;  u_i -= s;  L += lr
        in steps that are multiples of h:  u = mean u_i at 1 bit;  p = anchor + u;  anchor = p
                                           m = -u (sqrt(v) + eps) / L;  u_i = L = 0
        h doubles every so many steps, up to 16

In B the ranks' parameters differ between exchanges: save and evaluate when ``is_together``. The
anchor is p at the last exchange. (The paper uses p_i - u_i, which roundings make differ from rank
to rank.) Weights that other code writes in B become the new anchor, with u_i = 0. v and m are
unbiased, and where v is 0 nothing moves.

Residuals of A are in units of gradients, those of B in units of parameters: they have two names,
and A's end with it.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from typing_extensions import Unpack

from ...codecs import Compression, parse
from ...communicator import Communicator
from ...errors import ConfigError
from ..argument_checks import takes
from ..sync.kept import Kept
from .adam import Renewals
from .arithmetic import blend_in, mask, power, root, square_in, with_decay
from .checks import REMOVED, require_adam, require_at_least
from .rule import Exchange, Rule
from .span import Place, Span
from .wire import WireOptimizer, WireSettings


class ZeroOneAdam(WireOptimizer):
    """0/1 Adam; other arguments are WireOptimizer's.

    Args:
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        var_freeze_step: the last step of A: after the learning rate's warm-up, and late enough for
            the variance to have settled, which takes a good part of a short run.
        var_update_scaler: renewals of the variance until their interval doubles.
        local_step_scaler: steps of B until the interval of exchanges doubles.
        local_step_clipper: the longest such interval.
        compression, dense: codecs of gradients and movements, and of gradients in renewals.

    Attributes:
        is_together: whether all ranks have the same parameters, after the latest step.

    Code that writes to the weights after var_freeze_step must write the same on all ranks, as
    ``load_state_dict`` of a model does; values computed from the weights are the same only when the
    ranks are together. Otherwise ``step`` raises MismatchError on all ranks. The first step after
    the optimizer's ``load_state_dict`` assumes the weights that were saved with the state.
    """

    _rule: _ZeroOne

    @takes(WireSettings, removed=REMOVED)
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        var_freeze_step: int,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32768,
        local_step_clipper: int = 16,
        compression: Compression | None = "onebit",
        dense: Compression | None = "bf16",
        comm: Communicator | None = None,
        **settings: Unpack[WireSettings],
    ) -> None:
        require_adam(lr, betas, eps, weight_decay)
        paces = {
            "var_freeze_step": var_freeze_step,
            "var_update_scaler": var_update_scaler,
            "local_step_scaler": local_step_scaler,
            "local_step_clipper": local_step_clipper,
        }
        require_at_least(1, {f"{name} value": value for name, value in paces.items()})
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        renewals = Renewals(var_update_scaler, var_freeze_step)
        pace = _Pace(local_step_scaler, local_step_clipper)
        codec, densely = parse(compression).name, parse(dense, "dense=").name
        rule = _ZeroOne(var_freeze_step, renewals, pace, codec, densely)
        fixed = {**paces, "compression": codec, "dense": densely}
        super().__init__(params, defaults, rule, comm, fixed=fixed, **settings)

    @property
    def is_together(self) -> bool:
        """Whether all ranks have the same parameters, after the latest step."""
        return self._rule.is_together


class _Pace(Kept):
    """Decides when ranks exchange in B.

    Attributes:
        interval: steps between exchanges.
    """

    kept = ("interval", "_steps")

    def __init__(self, scaler: int, most: int) -> None:
        self._scaler, self._most = scaler, most
        self.interval, self._steps = 1, 0

    def is_due(self, step: int) -> bool:
        """Returns whether that step ends with an exchange."""
        return step % self.interval == 0

    def advance(self) -> None:
        """Counts a step of B."""
        self._steps += 1
        if self._steps == self._scaler:
            self._steps, self.interval = 0, min(2 * self.interval, self._most)


class _ZeroOne(Rule):
    """Rule of both phases."""

    method = "ZeroOneAdam"
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "moved", "anchor")
    local = frozenset({"exp_avg", "moved"})
    kept = ("_renewals", "_pace", "_is_local", "_rates", "_ages", "is_together")

    def __init__(
        self, last_of_a: int, renewals: Renewals, pace: _Pace, compression: str, dense: str
    ) -> None:
        self._last_of_a, self._renewals, self._pace = last_of_a, renewals, pace
        self._renewal = (Exchange("gradient", dense),)
        self._signs = (Exchange("signs", compression),)
        self._movement = (Exchange("movement", compression),)
        self._is_local = False  # in B
        self._ages: dict[str, Sequence[int]] = {}  # by span, numbers of means in m and in v
        self._rates: dict[str, float] = {}  # L by span
        self._written: dict[int, int] = {}  # by parameter, checksum of weights other code wrote
        self.is_together = True

    def exchanges(self, step: int) -> Sequence[Exchange]:
        if self._is_local:
            return self._movement if self._pace.is_due(step) else ()
        return self._renewal if self._renewals.is_due(step) else self._signs

    def usual(self, step: int) -> Sequence[Exchange]:
        return self._movement if self._is_local else self._signs

    def check(self, spans: Sequence[Span]) -> None:
        if self._is_local and any(span.name not in self._ages for span in spans):
            raise ConfigError(
                "parameters were added after var_freeze_step, and their variance is unknown: make "
                "a new optimizer"
            )

    def outgoing(self, what: str, span: Span, out: torch.Tensor) -> None:
        moves = what == "movement"
        out.copy_(span.state["moved"] if moves else span.gradient)
        if moves and any(span.present):
            moment = span.state["exp_avg"].lerp(span.gradient, 1 - span.group["betas"][0])
            torch._foreach_sub_(span.views(out), self._steps(span, moment))

    def update(self, span: Span, means: Mapping[str, torch.Tensor]) -> None:
        if not self._is_local:
            self._step_together(span, means)
            return
        moment = span.state["exp_avg"].lerp_(span.gradient, 1 - span.group["betas"][0])
        if any(span.present):
            self._rates[span.name] = self._rates.get(span.name, 0.0) + span.group["lr"]
        if "movement" in means:
            self._meet(span, means["movement"])
        else:
            steps = self._steps(span, moment)
            torch._foreach_sub_(span.parameters, steps)
            torch._foreach_sub_(span.views(span.state["moved"]), steps)

    def _step_together(self, span: Span, means: Mapping[str, torch.Tensor]) -> None:
        beta1, beta2 = span.group["betas"]
        first, second = self._ages.get(span.name, (0, 0))
        (gradient,) = means.values()
        blend_in(span.state["exp_avg"], gradient, 1 - beta1)
        if "gradient" in means:
            square_in(span.state["exp_avg_sq"], gradient, beta2)
            second += 1
        self._ages[span.name] = [first + 1, second]
        torch._foreach_sub_(span.parameters, self._steps(span, span.state["exp_avg"]))

    def _steps(self, span: Span, moment: torch.Tensor) -> list[torch.Tensor]:
        """Returns s of each parameter."""
        steps = with_decay(span, mask(span, moment / self._gains(span)[0] / self._root(span)))
        torch._foreach_mul_(steps, span.group["lr"])
        return steps

    def _meet(self, span: Span, mean: torch.Tensor) -> None:
        """Moves all ranks' parameters to the anchor plus the mean movement."""
        moved = mask(span, mean)
        span.state["anchor"].add_(moved)
        for place in span.slices:
            span.stepped(place).copy_(place.of(span.state["anchor"]))
        rates = self._rates[span.name]
        moment = (moved * self._root(span)).mul_(-1 / rates if rates > 0 else 0.0)
        span.state["exp_avg"].copy_(moment)
        span.state["moved"].zero_()
        self._rates[span.name] = 0.0

    def _root(self, span: Span) -> torch.Tensor:
        return root(span.state["exp_avg_sq"] / self._gains(span)[1]).add_(span.group["eps"])

    def _gains(self, span: Span) -> tuple[float, float]:
        """Returns the sums of the weights in m and v, which remove the bias."""
        first, second = self._ages.get(span.name, (0, 0))
        beta1, beta2 = span.group["betas"]
        gain1 = 1.0 if self._is_local or not first else 1 - power(beta1, first)
        return gain1, 1 - power(beta2, second) if second else 1.0

    def is_apart(self, span: Span, step: int) -> bool:
        moves = self._rates.get(span.name, 0.0) > 0
        return self._is_local and moves and self._pace.is_due(step)

    def follow(self, span: Span, written: Sequence[Place]) -> None:
        if not self._is_local:
            return
        for place in written:
            value = place.tensor.detach()
            place.of(span.state["anchor"]).copy_(value)
            if span.master is not None:  # has kept digits that may differ from rank to rank
                place.of(span.master).copy_(value)
            place.of(span.state["moved"]).zero_()
            flat = value.cpu().reshape(-1)
            self._written[place.index] = zlib.crc32(flat.view(torch.uint8).numpy().tobytes())
        if len(written) == len(span.slices):
            self._rates[span.name] = 0.0

    def alike(self) -> Mapping[str, object]:
        return {
            f"the checksum of what was written to parameter {index} outside of the optimizer": one
            for index, one in sorted(self._written.items())
        }

    # ---- phases ----

    def finish(self, spans: Sequence[Span]) -> Collection[str]:
        step = max((span.step for span in spans), default=0)
        self._written.clear()
        if self._is_local:
            self.is_together = self._pace.is_due(step)
            self._pace.advance()
            return ()
        if self._renewals.is_due(step):
            self._renewals.advance(step)
        if step < self._last_of_a:
            return ()
        for span in spans:
            span.state["exp_avg"].div_(self._gains(span)[0])
            for place in span.slices:
                place.of(span.state["anchor"]).copy_(span.stepped(place))
        self._is_local = True
        return ("signs",)

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._written.clear()
