"""Control connections of one rank: an authenticated one to each other rank; they show who lives.

They are made as lanes are (acceptor, dialer, handshake), with a role of their own, and
are quiet while a round runs: nothing here has a thread, and messages that arrive meanwhile stay in
the kernel until the next ``run`` or ``catch_up``.

Invariants: only ranks that passed the handshake are read from, one bounded message at a time; a
rank that has a living connection is not let in a second time, so nobody takes its place while it
lives; a forked child closes its copies at once, or a dead rank would seem to live in it.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from ..bootstrap.acceptor import Acceptor
from ..bootstrap.dialer import Dial, Target
from ..bootstrap.handshake_params import Key, RefusedError, Role, Terms, duplicate, unexpected
from ..bootstrap.join_failure import REFUSED
from ..bootstrap.loop import READ, WRITE, Loop
from ..bootstrap.sockets import end_when_silent, has_hung_up, show, tune
from ..errors import BootstrapError
from .decision import Silent
from .messages import HEADER, Address, Kind, frame, most_bytes

_log = logging.getLogger("ringcomm")
_READ_BYTES = 1 << 18
_ENDED = (errno.ECONNRESET, errno.EPIPE)

Receive = Callable[[int, Kind, bytes], None]
"""Takes a message: rank, kind, payload. A BootstrapError that it raises ends the connection."""
LinkMade = Callable[[int], None]
"""Called with each rank that a connection has been made to."""


class Connections(Protocol):
    """Interface of Control that Agreement and Formation use; see Control."""

    @property
    def loop(self) -> Loop: ...
    @property
    def connected(self) -> frozenset[int]: ...
    @property
    def silent(self) -> Mapping[int, Silent]: ...
    @property
    def letting_in(self) -> bool: ...
    def gone_since(self, rank: int) -> float | None: ...
    def is_linked(self, rank: int) -> bool: ...
    def send(self, rank: int, kind: Kind, payload: bytes) -> None: ...
    def send_all(self, kind: Kind, payload: bytes) -> None: ...
    def run(self, until: Callable[[], bool], deadline: float) -> bool: ...
    def catch_up(self) -> None: ...
    def dial(self, rank: int, places: Iterable[Address]) -> None: ...
    def troubles(self) -> dict[int, str]: ...
    def close(self) -> None: ...


class Control:
    """All control connections of one rank; owns the listeners.

    Args:
        rank, world_size: this rank, and the size of the whole job.
        key, job: as the handshake takes them.
        peer_timeout: seconds without a packet from a host after which its connection ends.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        key: Key,
        job: bytes,
        listeners: Iterable[socket.socket],
        peer_timeout: float,
        receive: Receive,
        link_made: LinkMade,
    ) -> None:
        self._rank, self._world = rank, world_size
        self._key, self._job = key, job
        self._peer_timeout = peer_timeout
        self._receive, self._link_made = receive, link_made
        self._links: dict[int, list[_Link]] = {}
        self._ended: dict[int, tuple[float, bool]] = {}  # by rank: time; True: its process ended
        self._began = time.monotonic()
        self._dials: dict[int, list[Dial]] = {}
        self.loop = Loop()
        terms = Terms(Role.MEMBERSHIP, job, world_size, -1, rank)
        self._acceptor = Acceptor(
            self.loop,
            list(listeners),
            key,
            terms,
            self._admit,
            lambda sock, claimed: self._take(claimed.client_rank, sock),
        )
        _alive.add(self)

    # ---- living ranks ----

    @property
    def connected(self) -> frozenset[int]:
        """Ranks whose process lives: they have a connection, or took one and have not yet answered
        the handshake."""
        return frozenset(rank for rank in self._others() if self.gone_since(rank) is None)

    @property
    def silent(self) -> dict[int, Silent]:
        """Ranks at whose address something took a connection but does not answer the handshake."""
        found = {}
        for rank in self._others():
            doors = [] if self.is_linked(rank) else self._doors(rank)
            if doors:
                since, _ = self._ended.get(rank, (self._began, True))
                where = (show(dial.target.address, dial.target.port) for dial in doors)
                found[rank] = Silent(since, tuple(where))
        return found

    def _doors(self, rank: int) -> list[Dial]:
        return [dial for dial in self._dials.get(rank, ()) if dial.shaking]

    def gone_since(self, rank: int) -> float | None:
        """Returns the time at which the rank's process ended; None where it lives. If the network
        ended the connection, it counts as ended peer_timeout later."""
        trying = [dial for dial in self._dials.get(rank, ()) if not dial.is_over]
        if self.is_linked(rank) or self._doors(rank):
            return None
        ended, surely = self._ended.get(rank, (self._began, True))
        refused = any(dial.state == REFUSED for dial in trying)
        return ended if surely or refused else ended + self._peer_timeout

    def is_linked(self, rank: int) -> bool:
        """True if there is a connection to the rank."""
        return bool(self._links.get(rank))

    @property
    def letting_in(self) -> bool:
        """True while a peer is in the middle of the handshake here."""
        return self._acceptor.pending > 0

    def _others(self) -> Iterable[int]:
        return (rank for rank in range(self._world) if rank != self._rank)

    # ---- messages ----

    def send(self, rank: int, kind: Kind, payload: bytes) -> None:
        """Sends a message to one rank, if it is connected."""
        links = self._links.get(rank)
        if links:
            links[-1].send(frame(kind, payload))

    def send_all(self, kind: Kind, payload: bytes) -> None:
        """Sends a message to every rank that is connected."""
        for rank in list(self._links):
            self.send(rank, kind, payload)

    def run(self, until: Callable[[], bool], deadline: float) -> bool:
        """Handles messages until the condition holds; returns False if it does not by the
        deadline."""
        return self.loop.run(until, deadline)

    def catch_up(self) -> None:
        """Handles messages that have arrived already."""
        self.loop.catch_up()

    # ---- connections ----

    def dial(self, rank: int, places: Iterable[Address]) -> None:
        """Tries to connect to a rank at these addresses while the loop runs and there is no
        connection."""
        if self.is_linked(rank):
            return
        self._dials[rank] = [dial for dial in self._dials.get(rank, ()) if not dial.is_over]
        known = {(d.target.address, d.target.port) for d in self._dials.get(rank, ())}
        wanted = [place for place in places if place not in known]
        terms = Terms(Role.MEMBERSHIP, self._job, self._world, self._rank, rank)
        self._dials[rank].extend(
            Dial(
                self.loop,
                Target(address, port),
                self._key,
                terms,
                lambda _dial, sock: self._take(rank, sock),
                lambda dial, _refusal: dial.stop() if self.is_linked(rank) else None,
            )
            for address, port in wanted
        )

    def troubles(self) -> dict[int, str]:
        """Returns the states of all dials, by rank."""
        return {
            rank: "; ".join(dict.fromkeys(f"{dial.state} {dial.detail}".strip() for dial in dials))
            for rank, dials in self._dials.items()
        }

    def close(self) -> None:
        """Closes every socket."""
        _alive.discard(self)
        for dials in self._dials.values():
            for dial in dials:
                dial.stop()
        self._dials.clear()
        self._acceptor.close()
        for links in self._links.values():
            for link in links:
                link.close()
        self._links.clear()
        self.loop.close()

    def _admit(self, claimed: Terms) -> RefusedError | None:
        if claimed.rail or claimed.lane:
            return unexpected(claimed)
        for link in list(self._links.get(claimed.client_rank, [])):
            if not link.has_ended():
                return duplicate(claimed)
            self.drop(link, True)
        return None

    def _take(self, rank: int, sock: socket.socket) -> None:
        tune(sock)
        end_when_silent(sock, self._peer_timeout)
        self._links.setdefault(rank, []).append(_Link(self, self.loop, rank, sock))
        for dial in self._dials.get(rank, ()):
            if not dial.shaking:  # else the other end may have this connection already
                dial.stop()
        self._link_made(rank)

    # ---- called by its links ----

    def received(self, rank: int, kind: int, payload: bytes) -> None:
        """Passes on a message. Raises BootstrapError for an unknown kind."""
        try:
            known = Kind(kind)
        except ValueError:
            raise BootstrapError(f"rank {rank} sent what no ringcomm sends", rank=rank) from None
        self._receive(rank, known, payload)

    def most_bytes(self) -> int:
        """Returns the most bytes of a payload."""
        return most_bytes(self._world)

    def drop(self, link: _Link, surely: bool) -> None:
        """Removes a connection that has ended. surely: the other process has ended, too."""
        link.close()
        links = self._links.get(link.rank, [])
        if link in links:
            links.remove(link)
        if not links:
            self._links.pop(link.rank, None)
            self._ended[link.rank] = (time.monotonic(), surely)


class _Link:
    """A connection to one rank."""

    def __init__(self, control: Control, loop: Loop, rank: int, sock: socket.socket) -> None:
        self.rank = rank
        self._control = control
        self._loop = loop
        self._sock = sock
        self._inbox = bytearray()
        self._outbox = bytearray()
        loop.watch(sock, READ, self._advance)

    def send(self, message: bytes) -> None:
        """Sends as many bytes as the socket takes at once, and the rest from the loop."""
        waits = bool(self._outbox)
        self._outbox += message
        if not waits:
            self._flush()

    def has_ended(self) -> bool:
        """True if the other end has closed."""
        return has_hung_up(self._sock)

    def close(self) -> None:
        """Closes the socket."""
        self._loop.forget(self._sock)
        self._sock.close()

    def _flush(self) -> None:
        try:
            sent = self._sock.send(self._outbox)
        except BlockingIOError:
            sent = 0
        except OSError:  # the next read raises the reason
            self._outbox.clear()
            return
        del self._outbox[:sent]
        self._loop.watch(self._sock, READ | (WRITE if self._outbox else 0), self._advance)

    def _advance(self) -> None:
        if self._outbox:
            self._flush()
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._control.drop(self, error.errno in _ENDED)
            return
        if not data:
            self._control.drop(self, True)
            return
        self._inbox += data
        try:
            while self._take_message():
                pass
        except BootstrapError as error:
            _log.warning("membership: the connection to rank %d is closed: %s", self.rank, error)
            self._control.drop(self, True)

    def _take_message(self) -> bool:
        if len(self._inbox) < HEADER.size:
            return False
        kind, size = HEADER.unpack_from(self._inbox)
        if size > self._control.most_bytes():
            raise BootstrapError(f"rank {self.rank} sent what is too long", rank=self.rank)
        end = HEADER.size + size
        if len(self._inbox) < end:
            return False
        payload = bytes(self._inbox[HEADER.size : end])
        del self._inbox[:end]
        self._control.received(self.rank, kind, payload)
        return True


# ---- forks ----

_alive: weakref.WeakSet[Control] = weakref.WeakSet()


def _after_fork() -> None:
    for control in list(_alive):
        control.loop.close_in_child()
    _alive.clear()


os.register_at_fork(after_in_child=_after_fork)
