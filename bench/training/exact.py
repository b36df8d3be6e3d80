"""T0: counter-examples whose outcome is known exactly, through the real codecs.

    telescoping   with feedback all results add up to all means, to what is still kept back
    sign          Karimireddy et al.: signs alone never leave a line, with feedback they do
    minima        ranks with different minima: the fixed point is biased without feedback
    never seen    a coordinate without any gradient has no variance: without a mask Adam's
                  1-bit momentum is thrown about there, with one it stays

Each example is a pair: what must work, and what must fail. Invariants: no random numbers but from
fixed seeds, so figures are the same in every run; four ranks, over sockets.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from ranks import run_ranks

from ringcomm import Communicator, Config, ErrorFeedback

Vector = Any
CONFIG = {"algorithm": "direct", "shared_memory": False}


@dataclasses.dataclass(frozen=True)
class Exact:
    """How an example came out.

    Attributes:
        what: the example and the figure.
        good: of what must work, at most ``bound``.
        bad: of what must fail, at least ``failed``.
    """

    what: str
    good: float
    bound: float
    bad: float
    failed: float

    @property
    def holds(self) -> bool:
        """Whether both came out as they must."""
        fails = not math.isfinite(self.bad) or self.bad >= self.failed
        return self.good <= self.bound and fails


def _ranks(count: int, fn: Callable[[Communicator], Any]) -> Any:
    return run_ranks(count, fn, timeout=120.0, config=Config(**CONFIG))[0]  # type: ignore[arg-type]


def _mean(comm: Communicator, x: Vector, codec: str, feedback: ErrorFeedback | None) -> Vector:
    return comm.allreduce(
        x.astype(np.float32),
        "avg",
        compression=codec,  # type: ignore[call-overload]
        feedback=feedback if feedback is not None else False,
    )


def _feedback(on: bool) -> ErrorFeedback | None:
    return ErrorFeedback() if on else None


def _telescoping(codec: str) -> Exact:
    count, steps = 4096, 60

    def rank(comm: Communicator, on: bool) -> float:
        draw = np.random.default_rng(comm.rank)
        kept = _feedback(on)
        sent, means = np.zeros(count), np.zeros(count)
        for _ in range(steps):
            x = draw.standard_normal(count).astype(np.float32) + 0.5
            means += comm.allreduce(x.astype(np.float64), "avg")
            sent += _mean(comm, x, codec, kept)
        sent += _mean(comm, np.zeros(count), "none", kept)  # delivers what is left
        return float(np.abs(sent - means).max() / np.abs(means).mean())

    good, bad = (_ranks(4, lambda comm, on=on: rank(comm, on)) for on in (True, False))
    return Exact(f"telescoping, {codec}: largest gap of the sums", good, 1e-5, bad, 1e-2)


def _sign() -> Exact:
    def rank(comm: Communicator, on: bool) -> float:
        x, kept = np.array([1.2, 0.9]), _feedback(on)
        for step in range(2000):
            up, across = np.sign(x[0] + x[1]), np.sign(x[0] - x[1])
            gradient = np.array([0.5 * up + across, 0.5 * up - across])
            x = x - 0.05 / math.sqrt(step + 1) * _mean(comm, gradient, "onebit", kept)
        return float(0.5 * abs(x[0] + x[1]) + abs(x[0] - x[1]))

    good, bad = (_ranks(4, lambda comm, on=on: rank(comm, on)) for on in (True, False))
    return Exact("signs, a kink: loss above the minimum", good, 0.1, bad, 0.5)


def _minima(codec: str) -> Exact:
    count = 256

    def rank(comm: Communicator, on: bool) -> float:
        minimum = np.random.default_rng(comm.rank).standard_normal(count) * (1 + 4 * comm.rank)
        best = comm.allreduce(minimum.copy(), "avg")
        x, kept, tail = np.zeros(count), _feedback(on), []
        for step in range(600):
            rate = 0.1 / (1 + step / 40)
            x = x - rate * _mean(comm, x - minimum, codec, kept)
            tail = [*tail[-49:], x]
        return float(np.linalg.norm(np.mean(tail, 0) - best) / np.linalg.norm(best))

    good, bad = (_ranks(4, lambda comm, on=on: rank(comm, on)) for on in (True, False))
    return Exact(f"different minima, {codec}: distance from the mean's", good, 0.02, bad, 0.04)


def _never_seen() -> Exact:
    count, eps = 256, 1e-8

    def rank(comm: Communicator, masks: bool) -> float:
        x, m = np.full(count, 0.5), np.zeros(count)
        v = np.full(count, 1e-2)
        v[:8] = 0.0  # no gradient has come by the time of the freeze, and none will
        kept = ErrorFeedback()
        mask = (v > 0) if masks else np.ones(count)
        draw = np.random.default_rng(comm.rank)
        for _ in range(100):
            gradient = np.where(v > 0, 0.1 * draw.standard_normal(count) + x, 0.0)
            m = _mean(comm, 0.9 * m + 0.1 * gradient, "onebit", kept)
            x = x - 1e-3 * m / (np.sqrt(v) + eps) * mask
        return float(np.abs(x).max())

    good, bad = (_ranks(4, lambda comm, on=on: rank(comm, on)) for on in (True, False))
    return Exact("never seen: largest weight, with a mask and without", good, 1.0, bad, 10.0)


EXAMPLES: dict[str, Callable[[], Exact]] = {
    "telescoping-int4": lambda: _telescoping("int4"),
    "telescoping-onebit": lambda: _telescoping("onebit"),
    "sign": _sign,
    "minima-int4": lambda: _minima("int4"),
    "minima-onebit": lambda: _minima("onebit"),
    "never-seen": _never_seen,
}
