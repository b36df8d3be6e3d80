"""Selector loop with timers, for sockets that are to become lanes.

It runs in one thread: that which joins the ranks, or a LaneKeeper's. Invariants: callbacks run in
that thread only, never from within watch() or call_at(); a socket is watched by one callback;
close() forgets all sockets and closes none.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import os
import selectors
import socket
import time
from collections.abc import Callable

_unclosed: list[selectors.EpollSelector] = []
"""Those whose descriptors are other files' now; else they would be closed with their objects."""

LOOK_EVERY = 0.05
"""Seconds between two checks of a state that no descriptor reports."""

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE

Callback = Callable[[], None]


def inode(descriptor: int) -> int:
    """Returns the inode of what a descriptor is; 0 if it is closed."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return 0


@dataclasses.dataclass
class Timer:
    """Callback that runs once at a time; cancel() may be called any number of times."""

    callback: Callback | None

    def cancel(self) -> None:
        """Keeps the callback from running."""
        self.callback = None


class Reading:
    """Reads so many bytes of a connection, which stays the caller's.

    Args:
        got: called once with them; with None if the connection ends before, or so many seconds
            later.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        size: int,
        seconds: float,
        got: Callable[[bytes | None], None],
    ) -> None:
        self._loop, self._sock, self._size, self._got = loop, sock, size, got
        self._data = b""
        self._timer = loop.call_at(time.monotonic() + seconds, lambda: self._end(None))
        loop.watch(sock, READ, self._read)

    def stop(self) -> None:
        """Reads no more."""
        self._timer.cancel()
        self._loop.forget(self._sock)

    def _read(self) -> None:
        try:
            part = self._sock.recv(self._size - len(self._data))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        self._data += part
        if len(self._data) == self._size:
            self._end(self._data)
        elif not part:
            self._end(None)

    def _end(self, data: bytes | None) -> None:
        self.stop()
        self._got(data)


class Loop:
    """Watches sockets and runs timers while run() is called."""

    def __init__(self) -> None:
        self._selector = selectors.EpollSelector()
        self._inode = inode(self._selector.fileno())
        self._inodes: dict[int, int] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()

    def fileno(self) -> int:
        """Returns a descriptor that is readable while a watched socket is ready, so that another
        loop can watch this one."""
        return self._selector.fileno()

    def watch(self, sock: socket.socket | Loop, events: int, callback: Callback) -> None:
        """Calls callback whenever sock is ready for one of events; replaces an earlier watch."""
        if sock in self._selector.get_map():
            self._selector.modify(sock, events, callback)
        else:
            self._selector.register(sock, events, callback)
            self._inodes[sock.fileno()] = inode(sock.fileno())

    def forget(self, sock: socket.socket | Loop) -> None:
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
        """Runs until the condition holds, checked after each event, or until the deadline.
        Returns True if the condition holds. An exception of a callback ends the run."""
        while not until():
            now = time.monotonic()
            if now >= deadline:
                return False
            next_timer = self._timers[0][0] if self._timers else deadline
            self._turn(max(0.0, min(deadline, next_timer) - now))
        return True

    def catch_up(self) -> None:
        """Handles events and timers that are due, without waiting."""
        self._turn(0.0)

    def close_in_child(self) -> None:
        """Closes a forked child's copies of the watched sockets. Does not unregister them, as the
        child shares the kernel's set of watched descriptors with its parent."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self.close()

    def disown_closed(self) -> None:
        """Detaches watched sockets whose descriptors another part of the program has closed: by now
        the numbers may be those of its own files."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket) and inode(key.fd) != self._inodes[key.fd]:
                self._selector.unregister(key.fileobj)
                key.fileobj.detach()

    def close(self) -> None:
        """Forgets all sockets and timers. A second time it does nothing."""
        self._timers.clear()
        if self._selector.get_map() is None:
            return
        if inode(self._selector.fileno()) == self._inode:
            self._selector.close()
        else:  # the number is another file's
            _unclosed.append(self._selector)

    def _turn(self, patience: float) -> None:
        """Waits at most so many seconds for events, handles them, and runs timers that are due."""
        for key, _ in self._selector.select(patience):
            # An earlier callback of this round may have unregistered this socket.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            _, _, timer = heapq.heappop(self._timers)
            if timer.callback is not None:
                timer.callback()
