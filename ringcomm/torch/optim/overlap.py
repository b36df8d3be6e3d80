"""Overlap: a span's exchange begins in backward, as soon as all its gradients are computed. A span
is a bucket of parameters: a Span, or a HostBucket of torch.sparse.

Invariants: exchanges begin in the order of the layout, the same on all ranks, whatever order
backward has; the step begins the remaining ones. If a gradient changes after its exchange has
begun, the step notices and raises: the gradient sent would not be the one applied.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from ...errors import ConfigError
from .span import ParameterBucket


class BegunExchange(Protocol):
    """Exchange that has begun (SpanExchanges, BucketRound)."""

    def cancel(self) -> None:
        """Ends the exchange without an update."""


S = TypeVar("S", bound=ParameterBucket)
F = TypeVar("F", bound=BegunExchange)


class Overlap(Generic[S, F]):
    """Launches the exchanges of spans from hooks of their parameters.

    Args:
        launch: begins a span's exchange.

    Attributes:
        is_in_step: whether backward has computed a gradient since the last step: then exchanges
            have begun, on some rank at least.
    """

    def __init__(self, launch: Callable[[S], F]) -> None:
        self._launch = launch
        self._spans: list[S] = []
        self._paused = False
        self._handles: list[Any] = []
        self._reset()

    def watch(self, spans: Sequence[S]) -> None:
        """Watches the parameters of these spans from now on, and no others. Drops exchanges that
        have begun."""
        self.cancel()
        for handle in self._handles:
            handle.remove()
        self._spans, self._handles = [], []
        self._reset()
        self.extend(spans)

    def extend(self, spans: Sequence[S]) -> None:
        """Watches these spans as well, after the others. Keeps exchanges that have begun; ``take``
        sends gradients that were computed before."""
        for number, span in enumerate(spans, len(self._spans)):
            for place in span.slices:
                parameter: Any = place.tensor
                hook = functools.partial(self._arrived, number)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self._spans += spans
        self._waiting += [len(span.slices) for span in spans]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Returns a context in which backwards begin nothing."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def take(self) -> list[F]:
        """Begins the remaining exchanges, and returns those of all spans. Raises ConfigError if a
        gradient has changed since its exchange began."""
        changed = any(
            place.tensor.grad is not known or (known is not None and known._version != version)
            for span in self._spans[: len(self._begun)]
            for place in span.slices
            for known, version in [self._versions[place.index]]
        )
        self._begin_rest()
        if changed:
            raise ConfigError(
                "gradients have changed since overlap=True began to send them in backward, as by "
                "clip_grad_norm_ or GradScaler.unscale_. Make the optimizer with overlap=False; "
                "those of ringcomm.torch.optim clip by max_norm= then"
            )
        begun = self._begun
        self._reset()
        return begun

    def cancel(self) -> None:
        """Drops the exchanges of a step that is not made, on all ranks alike: as ranks may have
        begun unlike numbers of them, each begins all if it has a gradient."""
        if self.is_in_step:
            self._begin_rest()
        begun = self._begun
        self._reset()
        for exchange in begun:
            exchange.cancel()

    def _begin_rest(self) -> None:
        while len(self._begun) < len(self._spans):
            self._begin()

    def _reset(self) -> None:
        self._begun: list[F] = []
        self.is_in_step = False
        self._versions: dict[int, tuple[torch.Tensor | None, int]] = {}
        self._waiting = [len(span.slices) for span in self._spans]  # gradients that each one lacks

    def _arrived(self, number: int, _: torch.Tensor) -> None:
        if self._paused:
            return
        if number < len(self._begun):
            raise ConfigError(
                "a second backward adds to gradients that overlap=True has begun to send; make all "
                "but the last one before a step under optimizer.no_sync(), or use overlap=False "
                "(with reentrant checkpoints, too)"
            )
        self.is_in_step = True
        self._waiting[number] -= 1
        while len(self._begun) < len(self._spans) and self._waiting[len(self._begun)] <= 0:
            self._begin()

    def _begin(self) -> None:
        span = self._spans[len(self._begun)]
        for place in span.slices:
            gradient = place.tensor.grad
            self._versions[place.index] = (gradient, 0 if gradient is None else gradient._version)
        with torch.no_grad():
            self._begun.append(self._launch(span))
