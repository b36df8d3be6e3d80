"""The threads that call back when something is over.

One thread leads: it takes what is over from the core, in order, and calls back. A callback may wait
for something that another callback is to do, so a second thread stands by, and takes over from a
leader that waits. That one stands by in turn when its callback returns.

    leader     take, call, take, call - - - (waits) - - - - - returns: stands by
    stand-by   - - - - - - - - - - - - - leads: take, call, take, call

A leader is relieved only while it is in a callback: when that says that it is about to wait
(``step_aside``), which this package says where it waits and where a Future is asked for; when
something else has been over for a while, and the callback has used next to no CPU time meanwhile;
and when others have been late for BUSY_S, whatever it does.

Invariants: callbacks begin in the order in which their things were over, and run one at a time, but
for those that wait or take long. However deep they wait for each other, there is a thread for the
next one: threads are made where none is left to stand by. A leader outside of a callback stays the
leader, so only one thread takes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

LATE_MS = 10
BUSY_S = 1.0
_WAITING = 0.25  # a callback that uses less of a CPU than this waits
_SPARE = 4  # threads that are kept
_TAKE_MS = 60_000
_log = logging.getLogger("ringcomm")
_here = threading.local()
#: Whether there has been any: who asks often asks this first.
are_running = False


class Source(Protocol):
    """What knows what is over."""

    def take(self, timeout_ms: int) -> Callable[[], None] | None:
        """Waits for the next thing that is over and returns what calls back; None: there is none
        yet, or ``interrupt`` was called."""

    def wait_late(self, late_ms: int) -> bool:
        """Waits until something has been over for so long and was not taken, or until ``hurry`` or
        ``interrupt`` is called. False if it gave up before."""

    def hurry(self) -> None:
        """Ends the current or next ``wait_late``."""

    def interrupt(self) -> None:
        """Ends the current or next ``take`` and ``wait_late``."""


def is_caller() -> bool:
    """Whether this thread is one that calls back."""
    return getattr(_here, "callers", None) is not None


def step_aside() -> None:
    """The callback that this thread is in, if it is in one, may wait: others go on without it."""
    callers: Callers | None = getattr(_here, "callers", None)
    if callers is not None:
        callers.relieve()


class Callers:
    """The threads of one source, which are started when it first has something to call back.

    Args:
        name: of the threads.
        source: what they take from.
    """

    def __init__(self, name: str, source: Source) -> None:
        self._name = name
        self._source = source
        self._place = threading.Lock()  # of the one thread that stands by
        self._lock = threading.RLock()  # of what follows; a signal handler may call within a call
        self._threads: set[threading.Thread] = set()
        self._spare = 0  # threads that stand by, or are going to
        self._leader: threading.Thread | None = None
        self._calls = 0  # that leaders have begun
        self._calling = False  # the leader is in one
        self._relieved = False  # and is not waited for
        self._stopping = False
        self._ended = False  # and nothing is left to take
        self._at_end: Callable[[], None] | None = None

    def start(self) -> None:
        """Starts the first thread. Harmless the second time."""
        global are_running
        with self._lock:
            are_running = True
            if not self._threads:
                self._add_thread()

    def relieve(self) -> None:
        """If this thread leads, another does from here on."""
        with self._lock:
            if self._leader is not threading.current_thread() or self._relieved:
                return
            self._relieved = True
        self._source.hurry()

    def stop(self, at_end: Callable[[], None]) -> None:
        """Calls back for all that is over by now and ends the threads. ``at_end`` is called when
        the last is gone: before this returns, unless it is called on one of them."""
        with self._lock:
            self._stopping = True
            inside = threading.current_thread() in self._threads
            self._at_end = at_end if inside else None
        self._source.interrupt()
        if inside:
            return
        while thread := self._any_thread():
            thread.join()
        at_end()

    # ---- threads ----

    def _add_thread(self) -> None:
        """Under the lock."""
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._threads.add(thread)
        self._spare += 1
        try:
            thread.start()
        except BaseException:  # at the interpreter's end there are no more
            self._threads.discard(thread)
            self._spare -= 1
            raise

    def _any_thread(self) -> threading.Thread | None:
        with self._lock:  # a thread is added and started under it
            return next(iter(self._threads), None)

    def _run(self) -> None:
        _here.callers = self
        me = threading.current_thread()
        while self._stand_by(me):
            self._lead(me)
            with self._lock:
                if self._spare >= _SPARE:
                    break
                self._spare += 1
        with self._lock:
            self._threads.discard(me)
            at_end = None if self._threads else self._at_end
        if at_end is not None:
            at_end()

    def _stand_by(self, me: threading.Thread) -> bool:
        """Returns True once this thread is the leader, False when there is no more to do."""
        with self._place:
            while not self._becomes_leader(me):
                if self._ended:
                    return False
                if self._source.wait_late(LATE_MS):
                    self._look()
        return True

    def _becomes_leader(self, me: threading.Thread) -> bool:
        with self._lock:
            is_free = self._calling and (self._relieved or self._stopping)
            if self._ended or not (is_free or self._leader is None):
                return False
            self._leader = me
            self._calling = self._relieved = False
            self._spare -= 1
            return True

    def _look(self) -> None:
        """Something may be late: relieves a leader that is in a callback and waits."""
        calls, since = self._calls, time.monotonic()
        while not self._stopping and time.monotonic() - since < BUSY_S:
            before = self._cpu_of_call(calls)
            if before is None or self._relieved:
                return
            time.sleep(LATE_MS / 1000)
            after = self._cpu_of_call(calls)
            if after is None or after - before < _WAITING * LATE_MS / 1000:
                break
        with self._lock:
            if self._calling and self._calls == calls:
                self._relieved = True

    def _cpu_of_call(self, number: int) -> float | None:
        """CPU seconds of the leader; None unless it is in this call."""
        with self._lock:  # without which it cannot end
            if self._leader is None or not self._calling or self._calls != number:
                return None
            assert self._leader.ident is not None
            return time.clock_gettime(time.pthread_getcpuclockid(self._leader.ident))

    def _lead(self, me: threading.Thread) -> None:
        """Takes and calls back until it is relieved, or there is no more."""
        while self._leader is me:
            stopping = self._stopping  # read first: what was over by then is still taken
            call = self._source.take(0 if stopping else _TAKE_MS)
            if call is not None:
                self._call(me, call)
                del call  # it holds the work, and so the tensor
            elif stopping:
                with self._lock:
                    self._ended = True
                self._source.hurry()

                return

    def _call(self, me: threading.Thread, call: Callable[[], None]) -> None:
        with self._lock:
            self._calls += 1
            self._calling = True
            if self._spare == 0:
                with contextlib.suppress(RuntimeError):
                    self._add_thread()
        try:
            call()
        except BaseException:  # sys.exit() in a callback too: others are still to be called
            _log.exception("a callback of a finished collective raised")
        with self._lock:
            if self._leader is me:
                self._calling = self._relieved = False
