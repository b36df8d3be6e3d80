"""Our own rendezvous: rank 0 is the hub, the others are its members.

    member --(handshake, role RENDEZVOUS)--> hub         once
    member --BLOB(round, seconds left)-----> hub         each round
    member <--ALL(round), or FAILED(table)-- hub

Invariants: the hub reads only from members that passed the handshake; a message to the hub is at
most 64 KiB; the bring-up ends for all at the earliest deadline of any, and then, or as soon as a
member leaves, the hub sends all members the missing ranks, so that all raise the same table. There
are no threads: the hub works only inside rank 0's allgather(). The listeners close once all members
are in.

Two processes of one job that were both started with RANK=0 find each other: where a port is in use,
rank 0 asks there (_RivalSearch), which delays it only if it cannot listen anywhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct
import time
from collections.abc import Callable, Sequence

from ..errors import BootstrapError
from .acceptor import Acceptor
from .dialer import Dial, Target
from .handshake_params import Key, Outcome, RefusedError, Terms, duplicate, unexpected
from .join_failure import (
    FAILED_HEADLINE,
    LEFT,
    MAX_ROWS,
    NEVER_CAME,
    JoinError,
    Lost,
    Row,
    join_error,
)
from .loop import READ, WRITE, Loop
from .records import MAX_BYTES, join_blobs, pack
from .sockets import end_when_silent, peer_of, show, tune

HEADER = struct.Struct("<BxHII")
"""Header of a message: kind, round, milliseconds until the sender's deadline, payload bytes."""
BLOB, ALL, FAILED = 1, 2, 3

_FLUSH_PATIENCE = 1.0
"""Least seconds for the members to take a message, as the deadline may have passed."""
_RIVAL_HEADLINE = "two processes of this job say that they are rank 0: give each a RANK of its own"
_RIVAL_PATIENCE = 1.0  # seconds for a hub that waits for its members to answer


class Hub:
    """Rank 0's end of the rendezvous.

    Takes over the listeners. key and terms are those of the handshake (server_rank 0). taken: the
    ports that another process has, which may be a second rank 0 of this job. peer_timeout:
    seconds without a packet from a member's host after which the member is lost. ``round`` is the
    number of the current round, from 1.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        key: Key,
        terms: Terms,
        taken: Sequence[Target] = (),
        peer_timeout: float = 10.0,
    ) -> None:
        self._peer_timeout = peer_timeout
        self._world = terms.world_size
        self._members: dict[int, _Member] = {}
        self._claims: dict[int, Row] = {}
        self._gone: dict[int, str] = {}
        self.round = 0
        self._began = time.monotonic()
        self._deadline = float("inf")
        self._address = show(*listeners[0].getsockname()[:2])
        self._loop = Loop()
        self._acceptor: Acceptor | None = Acceptor(
            self._loop,
            listeners,
            key,
            terms,
            self._admit,
            self._welcome,
            self._turned_away,
        )
        self._rivals = _RivalSearch(self._loop, key, terms, taken)

    def allgather(self, blob: bytes, deadline: float) -> list[bytes]:
        """Gathers the blobs of all members and sends all to each; see rendezvous.Exchange."""
        self.round += 1
        self._deadline = min(self._deadline, deadline)
        for member in self._members.values():
            member.next_round()
        self._loop.run(self._settled, deadline)
        if self._rivals.found is not None or not self._complete():
            raise self._fail()
        self._close_acceptor()
        blobs = [blob] + [self._members[rank].blob or b"" for rank in range(1, self._world)]
        self._send_all(ALL, join_blobs(blobs), self._deadline)
        return blobs

    def alarm(self, loop: Loop, ring: Callable[[], None], _lost: Lost) -> None:
        """Rings as soon as a member has left; keeps a member's next message until its round."""

        def look() -> None:
            self._loop.catch_up()
            if self._gone:
                loop.forget(self._loop)
                ring()

        loop.watch(self._loop, READ, look)
        look()

    def close(self) -> None:
        """Closes every socket."""
        self._close_acceptor()
        for member in self._members.values():
            member.close()
        self._loop.close()

    # -- called by the members' connections --

    def expect_by(self, deadline: float) -> None:
        """Takes a member's deadline if it is earlier than the hub's."""
        if deadline < self._deadline:
            self._deadline = deadline
            self._loop.call_at(deadline, lambda: None)  # wakes the loop

    def lost(self, rank: int, why: str) -> None:
        """Notes that a member's connection ended."""
        self._gone.setdefault(rank, why)

    # -- the round --

    def _complete(self) -> bool:
        return len(self._members) == self._world - 1 and all(
            member.blob is not None for member in self._members.values()
        )

    def _settled(self) -> bool:
        over = self._complete() or self._gone or self._rivals.found is not None
        return bool(over or time.monotonic() >= self._deadline)

    def _send_all(self, kind: int, payload: bytes, deadline: float = 0.0) -> None:
        """Sends a message to all members that are left: this may be the last before close()."""
        message = HEADER.pack(kind, self.round, 0, len(payload)) + payload
        members = [m for m in self._members.values() if m.rank not in self._gone]
        for member in members:
            member.send(message)
        self._loop.run(
            lambda: all(not m.outbox or m.rank in self._gone for m in members),
            max(deadline, time.monotonic() + _FLUSH_PATIENCE),
        )

    def _fail(self) -> BootstrapError:
        """Sends FAILED to the members and returns the error to raise."""
        ranks = sorted(self._gone) or range(1, self._world)
        rows = [row for row in map(self._row, ranks) if row is not None]
        if self._rivals.found is not None:
            headline, rows = _RIVAL_HEADLINE, [self._rivals.found]
        elif self._gone:
            headline = FAILED_HEADLINE
        else:
            here = self._world - len(rows)
            rows += [self._claims[0]] if 0 in self._claims else []
            waited = time.monotonic() - self._began
            headline = (
                f"only {here} of {self._world} ranks met at {self._address} within {waited:.1f} s"
            )
        fields = [row.to_fields() for row in rows[:MAX_ROWS]]
        self._send_all(FAILED, pack({"headline": headline, "rows": fields}))
        return join_error(headline, rows)

    def _row(self, rank: int) -> Row | None:
        """Returns a row with the problem of a rank; None if it has none."""
        member = self._members.get(rank)
        if member is None:
            trouble = self._acceptor.trouble if self._acceptor is not None else ""
            return self._claims.get(rank) or Row(rank, -1, "", NEVER_CAME, trouble)
        if rank in self._gone:
            return Row(rank, -1, member.address, self._gone[rank])
        if member.blob is None:
            return Row(rank, -1, member.address, "came, but stopped answering")
        return None

    # -- the acceptor's callbacks --

    def _admit(self, claimed: Terms) -> RefusedError | None:
        if claimed.rail or claimed.lane:
            return unexpected(claimed)
        if claimed.client_rank in self._members:
            return duplicate(claimed)
        return None

    def _welcome(self, sock: socket.socket, terms: Terms) -> None:
        tune(sock)
        end_when_silent(sock, self._peer_timeout)
        self._claims.pop(terms.client_rank, None)
        self._members[terms.client_rank] = _Member(self, self._loop, sock, terms.client_rank)
        if len(self._members) == self._world - 1:
            self._close_acceptor()

    def _turned_away(self, address: str, refusal: RefusedError, claimed: Terms) -> None:
        rank, why = claimed.client_rank, str(refusal)
        if rank >= self._world or (rank == 0 and not refusal.proven):
            return
        if rank == 0:
            why = "another process of this job says that it is rank 0, as this one does"
        self._claims[rank] = Row(rank, -1, address, refusal.outcome.text, why)

    def _close_acceptor(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None
        self._rivals.stop()


class _Member:
    """The hub's connection to one rank."""

    def __init__(self, hub: Hub, loop: Loop, sock: socket.socket, rank: int) -> None:
        self.rank = rank
        self.address = peer_of(sock)
        self.blob: bytes | None = None
        self._hub = hub
        self._loop = loop
        self._sock = sock
        self._inbox = b""
        self.outbox = b""
        self._watch()

    def next_round(self) -> None:
        """Forgets this round's blob and reads the next, if it has arrived already."""
        self.blob = None
        self._parse()

    def send(self, message: bytes) -> None:
        """Queues a message."""
        self.outbox += message
        self._watch()

    def close(self) -> None:
        """Closes the connection."""
        self._loop.forget(self._sock)
        self._sock.close()

    def _watch(self) -> None:
        self._loop.watch(self._sock, READ | (WRITE if self.outbox else 0), self._advance)

    def _lose(self, why: str) -> None:
        self._loop.forget(self._sock)
        self._hub.lost(self.rank, why)

    def _advance(self) -> None:
        try:
            if self.outbox:
                self.outbox = self.outbox[self._sock.send(self.outbox) :]
                self._watch()
            data = self._sock.recv(HEADER.size + MAX_BYTES - len(self._inbox) + 1)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"its connection broke: {error.strerror}")
            return
        if not data:
            self._lose(LEFT)
            return
        self._inbox += data
        self._parse()

    def _parse(self) -> None:
        if self.blob is not None or len(self._inbox) < HEADER.size:
            if len(self._inbox) > HEADER.size + MAX_BYTES:
                self._lose("sent more than is allowed")
            return
        kind, number, left_ms, size = HEADER.unpack_from(self._inbox)
        if kind != BLOB or number != self._hub.round or size > MAX_BYTES:
            self._lose("sent what no ringcomm sends")
            return
        self._hub.expect_by(time.monotonic() + left_ms / 1000)
        end = HEADER.size + size
        if len(self._inbox) >= end:
            self.blob = self._inbox[HEADER.size : end]
            self._inbox = self._inbox[end:]


class _RivalSearch:
    """Dials the targets; ``found`` is a row for another rank 0 once it has answered.

    It dials as a client that claims rank 0: only a hub of the same job, which has checked its
    proof, can answer that it has this rank already. Any other program there is asked once.
    """

    def __init__(self, loop: Loop, key: Key, terms: Terms, targets: Sequence[Target]) -> None:
        self.found: Row | None = None
        claim = dataclasses.replace(terms, client_rank=0)
        self._dials = [
            Dial(
                loop,
                target,
                key,
                claim,
                lambda _dial, sock: sock.close(),  # no hub lets rank 0 in
                self._refused,
            )
            for target in targets
        ]

    def stop(self) -> None:
        """Stops dialling."""
        for dial in self._dials:
            dial.stop()

    def _refused(self, dial: Dial, refusal: RefusedError) -> None:
        dial.stop()
        if refusal.proven and refusal.outcome == Outcome.DUPLICATE:
            there = show(dial.target.address, dial.target.port)
            self.found = Row(0, -1, there, refusal.outcome.text, str(refusal))


def find_rival(targets: Sequence[Target], key: Key, terms: Terms) -> JoinError | None:
    """Returns the error to raise if another rank 0 of this job listens at one of the targets."""
    with contextlib.closing(Loop()) as loop:
        search = _RivalSearch(loop, key, terms, targets)
        try:
            loop.run(lambda: search.found is not None, time.monotonic() + _RIVAL_PATIENCE)
        finally:
            search.stop()
    return None if search.found is None else join_error(_RIVAL_HEADLINE, [search.found])
