"""Makes lanes anew that a running communicator has lost.

    the core loses a lane --> the higher rank dials until the lower one answers (the lower one, too,
    where its port has another address now) --> each tells the other where it stands (Mark) --> both
    cores go on over the new connection

    all lanes of a peer are lost, and its host refuses every address --> the peer has ended

Invariants: all of it runs on one thread, "ringcomm lanes", which close() ends; nobody is let in but
who proves to be a rank of this communicator and asks for a lane between the two; a connection is
the core's or closed; of two attempts at a lane the later one counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import math
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol

from .dialer import Dial
from .handshake_params import Role
from .lanes import NEWS_LANE, LaneId, Plan
from .loop import READ, Loop, Reading, inode
from .moved_ports import MovedPorts
from .sockets import is_link_local, keep_alive, tune
from .status import StatusSocket

_LOOK_EVERY = 0.25
"""Seconds between two looks at what the core has lost."""
_PATIENCE = 5.0
"""Seconds for the other end's mark."""
_REST, _LONGEST_REST, _LONGEST_ALONE = 0.5, 30.0, 1.0
"""Seconds from one attempt at a lane to the next. They begin with the first and double, up to the
second; where no lane to the peer is left, up to the third."""
_STEADY = 2.0
"""Seconds for which a lane was open, after which it is tried at once when it is lost again."""
_DEAF, _DEAF_TO_KNOCKS = 0.5, 2.5
"""Seconds for which a peer's host refuses connections, after which the peer has ended: a lower
rank's, which has accepted before, and a higher one's. Its firewall may refuse all connections; but
if it lives, it dials within that time."""
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


class Losses(NamedTuple):
    """Lanes that are to be made anew."""

    lost: set[LaneId]
    silent: set[LaneId]
    """Open, but their peer is silent on all: it may have lost them, and cannot tell."""


class Core(Protocol):
    """The lanes of a communicator."""

    def losses(self) -> Losses | None:
        """Returns what is lost now; None once the communicator has failed."""

    def drop(self, lane: LaneId) -> Mark | None:
        """Gives a lane up, if it is not lost yet; None if it cannot be made anew."""

    def renew(self, lane: LaneId, fd: int, ours: Mark, theirs: Mark) -> bool:
        """Goes on over a connected socket, which is the core's from now on. False if the lane is
        not where our mark says."""

    def lose_peer(self, peer: int) -> None:
        """Ends the communicator, as the peer has ended; without effect while it has a lane."""

    def report(self) -> list[dict[str, Any]]:
        """Returns a row for each lane, for people."""

    def close(self) -> None:
        """Has every later call do nothing, and waits for one that is under way."""


@dataclasses.dataclass(frozen=True)
class Keeping:
    """Part of a bring-up that a LaneKeeper needs."""

    plan: Plan
    """The lanes that a link may have, and the listeners, which still listen."""
    finish: Callable[[LaneId, socket.socket], None]
    """Readies a connected socket of a lane as the bring-up did."""
    addresses_now: Callable[[Collection[LaneId]], dict[LaneId, str]]
    """Returns the address that each lane's port has here: another one, if it has lost that of the
    plan."""
    late: frozenset[LaneId] = frozenset()
    """Lanes of the plan that could not be made yet."""

    def close(self) -> None:
        """Closes the listeners; for use before they are handed on."""
        for listener in self.plan.listeners:
            listener.close()


class Pace:
    """Paces the attempts at lanes: one that was made anew in vain is not tried again at once."""

    def __init__(self) -> None:
        self._tries: dict[LaneId, tuple[float, float]] = {}
        self._made: dict[LaneId, float] = {}

    def begin(self, lane: LaneId, now: float, is_alone: bool) -> bool:
        """Returns True, and notes the attempt, if a lost lane may be tried now.

        is_alone: the peer has no other lane.
        """
        if now > self._made.pop(lane, math.inf) + _STEADY:
            self._tries.pop(lane, None)
        began, rest = self._tries.get(lane, (-math.inf, _REST / 2))
        if now < began + min(rest, _LONGEST_ALONE if is_alone else _LONGEST_REST):
            return False
        self._tries[lane] = now, min(2 * rest, _LONGEST_REST)
        return True

    def forget(self, lane: LaneId) -> None:
        """Has a lane tried at once: its port has another address."""
        self._tries.pop(lane, None)

    def made(self, lane: LaneId, now: float) -> None:
        """Notes that a lane was made anew."""
        self._made[lane] = now


class LaneKeeper:
    """Watches the lanes of one communicator. close() it before the core is freed.

    Args:
        keeping: its listeners are the keeper's from now on.
        core: asked and told on the keeper's thread.

    Raises OSError if it cannot start.
    """

    def __init__(self, keeping: Keeping, core: Core) -> None:
        plan = keeping.plan
        self._plan, self._core, self._finish = plan, core, keeping.finish
        self._addresses_now = keeping.addresses_now
        self._unproven = set(keeping.late)  # lanes whose peer may not listen where the plan says
        self._loop = Loop()
        self._dials: dict[LaneId, Dial] = {}
        self._pace = Pace()
        self._meetings: dict[LaneId, _Meeting] = {}
        self._links: dict[int, set[LaneId]] = {}
        for lane in plan.targets:
            self._links.setdefault(lane.peer, set()).add(lane)
        self._is_closing = False
        self._waker, self._woken = socket.socketpair()
        self._waker_inode = inode(self._waker.fileno())
        self._loop.watch(self._woken, READ, lambda: self._loop.forget(self._woken))
        self._acceptor = plan.accept(
            self._loop,
            Role.LANE_ANEW,
            lambda _lane, _claimed: None,
            self._welcome,
        )
        self._moved_ports = MovedPorts(
            self._loop, plan, self._acceptor, self._addresses_now, self._hear
        )
        self._status: StatusSocket | None = None
        with contextlib.suppress(OSError):  # the job works without it
            self._status = StatusSocket(self._loop, self._report)
        self._loop.repeat(_LOOK_EVERY, self._look)
        self._thread = threading.Thread(target=self._run, name="ringcomm lanes", daemon=True)
        _live.add(self)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._is_closing = True
            self._run()  # which closes all that is open
            self._waker.close()
            raise OSError(errno.EAGAIN, str(error)) from None

    def close(self) -> None:
        """Ends the thread, which closes all that the core does not have. The core is not called any
        more, even if this raises KeyboardInterrupt. Not for the thread itself."""
        self._is_closing = True
        try:
            self._core.close()
        finally:
            if inode(self._waker.fileno()) == self._waker_inode:
                self._waker.close()
            self._waker.detach()
            self._thread.join(_PATIENCE)  # a handler of its log may wait for this thread

    @property
    def is_own_thread(self) -> bool:
        """True on the thread that makes lanes anew, where the garbage collector may run, too."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        try:
            self._loop.run(lambda: self._is_closing, math.inf)
        except Exception:  # as where the program has closed its descriptors
            _log.exception("lost lanes are not made anew any more")
        finally:
            _live.discard(self)
            self._loop.disown_closed()
            for dial in self._dials.values():
                dial.stop()
            for meeting in list(self._meetings.values()):
                meeting.end()
            self._moved_ports.close()
            self._acceptor.close()
            if self._status is not None:
                self._status.close()
            self._loop.close()
            self._woken.close()

    def _report(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "rank": self._plan.rank,
            "world_size": self._plan.world_size,
            "lanes": self._core.report(),
        }

    def _look(self) -> None:
        losses = self._core.losses()
        if losses is None:  # who listened on would be taken for one that works
            self._is_closing = True
            return
        sources = self._addresses_now(losses.lost | losses.silent)
        moved = {
            lane: sources[lane] for lane in losses.lost if self._has_moved(lane, sources[lane])
        }
        open_lanes = self._plan.targets.keys() - losses.lost - losses.silent if moved else ()
        self._moved_ports.tell(moved, open_lanes)
        due = {lane for lane, source in sources.items() if self._is_due(lane, losses, source)}
        for lane in self._dials.keys() - due:
            self._dials.pop(lane).stop()
        for lane, dial in list(self._dials.items()):
            if dial.target.source != sources[lane]:
                self._dials.pop(lane).stop()
                self._pace.forget(lane)
        for lane in due - self._meetings.keys():
            if lane not in self._dials or self._dials[lane].is_over:
                self._dial(lane, sources[lane], is_alone=self._links[lane.peer] <= due)
        for peer in {lane.peer for lane in losses.lost}:
            if self._is_deaf(peer):
                self._core.lose_peer(peer)

    def _is_deaf(self, peer: int) -> bool:
        """True if a peer's host refuses our connections. A port that is dark tells nothing, nor
        an address that may not be the peer's, or not any more."""
        if self._links[peer] & self._meetings.keys():
            return False
        lanes = (self._links[peer] & self._dials.keys()) - self._unproven
        dials = [(lane, self._dials[lane]) for lane in lanes]
        if any(dial.shaking or dial.is_over for _, dial in dials):
            return False
        knocks = self._plan.expected
        return any(
            dial.refused_for >= (_DEAF_TO_KNOCKS if lane in knocks else _DEAF)
            for lane, dial in dials
        )

    def _is_due(self, lane: LaneId, losses: Losses, source: str) -> bool:
        """True if this rank dials the lane, or has to find out whether its peer still listens."""
        if lane not in self._plan.expected or self._links[lane.peer] <= losses.lost:
            return True
        is_told = self._moved_ports.may_have_helped(lane)
        return lane in losses.lost and self._has_moved(lane, source) and not is_told

    def _has_moved(self, lane: LaneId, source: str) -> bool:
        """True if the port of a lane has another address here than its peer may know."""
        return source != self._plan.targets[lane].source or self._moved_ports.has_told(lane)

    def _hear(self, lane: LaneId) -> None:
        """Dials a lane anew whose peer has told where it listens now."""
        self._unproven.add(lane)
        self._pace.forget(lane)
        if lane in self._dials:
            self._dials.pop(lane).stop()

    def _is_home(self, lane: LaneId, sock: socket.socket) -> bool:
        """True if a connection comes from where the peer listens."""
        try:
            return is_link_local(sock) or sock.getpeername()[0] == self._plan.targets[lane].address
        except OSError:
            return False

    def _dial(self, lane: LaneId, source: str, is_alone: bool) -> None:
        if not self._pace.begin(lane, time.monotonic(), is_alone):
            return
        if lane in self._plan.expected and not self._has_moved(lane, source):
            self._dials[lane] = self._plan.knock(self._loop, lane)
        else:
            self._dials[lane] = self._plan.dial(
                self._loop,
                Role.LANE_ANEW,
                lane,
                lambda sock: self._reach(lane, sock),
                source,
            )

    def _reach(self, lane: LaneId, sock: socket.socket) -> None:
        """Goes on with a connection that this rank has dialled."""
        losses = self._core.losses()
        # Of two at once the higher rank's counts.
        is_second = lane in self._meetings and lane in self._plan.expected
        is_wanted = losses is not None and lane in losses.lost | losses.silent and not is_second
        ours = self._core.drop(lane) if is_wanted else None
        if ours is None:  # it is well again
            sock.close()
            return
        self._meet(_Meeting(self, lane, sock, ours))

    def _welcome(self, lane: LaneId, sock: socket.socket) -> None:
        """Goes on with a connection that this rank has accepted."""
        if lane.lane == NEWS_LANE:
            self._moved_ports.hear(lane, sock)
            return
        mine = self._meetings.get(lane)
        if mine is not None and mine.ours is not None and lane not in self._plan.expected:
            sock.close()
            return
        self._meet(_Meeting(self, lane, sock, is_proof=self._is_home(lane, sock)))

    def _meet(self, meeting: _Meeting) -> None:
        if meeting.lane in self._meetings:
            self._meetings[meeting.lane].end()
        self._meetings[meeting.lane] = meeting
        meeting.begin()


def _close_in_child() -> None:
    for keeper in list(_live):
        keeper._acceptor.close_in_child()
        keeper._waker.close()
        keeper._woken.close()
        keeper._loop.close_in_child()
    _live.clear()


_live: weakref.WeakSet[LaneKeeper] = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_in_child)


@dataclasses.dataclass
class _Meeting:
    """A connection whose ends tell each other where they stand: first the one that has dialled, as
    the other does not give up a lane before that."""

    keeper: LaneKeeper
    lane: LaneId
    sock: socket.socket
    ours: Mark | None = None
    """None: this rank has accepted it."""
    is_proof: bool = True
    """It shows that the peer is where the plan says."""

    def begin(self) -> None:
        """Waits for the other end's mark, and sends ours."""
        self._reading = Reading(self.keeper._loop, self.sock, _MARK.size, _PATIENCE, self._read)
        if self.ours is not None:
            self._send(self.ours)

    def _send(self, mark: Mark) -> None:
        # If the peer has hung up, whoever has the socket next finds that out.
        with contextlib.suppress(OSError):
            self.sock.send(mark.pack(), socket.MSG_NOSIGNAL)  # into an empty buffer: all of it

    def _read(self, data: bytes | None) -> None:
        keeper = self.keeper
        ours = self.ours
        if data is not None and ours is None:
            ours = keeper._core.drop(self.lane)
            if ours is not None:
                self._send(ours)
        if data is None or ours is None:
            self.end()
            return
        theirs = Mark(*_MARK.unpack(data))
        self._leave()
        tune(self.sock)
        keep_alive(self.sock, False)
        keeper._finish(self.lane, self.sock)
        if keeper._core.renew(self.lane, self.sock.detach(), ours, theirs):
            keeper._pace.made(self.lane, time.monotonic())
            keeper._unproven.discard(self.lane)
            if not self.is_proof:
                keeper._unproven.add(self.lane)
            source = keeper._addresses_now([self.lane])[self.lane]
            if keeper._has_moved(self.lane, source):
                keeper._moved_ports.tell_peer(self.lane, source)

    def _leave(self) -> None:
        self._reading.stop()
        if self.keeper._meetings.get(self.lane) is self:
            del self.keeper._meetings[self.lane]

    def end(self) -> None:
        """Closes the connection."""
        self._leave()
        with contextlib.suppress(OSError):
            self.sock.close()
