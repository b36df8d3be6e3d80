"""Rounds on their way: a thread that chooses, sends, and steps the master copy as sums arrive.

    backward            | 1 has its gradients | 2 ...           | 3 ...
    this thread         | choose 1, send      | choose 2, send  | choose 3, send, step 1 | ...

Invariants: rounds are submitted, and waited for, in the order of ``add`` and ``finish``, whatever
time each takes: the same on all ranks. The first round of a step tells what must be alike on all
ranks by a message of its own, which travels before it; nothing is applied where it is not. The
communicator is this thread's alone. The master copy is touched by this thread only, but where
nothing is on its way. The model's weights are not touched at all: entries then have the new
weights, for whoever shows them.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from ...chunks import Entries
from ...errors import ConfigError
from ...sparse import SparseRound
from ...work import Work
from ..optim.agreement import fingerprint, require_equal
from ..worker import Worker
from .bucket import Bucket

_IN_FLIGHT = 2  # rounds behind which the next one is awaited

Apply = Callable[["Round"], None]


class Round:
    """One bucket in one step.

    Attributes:
        bucket: whose gradient travels.
        group: the hyperparameters, as they were when it began.
        number: of the step, from 1.
        alike: what all ranks must have the same of in this step; None: another round tells it.
        entries: the sums, once they are there; then the new weights. Poisoned where a gradient was
            not finite, and nothing has been changed then.
    """

    def __init__(
        self,
        bucket: Bucket,
        group: dict[str, Any],
        number: int,
        alike: Mapping[str, object] | None = None,
    ) -> None:
        self.bucket, self.group, self.number, self.alike = bucket, group, number, alike
        self.entries: Entries | None = None
        self.taken = threading.Event()  # the gradient is needed no more
        self.sent: SparseRound | None = None
        self.told: Work | None = None  # the fingerprints of what must be alike

    def drop(self) -> None:
        """It cannot be: what was sent is applied as it arrives."""
        raise ConfigError(f"{self.bucket.name} is on its way: it cannot be dropped")


class Pipeline:
    """Runs rounds.

    Args:
        apply: steps the master copy of a round's bucket by its entries, in this thread.
    """

    def __init__(self, apply: Apply) -> None:
        self._apply = apply
        self._worker = Worker("ringcomm sparse")
        self._flying: collections.deque[Round] = collections.deque()
        self._error: BaseException | None = None

    def add(self, one: Round) -> None:
        """Begins a round."""
        self._worker.submit(functools.partial(self._begin, one))

    def finish(self) -> Future[None]:
        """Is done when all rounds that were added are over; with the first error of any."""
        return self._worker.submit(self._finish)

    def close(self) -> None:
        """Ends the thread, when what it is at is over."""
        self._worker.close()

    def _begin(self, one: Round) -> None:
        try:
            if self._error is None:
                if one.alike is not None:
                    comm = one.bucket.exchange.comm
                    one.told = comm.allgather(fingerprint(one.alike), async_op=True)
                one.sent = one.bucket.exchange.submit(one.bucket.gradient)
                self._flying.append(one)
                if len(self._flying) > _IN_FLIGHT:
                    self._land()
        except BaseException as error:
            self._error = error
        finally:
            one.taken.set()

    def _finish(self) -> None:
        while self._error is None and self._flying:
            self._land()
        if self._error is not None:
            raise self._error

    def _land(self) -> None:
        one = self._flying.popleft()
        assert one.sent is not None
        if one.told is not None and one.alike is not None:
            require_equal(one.bucket.exchange.comm, one.told.wait(), one.alike)
        one.entries = one.sent.wait()
        if not one.entries.poisoned:
            self._apply(one)
