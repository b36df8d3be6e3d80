"""Law that chooses a codec, with its measurements and its forecast of a step's time.

A window holds the medians of several steps' times on this rank, so that one or two delayed steps do
not count:

    step before is over     first bucket              last submitted   last one over
      |                       |                           |              |
      |<------------------- compute ------------------->|<-- exposed -->|
                              |<---- can hide ----------->|
    in flight                 [0 .......]  [1 ............|..][2 ........]   busy: the union

From them follow the link's rate, and so the time of a step by another codec. Backward makes one
bucket after the other ready, and the link carries them in that order; a bucket takes as long as the
slower of the link and the codec:

    backward   |bucket 0 ready |bucket 1 ready |bucket 2 ready: backward is over
    link       |[0 .........]  |[1 .........]  |[2 .........]|
               |<--------- it can hide ------->|<- exposed ->|

The law chooses the gentlest codec whose forecast step is nearly the shortest of all: one that hides
behind backward, where there is any. Rungs, gentlest first:

    none < bf16 < int8 < int8 over more micro-batches (if asked) < int4 < onebit (opt-in)

    where the present one's step is clearly too long    after 3 windows; if grossly, after one
    where a gentler one would do as well, even if the   after 2 windows, not within 200 steps of the
    wire took 1/.85 as long                             change before
    in the first steps                                  rungs that quantise wait

Invariants: no clock is read; the caller gives moments of one clock, in seconds. Rates are in bytes
per second of encoded gradients, so that a rate includes how often the algorithm sends each byte.
One rank asks the law, with all ranks' measurements, and its answer follows from its inputs so far.
A window has steps of one codec only. Not thread-safe.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..codecs import CODECS, Codec, parse
from ..errors import ConfigError

DELAY = 3  # steps from a measurement to the change that follows from it
WINDOW, FIRST_WINDOW = 10, 4  # steps of a window; the first window after a change is shorter
FIRST_STEPS = 10

_DWELL = 200  # steps after a change before a change to a gentler rung
_NEAR = 1.02  # a step up to so many times the shortest is as good
_HARSHER, _GROSS = 1.04, 1.5  # a step over so many times the shortest is too long; grossly
_LONGER = 1 / 0.85  # times as long as the wire takes: by that a gentler rung is judged
_HARSHER_WINDOWS, _GENTLER_WINDOWS = 3, 2

#: Processor seconds for encoding, decoding and adding an element, used until a codec has been
#: measured.
CODEC_S = {"int8": 1.0e-9, "fp8": 1.2e-9, "int4": 1.5e-9, "onebit": 1.6e-9}

_BOUND = 0.35  # engine time per busy time from which the processor is the bottleneck
_SUSPECT = 0.15  # engine time per busy time from which it may be, if ranks share the processor
_CLEARLY = 1.25
_PROBE = 1.05
_REACH = 2.2  # most times the seen rate to assume: enough for the next gentler codec only


# ---- measurements ----


class WindowMedians(NamedTuple):
    """Measurements of one rank's window, the row that it sends: medians over its steps, in seconds.

    Attributes:
        steps: number of measured steps; 0: none, and all else is 0.
        compute_s: time of a step without the wait for the wire after its last bucket.
        hide_s: time from a step's first bucket to its last.
        deferred: 1 if the means were for the next step, 0 if not, between them if steps differ.
        busy_s: time in which a bucket was in flight.
        wire_bytes: bytes sent over ports.
        cpu_s: processor time of ringcomm's engine, the mean over the steps.
    """

    steps: float = 0.0
    compute_s: float = 0.0
    hide_s: float = 0.0
    deferred: float = 0.0
    busy_s: float = 0.0
    wire_bytes: float = 0.0
    cpu_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Measurements of one step: seconds, bytes over ports, and the times at which its buckets were
    ready, counted from the first."""

    compute_s: float
    hide_s: float
    deferred: bool
    busy_s: float
    wire_bytes: float
    ready_s: tuple[float, ...]


@dataclasses.dataclass
class Window:
    """Measured steps that are over, and the engine's processor time in them."""

    steps: list[StepTimes] = dataclasses.field(default_factory=list)
    cpu_s: float = 0.0

    def medians(self) -> WindowMedians:
        """Returns the medians over the steps."""
        steps = self.steps
        if not steps:
            return WindowMedians()
        names = ("compute_s", "hide_s", "deferred", "busy_s", "wire_bytes")
        middle = {name: statistics.median(getattr(one, name) for one in steps) for name in names}
        return WindowMedians(steps=len(steps), cpu_s=self.cpu_s / len(steps), **middle)

    def ready_s(self) -> tuple[float, ...]:
        """Times at which the buckets of the median step were ready; empty if there is no step."""
        if not self.steps:
            return ()
        ordered = sorted(self.steps, key=lambda one: one.hide_s)
        return ordered[len(ordered) // 2].ready_s


# ---- the forecast ----


@dataclasses.dataclass(frozen=True)
class BucketSize:
    """Contents of one bucket.

    Attributes:
        large: elements that travel by the codec.
        small: elements that travel at bf16 where the codec quantises.
        plain: bytes that are never encoded.
        width: bytes of an element without a codec.
    """

    large: int
    small: int = 0
    plain: int = 0
    width: int = 4

    def bytes_in(self, codec: Codec) -> float:
        """Returns the bytes of the bucket encoded by this codec."""
        bits = 8 * self.width if codec.name == "none" else codec.bits
        rest = CODECS["bf16"].bits if codec.quantises else bits
        return (self.large * bits + self.small * rest) / 8 + self.plain


Load = Sequence[BucketSize]
"""Buckets of a step, in the order in which they become ready."""


@dataclasses.dataclass(frozen=True)
class Link:
    """Speed of the network and of the codecs.

    Attributes:
        rate: encoded bytes per second while the link is busy.
        latency_s: latency of a bucket, beside the time of its bytes.
        codec_s: seconds an element, by codec's name; 0 for a codec without an entry.
    """

    rate: float
    latency_s: float = 0.0
    codec_s: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def seconds(self, bucket: BucketSize, codec: Codec) -> float:
        """Seconds for which a bucket keeps the link busy."""
        encoding = bucket.large * self.codec_s.get(codec.name, 0.0)
        return max(bucket.bytes_in(codec) / self.rate, encoding)


def encoded_bytes(load: Load, codec: Codec) -> float:
    """Returns the encoded bytes of one step's buckets."""
    return sum(bucket.bytes_in(codec) for bucket in load)


def transfer_s(load: Load, codec: Codec, link: Link) -> float:
    """Seconds of a step's buckets one after the other, if all were ready at once."""
    return sum(link.seconds(bucket, codec) for bucket in load) + link.latency_s


def exposed_s(load: Load, codec: Codec, link: Link, ready_s: Sequence[float]) -> float:
    """Seconds for which the link is still busy after the last bucket was ready.

    Args:
        ready_s: time at which each bucket is ready.
    """
    free = 0.0
    for bucket, at in zip(load, ready_s, strict=True):
        free = max(free, at) + link.seconds(bucket, codec)
    return max(0.0, free + link.latency_s - ready_s[-1])


class Rates:
    """Learns the speed of the link and of the codecs from windows of steps.

    A window has the time for which the link was busy, with the wire or with the processor that
    encodes. The processor time of the engine tells them apart: where it is a large part of the busy
    time, the codec is the bottleneck, and the wire's rate remains unknown. That rate is then
    assumed a little higher with every window, until the next gentler codec is tried, whose window
    shows the true rate. Where many ranks share a processor, its time says less; but if a codec that
    has just been changed to takes clearly longer than the wire did before, the codec itself takes
    that time. Codecs that do not quantise cost no time of their own: all of their time is the
    wire's.

    Attributes:
        link: speed by the latest window; None before the first.
    """

    def __init__(self) -> None:
        self.link: Link | None = None
        self._codec_s = dict(CODEC_S)

    def learn(
        self,
        codec: Codec,
        load: Load,
        busy_s: float,
        cpu_s: float,
        latency_s: float,
        is_first: bool,
    ) -> Link:
        """Learns from a window of that codec and returns the link's new speed.

        Args:
            busy_s, cpu_s: of a step: time in which a bucket was in flight; engine's processor time.
            latency_s: of a step, and part of busy_s.
            is_first: True for the first window since the codec changed.
        """
        busy = max(busy_s - latency_s, busy_s / 10, 1e-9)
        rate, elements = encoded_bytes(load, codec) / busy, sum(bucket.large for bucket in load)
        if codec.quantises and elements:
            name, own, before = codec.name, busy / elements, self.link.rate if self.link else rate
            took_over = is_first and cpu_s >= _SUSPECT * busy and rate * _CLEARLY < before
            if took_over or cpu_s >= _BOUND * busy:
                self._codec_s[name] = own
                reach = max(before, rate * (_REACH if codec.bits > 4 else 2 * _REACH))
                rate = max(rate, before if is_first else min(before * _PROBE, reach))
            else:
                self._codec_s[name] = min(self._codec_s[name], own)
        self.link = Link(rate, min(latency_s, busy_s), dict(self._codec_s))
        return self.link

    def state_dict(self) -> dict[str, Any]:
        """Returns the learned speeds for a checkpoint."""
        rate = None if self.link is None else self.link.rate
        return {"rate": rate, "codec_s": dict(self._codec_s)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the learned speeds of a checkpoint."""
        self._codec_s = {**CODEC_S, **state["codec_s"]}
        rate = state["rate"]
        self.link = None if rate is None else Link(rate, 0.0, dict(self._codec_s))


# ---- the law ----


@dataclasses.dataclass(frozen=True)
class Rung:
    """A codec, and the number of micro-batches over which gradients are accumulated."""

    codec: Codec
    accumulate: int = 1

    def __str__(self) -> str:
        return self.codec.name + (f" over {self.accumulate}" if self.accumulate > 1 else "")


def ladder(
    allow: Collection[str] = (),
    *,
    linear: bool = False,
    adapters: bool = False,
    max_accumulate: int = 1,
) -> tuple[Rung, ...]:
    """Returns the rungs, gentlest first.

    Args:
        allow: codecs beyond int8: int4, onebit.
        linear: True if the optimizer's update is linear in the gradients; else onebit is left out.
        adapters: True if a small part of the model is trained: then no rung quantises.
        max_accumulate: most micro-batches over which gradients may be accumulated.

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
        raise ConfigError(
            f"allow={name!r}: 'auto' takes none, bf16 and int8 by itself; what may "
            "be allowed beside is int4 and onebit"
        )
    return codec


@dataclasses.dataclass(frozen=True)
class Change:
    """Change to a rung from a step on, with the reason."""

    step: int
    rung: Rung
    reason: str


@dataclasses.dataclass(frozen=True)
class Outlook:
    """Forecast of the steps of all rungs, at one moment.

    Attributes:
        load, link, ready_s: buckets of a step, speed of the link, times at which buckets are ready.
        compute_s: seconds of a micro-batch.
        deferred: True if means are needed only once the next step's first bucket is ready.
    """

    load: Load
    link: Link
    ready_s: Sequence[float]
    compute_s: float
    deferred: bool = False

    @property
    def hide_s(self) -> float:
        """Seconds that backward hides."""
        return self.ready_s[-1]

    def slack_s(self, rung: Rung) -> float:
        """Seconds that hide after the last bucket, where means are deferred."""
        return rung.accumulate * self.compute_s - self.hide_s if self.deferred else 0.0

    def step_s(self, rung: Rung) -> float:
        """Seconds of a micro-batch: its compute, and its share of the exposed time."""
        behind = exposed_s(self.load, rung.codec, self.link, self.ready_s)
        return self.compute_s + max(0.0, behind - self.slack_s(rung)) / rung.accumulate

    def cautious(self) -> Outlook:
        """Returns the forecast for a wire that takes _LONGER for each byte."""
        link = dataclasses.replace(self.link, rate=self.link.rate / _LONGER)
        return dataclasses.replace(self, link=link)

    def gentlest(self, rungs: Iterable[Rung], shortest: float, otherwise: Rung) -> Rung:
        """Returns the first rung whose step is nearly the shortest, if there is one."""
        near = (rung for rung in rungs if self.step_s(rung) <= _NEAR * shortest)
        return next(near, otherwise)


class Law:
    """Decides which rung a run uses.

    Args:
        rungs: rungs to choose from, gentlest first; see ``ladder``.
        rung: the first rung; None: the second of rungs.
        first_steps: number of steps in which no rung that quantises is chosen.

    Attributes:
        rungs: as given; may be changed between two decisions.
        rung: rung in force, or decided.
    """

    def __init__(
        self, rungs: Sequence[Rung], rung: Rung | None = None, *, first_steps: int = FIRST_STEPS
    ) -> None:
        self.rungs = tuple(rungs)
        self.rung = rung or self.rungs[min(1, len(self.rungs) - 1)]
        self._first_steps = first_steps
        self._rates = Rates()
        self._since = 0
        self._is_settled = False  # True once a measurement led to a decision
        self._is_first_window = True
        self._harsher = self._gentler = 0  # consecutive windows in favour of such a rung

    def decide(
        self,
        step: int,
        ranks: Sequence[WindowMedians],
        load: Load,
        ready_s: Sequence[float],
        latency_s: float = 0.0,
    ) -> Change | None:
        """Decides from a window that ended before ``step``; returns the change, or None.

        Args:
            ranks: measurements of each rank.
            load: buckets of a step.
            ready_s: times at which the buckets are ready on one rank; the slowest rank's are
                assumed to be in proportion.
            latency_s: latency of a bucket.
        """
        measured = [medians for medians in ranks if medians.steps]
        if self.rung not in self.rungs:
            return self._change(step, self.rungs[-1], f"{self.rung} is not allowed any more")
        is_nothing = not encoded_bytes(load, self.rung.codec)
        if len(measured) < len(ranks) or is_nothing or len(ready_s) != len(load):
            return None
        slowest = max(measured, key=lambda medians: medians.compute_s)
        link = self._rates.learn(
            self.rung.codec,
            load,
            slowest.busy_s,
            slowest.cpu_s,
            latency_s,
            self._is_first_window,
        )
        self._is_first_window = False
        stretch = slowest.hide_s / ready_s[-1] if ready_s[-1] > 0 else 1.0
        outlook = Outlook(
            load,
            dataclasses.replace(link, latency_s=latency_s),
            [at * stretch for at in ready_s],
            slowest.compute_s / self.rung.accumulate,
            deferred=slowest.deferred > 0,
        )
        return self._choose(step, outlook, slowest)

    def _choose(self, step: int, outlook: Outlook, medians: WindowMedians) -> Change | None:
        waits = step < self._first_steps
        rungs = [rung for rung in self.rungs if not (waits and rung.codec.quantises)]
        shortest = min(outlook.step_s(rung) for rung in rungs)
        excess = outlook.step_s(self.rung) / shortest
        if excess > _HARSHER:
            to = outlook.gentlest(rungs, shortest, self.rung)
            self._harsher, self._gentler = self._harsher + 1, 0
            is_due = excess > _GROSS or self._harsher >= _HARSHER_WINDOWS
        else:
            gentler = itertools.takewhile(lambda rung: rung != self.rung, rungs)
            to = outlook.cautious().gentlest(gentler, shortest, self.rung)
            self._harsher, self._gentler = 0, self._gentler + 1 if to != self.rung else 0
            is_due = self._gentler >= _GENTLER_WINDOWS and step - self._since >= _DWELL
        is_first, self._is_settled = not self._is_settled, True
        if to == self.rung or not (is_due or is_first):
            return None
        return self._change(step, to, _why(self.rung, to, outlook, medians))

    def _change(self, step: int, to: Rung, reason: str) -> Change:
        self.rung, self._since = to, step + DELAY
        self._harsher = self._gentler = 0
        self._is_first_window = True
        return Change(step + DELAY, to, reason)

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint: strings, numbers and dictionaries of them."""
        return {
            "rates": self._rates.state_dict(),
            "since": self._since,
            "is_settled": self._is_settled,
        }

    def load_state_dict(self, state: Mapping[str, Any], rung: Rung) -> None:
        """Restores the state of a checkpoint, on that rung if it is allowed."""
        self._rates.load_state_dict(state["rates"])
        self._since, self._is_settled = int(state["since"]), bool(state["is_settled"])
        self.rung = rung if rung in self.rungs else self.rung


def _why(now: Rung, to: Rung, outlook: Outlook, medians: WindowMedians) -> str:
    """Describes the measurement that led to a change, for people."""
    wire = medians.wire_bytes or outlook.link.rate * medians.busy_s
    rate = 8e-9 * wire / medians.busy_s if medians.busy_s else 0.0
    hides = "the next step" if outlook.deferred else "backward"
    now_ms, to_ms, hide_ms = (
        f"{1e3 * seconds:.3g} ms"
        for seconds in (
            transfer_s(outlook.load, now.codec, outlook.link),
            transfer_s(outlook.load, to.codec, outlook.link),
            outlook.hide_s + outlook.slack_s(now),
        )
    )
    return (
        f"{now} needs {now_ms} on the wire at {rate:.3g} Gbit/s, {hides} hides {hide_ms}; "
        f"{to} {to_ms}"
    )
