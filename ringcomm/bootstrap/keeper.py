"""Makes lanes anew that a running communicator has lost.

    the core loses a lane --> the higher rank dials until the lower one answers --> each tells the
    other where it stands (Mark) --> both cores go on over the new connection

Invariants: all of it runs on one thread, "ringcomm lanes", which close() ends; nobody is let in but
who proves to be a rank of this communicator and asks for a lane between the two; a connection is
the core's or closed; of two attempts at a lane the later one counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

from .dialer import Dial
from .handshake_params import Role
from .lanes import LaneId, Plan
from .loop import READ, Loop
from .sockets import keep_alive, tune

_LOOK_EVERY = 0.25
"""Seconds between two looks at what the core has lost."""
_PATIENCE = 5.0
"""Seconds for the other end's mark."""
_MARK = struct.Struct("<IIII")
_log = logging.getLogger("ringcomm")


class Mark(NamedTuple):
    """Where an end of a lane stands; rc_lane_mark has the meaning of each."""

    made: int
    received: int
    before: int
    previous: int
    ticket: int = 0
    """Not for the other end."""

    def pack(self) -> bytes:
        """Returns what the other end gets."""
        return _MARK.pack(*self[:-1])


class Core(Protocol):
    """The lanes of a running communicator."""

    def lost(self) -> Collection[LaneId]:
        """Returns the lanes that are lost now."""
        ...

    def drop(self, lane: LaneId) -> Mark | None:
        """Gives a lane up, if it is not lost yet; None if it cannot be made anew."""
        ...

    def renew(self, lane: LaneId, fd: int, ours: Mark, theirs: Mark) -> bool:
        """Goes on over a connected socket, which is the core's from now on. False if the lane is
        not where our mark says."""
        ...


@dataclasses.dataclass(frozen=True)
class Keeping:
    """Part of a bring-up that a LaneKeeper needs."""

    plan: Plan
    """The lanes that all agreed on, and the listeners, which still listen."""
    finish: Callable[[LaneId, socket.socket], None]
    """Readies a connected socket of a lane as the bring-up did."""

    def close(self) -> None:
        """Closes the listeners; for use before they are handed on."""
        for listener in self.plan.listeners:
            listener.close()


class LaneKeeper:
    """Watches the lanes of one communicator. close() it before the core is freed.

    Args:
        keeping: its listeners are the keeper's from now on.
        core: asked and told on the keeper's thread.
    """

    def __init__(self, keeping: Keeping, core: Core) -> None:
        plan = keeping.plan
        self._plan, self._core, self._finish = plan, core, keeping.finish
        self._loop = Loop()
        self._dials: dict[LaneId, Dial] = {}
        self._meetings: dict[LaneId, _Meeting] = {}
        self._is_closing = False
        self._acceptor = plan.accept(
            self._loop, Role.LANE_ANEW, lambda _lane, _claimed: None, self._meet
        )
        self._loop.repeat(_LOOK_EVERY, self._look)
        self._thread = threading.Thread(target=self._run, name="ringcomm lanes", daemon=True)
        _live.add(self)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, which closes all that the core does not have."""
        self._is_closing = True
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run(lambda: self._is_closing, math.inf)
        except Exception:  # as where the program has closed its descriptors
            _log.exception("lost lanes are not made anew any more")
        finally:
            self._end()

    def _end(self) -> None:
        _live.discard(self)
        for dial in self._dials.values():
            dial.stop()
        for meeting in list(self._meetings.values()):
            meeting.end()
        self._acceptor.close()
        self._loop.close()

    def _look(self) -> None:
        lost = set(self._core.lost())
        for lane in self._dials.keys() - lost:
            self._dials.pop(lane).stop()
        for lane in lost & self._plan.dials.keys() - self._meetings.keys():
            if lane not in self._dials or self._dials[lane].is_over:
                self._dials[lane] = self._dial(lane)

    def _dial(self, lane: LaneId) -> Dial:
        return self._plan.dial(
            self._loop, Role.LANE_ANEW, lane, lambda sock: self._meet(lane, sock)
        )

    def _meet(self, lane: LaneId, sock: socket.socket) -> None:
        if lane in self._meetings:
            self._meetings[lane].end()
        ours = self._core.drop(lane)
        if ours is None:
            sock.close()
            return
        self._meetings[lane] = _Meeting(self, lane, sock, ours)


def _close_in_child() -> None:
    for keeper in list(_live):
        for listener in keeper._plan.listeners:
            listener.close()
        keeper._loop.close_in_child()
    _live.clear()


_live: weakref.WeakSet[LaneKeeper] = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_in_child)


@dataclasses.dataclass
class _Meeting:
    """A connection whose ends tell each other where they stand."""

    keeper: LaneKeeper
    lane: LaneId
    sock: socket.socket
    ours: Mark
    got: bytes = b""

    def __post_init__(self) -> None:
        loop = self.keeper._loop
        self._timer = loop.call_at(time.monotonic() + _PATIENCE, self.end)
        loop.watch(self.sock, READ, self._read)
        try:
            self.sock.send(self.ours.pack())  # into an empty buffer: all of it
        except OSError:
            loop.call_at(0.0, self.end)

    def _read(self) -> None:
        try:
            part = self.sock.recv(_MARK.size - len(self.got))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        self.got += part
        if len(self.got) == _MARK.size:
            self._go_on(Mark(*_MARK.unpack(self.got)))
        elif not part:
            self.end()

    def _go_on(self, theirs: Mark) -> None:
        keeper = self.keeper
        self._leave()
        tune(self.sock, keeper._plan.congestion)
        keep_alive(self.sock, False)
        keeper._finish(self.lane, self.sock)
        keeper._core.renew(self.lane, self.sock.detach(), self.ours, theirs)

    def _leave(self) -> None:
        self._timer.cancel()
        self.keeper._loop.forget(self.sock)
        if self.keeper._meetings.get(self.lane) is self:
            del self.keeper._meetings[self.lane]

    def end(self) -> None:
        """Closes the connection."""
        self._leave()
        with contextlib.suppress(OSError):
            self.sock.close()
