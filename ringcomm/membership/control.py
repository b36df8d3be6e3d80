"""Control connections of one rank: an authenticated one to each other rank; they show who lives.

They are made as lanes are (acceptor, dialer, handshake), with a role of their own, and
are quiet while a round runs: nothing here has a thread, and messages that arrive meanwhile stay in
the kernel until the loop's next ``run`` or ``catch_up``.

Invariants: only ranks that passed the handshake are read from, one bounded message at a time; a
rank that has a living connection is not let in a second time, so nobody takes its place while it
lives; a forked child closes its copies at once, or a dead rank would seem to live in it.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import socket
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable

from ..bootstrap.acceptor import Acceptor
from ..bootstrap.dialer import Dial, Target
from ..bootstrap.handshake_params import Key, RefusedError, Role, Terms, duplicate, unexpected
from ..bootstrap.join_failure import REFUSED
from ..bootstrap.loop import READ, WRITE, Loop
from ..bootstrap.sockets import end_when_silent, has_hung_up, show, tune
from ..errors import BootstrapError
from .decision import Silent
from .messages import HEADER, Address, Kind, most_bytes, no_message

_log = logging.getLogger("ringcomm")
_READ_BYTES = 1 << 18
_ENDED = (errno.ECONNRESET, errno.EPIPE)

Receive = Callable[[int, Kind, bytes], None]
"""Takes a message: rank, kind, payload. A BootstrapError that it raises ends the connection."""
LinkMade = Callable[[int], None]
"""Called with each rank that a connection has been made to."""


class Control:
    """All control connections of one rank; owns the listeners.

    Args:
        rank, world_size: this rank, and the size of the whole job.
        key, job: as the handshake takes them.
        peer_timeout: seconds without a packet from a host after which its connection ends.

    Attributes:
        loop: handles messages while it runs.
        receive: as given.
        most_bytes: most bytes of a payload.
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
        self.loop, self.receive, self.most_bytes = Loop(), receive, most_bytes(world_size)
        self._rank, self._world = rank, world_size
        self._key, self._job = key, job
        self._peer_timeout = peer_timeout
        self._link_made = link_made
        self._others = [other for other in range(world_size) if other != rank]
        self._links: defaultdict[int, list[_Link]] = defaultdict(list)
        self._dials: defaultdict[int, list[Dial]] = defaultdict(list)
        # By rank: since when it has no connection; True: its process has ended.
        self._ended = dict.fromkeys(self._others, (time.monotonic(), True))
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
        return frozenset(rank for rank in self._others if self.gone_since(rank) is None)

    @property
    def silent(self) -> dict[int, Silent]:
        """Ranks at whose address something took a connection but does not answer the handshake."""
        doors = {rank: self._doors(rank) for rank in self._others if not self.is_linked(rank)}
        return {
            rank: Silent(
                self._ended[rank][0],
                tuple(show(dial.target.address, dial.target.port) for dial in shaking),
            )
            for rank, shaking in doors.items()
            if shaking
        }

    def _doors(self, rank: int) -> list[Dial]:
        return [dial for dial in self._dials[rank] if dial.shaking]

    def gone_since(self, rank: int) -> float | None:
        """Returns the time at which the rank's process ended; None where it lives. If the network
        ended the connection, it counts as ended peer_timeout later."""
        if self.is_linked(rank) or self._doors(rank):
            return None
        ended, surely = self._ended[rank]
        refused = any(d.state == REFUSED for d in self._dials[rank] if not d.is_over)
        return ended if surely or refused else ended + self._peer_timeout

    def is_linked(self, rank: int) -> bool:
        """True if there is a connection to the rank."""
        return bool(self._links[rank])

    @property
    def letting_in(self) -> bool:
        """True while a peer is in the middle of the handshake here."""
        return self._acceptor.greeted > 0

    # ---- messages ----

    def send(self, rank: int, kind: Kind, payload: bytes) -> None:
        """Sends a message to one rank, if it is connected."""
        if self.is_linked(rank):
            self._links[rank][-1].send(HEADER.pack(kind, len(payload)) + payload)

    def send_all(self, kind: Kind, payload: bytes) -> None:
        """Sends a message to every rank that is connected."""
        for rank in self._others:
            self.send(rank, kind, payload)

    # ---- connections ----

    def dial(self, rank: int, places: Iterable[Address]) -> None:
        """Tries to connect to a rank at these addresses while the loop runs and there is no
        connection."""
        if self.is_linked(rank):
            return
        self._dials[rank] = [dial for dial in self._dials[rank] if not dial.is_over]
        known = {(d.target.address, d.target.port) for d in self._dials[rank]}
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
            if dials
        }

    def close(self) -> None:
        """Closes every socket."""
        _alive.discard(self)
        for dial in itertools.chain.from_iterable(self._dials.values()):
            dial.stop()
        self._dials.clear()
        self._acceptor.close()
        for link in itertools.chain.from_iterable(self._links.values()):
            link.close()
        self._links.clear()
        self.loop.close()

    def _admit(self, claimed: Terms) -> RefusedError | None:
        if claimed.rail or claimed.lane:
            return unexpected(claimed)
        for link in list(self._links[claimed.client_rank]):
            if not has_hung_up(link.sock):
                return duplicate(claimed)
            self.drop(link, True)
        return None

    def _take(self, rank: int, sock: socket.socket) -> None:
        tune(sock)
        end_when_silent(sock, self._peer_timeout)
        self._links[rank].append(_Link(self, rank, sock))
        for dial in self._dials[rank]:
            if not dial.shaking:  # else the other end may have this connection already
                dial.stop()
        self._link_made(rank)

    def drop(self, link: _Link, surely: bool) -> None:
        """Removes a connection that has ended. surely: the other process has ended, too."""
        link.close()
        links = self._links[link.rank]
        if link in links:
            links.remove(link)
        if not links:
            self._ended[link.rank] = (time.monotonic(), surely)


class _Link:
    """A connection to one rank."""

    def __init__(self, control: Control, rank: int, sock: socket.socket) -> None:
        self.rank, self.sock = rank, sock
        self._control = control
        self._inbox, self._outbox = bytearray(), bytearray()
        control.loop.watch(sock, READ, self._advance)

    def send(self, message: bytes) -> None:
        """Sends as many bytes as the socket takes at once, and the rest from the loop."""
        waits = bool(self._outbox)
        self._outbox += message
        if not waits:
            self._flush()

    def close(self) -> None:
        """Closes the socket."""
        self._control.loop.forget(self.sock)
        self.sock.close()

    def _flush(self) -> None:
        try:
            sent = self.sock.send(self._outbox)
        except BlockingIOError:
            sent = 0
        except OSError:  # the next read raises the reason
            self._outbox.clear()
            return
        del self._outbox[:sent]
        events = READ | (WRITE if self._outbox else 0)
        self._control.loop.watch(self.sock, events, self._advance)

    def _advance(self) -> None:
        if self._outbox:
            self._flush()
        try:
            data = self.sock.recv(_READ_BYTES)
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
            self._take_messages()
        except BootstrapError as error:
            _log.warning("membership: the connection to rank %d is closed: %s", self.rank, error)
            self._control.drop(self, True)

    def _take_messages(self) -> None:
        while len(self._inbox) >= HEADER.size:
            kind, size = HEADER.unpack_from(self._inbox)
            if size > self._control.most_bytes:
                raise BootstrapError(f"rank {self.rank} sent what is too long", rank=self.rank)
            end = HEADER.size + size
            if len(self._inbox) < end:
                return
            payload = bytes(self._inbox[HEADER.size : end])
            del self._inbox[:end]
            try:
                known = Kind(kind)
            except ValueError:
                raise no_message(self.rank) from None
            self._control.receive(self.rank, known, payload)


# ---- forks ----

_alive: weakref.WeakSet[Control] = weakref.WeakSet()


def _after_fork() -> None:
    for control in list(_alive):
        control._acceptor.close_in_child()
        control.loop.close_in_child()
    _alive.clear()


os.register_at_fork(after_in_child=_after_fork)
