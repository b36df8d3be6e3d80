"""One selectors loop with timers, for sockets that are on their way to becoming lanes.

It exists only while ranks are joined, in the thread that joins them. Invariants: callbacks run in
that thread only, never from within watch() or call_at(); a socket is watched by one callback;
close() lets go of everything and closes no socket.
"""

from __future__ import annotations

import heapq
import itertools
import selectors
import socket
import time
from collections.abc import Callable
from typing import Protocol

LOOK_EVERY = 0.05
"""Seconds between two looks at what no descriptor tells of."""

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE

Callback = Callable[[], None]


class Watched(Protocol):
    """A socket, or another loop."""

    def fileno(self) -> int:
        """Its descriptor; negative if it is closed."""
        ...


class Timer:
    """A callback at a time; cancel() any number of times."""

    def __init__(self, callback: Callback) -> None:
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        """Keeps the callback from running."""
        self.callback = None


class Loop:
    """Watches sockets and runs timers until told otherwise."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()

    def fileno(self) -> int:
        """Readable where a watched socket is ready, so that another loop can watch this one."""
        return self._selector.fileno()

    def watch(self, sock: Watched, events: int, callback: Callback) -> None:
        """Calls callback whenever sock is ready for one of events; replaces an earlier watch."""
        if sock in self._selector.get_map():
            self._selector.modify(sock, events, callback)
        else:
            self._selector.register(sock, events, callback)

    def forget(self, sock: Watched) -> None:
        """Stops watching sock, if it was watched. Call it before closing the socket."""
        if sock.fileno() >= 0 and sock in self._selector.get_map():
            self._selector.unregister(sock)

    def call_at(self, when: float, callback: Callback) -> Timer:
        """Calls callback once, at or after time.monotonic() == when."""
        timer = Timer(callback)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def repeat(self, seconds: float, callback: Callback) -> None:
        """Calls callback every so many seconds, as long as the loop runs."""

        def again() -> None:
            self.call_at(time.monotonic() + seconds, again)
            callback()

        self.call_at(time.monotonic() + seconds, again)

    def run(self, until: Callable[[], bool], deadline: float) -> bool:
        """Runs until the condition holds, checked after each event; returns whether it does at
        the deadline. Whatever a callback raises ends the run."""
        while not until():
            now = time.monotonic()
            if now >= deadline:
                return False
            self._turn(self._patience(now, deadline))
        return True

    def catch_up(self) -> None:
        """Does what is due, and waits for nothing."""
        self._turn(0.0)

    def let_go(self) -> None:
        """In a forked child: closes its copies of what is watched. The set of these is the
        parent's, too, and stays as it is."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self.close()

    def close(self) -> None:
        """Forgets all sockets and timers."""
        self._timers.clear()
        self._selector.close()

    def _turn(self, patience: float) -> None:
        for key, _ in self._selector.select(patience):
            # An earlier callback of this round may have let go of this socket.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        self._run_timers()

    def _patience(self, now: float, deadline: float) -> float:
        next_timer = self._timers[0][0] if self._timers else deadline
        return max(0.0, min(deadline, next_timer) - now)

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            _, _, timer = heapq.heappop(self._timers)
            if timer.callback is not None:
                timer.callback()
