"""A thread that runs jobs one after the other, beside the training.

Invariants: jobs run in the order in which they were submitted, one at a time. The thread starts
with the first job. The interpreter's exit does not wait for it: closing the communicators ends the
collectives that its jobs wait for.
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
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Queues a job. The Future raises the job's exception."""
        if self._thread is None:
            thread = threading.Thread(
                target=_work, args=(self._jobs,), name=self._name, daemon=True
            )
            thread.start()  # raises if the system refuses; the next job tries again
            self._thread = thread
        future: Future[None] = Future()
        self._jobs.put((job, future))
        return future

    def close(self, patience: float | None = None) -> None:
        """Ends the thread when all jobs are done, and waits for that, at most ``patience`` seconds.
        A later job starts a new thread."""
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
