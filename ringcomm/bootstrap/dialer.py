"""The connecting side of bring-up: tries one address until the right peer answers.

    waiting --> connecting --> shaking --> done
       ^------------+-------------+            (or stopped, at any time)

Invariants: ``state`` and ``detail`` always say, in the words of join_failure.py, how the latest try
went; a peer's refusal is trusted only if it is proven; once connected, a Dial waits (but for
Target.keeps_port) until the other end answers, closes or is no longer there (its kernel answers
keepalives), so that it keeps its place in the peer's queue, where strangers may be before it;
a Dial owns its socket until it hands it over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import socket
import time
from collections.abc import Callable, Sequence

from .handshake import Client, Talk
from .handshake_params import Key, Outcome, RefusedError, Terms
from .join_failure import MUTE, NO_ANSWER, REFUSED
from .loop import READ, WRITE, Loop, Timer
from .same_user import vetting
from .sockets import bind_to_device, family, keep_alive, place, set_congestion
from .system import describe

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.5
"""Seconds between two tries: doubled from the first to the longest."""

ANSWER_PATIENCE = 5.0
"""Seconds for the answer to a handshake, where ``Target.keeps_port`` is True."""

_CONNECT_PATIENCE = (1.5, 3.0, 5.0)
"""Seconds for the first, second and every later try. A target that keeps its port has the first for
all: TCP sends a lost packet again too late to notice soon that the port has come up."""

# What join_failure.py calls an error of connect().
_FAILURES = {
    errno.ECONNREFUSED: REFUSED,
    errno.ETIMEDOUT: NO_ANSWER,
    errno.EAGAIN: NO_ANSWER,
}


@dataclasses.dataclass(frozen=True)
class Target:
    """Address to connect to, and the local end to connect from."""

    address: str
    port: int
    source: str = ""
    """Local numeric address to bind; empty: the kernel's choice."""
    device: str = ""
    """Interface to bind to where permitted; empty: none. Every second try does not bind, as the
    route may lead over another interface."""
    link_local: Target | None = None
    """Another way to the same port of the peer, used in the first, third, ... try."""
    keeps_port: bool = False
    """No way is tried that may lead over another port: where there is a link_local, only that. And
    an answer has to come within ANSWER_PATIENCE."""


class Dial:
    """Connects to a target, again and again, until the handshake succeeds or stop() is called.

    Args:
        loop: where its socket is watched.
        target: the address.
        key, terms: what the handshake proves and asks for; no terms: to be connected is all.
        connected: takes the authenticated socket, once.
        refused: called with each RefusedError; may call stop().
        start_at: time.monotonic() of the first try; 0.0: at once.
        congestion: as sockets.set_congestion takes them.

    Attributes:
        way: what the latest try went by.
        state, detail: how the latest try went, in the words of join_failure.py.
        shaking: True while a handshake is under way.
        is_over: True once the socket was handed over, or stop() was called.
    """

    def __init__(
        self,
        loop: Loop,
        target: Target,
        key: Key,
        terms: Terms | None,
        connected: Callable[[Dial, socket.socket], None],
        refused: Callable[[Dial, RefusedError], None] | None = None,
        start_at: float = 0.0,
        congestion: Sequence[str] = (),
    ) -> None:
        self.target = target
        self.way = target
        self.shaking = False
        self.is_over = False
        self.state = NO_ANSWER
        self.detail = ""
        self._loop = loop
        self._key, self._terms = key, terms
        self._connected = connected
        self._refused = refused
        self._congestion = congestion
        self._tries = 0
        self._refused_since = math.inf
        self._heard = False
        self._pause = FIRST_PAUSE
        self._sock: socket.socket | None = None
        self._timer: Timer = loop.call_at(start_at, self._try)

    @property
    def refused_for(self) -> float:
        """Seconds for which each try has found that nobody listens; negative if the latest did
        not."""
        return time.monotonic() - self._refused_since

    def stop(self) -> None:
        """Gives up and closes the socket of a try in flight."""
        self._hang_up()
        self.is_over = True

    def _try(self) -> None:
        self._tries += 1
        self.way = way = self._way()
        try:
            self._sock = sock = self._open(way)
            code = sock.connect_ex(place(way.address, way.port))
        except OSError as error:
            self._retry(f"local error: {describe(error)}")
            return
        if code not in (0, errno.EINPROGRESS):
            self._connect_failed(code)
            return
        tries = 1 if self.target.keeps_port else min(self._tries, len(_CONNECT_PATIENCE))
        self._expire_in(_CONNECT_PATIENCE[tries - 1], NO_ANSWER)
        self._loop.watch(sock, WRITE, self._on_connect)

    def _way(self) -> Target:
        if self._tries % 2 or self.target.keeps_port:
            return self.target.link_local or self.target
        return dataclasses.replace(self.target, device="")

    def _open(self, way: Target) -> socket.socket:
        sock = socket.socket(family(way.address), socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(sock, True)
            set_congestion(sock, self._congestion)
            if way.device:
                bind_to_device(sock, way.device)
            if way.source:
                sock.bind(place(way.source, 0))
        except BaseException:
            sock.close()
            raise
        return sock

    def _on_connect(self) -> None:
        assert self._sock is not None
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not code and self._met_itself(self._sock):
            code = errno.ECONNREFUSED
        if code:
            self._connect_failed(code)
            return
        self._refused_since = math.inf
        if self._terms is None:
            self._finish()
            return
        self.shaking = True
        client = Client(self._key, self._terms, vetting(self._key, self._sock))
        talk = Talk(self._sock, client)
        self._timer.cancel()
        if self.target.keeps_port:
            self._expire_in(ANSWER_PATIENCE, MUTE)
        if not self._heard:
            self.state, self.detail = MUTE, ""
        self._loop.watch(self._sock, READ, lambda: self._shake(client, talk.go_on))
        self._shake(client, lambda: talk.send(client.first()))

    @staticmethod
    def _met_itself(sock: socket.socket) -> bool:
        """True if nobody listens and the kernel chose the port we dial as our local one."""
        try:
            return bool(sock.getsockname() == sock.getpeername())
        except OSError:
            return False

    def _shake(self, client: Client, step: Callable[[], None]) -> None:
        """Takes a step of the handshake."""
        try:
            step()
        except RefusedError as refusal:
            self._retry(refusal.outcome.text, str(refusal), refusal.outcome != Outcome.CLOSED)
            if self._refused is not None:
                self._refused(self, refusal)
            return
        if client.done:
            self._finish()

    def _finish(self) -> None:
        sock, self._sock = self._sock, None
        assert sock is not None
        self._loop.forget(sock)
        self.stop()
        self._connected(self, sock)

    def _connect_failed(self, code: int) -> None:
        self._retry(_FAILURES.get(code) or os.strerror(code).lower())

    def _expire_in(self, seconds: float, state: str) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_at(time.monotonic() + seconds, lambda: self._retry(state))

    def _retry(self, state: str, detail: str = "", heard: bool = False) -> None:
        """Closes the socket and schedules the next try.

        heard: the peer itself gave the reason; a later failure to connect does not replace it.
        """
        self._hang_up()
        since = min(self._refused_since, time.monotonic())
        self._refused_since = since if state == REFUSED else math.inf
        if heard or not self._heard:
            self.state, self.detail = state, detail
        self._heard = self._heard or heard
        self._timer = self._loop.call_at(time.monotonic() + self._pause, self._try)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _hang_up(self) -> None:
        self._timer.cancel()
        self.shaking = False
        if self._sock is not None:
            self._loop.forget(self._sock)
            with contextlib.suppress(OSError):
                self._sock.close()
            self._sock = None
