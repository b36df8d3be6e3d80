"""Threads that call back when a work is over.

One of them leads: it takes finished works from the core, in order, and calls back. A stand-by
thread takes over from a leader whose callback announces that it may wait (``about_to_block``), as
this package does where it waits and where a Future is asked for, or whose callback has not returned
after LATE_S, since it may wait for another callback. The former leader stands by once its callback
returns.

    leader     take, call, take, call - - - (waits) - - - - - returns: stands by
    stand-by   - - - - - - - - - - - - - leads: take, call, take, call

Invariants: callbacks begin in the order in which their works were over, and run one at a time, but
for those that wait or take long. However deep they wait for each other, there is a thread for the
next one: threads are made where none is left to stand by. A leader outside of a callback stays the
leader, so only one thread takes. No thread wakes up while there is nothing to call.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

LATE_S = 0.01
_MOST_STANDBY = 4  # stand-by threads that are kept
_TAKE_MS = 60_000
_log = logging.getLogger("ringcomm")
_here = threading.local()
#: True once a thread was started; a cheap check before about_to_block() and the like.
are_running = False


def on_callback_thread() -> bool:
    """True on a thread that calls back."""
    return getattr(_here, "threads", None) is not None


def about_to_block() -> None:
    """Announces that the callback on this thread, if there is one, may wait; another leads."""
    threads: CallbackThreads | None = getattr(_here, "threads", None)
    if threads is not None:
        threads.replace_leader()


class CallbackThreads:
    """Threads of one source, which call ``start`` before the first callback.

    Args:
        name: name of the threads.
        take: waits for the next finished work, at most so many milliseconds, and returns its
            callback; None if there is none, or if ``interrupt`` was called.
        interrupt: ends the current or next ``take``.

    Attributes:
        are_started: True once there is a thread.
    """

    def __init__(
        self,
        name: str,
        take: Callable[[int], Callable[[], None] | None],
        interrupt: Callable[[], object],
    ) -> None:
        self._name = name
        self._take, self._interrupt = take, interrupt
        self._lock = threading.RLock()  # guards all below; a signal handler may call within a call
        self._changed = threading.Condition(self._lock)
        self.are_started = False
        self._threads: set[threading.Thread] = set()
        self._standby_count = 0  # threads that stand by, or are about to
        self._watched = False  # a stand-by thread measures how long the leader's callback takes
        self._leader: threading.Thread | None = None
        self._calling = False  # the leader is in a callback
        self._began = 0.0  # when the callback began
        self._replaced = False  # another thread may lead before the callback returns
        self._stopping = False
        self._ended = False  # stopping, and no work is left to take
        self._at_end: Callable[[], None] | None = None

    def start(self) -> None:
        """Starts the first thread, unless there is one. Raises RuntimeError if none can start."""
        global are_running
        with self._lock:
            are_running = True
            if not self._threads:
                self._add_thread()
            self.are_started = True

    def replace_leader(self) -> None:
        """Lets another thread lead, if this one does."""
        with self._lock:
            if self._leader is threading.current_thread() and not self._replaced:
                self._replaced = True
                self._changed.notify()

    def stop(self, at_end: Callable[[], None]) -> None:
        """Calls back for all works that are over by now and ends the threads. Calls ``at_end`` when
        the last has ended: before stop() returns, unless one of the threads called it."""
        with self._lock:
            self._stopping = True
            inside = threading.current_thread() in self._threads
            self._at_end = at_end if inside else None
            self._changed.notify_all()
        self._interrupt()
        if inside:
            return
        while self._threads:
            with self._lock:  # a thread is added and started under it
                threads = list(self._threads)
            for thread in threads:
                thread.join()
        at_end()

    # ---- threads ----

    def _add_thread(self) -> None:
        """Starts a thread that stands by. Called under the lock."""
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._threads.add(thread)
        self._standby_count += 1
        try:
            thread.start()
        except BaseException:  # at the interpreter's end no thread can start
            self._threads.discard(thread)
            self._standby_count -= 1
            raise

    def _run(self) -> None:
        _here.threads = self
        me = threading.current_thread()
        while self._stand_by(me):
            self._lead(me)
            with self._lock:
                if self._standby_count >= _MOST_STANDBY:
                    break
                self._standby_count += 1
        with self._lock:
            self._threads.discard(me)
            at_end = None if self._threads else self._at_end
        if at_end is not None:
            at_end()

    def _stand_by(self, me: threading.Thread) -> bool:
        """Waits; returns True once this thread is the leader, False when no work is left."""
        watches = False
        with self._lock:
            while not self._ended:
                if watches:
                    self._watched = watches = False
                late = time.monotonic() - self._began >= LATE_S
                gives_way = self._replaced or self._stopping or late
                if self._leader is None or (self._calling and gives_way):
                    self._leader = me
                    self._calling = self._replaced = False
                    self._standby_count -= 1
                    return True
                if self._calling and not self._watched:
                    self._watched = watches = True
                self._changed.wait(self._began + LATE_S - time.monotonic() if watches else None)
        return False

    def _lead(self, me: threading.Thread) -> None:
        """Takes works and calls back until another thread leads, or no work is left."""
        while self._leader is me:
            stopping = self._stopping  # read first, so that works over by then are still taken
            call = self._take(0 if stopping else _TAKE_MS)
            if call is not None:
                self._call(me, call)
                del call  # the callback holds the work, and so the tensor
            elif stopping:
                with self._lock:
                    self._ended = True
                    self._changed.notify_all()
                return

    def _call(self, me: threading.Thread, call: Callable[[], None]) -> None:
        with self._lock:
            self._began, self._calling = time.monotonic(), True
            if self._standby_count == 0:
                with contextlib.suppress(RuntimeError):
                    self._add_thread()
            elif not self._watched:
                self._changed.notify()
        try:
            call()
        except BaseException:  # sys.exit() in a callback, too: others are still to be called
            _log.exception("a callback of a finished collective raised")
        with self._lock:
            if self._leader is me:
                self._calling = self._replaced = False
