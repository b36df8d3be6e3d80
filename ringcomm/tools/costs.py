"""What the cost model's constants would be, going by what was measured.

The core chooses by a model of an all-reduce of S bytes (csrc/plan/choose.c): so many hops, so many
further messages, so many bytes on the wire, each with a price. Prices that make the model's times
those that were measured, as well as any do, are beside its own a check of these, and where they
came from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from ..bootstrap.tuned import Measured


@dataclasses.dataclass(frozen=True)
class Costs:
    """Prices, in seconds."""

    hop: float
    message: float
    """Of each further message that a rank handles in a hop."""
    byte: float

    def text(self, world: int) -> str:
        """Among two ranks no hop has further messages."""
        message = f"{self.message * 1e6:.3g} us a further message, " if world > 2 else ""
        return f"{self.hop * 1e6:.3g} us a hop, {message}{1e-6 / self.byte:.3g} MB/s"


MODEL = Costs(50e-6, 25e-6, 1 / 0.117e9)
"""HOP_NS, MESSAGE_NS and BYTES_PER_NS of csrc/plan/choose.c."""


def counts(algorithm: str, world: int, size: int) -> tuple[float, float, float]:
    """Hops, further messages and bytes that each rank sends, one after the other."""
    down = world.bit_length() - 1
    up = down + (world > 1 << down)
    shared = 2 * (world - 1) / world * size
    exchanges = down + 2 * (up - down)
    return {
        "ring": (2 * (world - 1), 0, shared),
        "direct": (2, 2 * (world - 2), shared),
        "one_shot": (1, world - 2, (world - 1) * size),
        "doubling": (exchanges, 0, exchanges * size),
        "halving": (2 * up, 0, shared),
    }[algorithm]


def fit(measured: Iterable[Measured], world: int) -> tuple[Costs, float] | None:
    """The prices by which the model is least wrong, in squares of its errors as parts of the time,
    and its median error then. None if the times are none of such a model: a price is below 0."""
    times = [
        (name, size.bytes, seconds)
        for size in measured
        for name, seconds in size.seconds.items()
        if name != "auto"
    ]
    rows = [np.array(counts(name, world, size)) / seconds for name, size, seconds in times]
    used = [0, 1, 2] if world > 2 else [0, 2]
    if len(rows) < 2 * len(used):
        return None
    parts = np.array(rows)
    prices = np.zeros(3)
    prices[used] = np.linalg.lstsq(parts[:, used], np.ones(len(parts)), rcond=None)[0]
    if prices[0] <= 0 or prices[1] < 0 or prices[2] <= 0:
        return None
    wrong = np.median(np.abs(parts @ prices - 1))
    return Costs(*(float(price) for price in prices)), float(wrong)


def line(measured: Iterable[Measured], world: int) -> str:
    """For people."""
    found = fit(measured, world)
    here = "these times fit no such model"
    if found is not None:
        here = f"these times fit {found[0].text(world)}, within {found[1]:.0%} in the median"
    return f"the model has {MODEL.text(world)}; {here}"
