"""Pipeline of rounds: a thread that chooses blocks, sends them, and applies sums as they arrive.

    backward            | 1 has its gradients | 2 ...           | 3 ...
    this thread         | choose 1, send      | choose 2, send  | choose 3, send, step 1 | ...

Invariants: rounds are submitted, and waited for, in the order of ``add`` and ``finish``, whatever
time each takes: the same on all ranks. Before the first round of a step a message carries the
values that must be alike on all ranks; if they differ, nothing is applied. Only this thread uses
the communicator. Only it touches the master copy, except when no round is in flight. It never
touches the model's weights: it leaves the new weights in the entries, for the caller to show.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from ...core.chunks import Entries
from ...core.work import Work
from ...errors import ConfigError, MismatchError, RingcommError
from ...sparse import SparseRound
from ..sync.agreement import fingerprint, require_equal
from ..worker import Worker
from .host_bucket import HostBucket

_IN_FLIGHT = 2  # most rounds in flight


@dataclasses.dataclass(eq=False, repr=False)
class BucketRound:
    """Exchange and update of one bucket in one step.

    Attributes:
        bucket: the bucket.
        group: the hyperparameters, as they were when it began.
        number: number of the step, from 1.
        alike: values that must be the same on all ranks in this step; None: another round compares
            them.
        entries: the sums, when they have arrived; then the new weights. Poisoned if a gradient was
            not finite, in which case nothing has been changed.
        sent: its exchange, when that has begun.
        fingerprints: exchange of the fingerprints of ``alike``, if given, when that has begun.
    """

    bucket: HostBucket
    group: dict[str, Any]
    number: int
    alike: Mapping[str, object] | None = None
    entries: Entries = dataclasses.field(init=False)
    sent: SparseRound = dataclasses.field(init=False)
    fingerprints: Work = dataclasses.field(init=False)

    def cancel(self) -> None:
        """Raises ConfigError: the sum of a sent gradient is applied when it arrives."""
        raise ConfigError(f"{self.bucket.name} is on its way: it cannot be dropped")


class Pipeline:
    """Runs rounds in a thread.

    Args:
        apply: called in that thread, updates the master copy of a round's bucket by its entries.
    """

    def __init__(self, apply: Callable[[BucketRound], None]) -> None:
        self._apply = apply
        self._worker = Worker("ringcomm sparse")
        self._in_flight: collections.deque[BucketRound] = collections.deque()
        self._error: BaseException | None = None

    def add(self, one: BucketRound) -> Future[None]:
        """Queues a round. Returns a Future that completes, without an error, when its gradient has
        been read."""
        return self._worker.submit(functools.partial(self._begin, one))

    def finish(self) -> Future[None]:
        """Returns a Future that completes when all rounds added so far are over; with the first
        error of any. A MismatchError drops them, any other error is that of later calls, too."""
        return self._worker.submit(self._finish)

    def close(self) -> None:
        """Ends the thread after its current rounds."""
        self._worker.close()

    def _begin(self, one: BucketRound) -> None:
        try:
            if self._error is None:
                if one.alike is not None:
                    comm = one.bucket.exchange.comm
                    one.fingerprints = comm.allgather(fingerprint(one.alike), async_op=True)
                one.sent = one.bucket.exchange.submit(one.bucket.gradient)
                self._in_flight.append(one)
                if len(self._in_flight) > _IN_FLIGHT:
                    self._finish_first()
        except BaseException as error:
            self._error = error

    def _finish(self) -> None:
        while self._error is None and self._in_flight:
            try:
                self._finish_first()
            except MismatchError as error:
                self._error = error
        failed = self._error
        if isinstance(failed, MismatchError):  # nothing has been applied: the next step may be made
            while self._in_flight:
                one = self._in_flight.popleft()
                with contextlib.suppress(RingcommError):
                    one.sent.wait()
                    one.sent.undo()
            self._error = None
        if failed is not None:
            raise failed

    def _finish_first(self) -> None:
        one = self._in_flight[0]
        if one.alike is not None:
            require_equal(one.bucket.exchange.comm, one.fingerprints.wait(), one.alike)
        one.entries = self._in_flight.popleft().sent.wait()
        if not one.entries.poisoned:
            self._apply(one)
