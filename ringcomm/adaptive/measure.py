"""What steps took on this rank, as far as the choice of a codec goes by it.

    step before is over     first bucket              last submitted   last one over
      |                       |                           |              |
      |<------------------- compute ------------------->|<-- exposed -->|
                              |<---- can hide ----------->|
    in flight                 [0 .......]  [1 ............|..][2 ........]   busy: the union

Invariants: moments are given, of one clock, in seconds; this file reads none. A window has steps of
one codec only, and its figures are medians, so that a step or two that were held up do not count.
Not thread-safe.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a window of steps was on one rank: medians over steps, seconds.

    Attributes:
        steps: that were measured; 0: none, and all else is 0.
        compute_s: of a step, all but what is exposed.
        hide_s: from its first bucket to its last.
        exposed_s: from there until it is over.
        deferred: its means were for the step after: 0 or 1, between them where steps differ.
        busy_s: in which a bucket was in flight.
        wire_bytes: sent over ports.
        cpu_s: that ringcomm's engine has computed, over the steps' mean.
        norm: of the gradients, over the steps' mean; of a sample of them, as only changes matter.
        spoilt: steps whose result was not finite.
        rate_rises: steps before which the learning rate had been raised.
    """

    steps: float = 0.0
    compute_s: float = 0.0
    hide_s: float = 0.0
    exposed_s: float = 0.0
    deferred: float = 0.0
    busy_s: float = 0.0
    wire_bytes: float = 0.0
    cpu_s: float = 0.0
    norm: float = 0.0
    spoilt: float = 0.0
    rate_rises: float = 0.0

    def row(self) -> list[float]:
        """As it is sent."""
        return list(dataclasses.astuple(self))

    @staticmethod
    def of_row(row: Iterable[float]) -> Seen:
        """The same from a row."""
        return Seen(*(float(value) for value in row))


@dataclasses.dataclass(frozen=True)
class StepTook:
    """One step of the picture above: seconds, bytes over ports, and when each of its buckets was
    ready, from its first one on."""

    compute_s: float
    hide_s: float
    exposed_s: float
    deferred: bool
    busy_s: float
    wire_bytes: float
    ready_s: tuple[float, ...]


class Window:
    """The steps since it was last emptied."""

    def __init__(self) -> None:
        self.empty()

    def empty(self) -> None:
        """Begins anew."""
        self._took: list[StepTook] = []
        self._norms: list[float] = []
        self._spoilt = self._rises = 0
        self._cpu_s = 0.0

    def add(self, step: StepTook) -> None:
        """A step is over."""
        self._took.append(step)

    def add_cpu(self, seconds: float) -> None:
        """Processor time of the engine."""
        self._cpu_s += seconds

    def add_norm(self, squared: float) -> None:
        """The squared norm of a step's result."""
        if math.isfinite(squared):
            self._norms.append(math.sqrt(squared))
        else:
            self._spoilt += 1

    def add_rise(self) -> None:
        """The learning rate was raised."""
        self._rises += 1

    def seen(self) -> Seen:
        """Medians over its steps, the norms' mean, and counts of the rest."""
        took = self._took
        norm = statistics.fmean(self._norms) if self._norms else 0.0
        told = Seen(norm=norm, spoilt=self._spoilt, rate_rises=self._rises)
        if not took:
            return told
        names = ("compute_s", "hide_s", "exposed_s", "deferred", "busy_s", "wire_bytes")
        middle = {name: statistics.median(getattr(one, name) for one in took) for name in names}
        return dataclasses.replace(told, steps=len(took), cpu_s=self._cpu_s / len(took), **middle)

    def ready_s(self) -> tuple[float, ...]:
        """When the buckets of a step are ready, of the median step; empty if there is none."""
        if not self._took:
            return ()
        ordered = sorted(self._took, key=lambda one: one.hide_s)
        return ordered[len(ordered) // 2].ready_s
