"""Outer rules: how an anchor follows the mean of the ranks' deltas.

A rank's delta is the anchor less its own weights, so it points in a gradient's direction, and an
outer rule is an optimizer that takes it for one. With D the (weighted) mean of the deltas:

    Nesterov(gamma, mu)  u <- mu u + D; anchor <- anchor - gamma (D + mu u)
    Nesterov(1, 0)       anchor <- anchor - D              "mean": the mean of the ranks' weights
    Sparse(gamma)        anchor <- anchor - gamma D        of the few elements that are sent

gamma / (1 - mu) matters: the whole way that one delta moves the anchor. Given one of the two, the
other follows from this quotient being GAIN: gamma .7 for mu .5. mu near .9 needs hundreds of
rounds, and overshoots at the end of a short run.

Invariants: a rule works element by element, in place, on flat tensors that are the same on all
ranks, by operations that round once (not add with alpha, lerp or addcmul, whose rounding depends on
the CPU), so that all ranks have the same anchor to the bit. It has no state itself: its memory is a
dictionary of flat tensors by name, made by ``memory``, which a checkpoint stores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch

from ...errors import ConfigError, did_you_mean
from ..argument_checks import require_number
from ..sync.bucket import tiles

GAIN = 1.4
Memory = dict[str, torch.Tensor]


class Rule(Protocol):
    """Moves an anchor by the mean of the ranks' deltas."""

    def memory(self, anchor: torch.Tensor) -> Memory:
        """Makes the rule's memory for an anchor: tensors of its size, by name."""

    def step(self, anchor: torch.Tensor, mean: torch.Tensor, memory: Memory) -> None:
        """Moves the anchor, in place. ``mean`` may be overwritten."""


class Nesterov:
    """Nesterov's momentum over the mean deltas, as in torch.optim.SGD(nesterov=True).

    Args:
        gamma: the outer rate; None: GAIN (1 - mu).
        mu: the outer momentum; None: 1 - gamma / GAIN; both None: .7 and .5. With 0 the rule has
            no momentum, and no memory.

    Raises ConfigError unless gamma is above 0 and at most 100, and mu is in [0, 1).
    """

    def __init__(self, gamma: float | None = None, mu: float | None = None) -> None:
        if mu is None:
            mu = 0.5 if gamma is None else max(0.0, 1 - _rate(gamma) / GAIN)
        self.mu = require_number("mu", mu, 0, 1, open_most=True)
        self.gamma = _rate(GAIN * (1 - self.mu) if gamma is None else gamma)

    def memory(self, anchor: torch.Tensor) -> Memory:
        """Makes the momentum, unless mu is 0."""
        return {"momentum": torch.zeros_like(anchor)} if self.mu else {}

    def step(self, anchor: torch.Tensor, mean: torch.Tensor, memory: Memory) -> None:
        """Moves the anchor by gamma (D + mu u), after updating u."""
        if not self.mu:
            _descend(anchor, mean, self.gamma)
            return
        for a, d, u in tiles(anchor, mean, memory["momentum"]):
            u.mul_(self.mu).add_(d)
            a.sub_(d.add_(u * self.mu).mul_(self.gamma))

    def __repr__(self) -> str:
        return f"Nesterov(gamma={self.gamma:g}, mu={self.mu:g})"


def _rate(gamma: float) -> float:
    return require_number("gamma", gamma, 0, 100, open_least=True)


def _descend(anchor: torch.Tensor, mean: torch.Tensor, gamma: float) -> None:
    """Subtracts gamma times the mean; without the product if gamma is 1, as integers have none."""
    for a, d in tiles(anchor, mean):
        a.sub_(d if gamma == 1.0 else d.mul_(gamma))


class Sparse:
    """Sends the largest elements of the deltas' decayed sum e; has no outer momentum, as unsent
    elements stay in e (e <- decay e + d; q = the largest of each chunk of e; e <- e - q).

    Args:
        density: the share of the elements that is sent.
        decay: factor for e from round to round.
        gamma: the outer rate.
        aggregate: "mean" divides an element's sum by the number of ranks, "senders" by the number
            of those that have sent the element.

    Raises ConfigError for a density outside (0, 1], a decay outside [0, 1], a gamma outside
    (0, 100], another aggregate.
    """

    def __init__(
        self,
        density: float = 1 / 64,
        decay: float = 0.95,
        gamma: float = 1.0,
        aggregate: str = "mean",
    ) -> None:
        self.gamma = _rate(gamma)
        self.density = require_number("density", density, 0, 1, open_least=True)
        self.decay = require_number("decay", decay, 0, 1)
        if aggregate not in ("mean", "senders"):
            raise ConfigError(f'Invalid aggregate: {aggregate!r}; give "mean" or "senders"')
        self.aggregate = aggregate

    def memory(self, anchor: torch.Tensor) -> Memory:
        """Returns nothing: the exchange keeps unsent elements."""
        return {}

    def step(self, anchor: torch.Tensor, mean: torch.Tensor, memory: Memory) -> None:
        """Moves the anchor by gamma times the mean."""
        _descend(anchor, mean, self.gamma)

    def __repr__(self) -> str:
        return (
            f"Sparse(density={self.density:g}, decay={self.decay:g}, gamma={self.gamma:g}, "
            f"aggregate={self.aggregate!r})"
        )


MEAN = functools.partial(Nesterov, 1.0, 0.0)
_BY_NAME: dict[str, Callable[[], Rule]] = {"mean": MEAN, "nesterov": Nesterov, "sparse": Sparse}


def rule_of(outer: object) -> Rule:
    """Returns the rule that OuterStep's ``outer`` names or is. Raises ConfigError for anything
    else."""
    if outer == "sgd":
        raise ConfigError("outer='sgd' is gone: give Nesterov(gamma, mu=0), or \"mean\"")
    if isinstance(outer, str) and outer in _BY_NAME:
        return _BY_NAME[outer]()
    if isinstance(outer, type) or not callable(getattr(outer, "step", None)):
        raise ConfigError(
            f"outer={outer!r}: give one of {', '.join(_BY_NAME)}, or a rule such as "
            f"Nesterov(gamma=0.7, mu=0.5){did_you_mean(outer, _BY_NAME)}"
        )
    return outer  # type: ignore[return-value]
