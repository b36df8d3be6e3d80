"""Makes the lanes of one rank: dials the lower ranks, accepts the higher ones, in one loop.

Invariants: a lane that is not in ``made`` has no socket left; run() ends when every lane is made,
at the deadline, or when each peer has a lane and no lane was made for RAIL_GRACE seconds (a port
that is dead while its sibling works must not hold up the start); a lane whose peer fell silent
before run() ended is not kept; the higher rank dials the lower one.
"""

from __future__ import annotations

import dataclasses
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .acceptor import Acceptor, TurnedAway
from .dialer import Dial, Target
from .handshake_params import Key, RefusedError, Role, Terms, duplicate, unexpected
from .join_failure import CONNECTED, LEFT, NO_ANSWER, NOT_SEEN, REFUSED, Row
from .loop import Loop
from .probe import PROBE_LANE
from .sockets import has_hung_up, is_link_local, keep_alive, show, silence, tune

Alarm = Callable[[Loop, Callable[[], None]], None]
"""Calls a function in a loop once the bring-up has failed; see rendezvous.Exchange.alarm."""

RAIL_GRACE = 3.0
"""Seconds without progress after which a rail is left out, if its peer has another."""
_DARK = 2.0
"""Seconds of silence after which a lane is dead; two live kernels exchange a packet a second."""
# No peer sends on a lane before all are made, so bytes that arrive earlier mean a broken lane.
_ANYTHING = select.POLLIN | select.POLLRDHUP


NEWS_LANE = PROBE_LANE - 1
"""Number of no lane: its connection brings news of a port, by moved_ports.py."""


class LaneId(NamedTuple):
    """A lane as this rank names it."""

    peer: int
    rail: int
    lane: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The lanes that one rank is to make."""

    rank: int
    world_size: int
    job: bytes
    epoch: int
    key: Key
    listeners: Sequence[socket.socket]
    """Listening sockets; the LaneMaker takes them over."""
    targets: dict[LaneId, Target]
    """Where the peer of each lane listens; all lanes are here."""
    expected: frozenset[LaneId]
    """Lanes that higher ranks will dial."""
    congestion: Sequence[str] = ()

    def dial(
        self,
        loop: Loop,
        role: Role,
        lane: LaneId,
        connected: Callable[[socket.socket], None],
        source: str = "",
        by: LaneId | None = None,
    ) -> Dial:
        """Dials a lane until its peer answers, and hands over the authenticated socket.

        source: the address to dial from, in place of the target's.
        by: the lane whose target is dialled; the lane's own unless given.
        """
        target = self.targets[by or lane]
        terms = Terms(
            role,
            self.job,
            self.world_size,
            self.rank,
            lane.peer,
            lane.rail,
            lane.lane,
            self.epoch,
        )
        return Dial(
            loop,
            dataclasses.replace(target, source=source or target.source),
            self.key,
            terms,
            lambda _dial, sock: connected(sock),
            congestion=self.congestion,
        )

    def knock(self, loop: Loop, lane: LaneId) -> Dial:
        """Finds out whether a lane's peer still listens: Dial.refused_for tells."""
        return Dial(loop, self.targets[lane], self.key, None, lambda _dial, sock: sock.close())

    def accept(
        self,
        loop: Loop,
        role: Role,
        admit: Callable[[LaneId, Terms], RefusedError | None],
        welcome: Callable[[LaneId, socket.socket], None],
        turned_away: TurnedAway | None = None,
    ) -> Acceptor:
        """Accepts on the listeners the plan's lanes that ``admit`` does not refuse, and hands over
        their authenticated sockets. Lower ranks dial only to make a lane anew."""
        terms = Terms(role, self.job, self.world_size, -1, self.rank, epoch=self.epoch)

        known = set(self.expected)
        if role == Role.LANE_ANEW:
            known = {*self.targets, *(lane._replace(lane=NEWS_LANE) for lane in self.targets)}

        def judge(claimed: Terms) -> RefusedError | None:
            lane = _lane_of(claimed)
            return admit(lane, claimed) if lane in known else unexpected(claimed)

        return Acceptor(
            loop,
            self.listeners,
            self.key,
            terms,
            judge,
            lambda sock, claimed: welcome(_lane_of(claimed), sock),
            turned_away,
        )


def _lane_of(claimed: Terms) -> LaneId:
    return LaneId(claimed.client_rank, claimed.rail, claimed.lane)


class LaneMaker:
    """Runs a plan. close() it after use: it closes every socket not taken from ``made``."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.made: dict[LaneId, socket.socket] = {}
        self._dark: set[LaneId] = set()
        self._claims: dict[int, Row] = {}
        self._progress = time.monotonic()
        self._in_vain = False
        self._loop = Loop()
        self._acceptor = plan.accept(
            self._loop, Role.LANE, self._admit, self._welcome, self._turned_away
        )
        self._dials = {lane: self._dial(lane) for lane in plan.targets if lane not in plan.expected}

    def run(self, deadline: float, alarm: Alarm | None = None) -> None:
        """Makes as many lanes as possible until the deadline, or until the alarm rings."""
        self._loop.repeat(RAIL_GRACE / 10, lambda: None)  # wakes the loop to ask _settled()
        if alarm is not None:
            alarm(self._loop, self._give_up)
        self._loop.run(self._settled, deadline)
        for lane, sock in list(self.made.items()):
            keep_alive(sock, False)
            if silence(sock) > _DARK:
                self._dark.add(lane)
                self.made.pop(lane).close()

    def lost(self) -> list[Row]:
        """Returns a row for each peer that seems to have left: one of its lanes has ended, or
        all its addresses refuse connections."""
        ended = {
            lane.peer
            for lane, sock in self.made.items()
            if lane.lane != PROBE_LANE and has_hung_up(sock)
        }
        tried: dict[int, set[str]] = {}
        for lane, dial in self._dials.items():
            tried.setdefault(lane.peer, set()).add(CONNECTED if lane in self.made else dial.state)
        deaf = {peer for peer, states in tried.items() if states == {REFUSED}}
        return [Row(peer, self.plan.rank, "", LEFT) for peer in sorted(ended | deaf)]

    def hand_over(self, lanes: Sequence[LaneId]) -> Plan:
        """Returns the plan of these lanes alone, with the listeners, which are the caller's from
        now on."""
        return dataclasses.replace(
            self.plan,
            listeners=self._acceptor.release(),
            targets={lane: self._later_target(lane) for lane in lanes},
            expected=self.plan.expected & frozenset(lanes),
        )

    def _later_target(self, lane: LaneId) -> Target:
        """Returns the target of a lane without the ways that may lead over another port than that
        by which it was made, or was to be."""
        target = self.plan.targets[lane]
        if lane not in self.made:  # no way is known to work
            return target
        way = self._dials[lane].way if lane in self._dials else target
        if not is_link_local(self.made[lane]):
            target = dataclasses.replace(way, link_local=None)
        return dataclasses.replace(target, keeps_port=True)

    def close(self) -> None:
        """Closes every socket that was not taken from ``made``."""
        for dial in self._dials.values():
            dial.stop()
        self._acceptor.close()
        for sock in self.made.values():
            sock.close()
        self.made.clear()
        self._loop.close()

    def rows(self) -> list[Row]:
        """Returns one row per peer and rail that was dialled, and per peer that never dialled."""
        found: dict[tuple[int, int], Row] = {}
        for lane, dial in self._dials.items():
            if lane.lane == PROBE_LANE:
                continue
            where = show(dial.target.address, dial.target.port)
            made = lane in self.made
            state, detail = (CONNECTED, "") if made else (dial.state, dial.detail)
            if lane in self._dark:
                state, detail = NO_ANSWER, "it was connected, and went dark"
            if not made or (lane.peer, lane.rail) not in found:
                found[lane.peer, lane.rail] = Row(
                    lane.peer, self.plan.rank, where, state, detail, lane.rail
                )
        awaited = {lane.peer for lane in self.plan.expected - self.made.keys()}
        rows = [
            self._claims.get(peer)
            or Row(peer, self.plan.rank, "", NOT_SEEN, self._acceptor.trouble)
            for peer in sorted(awaited)
        ]
        return list(found.values()) + rows

    def _settled(self) -> bool:
        if self._in_vain or len(self.made) == len(self.plan.targets):
            return True
        is_stuck = time.monotonic() - self._progress >= RAIL_GRACE
        return is_stuck and {i.peer for i in self.made} == {i.peer for i in self.plan.targets}

    def _give_up(self) -> None:
        self._in_vain = True

    def _keep(self, lane: LaneId, sock: socket.socket) -> None:
        tune(sock)
        keep_alive(sock, True)
        self.made[lane] = sock
        self._progress = time.monotonic()

    # -- lanes to lower ranks --

    def _dial(self, lane: LaneId) -> Dial:
        return self.plan.dial(self._loop, Role.LANE, lane, lambda sock: self._keep(lane, sock))

    # -- lanes from higher ranks --

    def _admit(self, lane: LaneId, claimed: Terms) -> RefusedError | None:
        if lane in self.made and not has_hung_up(self.made[lane], _ANYTHING):
            return duplicate(claimed)
        return None

    def _welcome(self, lane: LaneId, sock: socket.socket) -> None:
        if lane in self.made:  # its other end gave up on the first try, see _admit
            self.made.pop(lane).close()
        self._keep(lane, sock)

    def _turned_away(self, address: str, refusal: RefusedError, claimed: Terms) -> None:
        if self.plan.rank < claimed.client_rank < self.plan.world_size:
            peer, text = claimed.client_rank, refusal.outcome.text
            self._claims[peer] = Row(peer, self.plan.rank, address, text, str(refusal))
