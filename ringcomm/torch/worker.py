"""A thread that does one thing after the other, beside the training.

Invariants: jobs run in the order in which they were submitted, one at a time. The thread begins
with the first job. The interpreter's end does not wait for it: what it waits for there is over when
communicators are closed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

_Job = tuple[Callable[[], None], "Future[None]"]


class Worker:
    """One thread and its queue.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Has the job done. The Future raises what it raised."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._jobs,), name=self._name, daemon=True
            )
            self._thread.start()
        future: Future[None] = Future()
        self._jobs.put((job, future))
        return future

    def close(self, patience: float | None = None) -> None:
        """Ends the thread when all jobs are done, and waits for that, at most ``patience`` seconds.
        Another job begins another one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            self._jobs = queue.SimpleQueue()
            thread.join(patience)


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (one := jobs.get()) is not None:
        job, future = one
        try:
            job()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del one, job, future  # they hold tensors
