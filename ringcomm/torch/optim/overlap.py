"""Overlap: a span's exchange begins in backward, as soon as all its gradients are there. A span is
what travels together: a Span, or a Bucket of torch.sparse.

Invariants: spans begin in the order of the layout, so in the same one on all ranks, whatever order
backward has; what has not begun when the step is made begins then. A gradient that changes after
its span has begun is noticed at the step, which raises: what was sent would not be what is applied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from ...errors import ConfigError
from .span import Place


class Launched(Protocol):
    """What has begun (Flight, Round)."""

    def drop(self) -> None:
        """Gives it up."""


class Watched(Protocol):
    """Parameters that travel together (Span, Bucket)."""

    @property
    def places(self) -> Sequence[Place]:
        """The parameters."""


S = TypeVar("S", bound=Watched)
F = TypeVar("F", bound=Launched)


class Overlap(Generic[S, F]):
    """Begins spans by hooks of their parameters.

    Args:
        launch: begins a span.
    """

    def __init__(self, launch: Callable[[S], F]) -> None:
        self._launch = launch
        self._spans: list[S] = []
        self._waiting: list[int] = []  # for how many gradients each span waits
        self._versions: dict[int, tuple[torch.Tensor | None, int]] = {}
        self._flights: list[F] = []
        self._paused = False
        self._handles: list[Any] = []

    def watch(self, spans: Sequence[S]) -> None:
        """Watches the parameters of these spans from now on, and no others. What has begun is
        dropped."""
        self.drop()
        for handle in self._handles:
            handle.remove()
        self._spans, self._handles = [], []
        self._reset()
        self.extend(spans)

    def extend(self, spans: Sequence[S]) -> None:
        """Watches these spans as well, behind the others. What has begun goes on; a gradient that
        is there already is sent by ``take``."""
        for number, span in enumerate(spans, len(self._spans)):
            for place in span.places:
                parameter: Any = place.parameter
                handle = parameter.register_post_accumulate_grad_hook(self._hook_of(number))
                self._handles.append(handle)
        self._spans += spans
        self._waiting += [len(span.places) for span in spans]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Backwards in this context begin nothing."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @property
    def has_begun(self) -> bool:
        """Whether something is on its way that ``take`` has not brought."""
        return bool(self._flights)

    def take(self) -> list[F]:
        """The flights of all spans; those that have not begun do now. Raises ConfigError where a
        gradient has changed since its span has begun."""
        changed = any(
            place.parameter.grad is not known or (known is not None and known._version != version)
            for span in self._spans[: len(self._flights)]
            for place in span.places
            for known, version in [self._versions[place.index]]
        )
        while len(self._flights) < len(self._spans):
            self._begin()
        if changed:
            raise ConfigError(
                "gradients have changed since overlap=True began to send them in backward, as by "
                "clip_grad_norm_ or GradScaler.unscale_. Make the optimizer with overlap=False; "
                "those of ringcomm.torch.optim clip by max_norm= then"
            )
        flights = self._flights
        self._reset()
        return flights

    def drop(self) -> None:
        """Gives up what has begun, on all ranks alike: the step is not made."""
        flights = self._flights
        self._reset()
        for flight in flights:
            flight.drop()

    def _reset(self) -> None:
        self._flights = []
        self._versions = {}
        self._waiting = [len(span.places) for span in self._spans]

    def _hook_of(self, number: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            if not self._paused:
                self._arrived(number)

        return hook

    def _arrived(self, number: int) -> None:
        if number < len(self._flights):
            raise ConfigError(
                "a second backward adds to gradients that overlap=True has begun to send; make all "
                "but the last one before a step under optimizer.no_sync(), or use overlap=False "
                "(with reentrant checkpoints, too)"
            )
        self._waiting[number] -= 1
        while len(self._flights) < len(self._spans) and self._waiting[len(self._flights)] <= 0:
            self._begin()

    def _begin(self) -> None:
        span = self._spans[len(self._flights)]
        for place in span.places:
            gradient = place.parameter.grad
            self._versions[place.index] = (gradient, 0 if gradient is None else gradient._version)
        with torch.no_grad():
            self._flights.append(self._launch(span))
