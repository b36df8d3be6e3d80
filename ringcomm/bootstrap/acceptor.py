"""The accepting side of bring-up: authenticates incoming connections and hands them over.

    listener --accept--> new --complete HELLO--> greeted --PROOF--> welcome(sock, terms)
                          |                        |
                          +------------------------+--> turned away: wrong bytes, wrong key,
                                                        too slow, too many

A connection is greeted once it has sent a complete, well-formed HELLO; a peer's has usually arrived
when its connection is accepted. Connections without one have few places and lose them first.

Invariants: at most MAX_NEW new connections and NEW_PER_ADDRESS from one address, of which the
oldest gives way at once; each ends after NEW_PATIENCE seconds, or after CROWDED_PATIENCE if
NEW_PER_ADDRESS or more are new then. At most MAX_GREETED greeted ones, each for at most PATIENCE
seconds; the oldest of the address that has the most gives way, but not within GREETED_GRACE
seconds, in which any peer answers (so that a recorded HELLO, sent again and again, keeps nobody
out). 512 bytes are read from anyone. An error of accept() pauses a listener, it never ends the
bring-up. A stranger costs one small object, which goes with its socket.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Sequence

from .handshake import Admit, Server, Talk
from .handshake_params import Key, Outcome, RefusedError, Terms
from .loop import READ, Loop
from .pending_connections import Places
from .same_user import vetting
from .strangers import LOG
from .system import OUT_OF_RESOURCES, describe

MAX_NEW, NEW_PER_ADDRESS = 64, 8
MAX_GREETED = 256
NEW_PATIENCE, CROWDED_PATIENCE = 1.0, 0.05
"""Seconds for a whole HELLO: with fewer than NEW_PER_ADDRESS new connections, and with so many."""
PATIENCE = 5.0
"""Seconds for the rest of the handshake."""
GREETED_GRACE = 0.1
"""Seconds for which a greeted connection keeps its place, however many others come."""

_FULL_PAUSE, _ERROR_PAUSE = 0.01, 0.1
_ACCEPT_BATCH = 64
_DRAIN_BYTES = 352  # with a handshake's 160, at most 512 bytes are read from anyone

Welcome = Callable[[socket.socket, Terms], None]
TurnedAway = Callable[[str, RefusedError, Terms], None]


class Acceptor:
    """Accepts on the listeners, which it owns, and hands over connections that pass the handshake.

    Args:
        loop: where its sockets are watched.
        listeners: listening, non-blocking.
        key, terms, admit: as the handshake's Server takes them.
        welcome: takes each authenticated socket and what its peer proved to be.
        turned_away: called with the address, the reason and the claims of each connection that
            was refused after a well-formed HELLO.

    Attributes:
        trouble: the resource this process lacked when it last failed to accept; empty if it
            never failed.
    """

    def __init__(
        self,
        loop: Loop,
        listeners: Sequence[socket.socket],
        key: Key,
        terms: Terms,
        admit: Admit,
        welcome: Welcome,
        turned_away: TurnedAway | None = None,
    ) -> None:
        self._loop = loop
        self._listeners = list(listeners)
        self._key, self._terms, self._admit = key, terms, admit
        self._welcome = welcome
        self._turned_away = turned_away
        self._new: Places[_Pending] = Places(MAX_NEW, NEW_PER_ADDRESS)
        self.trouble = ""
        self._greeted: Places[_Pending] = Places(MAX_GREETED, MAX_GREETED)
        for listener in self._listeners:
            self._resume(listener)

    @property
    def pending(self) -> int:
        """Number of connections that have not finished the handshake."""
        return len(self._new) + len(self._greeted)

    @property
    def greeted(self) -> int:
        """Number of those that have sent a HELLO."""
        return len(self._greeted)

    def close_in_child(self) -> None:
        """Closes a forked child's copies of the listeners."""
        for listener in self._listeners:
            listener.close()

    def close(self) -> None:
        """Closes the listeners and every connection that has not finished the handshake."""
        for listener in self.release():
            listener.close()

    def release(self) -> list[socket.socket]:
        """Closes every connection that has not finished the handshake, and returns the listeners,
        which are the caller's from now on."""
        for pending in self._new.all() + self._greeted.all():
            self._drop(pending)
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            self._loop.forget(listener)
        return listeners

    def add(self, listener: socket.socket) -> None:
        """Accepts on one more."""
        self._listeners.append(listener)
        self._resume(listener)

    def _resume(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop.watch(listener, READ, lambda: self._accept(listener))

    def _pause(self, listener: socket.socket, seconds: float) -> None:
        self._loop.forget(listener)
        self._loop.call_at(time.monotonic() + seconds, lambda: self._resume(listener))

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPT_BATCH):
            if listener not in self._listeners:  # the last peer is in, and close() was called
                return
            if not self._room_for_greeted():
                self._pause(listener, _FULL_PAUSE)
                return
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in OUT_OF_RESOURCES:
                    self.trouble = f"nobody can be let in: {describe(error)}"
                    self._pause(listener, _ERROR_PAUSE)
                    self._evict(self._new.first_to_go() or self._greeted.first_to_go())
                    return
                continue  # that connection broke while it waited
            sock.setblocking(False)
            self._evict(self._new.in_the_way(address[0]))
            pending = _Pending(self, sock, address[0])
            self._new.add(pending)
            pending.read()

    def _room_for_greeted(self) -> bool:
        """True if there is a place among the greeted, after taking one away if need be."""
        victim = self._greeted.in_the_way("")
        if victim is not None and time.monotonic() - victim.since < GREETED_GRACE:
            return False
        self._evict(victim)
        return True

    def _evict(self, victim: _Pending | None) -> None:
        if victim is not None:
            self._turn_away(victim, RefusedError("too many at once", outcome=Outcome.TIMEOUT))

    def _promote(self, pending: _Pending) -> None:
        """Moves a connection whose HELLO is complete to the greeted ones."""
        self._new.remove(pending)
        self._evict(self._greeted.in_the_way(pending.address))
        self._greeted.add(pending)

    def _turn_away(self, pending: _Pending, refusal: RefusedError) -> None:
        serious = refusal.outcome in (
            Outcome.AUTHENTICATION_FAILED,
            Outcome.UNEXPECTED_PEER,
            Outcome.OTHER_USER,
        )
        level = logging.WARNING if serious else logging.INFO
        LOG.note(pending.address, f"{refusal.outcome.text} ({refusal})", level)
        claimed = pending.server.claimed
        self._drop(pending)
        if self._turned_away is not None and claimed is not None:
            self._turned_away(pending.address, refusal, claimed)

    def _drop(self, pending: _Pending) -> None:
        self._release(pending)
        # Unread bytes would turn the close into a reset, which can overtake our last answer.
        with contextlib.suppress(OSError):
            pending.sock.recv(_DRAIN_BYTES)
        pending.sock.close()

    def _release(self, pending: _Pending) -> None:
        self._new.remove(pending)
        self._greeted.remove(pending)
        self._loop.forget(pending.sock)
        pending.timer.cancel()


class _Pending:
    """A connection whose other end has not yet proven who it is."""

    def __init__(self, owner: Acceptor, sock: socket.socket, address: str) -> None:
        self._owner = owner
        self.sock = sock
        self.address = address
        key = owner._key
        self.server = Server(key, owner._terms, owner._admit, vetting(key, sock))
        self.since = time.monotonic()
        self._greeted = False
        self._talk = Talk(sock, self.server)
        self.timer = owner._loop.call_at(self.since + CROWDED_PATIENCE, self._expire_if_crowded)
        owner._loop.watch(sock, READ, self.read)

    def read(self) -> None:
        """Goes on with the handshake, up to its end."""
        try:
            self._talk.go_on()
        except RefusedError as refusal:
            self._owner._turn_away(self, refusal)
            return
        if self.server.refusal is not None:
            self._owner._turn_away(self, self.server.refusal)
        elif self.server.done:
            self._owner._release(self)
            assert self.server.claimed is not None
            self._owner._welcome(self.sock, self.server.claimed)
        elif self.server.greeted and not self._greeted:
            self._greeted = True
            self._expire_in(PATIENCE, self._expire)
            self._owner._promote(self)

    def _expire_in(self, seconds: float, act: Callable[[], None]) -> None:
        self.timer.cancel()
        self.timer = self._owner._loop.call_at(time.monotonic() + seconds, act)

    def _expire_if_crowded(self) -> None:
        if len(self._owner._new) >= NEW_PER_ADDRESS:
            self._expire()
        else:
            self._expire_in(NEW_PATIENCE - CROWDED_PATIENCE, self._expire)

    def _expire(self) -> None:
        refusal = RefusedError("said too little in time", outcome=Outcome.TIMEOUT)
        self._owner._turn_away(self, refusal)
