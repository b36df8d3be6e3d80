"""The threads that call back (callers.py): in order, one at a time, and others where one waits.

A source of the test stands for the core: a queue of what is over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from patience import PATIENCE, until

from ringcomm import callers
from ringcomm.callers import Callers


class Queue:
    """What is over, in order."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.calls: list[tuple[float, Callable[[], None]]] = []
        self.hurried = self.interrupted = False

    def put(self, *calls: Callable[[], None]) -> None:
        with self.changed:
            self.calls += [(time.monotonic(), call) for call in calls]
            self.changed.notify_all()

    def take(self, timeout_ms: int) -> Callable[[], None] | None:
        with self.changed:
            self.changed.wait_for(lambda: self.calls or self.interrupted, timeout_ms / 1000)
            self.interrupted = False
            return self.calls.pop(0)[1] if self.calls else None

    def _is_late(self, late_ms: int) -> bool:
        return bool(self.calls) and time.monotonic() - self.calls[0][0] >= late_ms / 1000

    def wait_late(self, late_ms: int) -> bool:
        with self.changed:
            while not (self.hurried or self._is_late(late_ms)):
                self.changed.wait(late_ms / 1000 if self.calls else None)
            self.hurried = False
            return True

    def hurry(self) -> None:
        with self.changed:
            self.hurried = True
            self.changed.notify_all()

    def interrupt(self) -> None:
        self.interrupted = True
        self.hurry()


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "test-callers"}


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.fixture
def made(queue: Queue) -> Iterator[Callers]:
    """Its threads must be gone after the test."""
    made = Callers("test-callers", queue)
    made.start()
    yield made
    ended = threading.Event()
    made.stop(ended.set)
    assert ended.is_set()
    assert until(lambda: not threads())


@pytest.mark.usefixtures("made")
def test_they_are_called_in_order_by_one_thread(queue: Queue) -> None:
    seen: list[tuple[int, str, threading.Thread]] = []

    def call(number: int) -> None:
        seen.append((number, "begins", threading.current_thread()))
        time.sleep(0)
        seen.append((number, "ends", threading.current_thread()))

    queue.put(*(lambda n=n: call(n) for n in range(200)))  # type: ignore[misc]
    assert until(lambda: len(seen) == 400)
    assert [entry[:2] for entry in seen] == [
        (n, what) for n in range(200) for what in ("begins", "ends")
    ]


@pytest.mark.parametrize("says_so", [True, False])
@pytest.mark.usefixtures("made")
def test_callbacks_wait_for_each_other(queue: Queue, says_so: bool) -> None:
    """Each for the next, twelve deep, more than there are threads at first."""
    told = [threading.Event() for _ in range(13)]
    began: list[int] = []
    outcome: list[bool] = []

    def call(number: int) -> None:
        began.append(number)
        if says_so:
            callers.step_aside()
        outcome.append(told[number + 1].wait(PATIENCE))
        told[number].set()

    queue.put(*(lambda n=n: call(n) for n in range(12)), told[12].set)  # type: ignore[misc]
    assert told[0].wait(PATIENCE)
    assert all(outcome)
    assert began == list(range(12))
    assert until(lambda: len(threads()) <= callers._SPARE + 2)


@pytest.mark.usefixtures("made")
def test_one_that_computes_is_not_disturbed(
    queue: Queue, made: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Save for very long. How much CPU time it gets is for the machine to say, so not here."""
    used = iter(range(10**9))
    monkeypatch.setattr(made, "_cpu_of_call", lambda _: float(next(used)))
    monkeypatch.setattr(callers, "BUSY_S", 0.5)
    took: list[float] = []
    began = time.monotonic()
    done = threading.Event()
    queue.put(lambda: (done.wait(PATIENCE), None)[1], lambda: took.append(time.monotonic()))
    queue.put(done.set)
    assert done.wait(PATIENCE)
    assert took[0] - began >= 0.5


def test_stopped_by_a_callback(queue: Queue) -> None:
    """What was over by then is still called back, also beside one that waits."""
    made, ended, called = Callers("test-callers", queue), threading.Event(), threading.Event()
    queue.put(lambda: (called.wait(PATIENCE), None)[1], lambda: made.stop(ended.set), called.set)
    made.start()
    assert ended.wait(PATIENCE)
    assert called.is_set()
    assert until(lambda: not threads())


@pytest.mark.usefixtures("made")
def test_an_exception_stops_nothing(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    called = threading.Event()
    queue.put(lambda: 1 // 0, called.set)  # type: ignore[arg-type, return-value]
    assert called.wait(PATIENCE)
    assert "a callback of a finished collective raised" in caplog.text


def test_others_have_nothing_to_step_aside_for() -> None:
    assert not callers.is_caller()
    callers.step_aside()
