"""The clock of a run whose time counts: it stands still while the model is judged.

    watch = Watch(comm, every=10, limit_s=480.0, sent=port_bytes)
    train(comm, run, distributed=True, watch=watch)
    watch.curve         of rank 0: [step, what the model is judged by, seconds, bytes sent]

Invariants: all ranks stop and go on together, so nobody trains while another one judges. Whether
the time is up is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np

from ringcomm import Communicator


class Watch:
    """One rank's.

    Args:
        every: steps from one judgement to the next.
        limit_s: no step is begun when a judgement finds that so many seconds have passed.
        sent: bytes that have left this rank's ports, of any time.

    Attributes:
        seconds: of training, as the slowest rank has it.
        is_over: whether the limit was reached.
    """

    def __init__(
        self, comm: Communicator, *, every: int, limit_s: float, sent: Callable[[], int]
    ) -> None:
        self.every, self._limit_s = every, limit_s
        self._comm, self._sent = comm, sent
        self.curve: list[tuple[int, float | None, float, int]] = []
        self.seconds, self.is_over, self._bytes = 0.0, False, 0

    def start(self) -> None:
        """Begins to count."""
        self._comm.barrier()
        self._began, self._sent_before = time.perf_counter(), self._sent()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Does not count what is done within, of which all ranks wait for the end."""
        taken = time.perf_counter() - self._began
        self._bytes += self._sent() - self._sent_before
        self.seconds += float(self._comm.allreduce(np.array([taken]), "max")[0])
        self.is_over = self.seconds >= self._limit_s
        yield
        self.start()

    def note(self, step: int, figure: float | None) -> None:
        """What the model was judged by; within ``stopped``."""
        self.curve.append((step, figure, self.seconds, self._bytes))
