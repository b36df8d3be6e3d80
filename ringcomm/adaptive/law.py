"""The law by which a codec is chosen.

The gentlest codec is taken whose step is forecast to be next to the shortest of all: one that hides
behind backward, where there is any. Rungs, gentlest first:

    none < bf16 < int8 < int8 over more micro-batches (if asked) < int4 < onebit (opt-in)

    to a harsher one    its step would be clearly shorter in 3 windows
    to a gentler one    it would do even if the wire took 1/.85 as long, in 2 windows
    in any case         not within 50 steps of the change before, unless the present one is grossly
                        wrong, nothing has been decided yet, or it was a gentler one's trial
    critical phases     first steps, a raised learning rate, gradients whose norm has changed by
                        half, values that are not finite: rungs that quantise wait

Invariants: it is asked on one rank, of all ranks' measurements. What it returns follows from what
it was given so far: it reads no clock. A gentler rung that had to be left again is tried again
after twice as long.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..codecs import CODECS, Codec, parse
from ..errors import ConfigError
from .forecast import Link, Load, exposed_s, transfer_s
from .measure import Seen
from .rates import Rates

DELAY = 3  # steps from a measurement to what follows from it
WINDOW, FIRST_WINDOW = 10, 4  # steps; the first one after a change is shorter
FIRST_STEPS = 10

_DWELL, _LONGEST_DWELL = 50, 800  # steps
_GUARD = 50  # steps
_NEAR = 1.02  # of the shortest step: as good
_HARSHER, _GROSS = 1.04, 1.5  # of the shortest step: too long
_MARGIN = 0.85  # of the wire's rate
_HARSHER_WINDOWS, _GENTLER_WINDOWS = 3, 2
_NORM_CHANGE = 0.5


@dataclasses.dataclass(frozen=True)
class Rung:
    """A codec, and over how many micro-batches gradients are accumulated."""

    codec: Codec
    accumulate: int = 1

    def __str__(self) -> str:
        return self.codec.name + (f" over {self.accumulate}" if self.accumulate > 1 else "")


def ladder(
    allow: Collection[str] = (), *, linear: bool = False, adapters: bool = False,
    max_accumulate: int = 1,
) -> tuple[Rung, ...]:  # fmt: skip
    """The rungs, gentlest first.

    Args:
        allow: codecs beyond int8: int4, onebit.
        linear: the optimizer's update is linear in the gradients; else onebit is left out.
        adapters: a small part of the model is trained: no rung quantises.
        max_accumulate: micro-batches over which gradients may be accumulated.

    Raises ConfigError for a codec that cannot be allowed.
    """
    asked = [_allowed(name) for name in allow]
    gentle = tuple(Rung(CODECS[name]) for name in ("none", "bf16"))
    if adapters:
        return gentle
    known = [codec for codec in asked if linear or codec.name == "int4"]
    more = tuple(Rung(CODECS["int8"], times) for times in range(1, max_accumulate + 1))
    return (*gentle, *more, *(Rung(codec) for codec in sorted(known, key=lambda one: -one.bits)))


def _allowed(name: str) -> Codec:
    codec = parse(name, "allow=")
    if codec.name not in ("int4", "onebit"):
        raise ConfigError(f"allow={name!r}: 'auto' takes none, bf16 and int8 by itself; what may "
                          "be allowed beside is int4 and onebit")  # fmt: skip
    return codec


@dataclasses.dataclass(frozen=True)
class Change:
    """From which step on which rung, and why."""

    step: int
    rung: Rung
    reason: str


@dataclasses.dataclass(frozen=True)
class Outlook:
    """The forecast at one moment.

    Attributes:
        load, link, ready_s: see ``forecast``.
        compute_s: of a micro-batch.
        deferred: means are needed where the next step's first bucket is ready, not at once.
    """

    load: Load
    link: Link
    ready_s: Sequence[float]
    compute_s: float
    deferred: bool = False

    @property
    def hide_s(self) -> float:
        """What backward hides."""
        return self.ready_s[-1]

    def slack_s(self, rung: Rung) -> float:
        """What hides behind the last bucket."""
        return rung.accumulate * self.compute_s - self.hide_s if self.deferred else 0.0

    def step_s(self, rung: Rung) -> float:
        """Seconds of a micro-batch: its compute, and its share of what is exposed."""
        behind = exposed_s(self.load, rung.codec, self.link, self.ready_s)
        return self.compute_s + max(0.0, behind - self.slack_s(rung)) / rung.accumulate

    def transfer_s(self, rung: Rung) -> float:
        """Seconds on the link for one exchange."""
        return transfer_s(self.load, rung.codec, self.link)

    def cautious(self) -> Outlook:
        """On a wire that is a little slower."""
        return dataclasses.replace(self, link=self.link.slower(1 / _MARGIN))

    def gentlest(self, rungs: Sequence[Rung], shortest: float) -> Rung:
        """The first whose step is next to the shortest of them."""
        return next(rung for rung in rungs if self.step_s(rung) <= _NEAR * shortest)


class Law:
    """The decisions of a run.

    Args:
        rungs: what there is to choose from, gentlest first; see ``ladder``.
        rung: where it begins.
        first_steps: in which rungs that quantise wait.

    Attributes:
        rungs: may be changed between two decisions.
        rung: the one in force, or decided.
    """

    def __init__(
        self, rungs: Sequence[Rung], rung: Rung | None = None, *, first_steps: int = FIRST_STEPS
    ) -> None:
        self.rungs = tuple(rungs)
        self.rung = rung or self.rungs[min(1, len(self.rungs) - 1)]
        self._first_steps = first_steps
        self._rates = Rates()
        self._since = 0
        self._is_settled = False  # something was decided by a measurement, and not for a guard
        self._is_first_window = True
        self._harsher = self._gentler = 0  # windows in a row that ask for it
        self._was_gentler = False
        self._dwell = _DWELL  # before a gentler one
        self._norm = 0.0
        self._guard_until, self._guard_reason = first_steps, "these are the first steps"

    def decide(
        self, step: int, ranks: Sequence[Seen], load: Load, ready_s: Sequence[float],
        latency_s: float = 0.0,
    ) -> Change | None:  # fmt: skip
        """What follows from a window that ended before ``step``; None: nothing.

        Args:
            ranks: what each rank has seen.
            load: what a step has to move.
            ready_s: when its buckets are ready, on one rank; the slowest rank's are taken to be in
                proportion.
            latency_s: of a bucket.
        """
        self._watch(step, ranks)
        measured = [seen for seen in ranks if seen.steps]
        if len(measured) < len(ranks) or not load or len(ready_s) != len(load):
            return self._retreat(step)
        slowest = max(measured, key=lambda seen: seen.compute_s)
        link = self._rates.learn(
            self.rung.codec, load, slowest.busy_s, slowest.cpu_s, latency_s,
            self._is_first_window,
        )  # fmt: skip
        self._is_first_window = False
        stretch = slowest.hide_s / ready_s[-1] if ready_s[-1] > 0 else 1.0
        outlook = Outlook(
            load, dataclasses.replace(link, latency_s=latency_s), [at * stretch for at in ready_s],
            slowest.compute_s / self.rung.accumulate, deferred=slowest.deferred > 0,
        )  # fmt: skip
        return self._retreat(step) or self._choose(step, outlook, slowest)

    # ---- critical phases ----

    def _watch(self, step: int, ranks: Sequence[Seen]) -> None:
        norm = statistics.fmean(seen.norm for seen in ranks)
        before, self._norm = self._norm, norm or self._norm
        reason = ""
        if any(seen.spoilt for seen in ranks):
            reason = "a gradient was not finite"
        elif any(seen.rate_rises for seen in ranks):
            reason = "the learning rate was raised"
        elif before and norm and abs(norm - before) >= _NORM_CHANGE * before:
            reason = f"the gradients' norm went from {before:.3g} to {norm:.3g}"
        if reason:
            self._guard_until, self._guard_reason = step + _GUARD, reason

    def _open(self, step: int) -> tuple[Rung, ...]:
        """The rungs that are not waiting for the end of a critical phase."""
        if step >= self._guard_until:
            return self.rungs
        return tuple(rung for rung in self.rungs if not rung.codec.quantises)

    def _retreat(self, step: int) -> Change | None:
        """To a rung that is open."""
        rungs = self._open(step)
        if self.rung in rungs:
            return None
        gentler = [rung for rung in rungs if rung.codec.bits >= self.rung.codec.bits]
        reason = self._guard_reason if self.rung in self.rungs else "it is not allowed any more"
        self._is_settled = False
        return self._change(step, (gentler or list(rungs))[-1], f"{self.rung} is left: {reason}")

    # ---- choices ----

    def _choose(self, step: int, outlook: Outlook, seen: Seen) -> Change | None:
        rungs = self._open(step)
        shortest = min(outlook.step_s(rung) for rung in rungs)
        excess = outlook.step_s(self.rung) / shortest
        place = rungs.index(self.rung)
        if excess > _HARSHER:
            return self._leave(step, outlook.gentlest(rungs, shortest), excess, outlook, seen)
        self._harsher = 0
        cautious = outlook.cautious()
        gentler = [rung for rung in rungs[:place] if cautious.step_s(rung) <= _NEAR * shortest]
        if not gentler:
            self._gentler, self._is_settled = 0, True
            return None
        self._gentler += 1
        waited = self._gentler >= _GENTLER_WINDOWS and step - self._since >= self._dwell
        if self._is_settled and not waited:
            return None
        self._was_gentler, self._is_settled = True, True
        return self._change(step, gentler[0], _why(self.rung, gentler[0], outlook, seen))

    def _leave(
        self, step: int, to: Rung, excess: float, outlook: Outlook, seen: Seen
    ) -> Change | None:
        """The present rung's step is too long."""
        is_gentler = to.codec.bits > self.rung.codec.bits
        self._gentler = 0
        self._harsher += 1
        stayed = step - self._since
        waited = self._was_gentler or stayed >= (self._dwell if is_gentler else _DWELL)
        waited = waited and self._harsher >= _HARSHER_WINDOWS
        is_gross = excess > _GROSS and not is_gentler
        if self._is_settled and not waited and not is_gross:
            return None
        if self._was_gentler:
            failed = stayed < 2 * _DWELL
            self._dwell = min(2 * self._dwell, _LONGEST_DWELL) if failed else _DWELL
        self._was_gentler, self._is_settled = is_gentler, True
        return self._change(step, to, _why(self.rung, to, outlook, seen))

    def _change(self, step: int, to: Rung, reason: str) -> Change:
        self.rung, self._since = to, step + DELAY
        self._harsher = self._gentler = 0
        self._is_first_window = True
        return Change(step + DELAY, to, reason)

    # ---- checkpoints ----

    _KEPT = ("_since", "_is_settled", "_was_gentler", "_dwell", "_norm", "_guard_until",
             "_guard_reason")  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Strings, numbers and dictionaries of them."""
        kept = {name.strip("_"): getattr(self, name) for name in self._KEPT}
        return {"rates": self._rates.state_dict(), **kept}

    def load_state_dict(self, state: Mapping[str, Any], rung: Rung) -> None:
        """Goes on from it, on that rung."""
        self._rates.load_state_dict(state["rates"])
        for name in self._KEPT:
            setattr(self, name, type(getattr(self, name))(state[name.strip("_")]))
        self.rung = rung if rung in self.rungs else self.rung


def _why(now: Rung, to: Rung, outlook: Outlook, seen: Seen) -> str:
    """The measurement, for people."""
    wire = seen.wire_bytes or outlook.link.rate * seen.busy_s
    rate = 8e-9 * wire / seen.busy_s if seen.busy_s else 0.0
    hides = "the next step" if outlook.deferred else "backward"
    now_ms, to_ms, hide_ms = (
        f"{1e3 * seconds:.3g} ms"
        for seconds in (
            outlook.transfer_s(now), outlook.transfer_s(to), outlook.hide_s + outlook.slack_s(now),
        )
    )  # fmt: skip
    return (
        f"{now} needs {now_ms} on the wire at {rate:.3g} Gbit/s, {hides} hides {hide_ms}; "
        f"{to} {to_ms}"
    )
