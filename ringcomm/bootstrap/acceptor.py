"""The accepting side of bring-up: strangers knock, peers come in.

    listener --accept--> pending --handshake--> welcome(sock, terms)
                            |
                            +--> turned away: wrong bytes, wrong key, too slow, too many

Invariants: at most 64 unauthenticated connections, each for at most 5 s and 512 bytes; when all
64 places are taken the oldest gives way, at once if it has been silent for a moment and otherwise
after a second, so that a scanner cannot keep peers out; an error of accept() pauses a listener,
it never ends the bring-up; a stranger costs one small object, which goes with its socket.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import time
from collections.abc import Callable, Sequence

from .handshake import Server
from .loop import READ, Loop
from .strangers import LOG
from .terms import Outcome, RefusedError, Terms

MAX_PENDING = 64
PATIENCE = 5.0
"""Seconds for a whole handshake."""

_SILENT_GRACE, _TALKING_GRACE = 0.05, 1.0  # seconds before a place may be taken away
_FULL_PAUSE, _ERROR_PAUSE = 0.01, 0.1
_ACCEPT_BATCH = 16
_DRAIN_BYTES = 352  # with a handshake's 160, at most 512 bytes are read from anyone
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Welcome = Callable[[socket.socket, Terms], None]
TurnedAway = Callable[[str, RefusedError, Terms | None], None]


class Acceptor:
    """Accepts on the listeners, which it owns, and hands over who passes the handshake.

    Args:
        loop: where its sockets are watched.
        listeners: listening, non-blocking.
        new_server: makes the handshake of one connection.
        welcome: takes each authenticated socket and what its peer proved to be.
        turned_away: told the address, the reason and the claims of each that was refused after a
            well-formed HELLO.
    """

    def __init__(
        self,
        loop: Loop,
        listeners: Sequence[socket.socket],
        new_server: Callable[[], Server],
        welcome: Welcome,
        turned_away: TurnedAway | None = None,
    ) -> None:
        self._loop = loop
        self._listeners = list(listeners)
        self._new_server = new_server
        self._welcome = welcome
        self._turned_away = turned_away
        self._pending: dict[int, _Pending] = {}  # by fd, oldest first
        for listener in self._listeners:
            self._resume(listener)

    def close(self) -> None:
        """Closes the listeners and every connection that is not yet through."""
        for pending in list(self._pending.values()):
            self._drop(pending)
        for listener in self._listeners:
            self._loop.forget(listener)
            listener.close()
        self._listeners.clear()

    def _resume(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop.watch(listener, READ, lambda: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPT_BATCH):
            if not self._make_room():
                self._pause(listener, _FULL_PAUSE)
                return
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    self._pause(listener, _ERROR_PAUSE)
                    return
                continue  # that connection broke while it waited
            sock.setblocking(False)
            self._pending[sock.fileno()] = _Pending(self, sock, str(address[0]))

    def _pause(self, listener: socket.socket, seconds: float) -> None:
        self._loop.forget(listener)
        self._loop.call_at(time.monotonic() + seconds, lambda: self._resume(listener))

    def _make_room(self) -> bool:
        """True if there is a place for one more, after taking one away if need be."""
        if len(self._pending) < MAX_PENDING:
            return True
        silent = next((p for p in self._pending.values() if not p.received), None)
        oldest = next(iter(self._pending.values()))
        for victim, grace in ((silent, _SILENT_GRACE), (oldest, _TALKING_GRACE)):
            if victim is not None and time.monotonic() - victim.since > grace:
                self._turn_away(victim, RefusedError("too many at once", outcome=Outcome.TIMEOUT))
                return True
        return False

    def _turn_away(self, pending: _Pending, refusal: RefusedError) -> None:
        serious = refusal.outcome in (Outcome.AUTHENTICATION_FAILED, Outcome.UNEXPECTED_PEER)
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
        self._pending.pop(pending.sock.fileno(), None)
        self._loop.forget(pending.sock)
        pending.timer.cancel()


class _Pending:
    """A connection whose other end has not yet proven who it is."""

    def __init__(self, owner: Acceptor, sock: socket.socket, address: str) -> None:
        self._owner = owner
        self.sock = sock
        self.address = address
        self.server = owner._new_server()
        self.received = 0
        self.since = time.monotonic()
        self._data = b""
        self.timer = owner._loop.call_at(self.since + PATIENCE, self._expire)
        owner._loop.watch(sock, READ, self._read)

    def _read(self) -> None:
        try:
            part = self.sock.recv(self.server.want - len(self._data))
            if not part:
                raise self.server.closed()
            self.received += len(part)
            self._data += part
            if len(self._data) < self.server.want:
                return
            data, self._data = self._data, b""
            answer = self.server.feed(data)
            # The socket's buffer is empty, so a short write means that the peer is gone.
            if answer and self.sock.send(answer) != len(answer):
                raise self.server.closed()
        except BlockingIOError:
            return
        except RefusedError as refusal:
            self._owner._turn_away(self, refusal)
            return
        except OSError:
            self._owner._turn_away(self, self.server.closed())
            return
        self._advance()

    def _advance(self) -> None:
        if self.server.refusal is not None:
            self._owner._turn_away(self, self.server.refusal)
        elif self.server.done:
            self._owner._release(self)
            assert self.server.claimed is not None
            self._owner._welcome(self.sock, self.server.claimed)

    def _expire(self) -> None:
        refusal = RefusedError("said too little in time", outcome=Outcome.TIMEOUT)
        self._owner._turn_away(self, refusal)
