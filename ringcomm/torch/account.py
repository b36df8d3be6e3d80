"""What the hook has measured: buckets, bytes, and where the time of each step went.

    step before ends      first bucket           last bucket submitted     last one over
      |                      |                          |                       |
      |  forward, backward   | [bucket 1 .........]     |                       |
      |                      |      [bucket 2 ..........|..]  [last bucket .....|
      |<------------------ compute -------------------->|<------ exposed ------>|
                             |<------ hidden: any ----->|

DDP submits its last bucket when backward has nothing else left to do, so what comes after is lost
to communication, and what was in flight before is hidden behind computation. On a GPU the moments
are those of the host, and a bucket is over when its result is on the way back there.

Invariants: times are of time.perf_counter(). A step begins with the first bucket after the last one
of the step before. Totals count all steps since the reset; of single steps the latest KEPT remain.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ..intervals import Interval, covered

KEPT = 1000


class _Step:
    """One backward with its exchange."""

    def __init__(self, began: float, sent_before: int) -> None:
        self.began, self.sent_before = began, sent_before
        self.works: list[Interval] = []
        self.nbytes = self.open = 0
        self.last_submitted = 0.0
        self.complete = False
        self.wire_bytes: int | None = None

    def told(self) -> dict[str, Any]:
        """The step's figures; it must be over."""
        ended = max(done for _, done in self.works)
        exposed = max(0.0, ended - self.last_submitted)
        return {
            "step_s": ended - self.began,
            "compute_s": ended - self.began - exposed,
            "hidden_s": covered(self.works, self.last_submitted),
            "exposed_s": exposed,
            "buckets": len(self.works),
            "payload_bytes": self.nbytes,
            "wire_bytes": self.wire_bytes or 0,
        }


class Account:
    """The figures of one HookState.

    Args:
        sent: payload bytes that this rank's communicator has sent so far.
    """

    def __init__(self, sent: Callable[[], int]) -> None:
        self._sent = sent
        self._lock = threading.Lock()
        self._sent_before = 0
        self._ended: float | None = None
        self._zero()

    def _zero(self) -> None:
        self._buckets = self._nbytes = 0
        self._comm_s = 0.0
        self._step: _Step | None = None
        self._steps: deque[_Step] = deque(maxlen=KEPT)

    def reset(self) -> None:
        """Starts anew; the coming step counts from now on."""
        with self._lock:
            self._zero()
            self._sent_before = self._sent()
            self._ended = time.perf_counter()

    def submit(self, nbytes: int, last: bool) -> Callable[[], None]:
        """A bucket starts, ``last`` of its step. Returns what is to be called once it is over."""
        now = time.perf_counter()
        with self._lock:
            step = self._step or self._begin(now)
            step.nbytes += nbytes
            step.open += 1
            if last:
                step.last_submitted, step.complete = now, True
                self._step = None

        def over() -> None:
            done = time.perf_counter()
            with self._lock:
                self._buckets += 1
                self._nbytes += nbytes
                self._comm_s += done - now
                step.works.append((now, done))
                step.open -= 1
                if step.complete and not step.open:
                    self._ended = done

        return over

    def _begin(self, now: float) -> _Step:
        sent = self._sent()
        self._settle(sent)
        self._step = _Step(now if self._ended is None else self._ended, sent)
        self._steps.append(self._step)
        return self._step

    def _settle(self, sent: int) -> None:
        """Bytes of the latest step, if it is over: what was sent since it began."""
        latest = self._steps[-1] if self._steps else None
        if latest is not None and latest.wire_bytes is None and _over(latest):
            latest.wire_bytes = sent - latest.sent_before

    def report(self) -> dict[str, Any]:
        """See ``HookState.report``."""
        sent = self._sent()
        with self._lock:
            self._settle(sent)
            return {
                "buckets": self._buckets,
                "payload_bytes": self._nbytes,
                "wire_bytes": sent - self._sent_before,
                "comm_s": self._comm_s,
                "works": [work for step in self._steps for work in step.works],
                "steps": [step.told() for step in self._steps if _over(step)],
            }


def _over(step: _Step) -> bool:
    return step.complete and not step.open
