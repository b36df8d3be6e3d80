"""Members in a world of a test's own: agreement.py and decision.py of each rank, over a clock that
is set and a network that delays, repeats and loses what is said. No socket, no thread, no wait.

    World      the clock, what is on its way, and what has come of all rounds
    Process    a rank: comes to a round, forms, is in it, has completed it; its mailbox
    Wire       its connections, as control.py's are for its Agreement

Invariants: what is said over a connection arrives in order, and late only; a READY may arrive again
at any time while its connection stands (a rank repeats it, too); what a process does not hear,
because it works, lies in its mailbox, as in a kernel; a connection that is cut loses what is on
its way, and both ends learn of it. A round is done when all its members have been in it for a
moment, by a communicator that none has left. All members then have worked on the same: on what the
leader has, which those who joined are given.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from ringcomm import PeerLostError
from ringcomm.membership.agreement import Agreement
from ringcomm.membership.control import LinkMade, Receive
from ringcomm.membership.decision import (
    NONE_YET,
    STARTED_AGAIN,
    Go,
    History,
    Limits,
    Ready,
    Silent,
)
from ringcomm.membership.formation import FormationError
from ringcomm.membership.messages import Address, Kind

ROUND_S = 0.02
"""In which a round's collective is over."""
RETRY_S = 0.5
"""Of a dial that was not let in."""
FORMING_S = 5.0
"""After which members give a formation up."""


@dataclasses.dataclass(eq=False)
class Link:
    """A connection of two processes."""

    ends: tuple[Process, Process]
    stands: bool = True
    latest: dict[int, float] = dataclasses.field(default_factory=dict)
    """When what was said last arrives, by the rank that hears it."""
    readies: list[tuple[Process, bytes]] = dataclasses.field(default_factory=list)
    """READYs that were said on it, and to whom."""

    def other(self, process: Process) -> Process:
        return self.ends[1] if process is self.ends[0] else self.ends[0]


class World:
    """All processes of a job; see above.

    Attributes:
        delay: from now on of what is said, by the ranks that say and hear it.
        rounds: which ranks have been in a round and by which GO, by epoch and number.
        done: rounds that have been completed, in order.
        broken: communicators that somebody has left, and who was first, by epoch and origin.
        may_part: a formation had so few members that remember the one before that another one may
            have been made beside it.
        dark: ranks that reach nobody now.
    """

    def __init__(self, size: int, min_peers: int, grace_s: float, timeout: float) -> None:
        self.size, self.min_peers = size, min_peers
        self.grace_s, self.timeout = grace_s, timeout
        self.now = 1000.0
        self.delay: dict[tuple[int, int], float] = {}
        self.rounds: dict[History, dict[int, Go]] = {}
        self.done: list[History] = []
        self.broken: dict[Epoch, int] = {}
        self.may_part = False
        self.dark: set[int] = set()
        self._works = itertools.count(1)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._places = itertools.count(1024)
        self.processes = [Process(self, rank) for rank in range(size)]
        books = [one.agreement.own_places for one in self.processes]
        for one in reversed(self.processes):  # who dials comes before who is dialled
            one.agreement.meet_all(books, 30.0)
            one.hears = False

    def new_place(self) -> Address:
        return "127.0.0.1", next(self._places)

    def clock(self) -> float:
        return self.now

    def later(self, at: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), event))

    def say(self, link: Link, to: Process, item: Item) -> None:
        """Puts it on its way, behind what is."""
        path = (link.other(to).rank, to.rank)
        at = max(self.now + self.delay.get(path, 0.001), link.latest.get(to.rank, 0.0))
        link.latest[to.rank] = at
        self.later(at, lambda: to.receive(item))

    def run(self, until: Callable[[], bool], deadline: float) -> bool:
        """Lets time pass until the condition holds; whether it does at the deadline."""
        while not until():
            wakes = min(one.wakes_at for one in self.processes)
            at = min(wakes, self._events[0][0] if self._events else math.inf)
            self.now = max(self.now, min(at, deadline))
            if at > deadline:
                return until()
            if self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            for one in self.processes:
                one.advance()
        return True

    def at_place(self, place: Address) -> Process | None:
        return next((one for one in self.processes if one.place == place and one.lives), None)

    def restart(self, rank: int) -> None:
        """Another process takes the place of one that has ended."""
        assert not self.processes[rank].lives
        before = {one.rank: [one.place] for one in self.processes if one.rank != rank}
        self.processes[rank] = Process(self, rank, rejoins=True)
        self.processes[rank].agreement.look_for(before)

    def enter(self, process: Process, key: History, go: Go) -> None:
        """It is in a round by this GO."""
        inside = self.rounds.setdefault(key, {})
        for rank, other in inside.items():
            assert other == go, f"ranks {rank} and {process.rank} are in {key} by {other} and {go}"
        inside[process.rank] = go
        epoch = (go.epoch, go.origin)
        if epoch in self.broken:
            self.later(self.now, lambda: process.lose(self.broken[epoch], epoch))
        elif len(inside) == len(go.members):
            self.later(self.now + ROUND_S, lambda: self._complete(key, go))

    def _complete(self, key: History, go: Go) -> None:
        inside = self.rounds[key]
        is_broken = (go.epoch, go.origin) in self.broken
        if is_broken or not all(inside.get(rank) == go for rank in go.members):
            return
        members = {rank: self.processes[rank] for rank in go.members}
        remember = [one for one in members.values() if one.history != STARTED_AGAIN]
        self.may_part |= len(remember) + self.min_peers <= self.size
        latest = max(self.done, default=NONE_YET)
        assert self.may_part or key > latest, f"{key} is done behind {latest}"
        for rank, one in members.items():
            same = one.work == members[go.leader].work
            assert same or rank in go.joined, f"rank {rank} has other work than {go}"
        self.done.append(key)
        work = next(self._works)
        for one in members.values():
            one.complete(key, work)

    def left_communicator(self, process: Process, epoch: Epoch) -> None:
        """Its lanes end: the others' round fails."""
        self.broken.setdefault(epoch, process.rank)
        for one in self.processes:
            if one is not process:
                self.later(self.now, partial(one.lose, process.rank, epoch))

    def darken(self, process: Process) -> None:
        """Its network is cut off, until ``lighten``: it and the others lose each other."""
        self.dark.add(process.rank)
        others = [one for one in self.processes if one is not process]
        for one in others:
            one.wire.cut(process.rank)
            process.wire.cut(one.rank)
        if process.epoch is not None:
            self.left_communicator(process, process.epoch)
            process.lose(process.rank, process.epoch)

    def lighten(self) -> None:
        """All networks are back, and who waits dials."""
        self.dark.clear()
        self.later(self.now, lambda: None)


Item = tuple[str, Link, Any]
"""What a process hears: a knock, a welcome, a message or the end of a link."""
Epoch = tuple[int, int]
"""Epoch and origin of a communicator's formation."""


class Process:
    """One rank's; as Membership drives an Agreement.

    Attributes:
        state: "works" (between two rounds), "waits" (in begin_round or lost), "inside" (a round),
            "ended".
        epoch: of its communicator; None: it has none.
        work: number of what it has worked on; all members of a round have the same after it.
        wakes_at: when it has to decide anew.
        why: it has given up, in the error's words.
        in_vain: when it gave up, after the timeout, enough ranks waited.
    """

    def __init__(self, world: World, rank: int, rejoins: bool = False) -> None:
        self.world, self.rank = world, rank
        self.place = world.new_place()
        self.state = "works"
        self.hears = not rejoins
        self.lives = True
        self.why, self.in_vain = "", False
        self.history: History = STARTED_AGAIN if rejoins else NONE_YET
        self.number = self.work = 0
        self.epoch: Epoch | None = None if rejoins else (0, 0)
        self.is_well = not rejoins
        self.members: tuple[int, ...] = () if rejoins else tuple(range(world.size))
        self.blames: set[int] = set()
        self.wakes_at = math.inf
        self.mailbox: list[Item] = []
        self._came_at = self._forming_until = math.inf
        limits = Limits(rank, world.size, world.min_peers, world.grace_s, world.timeout)
        self.agreement = Agreement(limits, [self.place], self._connect, world.clock)
        self.agreement._process = self.place[1]  # else by chance, and no run were like another

    def _connect(self, receive: Receive, link_made: LinkMade) -> Wire:
        self.wire = Wire(self, receive, link_made)
        return self.wire

    # ---- what it does ----

    def come(self) -> None:
        """To the next round, if it works."""
        if self.state == "works":
            self._come()

    def _come(self) -> None:
        self.agreement.catch_up()
        self._came_at = self.world.now
        self._send_ready()

    def _send_ready(self) -> None:
        self.state, self._forming_until = "waits", math.inf
        self.agreement.send_ready(
            Ready(
                self.rank,
                self.history,
                self.number,
                self.is_well,
                tuple(sorted(self.blames)),
                b"",
                self._came_at,
            )
        )
        self.advance()

    def advance(self) -> None:
        """Does what is due."""
        self.wakes_at = math.inf
        if self.state != "waits" or not self.lives:
            return
        self.wire.hear_all()
        if self.agreement.formation is None:
            try:
                self.wakes_at = self.agreement.advance()
            except PeerLostError as error:
                self.why = str(error)
                waiting = [one for one in self.world.processes if one.state == "waits"]
                is_late = self.world.now - self._came_at >= self.world.timeout
                self.in_vain = is_late and len(waiting) >= self.world.min_peers
                self.end()
                return
        if self.agreement.formation is not None:
            self._form()

    def _form(self) -> None:
        """Enters the round by the communicator that there is, or waits for the others' coming."""
        formation = self.agreement.formation
        assert formation is not None
        go = formation.go
        if go.is_new:
            self._leave_communicator()
            if self._forming_until == math.inf:
                self._forming_until = self.world.now + max(self.world.grace_s, FORMING_S)
            members = [self.world.processes[rank] for rank in go.members]
            formations = [one.agreement.formation for one in members if one.lives]
            if [one.go for one in formations if one is not None] != [go] * len(members):
                self._wait_for_members()
                return
            for rank in go.members:  # as the last step of a bring-up, which all take at once
                self.world.processes[rank].enter(go)
        else:
            self.enter(go)

    def _wait_for_members(self) -> None:
        formation = self.agreement.formation
        assert formation is not None
        self.wakes_at = self._forming_until
        if self.world.now >= self._forming_until:
            formation.fail("it takes too long", self._silent(formation.go, formation.decider))
        if formation._over(False):
            try:
                formation._raise_trouble()
            except FormationError as error:
                self.blames |= set(error.blames) - {self.rank}
                self.is_well = False
                self.agreement.failed(formation, error.blames, str(error))
                self._send_ready()

    def _silent(self, go: Go, decider: int) -> tuple[int, ...]:
        """As the decider sees it, and as members do, which hear the decider only."""
        if decider != self.rank:
            return (decider,)
        formations = {rank: self.world.processes[rank].agreement.formation for rank in go.members}
        return tuple(rank for rank, one in formations.items() if one is None or one.go != go)

    def enter(self, go: Go) -> None:
        """The round begins here."""
        if go.is_new:
            self._leave_communicator()
            self.epoch, self.is_well = (go.epoch, go.origin), True
        assert self.epoch == (go.epoch, go.origin)
        self.agreement.entered(go)
        self.state, self.wakes_at, self._forming_until = "inside", math.inf, math.inf
        self.members, self.number, self.blames = go.members, go.number, set()
        self.world.enter(self, (go.epoch, go.number, go.origin), go)

    def complete(self, key: History, work: int) -> None:
        self.state, self.history, self.number, self.work = "works", key, key[1] + 1, work

    def lose(self, rank: int, epoch: Epoch) -> None:
        """That communicator has ended with this rank's lanes."""
        if self.epoch != epoch or not self.lives:
            return
        self.is_well = False
        self.blames |= {rank} - {self.rank}
        if self.state == "inside":
            self._come()

    def _leave_communicator(self) -> None:
        epoch, self.epoch = self.epoch, None
        if epoch is not None:
            self.world.left_communicator(self, epoch)

    def end(self) -> None:
        """Its process ends."""
        self.lives, self.state, self.wakes_at = False, "ended", math.inf
        self.wire.end_all()
        self._leave_communicator()

    # ---- what it hears ----

    def receive(self, item: Item) -> None:
        if self.lives:
            self.mailbox.append(item)
            if self.hears or self.state == "waits":
                self.wire.hear_all()
        elif item[0] == "knock":
            item[1].other(self).wire.turned_away(item[1])


class Wire:
    """The connections of a process, for its Agreement: as control.Control.

    Attributes:
        unsaid: ranks to which the process does not say its next GO, since it ends before that.
    """

    def __init__(self, process: Process, receive: Receive, link_made: LinkMade) -> None:
        self._process, self._world = process, process.world
        self._receive, self._link_made = receive, link_made
        self._links: dict[int, list[Link]] = {}
        self._ended: dict[int, tuple[float, bool]] = {}
        self._began = process.world.now
        self._places: dict[int, set[Address]] = {}
        self._wanted: set[int] = set()
        self._knocks: dict[int, Link] = {}
        self.unsaid: set[int] = set()

    # ---- control.Control, and its loop ----

    @property
    def loop(self) -> Wire:
        return self

    @property
    def connected(self) -> frozenset[int]:
        others = set(range(self._world.size)) - {self._process.rank}
        return frozenset(rank for rank in others if self.gone_since(rank) is None)

    @property
    def silent(self) -> dict[int, Silent]:
        ranks = [rank for rank in self._knocks if not self.is_linked(rank)]
        return {rank: Silent(self._ended.get(rank, (self._began, True))[0], ()) for rank in ranks}

    @property
    def letting_in(self) -> bool:
        return any(kind == "knock" for kind, _, _ in self._process.mailbox)

    def gone_since(self, rank: int) -> float | None:
        if self.is_linked(rank) or rank in self._knocks:
            return None
        ended, surely = self._ended.get(rank, (self._began, True))
        return ended if surely else ended + self._world.grace_s

    def is_linked(self, rank: int) -> bool:
        return bool(self._links.get(rank))

    def send(self, rank: int, kind: Kind, payload: bytes) -> None:
        if kind == Kind.GO and rank in self.unsaid:
            self._world.later(self._world.now, self._process.end)
            return
        links = self._links.get(rank)
        if links:
            link = links[-1]
            to = link.other(self._process)
            if kind == Kind.READY:
                link.readies.append((to, payload))
            self._world.say(link, to, ("message", link, (kind, payload)))

    def send_all(self, kind: Kind, payload: bytes) -> None:
        for rank in range(self._world.size):
            self.send(rank, kind, payload)

    def run(self, until: Callable[[], bool], deadline: float) -> bool:
        return self._world.run(until, deadline)

    def catch_up(self) -> None:
        self.hear_all()

    def dial(self, rank: int, places: Iterable[Address]) -> None:
        known = self._places.setdefault(rank, set())
        known.update(places)
        if self.is_linked(rank) or rank in self._knocks:
            return
        self._wanted.add(rank)
        found = next(filter(None, map(self._world.at_place, sorted(known))), None)
        if found is not None and self._world.dark.isdisjoint((self._process.rank, rank)):
            link = Link((self._process, found))
            self._knocks[rank] = link
            self._world.say(link, found, ("knock", link, None))

    def troubles(self) -> dict[int, str]:
        return {}

    def close(self) -> None:
        self.end_all()

    # ---- what comes ----

    def hear_all(self) -> None:
        for rank in sorted(self._wanted):
            self.dial(rank, ())
        mailbox = self._process.mailbox
        while mailbox and self._process.lives:
            what, link, said = mailbox.pop(0)
            rank = link.other(self._process).rank
            if what == "knock":
                self._let_in(rank, link)
            elif what == "welcome":
                self._forget_knock(rank, link)
                if link.stands:
                    self._take(rank, link)
            elif what == "end":
                self._forget_knock(rank, link)
                self._drop(rank, link, said)
            elif link in self._links.get(rank, ()):
                self._receive(rank, *said)

    def _forget_knock(self, rank: int, link: Link) -> None:
        if self._knocks.get(rank) is link:
            del self._knocks[rank]

    def _let_in(self, rank: int, link: Link) -> None:
        other = link.other(self._process)
        self._drop_ended(rank)
        if not link.stands:
            return
        if self.is_linked(rank):
            other.wire.turned_away(link)
            return
        self._world.say(link, other, ("welcome", link, None))
        self._take(rank, link)

    def _drop_ended(self, rank: int) -> None:
        for link in list(self._links.get(rank, ())):
            if not link.stands:
                self._drop(rank, link, True)

    def _take(self, rank: int, link: Link) -> None:
        self._links.setdefault(rank, []).append(link)
        self._wanted.discard(rank)
        self._link_made(rank)

    def _drop(self, rank: int, link: Link, surely: bool) -> None:
        links = self._links.get(rank, [])
        if link in links:
            links.remove(link)
            if not links:
                del self._links[rank]
                self._ended[rank] = (self._world.now, surely)

    # ---- what goes wrong ----

    def turned_away(self, link: Link) -> None:
        """Tries again, in a while."""
        rank = link.other(self._process).rank
        link.stands = False

        def again() -> None:
            self._forget_knock(rank, link)
            if self._process.lives:
                self.dial(rank, ())

        self._world.later(self._world.now + RETRY_S, again)

    def repeat(self, rank: int, which: int) -> None:
        """A READY that was said to this process arrives again."""
        for link in self._links.get(rank, ()):
            said = [payload for to, payload in link.readies if to is self._process]
            if said and link.stands:
                again = ("message", link, (Kind.READY, said[which % len(said)]))
                self._world.later(self._world.now, partial(self._process.receive, again))

    def cut(self, rank: int) -> None:
        """The network ends the connections to a rank, and what is on its way is lost."""
        knock = self._knocks.get(rank)
        if knock is not None:
            knock.other(self._process).receive(("end", knock, False))  # if it has let this one in
            self.turned_away(knock)
        for link in list(self._links.get(rank, ())):
            link.stands = False
            other = link.other(self._process)
            for one, item in itertools.product(link.ends, [("end", link, False)]):
                one.mailbox[:] = [kept for kept in one.mailbox if kept[1] is not link]
                one.receive(item)
            assert other.rank == rank

    def end_all(self) -> None:
        """The process ends, and its kernel says so behind what was said."""
        links = [link for links in self._links.values() for link in links]
        for link in [*links, *self._knocks.values()]:
            link.stands = False
            self._world.say(link, link.other(self._process), ("end", link, True))
        for what, link, _ in self._process.mailbox:
            if what == "knock" and link.stands:
                link.other(self._process).wire.turned_away(link)
        self._links.clear()
        self._knocks.clear()
