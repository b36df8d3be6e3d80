"""The threads that call back (callback_threads.py): in order, one at a time, and others where one
waits or takes long.

A source of the test stands for the core: a queue of what is over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from patience import PATIENCE, until
from ranks import World

from ringcomm.core import callback_threads
from ringcomm.core.callback_threads import CallbackThreads


class Queue:
    """What is over, in order."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.calls: list[Callable[[], None]] = []
        self.interrupted = False

    def put(self, *calls: Callable[[], None]) -> None:
        with self.changed:
            self.calls += calls
            self.changed.notify_all()

    def take(self, timeout_ms: int) -> Callable[[], None] | None:
        with self.changed:
            self.changed.wait_for(lambda: self.calls or self.interrupted, timeout_ms / 1000)
            self.interrupted = False
            return self.calls.pop(0) if self.calls else None

    def interrupt(self) -> None:
        with self.changed:
            self.interrupted = True
            self.changed.notify_all()


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "test-callers"}


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.fixture
def made(queue: Queue) -> Iterator[CallbackThreads]:
    """Its threads must be gone after the test."""
    made = CallbackThreads("test-callers", queue.take, queue.interrupt)
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
            callback_threads.about_to_block()
        outcome.append(told[number + 1].wait(PATIENCE))
        told[number].set()

    queue.put(*(lambda n=n: call(n) for n in range(12)), told[12].set)  # type: ignore[misc]
    assert told[0].wait(PATIENCE)
    assert all(outcome)
    assert began == list(range(12))
    assert until(lambda: len(threads()) <= callback_threads._MOST_STANDBY + 2)


@pytest.mark.usefixtures("made")
def test_one_that_takes_long_holds_nothing_up(queue: Queue) -> None:
    """Whatever it does; and while it does that, the others are called one at a time."""
    returns, seen = threading.Event(), []
    queue.put(lambda: (returns.wait(PATIENCE), None)[1])
    queue.put(*(lambda n=n: seen.append(n) for n in range(100)))  # type: ignore[misc]
    assert until(lambda: len(seen) == 100)
    assert seen == list(range(100))
    returns.set()


@pytest.mark.usefixtures("made")
def test_nothing_wakes_up_while_there_is_nothing_to_call(
    queue: Queue, made: CallbackThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = threading.Event()
    for _ in range(3):  # also after callbacks that were watched
        queue.put(lambda: time.sleep(3 * callback_threads.LATE_S), called.set)
        assert called.wait(PATIENCE)
        called.clear()
    looked, wait = [], made._changed.wait
    monkeypatch.setattr(made._changed, "wait", lambda s: (looked.append(1), wait(s)))
    time.sleep(100 * callback_threads.LATE_S)
    assert len(looked) < 10  # what was told of the last callback; not one every LATE_S


def test_stopped_by_a_callback(queue: Queue) -> None:
    """What was over by then is still called back, also beside one that waits."""
    made, ended, called = (
        CallbackThreads("test-callers", queue.take, queue.interrupt),
        threading.Event(),
        threading.Event(),
    )
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


def test_a_thread_that_did_not_start_starts_with_the_next_callback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with World(1) as world:
        called: list[object] = []
        work = world.comms[0].allreduce(np.ones(3), async_op=True)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                work.call_back(called.append, elsewhere=True)
        work.call_back(called.append, elsewhere=True)
        assert until(lambda: called == [work])


def test_other_threads_may_announce_that_they_block() -> None:
    assert not callback_threads.on_callback_thread()
    callback_threads.about_to_block()
