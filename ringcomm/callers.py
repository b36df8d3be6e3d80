"""The threads that call back when something is over.

One of them leads: it takes what is over from the core, in order, and calls back. One that stands by
takes over from a leader whose callback says that it is about to wait (``step_aside``), which this
package says where it waits and where a Future is asked for, or has not returned after LATE_S, for
it may wait for what another callback is to do. That thread stands by when its callback returns.

    leader     take, call, take, call - - - (waits) - - - - - returns: stands by
    stand-by   - - - - - - - - - - - - - leads: take, call, take, call

Invariants: callbacks begin in the order in which their things were over, and run one at a time, but
for those that wait or take long. However deep they wait for each other, there is a thread for the
next one: threads are made where none is left to stand by. A leader outside of a callback stays the
leader, so only one thread takes. Nothing wakes up while there is nothing to call.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

LATE_S = 0.01
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

    def interrupt(self) -> None:
        """Ends the current or next ``take``."""


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
        self._lock = threading.RLock()  # of what follows; a signal handler may call within a call
        self._changed = threading.Condition(self._lock)
        self._threads: set[threading.Thread] = set()
        self._spare = 0  # threads that stand by, or are going to
        self._watched = False  # one of them looks how long the leader's callback takes
        self._leader: threading.Thread | None = None
        self._calling = False  # the leader is in a callback
        self._began = 0.0  # when it was begun
        self._relieved = False  # it is not waited for
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
            self._changed.notify()

    def stop(self, at_end: Callable[[], None]) -> None:
        """Calls back for all that is over by now and ends the threads. ``at_end`` is called when
        the last is gone: before this returns, unless it is called on one of them."""
        with self._lock:
            self._stopping = True
            inside = threading.current_thread() in self._threads
            self._at_end = at_end if inside else None
            self._changed.notify_all()
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
        watches = False
        with self._lock:
            while not self._ended:
                if watches:
                    self._watched = watches = False
                if self._is_free():
                    self._leader = me
                    self._calling = self._relieved = False
                    self._spare -= 1
                    return True
                if self._calling and not self._watched:
                    self._watched = watches = True
                self._changed.wait(self._began + LATE_S - time.monotonic() if watches else None)
        return False

    def _is_free(self) -> bool:
        """Whether somebody else may lead. Under the lock."""
        if self._leader is None:
            return True
        late = time.monotonic() - self._began >= LATE_S
        return self._calling and (self._relieved or self._stopping or late)

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
                    self._changed.notify_all()
                return

    def _call(self, me: threading.Thread, call: Callable[[], None]) -> None:
        with self._lock:
            self._began, self._calling = time.monotonic(), True
            if self._spare == 0:
                with contextlib.suppress(RuntimeError):
                    self._add_thread()
            elif not self._watched:
                self._changed.notify()
        try:
            call()
        except BaseException:  # sys.exit() in a callback too: others are still to be called
            _log.exception("a callback of a finished collective raised")
        with self._lock:
            if self._leader is me:
                self._calling = self._relieved = False
