"""Figures of exchanges: buckets, bytes, and where the time of each step went.

    step before ends      first bucket           last bucket submitted     last one over
      |                      |                          |                       |
      |  forward, backward   | [bucket 1 .........]     |                       |
      |                      |      [bucket 2 ..........|..]  [last bucket .....|
      |<------------------ compute -------------------->|<------ exposed ------>|
                             |<------ hidden: any ----->|

DDP submits its last bucket when backward has nothing else left to do, so the time after that is
lost to communication, and transfers before it are hidden behind computation. On a GPU the host's
clock measures, and a bucket is over when its result is on the way back to the GPU.

Where a step's buckets travel during the next one (``deferred``), a step ends with its last
submission, and the time it lost is its wait for the buckets of the step before.

An optimizer that exchanges in its step waits, between updates, for one bucket after the other
(``stall``), and its step ends with it (``end_step``). The time lost is what it has waited, and
transfers at any other time are hidden. A step without exchanges is part of the next.

An OuterStep's calls are pauses of training (``paused``): what they do not wait is its own time.

Invariants: times are of time.perf_counter(), which is the core's clock. A step begins with the
first bucket after the last one of the step before. Bytes are counted in the buckets' own works, so
other traffic of the same communicator does not count. Totals count all steps since the reset;
single steps are kept for the latest KEPT.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from ...core.work import WorkStats
from .exchange_report import CodecStretch, ExchangeReport, Interval, StepReport

KEPT = 1000


def covered(intervals: Iterable[Interval], until: float) -> float:
    """Returns the length of the intervals' union, up to a moment."""
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        end = min(end, until)
        if end > reached:
            length += end - max(begin, reached)
            reached = end
    return length


@dataclasses.dataclass
class Moved:
    """Bytes that works have sent.

    Attributes:
        wire, shared: bytes of payload, over ports and through shared memory.
        rails: bytes by port, with frame headers.
    """

    wire: int = 0
    shared: int = 0
    rails: list[int] = dataclasses.field(default_factory=list)

    @property
    def total(self) -> int:
        """Bytes of payload, whichever way."""
        return self.wire + self.shared

    @classmethod
    def of(cls, works: Iterable[WorkStats]) -> Moved:
        """Returns the bytes of works."""
        moved = cls()
        for work in works:
            moved.join(cls(work.sent_bytes, work.shared_bytes, list(work.rail_bytes)))
        return moved

    def add(self, works: Iterable[WorkStats]) -> None:
        """Adds the bytes of more works."""
        self.join(Moved.of(works))

    def join(self, other: Moved) -> None:
        """Adds the bytes of another count."""
        self.wire += other.wire
        self.shared += other.shared
        self.rails += [0] * (len(other.rails) - len(self.rails))
        for rail, sent in enumerate(other.rails):
            self.rails[rail] += sent


class _Step:
    """Times and bytes of one step's exchange."""

    def __init__(self, began: float, deferred: bool, stalls: list[Interval], resets: int) -> None:
        self.began, self.deferred, self.stalls, self.resets = began, deferred, stalls, resets
        self.ended: float | None = None  # by end_step
        self.waited_for = float("inf")
        self.works: list[Interval] = []
        self.nbytes = self.open = self.submitted = 0
        self.last_submitted = 0.0
        self.complete = False
        self.moved = Moved()
        self.buckets: list[tuple[int, Moved]] = []  # (number, bytes), in order of completion

    @property
    def is_over(self) -> bool:
        return self.complete and not self.open

    def report(self) -> StepReport:
        """Returns the step's figures; the step must be over."""
        arrived = max(done for _, done in self.works)
        in_flight = covered(self.works, arrived)
        stalls = [(max(begin, self.began), end) for begin, end in self.stalls if end > self.began]
        exposed = covered(stalls, float("inf"))
        if self.ended is not None:
            ended = self.ended
            hidden = covered([*self.works, *stalls], float("inf")) - exposed
        else:
            late = 0.0 if self.deferred else max(0.0, arrived - self.last_submitted)
            ended, exposed = self.last_submitted + late, exposed + late
            until = self.waited_for if self.deferred else self.last_submitted
            hidden = covered(self.works, until)
        return {
            "step_s": ended - self.began,
            "compute_s": ended - self.began - exposed,
            "backward_s": self.last_submitted - min(begun for begun, _ in self.works),
            "hidden_s": hidden,
            "exposed_s": exposed,
            "in_flight_s": in_flight,
            "deferred": self.deferred,
            "buckets": len(self.works),
            "payload_bytes": self.nbytes,
            "wire_bytes": self.moved.wire,
            "shared_bytes": self.moved.shared,
        }


class Account:
    """Counts the buckets, bytes and times of one hook, optimizer or OuterStep.

    Attributes:
        submitted: number of buckets submitted since it was made; a reset does not change it.
        payload: bytes of the buckets that are over since the reset, before compression.
        sent: bytes sent for them.
        waited_s: seconds that training has stalled since the reset.
        training_s: seconds between pauses, from ``resume`` on.
        own_s: seconds of pauses in which nothing was waited for.
        deferred: whether the buckets of the coming steps travel during the next step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: float | None = None
        self._resumed: float | None = None  # start of training that is not counted yet
        self._unreported: deque[_Step] = deque(maxlen=KEPT)
        self.submitted = self._resets = 0
        self.deferred = False
        self._codecs: deque[CodecStretch] = deque(maxlen=KEPT)
        self._zero()

    def _zero(self) -> None:
        self._buckets = self.payload = 0
        self._comm_s = self.waited_s = self.training_s = self.own_s = 0.0
        self.sent = Moved()
        self._step: _Step | None = None
        self._steps: deque[_Step] = deque(maxlen=KEPT)
        self._stalls: list[Interval] = []  # of the step that is the next to begin or to end

    def reset(self) -> None:
        """Zeroes the totals; the coming step counts from now on, and nothing of those before."""
        self.drop_step()
        with self._lock:
            self._zero()
            self._resets += 1
            self._ended = time.perf_counter()

    def drop_step(self) -> None:
        """Drops a step that has begun and does not end; its buckets count in the totals only."""
        with self._lock:
            step, self._step = self._step, None
            for steps in (self._steps, self._unreported):
                if step is not None and step in steps:
                    steps.remove(step)

    def submit(
        self, nbytes: int, last: bool, began: float | None = None
    ) -> Callable[[Iterable[WorkStats]], None]:
        """Counts a bucket that starts now, or has started at ``began``. Returns a function: call it
        with the statistics of the bucket's works when these are over.

        Args:
            last: whether it is the last bucket of its step.
        """
        now = time.perf_counter() if began is None else began
        with self._lock:
            self.submitted += 1
            step = self._step or self._begin(now)
            number = step.submitted
            step.submitted += 1
            step.nbytes += nbytes
            step.open += 1
            if last:
                step.last_submitted, step.complete = now, True
                self._step = None
                if step.deferred:
                    self._ended = now

        def over(works: Iterable[WorkStats]) -> None:
            done, moved = time.perf_counter(), Moved.of(works)
            with self._lock:
                self._count(step, nbytes, (now, done), moved)
                step.buckets.append((number, moved))
                step.open -= 1
                if step.is_over and not step.deferred:
                    self._ended = done

        return over

    def _begin(self, now: float) -> _Step:
        began = now if self._ended is None else self._ended
        self._step = _Step(began, self.deferred, self._stalls, self._resets)
        self._stalls = []
        self._steps.append(self._step)
        self._unreported.append(self._step)
        return self._step

    def note(self, nbytes: int, works: Iterable[WorkStats]) -> None:
        """Notes a bucket that is over, of a step that ``end_step`` ends."""
        stats = list(works)
        moved = Moved.of(stats)
        if stats:
            begun = 1e-9 * min(work.submitted_ns for work in stats)
            done = 1e-9 * max(work.finished_ns for work in stats)
        else:
            begun = done = time.perf_counter()
        with self._lock:
            waited = [begin for begin, _ in self._stalls]
            step = self._step or self._begin(min([begun, *waited]))
            self.submitted += 1
            step.nbytes += nbytes
            self._count(step, nbytes, (begun, done), moved)

    def _count(self, step: _Step, nbytes: int, when: Interval, moved: Moved) -> None:
        """Counts a bucket that is over: in the totals, unless its step is of before a reset."""
        if step.resets == self._resets:
            self._buckets += 1
            self.payload += nbytes
            self._comm_s += when[1] - when[0]
            self.sent.join(moved)
        step.works.append(when)
        step.moved.join(moved)

    def end_step(self) -> None:
        """Ends a step whose buckets are all noted. A step without buckets is part of the next one,
        in which its waits count."""
        now = time.perf_counter()
        with self._lock:
            step = self._step
            if step is None:
                return
            self._step, self._ended = None, now
            step.ended, step.complete = now, True
            step.last_submitted = max(begun for begun, _ in step.works)
            step.stalls, self._stalls = step.stalls + self._stalls, []

    @contextlib.contextmanager
    def stall(self) -> Iterator[None]:
        """Measures a wait of training. It counts as lost in the step that ``end_step`` ends next;
        without ``end_step``, in the step that begins next."""
        began = time.perf_counter()
        with self._lock:
            if self._steps:
                self._steps[-1].waited_for = began
        try:
            yield
        finally:
            ended = time.perf_counter()
            with self._lock:
                self._stalls.append((began, ended))
                self.waited_s += ended - began

    def resume(self) -> None:
        """Starts training; the time before does not count."""
        self._resumed = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pauses training while its thread does, or waits for, something else."""
        entered, waited_before = time.perf_counter(), self.waited_s
        if self._resumed is not None:
            self.training_s += entered - self._resumed
        self._resumed = None
        try:
            yield
        finally:
            self._resumed = time.perf_counter()
            self.own_s += max(0.0, self._resumed - entered - (self.waited_s - waited_before))

    def unreported_steps(self) -> list[StepReport]:
        """Returns the finished steps that no earlier call returned, oldest first; a reset does not
        matter."""
        reports = []
        with self._lock:
            while self._unreported and self._unreported[0].is_over:
                reports.append(self._unreported.popleft().report())
        return reports

    def note_codec(self, step: int, codec: str) -> None:
        """Notes that a step begins, and its codec."""
        with self._lock:
            if not self._codecs or self._codecs[-1]["codec"] != codec:
                self._codecs.append({"codec": codec, "first": step, "last": step})
            self._codecs[-1]["last"] = step

    @property
    def position(self) -> int:
        """Number of the next bucket in its step, from 0 on."""
        step = self._step
        return 0 if step is None else step.submitted

    def latest_buckets(self) -> list[tuple[int, Moved]]:
        """Returns (number, bytes sent) of each finished bucket of the latest step, by number."""
        with self._lock:
            return sorted(self._steps[-1].buckets, key=lambda one: one[0]) if self._steps else []

    def report(self) -> ExchangeReport:
        """Returns the figures since the last reset."""
        with self._lock:
            return ExchangeReport(
                buckets=self._buckets,
                payload_bytes=self.payload,
                wire_bytes=self.sent.wire,
                shared_bytes=self.sent.shared,
                rail_bytes=list(self.sent.rails),
                comm_s=self._comm_s,
                works=[work for step in self._steps for work in step.works],
                steps=[step.report() for step in self._steps if step.is_over],
                codecs=[stretch.copy() for stretch in self._codecs],
            )
