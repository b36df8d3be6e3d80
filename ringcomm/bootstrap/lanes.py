"""Makes the lanes of one rank: dials the lower ranks, lets the higher ones in, in one loop.

Invariants: a lane that is not in ``made`` has no socket left; run() ends when every lane is made,
at the deadline, or when each peer has a lane and nothing has moved for RAIL_GRACE seconds (a port
that is dead while its sibling works must not hold up the start); who dials and who listens
follows from the ranks alone.
"""

from __future__ import annotations

import dataclasses
import select
import socket
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .acceptor import Acceptor
from .dialer import Dial, Target
from .handshake import Client, Server
from .loop import Loop
from .probe import PROBE_LANE
from .report import CONNECTED, NOT_SEEN, Row
from .same_user import vetting
from .sockets import show, tune
from .terms import Key, RefusedError, Role, Terms, duplicate, unexpected

RAIL_GRACE = 3.0
"""Seconds without progress after which a rail is left out, if its peer has another."""


class LaneId(NamedTuple):
    """A lane as this rank names it."""

    peer: int
    rail: int
    lane: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one rank is to make."""

    rank: int
    world_size: int
    job: bytes
    epoch: int
    key: Key
    listeners: Sequence[socket.socket]
    """Taken over."""
    dials: dict[LaneId, Target]
    expected: frozenset[LaneId]
    """Lanes that higher ranks will dial."""
    congestion: Sequence[str] = ()


class LaneMaker:
    """Runs one Plan. close() it after use: whatever is not taken from ``made`` is closed."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.made: dict[LaneId, socket.socket] = {}
        self._claims: dict[int, Row] = {}
        self._progress = time.monotonic()
        self._loop = Loop()
        terms = Terms(Role.LANE, plan.job, plan.world_size, -1, plan.rank, epoch=plan.epoch)
        self._acceptor = Acceptor(
            self._loop, plan.listeners,
            lambda sock: Server(plan.key, terms, self._admit, vetting(plan.key, sock)),
            self._welcome, self._turned_away,
        )  # fmt: skip
        self._dials = {lane: self._dial(lane, target) for lane, target in plan.dials.items()}
        self._peers = {lane.peer for lane in self._all()}

    def run(self, deadline: float) -> None:
        """Makes what can be made by then."""
        self._loop.call_at(time.monotonic() + RAIL_GRACE, self._tick)
        self._loop.run(self._settled, deadline)

    def close(self) -> None:
        """Closes all that is left."""
        for dial in self._dials.values():
            dial.stop()
        self._acceptor.close()
        for sock in self.made.values():
            sock.close()
        self.made.clear()
        self._loop.close()

    def rows(self) -> list[Row]:
        """One row per peer and rail that was dialled, and per peer that was waited for in vain."""
        found: dict[tuple[int, int], Row] = {}
        for lane, dial in self._dials.items():
            if lane.lane == PROBE_LANE:
                continue
            where = show(dial.target.address, dial.target.port)
            made = lane in self.made
            state, detail = (CONNECTED, "") if made else (dial.state, dial.detail)
            if not made or (lane.peer, lane.rail) not in found:
                found[lane.peer, lane.rail] = Row(
                    lane.peer, self._plan.rank, where, state, detail, lane.rail
                )
        awaited = {lane.peer for lane in self._plan.expected - self.made.keys()}
        rows = [
            self._claims.get(peer) or Row(peer, self._plan.rank, "", NOT_SEEN)
            for peer in sorted(awaited)
        ]
        return list(found.values()) + rows

    def _all(self) -> Iterable[LaneId]:
        return self._dials.keys() | self._plan.expected

    def _settled(self) -> bool:
        if len(self.made) == len(self._dials) + len(self._plan.expected):
            return True
        if time.monotonic() - self._progress < RAIL_GRACE:
            return False
        return {lane.peer for lane in self.made} == self._peers

    def _tick(self) -> None:
        """Wakes the loop, so that _settled() is asked although nothing happens."""
        self._loop.call_at(time.monotonic() + RAIL_GRACE / 10, self._tick)

    def _keep(self, lane: LaneId, sock: socket.socket) -> None:
        tune(sock, self._plan.congestion)
        self.made[lane] = sock
        self._progress = time.monotonic()

    # -- lanes to lower ranks --

    def _dial(self, lane: LaneId, target: Target) -> Dial:
        plan = self._plan
        terms = Terms(
            Role.LANE, plan.job, plan.world_size, plan.rank, lane.peer, lane.rail, lane.lane,
            plan.epoch,
        )  # fmt: skip
        return Dial(
            self._loop,
            target,
            lambda sock: Client(plan.key, terms, vetting(plan.key, sock)),
            lambda _dial, sock: self._keep(lane, sock),
        )

    # -- lanes from higher ranks --

    def _admit(self, claimed: Terms) -> RefusedError | None:
        lane = LaneId(claimed.client_rank, claimed.rail, claimed.lane)
        if lane not in self._plan.expected:
            return unexpected(claimed)
        if lane in self.made and not _hung_up(self.made[lane]):
            return duplicate(claimed)
        return None

    def _welcome(self, sock: socket.socket, terms: Terms) -> None:
        lane = LaneId(terms.client_rank, terms.rail, terms.lane)
        if lane in self.made:  # its other end gave up on the first try, see _admit
            self.made.pop(lane).close()
        self._keep(lane, sock)

    def _turned_away(self, address: str, refusal: RefusedError, claimed: Terms | None) -> None:
        if claimed is not None and self._plan.rank < claimed.client_rank < self._plan.world_size:
            peer, text = claimed.client_rank, refusal.outcome.text
            self._claims[peer] = Row(peer, self._plan.rank, address, text, str(refusal))


def _hung_up(sock: socket.socket) -> bool:
    """True if the other end has closed: nothing is sent on a lane before all lanes are made."""
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLRDHUP)
    return bool(poll.poll(0))
