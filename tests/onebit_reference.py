"""1-bit Adam, 1-bit LAMB and 0/1 Adam of all ranks in one process, in numpy, from their papers.

    1-bit Adam   arXiv 2102.02888, algorithm 1      1-bit LAMB   arXiv 2104.06069, algorithm 1
    0/1 Adam     arXiv 2202.06009, algorithms 1, 2

All in the dtype of the parameters, which is that of the gradients, one rounding for each operation:
float32 as the library has it, or float64, beside which float32's roundings show. What travels is
float32. A tensor is a flat array; parameters are a list of tensors, which all ranks have alike;
gradients are of [rank][tensor]. How values are averaged is an argument: `Dense` or `Blocks`, with
the errors of one tensor on all ranks. Nothing is shared with ringcomm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
import quantised_reference
from quantised_reference import Residuals
from reference import Array

Gradients = Sequence[Sequence[Array]]


# ---- averages over the ranks ----


class Average(Protocol):
    """Averages a tensor of all ranks, and keeps what it has not delivered."""

    def __call__(self, inputs: Sequence[Array]) -> Array: ...

    def rescale(self, factor: Array) -> None: ...


class Dense:
    """The mean: all ranks' values, added in order of rank."""

    def __call__(self, inputs: Sequence[Array]) -> Array:
        total = inputs[0]
        for x in inputs[1:]:
            total = total + x
        return total * (1 / len(inputs))

    def rescale(self, factor: Array) -> None:
        """Nothing is left."""


class UnclearError(Exception):
    """A code hangs on a rounding: other arithmetic, as right as this, may send another one."""


class Blocks:
    """The codec onebit: a scale for every 256 elements."""

    def __init__(self, count: int, ranks: int, codec: str = "onebit") -> None:
        self.codec = codec
        self.left = [Residuals.zero(count) for _ in range(ranks)]

    def __call__(self, inputs: Sequence[Array]) -> Array:
        def exchange(given: Sequence[Array]) -> tuple[Array, list[Residuals]]:
            return quantised_reference.allreduce(given, "avg", self.codec, self.left)

        result, self.left = clearly(exchange, inputs)
        return result.astype(inputs[0].dtype)

    def rescale(self, factor: Array) -> None:
        """What is left, in the units of another preconditioner."""
        for one in self.left:
            own = factor[one.start : one.start + len(one.owner)]
            one.worker = (one.worker * factor).astype(np.float32)
            one.owner = (one.owner * own).astype(np.float32)


_ROUNDINGS = 2.0**-20  # 16 roundings of float32, all one way


def clearly(
    exchange: Callable[[Sequence[Array]], tuple[Array, list[Residuals]]], inputs: Sequence[Array]
) -> tuple[Array, list[Residuals]]:
    """What an exchange gives and leaves. Of float64 inputs: raises UnclearError if it gives or
    leaves something else where they are off by roundings, as a sign or a scale has changed."""
    result, left = exchange(inputs)
    if inputs[0].dtype != np.float64:
        return result, left
    whole = _joined(result, left)
    for off in (-_ROUNDINGS, _ROUNDINGS):
        moved = _joined(*exchange([x + off * _size(x) for x in inputs]))
        if np.abs(moved - whole).max() > 64 * _ROUNDINGS * np.abs(whole).max():
            raise UnclearError
    return result, left


def _size(x: Array) -> Array:
    """What roundings of x are parts of; an exact 0 stays one."""
    return np.where(x == 0, 0, x + np.sqrt(np.mean(x * x)))


def _joined(result: Array, left: Sequence[object]) -> Array:
    kept = (part for one in left for part in vars(one).values() if isinstance(part, np.ndarray))
    return np.concatenate([result, *kept])


# ---- 1-bit Adam ----


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all three have."""

    lr: float = 1e-3
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.0


def _ema(old: Array, new: Array, beta: float) -> Array:
    return beta * old + (1 - beta) * new


class FrozenAdam:
    """ringcomm's own form, of one flat tensor.

        t <= T:  AdamW, unbiased;  w_i = EMA(g_i^2)
        at T:    m = m / (1 - b1^T);  v = v / (1 - b2^T)
        t >  T:  z = [v > 0] C([v > 0] (b1 m + (1 - b1) g_i) / q);  w_i = EMA(g_i^2)
                 u = z q / r,  r = sqrt(v) + eps;  p -= lr (u + wd p);  m = z q
                 q = min(5 r, sqrt(mean r^2 over 256))
        t in R:  then w = mean w_i / (1 - b2^t);  v' = w / N + (1 - 1/N) min(m^2, w)
                 what C has left times q / q', 0 where v' is 0

    ``renewals``, R above, are step numbers.
    """

    def __init__(
        self,
        p: Array,
        settings: Settings,
        freeze: int,
        average: Average,
        ranks: int,
        renewals: Collection[int] = (),
        masked: bool = True,
    ) -> None:
        self.p, self.m, self.v = p.copy(), np.zeros_like(p), np.zeros_like(p)
        self.own = [np.zeros_like(p) for _ in range(ranks)]
        self.settings, self.freeze, self.average = settings, freeze, average
        self.renewals, self.masked, self.t = frozenset(renewals), masked, 0

    def _root(self) -> Array:
        return np.sqrt(self.v) + self.settings.eps

    def _units(self) -> Array:
        root = self._root()
        typical = np.sqrt(np.mean(root.reshape(-1, 256) ** 2, axis=1))
        return np.minimum(5 * root, np.repeat(typical, 256))

    def step(self, grads: Sequence[Array]) -> Array:
        """One step of all ranks; what moved the parameters."""
        s = self.settings
        self.t += 1
        self.own = [_ema(w, g * g, s.b2) for w, g in zip(self.own, grads, strict=True)]
        if self.t <= self.freeze:
            g = Dense()(grads)
            self.m, self.v = _ema(self.m, g, s.b1), _ema(self.v, g * g, s.b2)
            first, second = 1 - s.b1**self.t, 1 - s.b2**self.t
            u = (self.m / first) / (np.sqrt(self.v / second) + s.eps)
            if self.t == self.freeze:
                self.m, self.v = self.m / first, self.v / second
        else:
            live = (self.v > 0) | (not self.masked)
            q, sent = self._units(), [_ema(self.m, g, s.b1) for g in grads]
            with np.errstate(all="ignore"):
                z = self.average([np.where(live, one / q, 0) for one in sent])
                z = np.where(live, z, 0)
                u, self.m = np.where(live, z * (q / self._root()), 0), z * q
        self.move(u)
        if self.t in self.renewals:
            self._renew()
        return u

    def move(self, u: Array) -> None:
        """The parameters."""
        self.p = self.p - self.settings.lr * (u + self.settings.decay * self.p)

    def _renew(self) -> None:
        n, before = len(self.own), self._units()
        w = Dense()(self.own) / (1 - self.settings.b2**self.t)
        self.v = w * (1 / n) + (1 - 1 / n) * np.minimum(self.m * self.m, w)
        self.average.rescale(np.where(self.v > 0, before / self._units(), 0))


# ---- 1-bit LAMB ----


@dataclasses.dataclass(frozen=True)
class LambSettings(Settings):
    """DeepSpeed's defaults."""

    coeff_beta: float = 0.9
    coeff_min: float = 0.01
    coeff_max: float = 10.0
    factor_min: float = 0.5
    factor_max: float = 4.0
    factor_step: float = 0.1


def _norm(x: Array) -> float:
    return float(np.sqrt(np.sum(x.astype(np.float64) ** 2)))


class FrozenLamb(FrozenAdam):
    """ringcomm's own form, of one flat tensor: FrozenAdam, and c = clip(||p|| / ||u||) until the
    freeze; then its unbiased running mean, times how much ||p|| has grown, but 2 ||p|| / ||u|| at
    most."""

    coeff = weight = 0.0
    size: float | None = None

    def move(self, u: Array) -> None:
        s = self.settings
        assert isinstance(s, LambSettings)
        update, size = u + s.decay * self.p, _norm(self.p)
        if self.t <= self.freeze:
            coeff = min(max(size / _norm(update), s.coeff_min), s.coeff_max)
            self.coeff = s.coeff_beta * self.coeff + (1 - s.coeff_beta) * coeff
            self.weight = s.coeff_beta * self.weight + (1 - s.coeff_beta)
        else:
            self.size = size if self.size is None else self.size
            coeff = self.coeff / self.weight * size / self.size
            coeff = min(coeff, 2 * size / _norm(update))
            coeff = min(max(coeff, s.coeff_min), s.coeff_max)
        self.p = self.p - (s.lr * coeff) * update


# ---- 0/1 Adam ----


@dataclasses.dataclass(frozen=True)
class ZeroOneSettings(Settings):
    """Intervals double after so many uses; those of local steps up to a limit."""

    var_freeze: int = 100
    var_updates: int = 16
    local_doubling: int = 1000
    local_most: int = 16


class ZeroOne:
    """0/1 Adam: the variance at growing intervals; then local steps, their sum averaged.

        A, t <= T:  t a multiple of k: g = mean g_i;  m, v = EMA(g), EMA(g^2); k doubles after 16
                    else:              g = C(g_i);    m = EMA(g)
                    p -= lr (m / (sqrt(v) + eps) + wd p)
        B, t > T:   m_i = EMA(g_i);  s = lr (m_i / (sqrt(v) + eps) + wd p_i);  p_i -= s;  u_i -= s
                    L += lr
                    t a multiple of h: w = C'(u_i);  m = -w (sqrt(v) + eps) / L
                                       p = p before + w;  u = L = 0

    C' begins without errors: they have the units of what it averages. h doubles after so many
    steps. "p before": that of the last average; the papers' p_i - u_i, without its rounding.

    m and v are unbiased in A, and m at its end; steps and w are 0 where v is 0.
    """

    def __init__(
        self,
        params: Sequence[Array],
        settings: ZeroOneSettings,
        ranks: int,
        average: Callable[[int], Average],
    ) -> None:
        self.var_uses = 0
        self.local = [[p.copy() for p in params] for _ in range(ranks)]
        self.m = [[np.zeros_like(p) for p in params] for _ in range(ranks)]
        self.v = [np.zeros_like(p) for p in params]
        self.u = [[np.zeros_like(p) for p in params] for _ in range(ranks)]
        self.before = [p.copy() for p in params]
        self.make, self.average = average, [average(len(p)) for p in params]
        self.settings, self.t, self.rates = settings, 0, 0.0
        self.var_interval, self.var_count = 1, 0
        self.local_interval, self.local_count = 1, 0

    def step(self, grads: Gradients) -> None:
        """One step of all ranks."""
        self.t += 1
        if self.t <= self.settings.var_freeze:
            self._phase_a(grads)
        else:
            self._phase_b(grads)
        if self.t == self.settings.var_freeze:
            first, second = self._gains()
            self.m = [[m / first for m in rank] for rank in self.m]
            self.v = [v / second for v in self.v]
            self.average = [self.make(len(p)) for p in self.v]
            self.before = [p.copy() for p in self.local[0]]

    def _gains(self) -> tuple[float, float]:
        s = self.settings
        return 1 - s.b1**self.t, 1 - s.b2**self.var_uses

    def _update(self, m: Array, v: Array) -> Array:
        with np.errstate(all="ignore"):
            update = m / (np.sqrt(v) + self.settings.eps)
        return np.where(v > 0, update, 0)

    def _phase_a(self, grads: Gradients) -> None:
        s, dense, full = self.settings, Dense(), self.t % self.var_interval == 0
        self.var_uses += full
        first, second = self._gains()
        for i in range(len(self.v)):
            mine = [rank[i] for rank in grads]
            g = dense(mine) if full else self.average[i](mine)
            if full:
                self.v[i] = _ema(self.v[i], g * g, s.b2)
            for m, params in zip(self.m, self.local, strict=True):
                m[i] = _ema(m[i], g, s.b1)
                update = self._update(m[i] / first, self.v[i] / second) + s.decay * params[i]
                params[i] = params[i] - s.lr * update
        if full:
            self.var_count += 1
            if self.var_count == s.var_updates:
                self.var_count, self.var_interval = 0, 2 * self.var_interval

    def _phase_b(self, grads: Gradients) -> None:
        s = self.settings
        self.rates += s.lr
        for i, v in enumerate(self.v):
            denom = np.sqrt(v) + s.eps
            for rank, g in enumerate(grads):
                m, p = _ema(self.m[rank][i], g[i], s.b1), self.local[rank][i]
                move = s.lr * (self._update(m, v) + s.decay * p)
                self.m[rank][i], self.local[rank][i] = m, p - move
                self.u[rank][i] = self.u[rank][i] - move
            if self.t % self.local_interval == 0:
                w = np.where(v > 0, self.average[i]([u[i] for u in self.u]), 0)
                self.before[i] = self.before[i] + w
                for rank in range(len(grads)):
                    self.m[rank][i] = -(w * denom) * (1 / self.rates)
                    self.local[rank][i] = self.before[i].copy()
                    self.u[rank][i] = np.zeros_like(v)
        if self.t % self.local_interval == 0:
            self.rates = 0.0
        self.local_count += 1
        if self.local_count == s.local_doubling:
            self.local_count = 0
            self.local_interval = min(2 * self.local_interval, s.local_most)
