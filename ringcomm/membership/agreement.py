"""One rank's part in agreeing on the members of a round: sends, receives and decides.

    APART --send_ready--> WAITING --GO that counts its READY--> AGREED --entered--> APART
                           |  ^                                   |
                           |  +------ send_ready: it failed ------+
                           +-- too few --> APART

    APART      it works, alone or in a round
    WAITING    its own READY is among those that it knows, and it has no formation
    AGREED     it has a formation, by the GO, and forms a communicator if that says so

Invariants: a GO counts only if its epoch is new or the present one, and it counts this rank's
latest READY; a rank that learns of a newer formation without itself is behind, and decides nothing
until it is a member again; a READY is counted by one GO only, unless the formation fails. Nothing
here knows of communicators, nor makes a connection or reads a clock that it was not given.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..errors import BootstrapError, PeerLostError
from . import messages
from .control import Control, LinkMade, Receive
from .decision import Go, Knowledge, Limits, Ready, TooFew, Wait, decide
from .formation import Formation
from .messages import Address, Book, Kind

_log = logging.getLogger("ringcomm")
_LINGER_S = 0.25
"""Seconds to wait for a rank that is let in, or that says READY anew."""
_AGE_MATTERS_S = 0.05
_SLICE_S = 60.0


class Agreement:
    """One rank's knowledge of the others and its decisions; owns its connections.

    Args:
        listens: addresses at which this rank listens.
        connect: makes the connections, given callbacks for messages and for new connections.
        clock: seconds that never go backwards; the clock of the connections.

    Attributes:
        members: ranks of the formation that this rank belongs to; empty before the first.
        epoch: number of that formation.
        origin: process that decided on it; see Ready.
        behind: True if the others have gone on without this rank.
        formation: that this rank has agreed to; None before, and once the round has begun.
    """

    def __init__(
        self,
        limits: Limits,
        listens: Sequence[Address],
        connect: Callable[[Receive, LinkMade], Control],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.members: tuple[int, ...] = ()
        self.epoch = -1
        self.origin = 0
        self.behind = True
        self.formation: Formation | None = None
        self._limits = limits
        self._seen = -1
        self._serial = 0
        self._ready: dict[int, Ready] = {}
        self._counted: dict[int, int] = {}  # the latest serial that a GO counted, by rank
        self._process = secrets.randbits(48)
        self._processes: dict[int, int] = {}  # the latest process of each rank
        self._announced: Go | None = None
        self._linger_until = 0.0
        self._lingers_in_vain = False
        self._book: Book = {limits.rank: list(listens)}
        self._clock = clock
        self._control = connect(self._receive, self._introduce)

    # ---- at the start ----

    @property
    def own_places(self) -> bytes:
        """Addresses at which this rank listens, encoded for ``meet_all``."""
        return messages.pack_book({self._limits.rank: self._book[self._limits.rank]})

    def meet_all(self, books: Sequence[bytes], patience: float) -> None:
        """Connects all ranks of a job that begins, all of which are members. books: own_places of
        the ranks, in order. Raises BootstrapError."""
        mine, world = self._limits.rank, self._limits.world_size
        self.members, self.epoch, self._seen = tuple(range(world)), 0, 0
        self.behind = False
        for rank, blob in enumerate(books):
            self._book.update(messages.read_book(f"rank {rank}", blob, world))
        self._dial_missing()

        def missing() -> list[int]:
            return [r for r in range(world) if r != mine and not self._control.is_linked(r)]

        if not self._control.loop.run(lambda: not missing(), self._clock() + patience):
            troubles = self._control.troubles()
            why = "; ".join(f"rank {r}: {troubles.get(r, 'it did not connect')}" for r in missing())
            raise BootstrapError(f"no control connection within {patience:g} s: {why}")

    def look_for(self, candidates: Mapping[int, Iterable[Address]]) -> None:
        """Dials ranks at these addresses whenever this rank waits."""
        for rank, places in candidates.items():
            self._control.dial(rank, places)

    def close(self) -> None:
        """Closes all connections, so that the others see this rank as gone."""
        self._control.close()

    # ---- coming to a round ----

    def catch_up(self) -> None:
        """Handles messages that arrived while this rank was in a round."""
        self._control.loop.catch_up()

    def send_ready(self, ready: Ready) -> None:
        """Sends READY to all, after filling in serial, epoch, origin, seen and behind."""
        if self.formation is not None:  # it failed
            for rank in self.formation.go.members:  # who may not have known of it
                self._counted.pop(rank, None)
            if self.formation.is_nobodys_fault:  # its members are about to say READY anew
                self._linger_until = self._clock() + _LINGER_S
        self.formation = None
        self._renew_ready(ready)
        self._dial_missing()
        if len(self.members) < self._limits.world_size:
            self._control.loop.catch_up()
            if not self._control.letting_in:
                self._lingers_in_vain = False
            elif not self._lingers_in_vain:  # until somebody is let in
                self._lingers_in_vain = True
                self._linger_until = self._clock() + _LINGER_S

    def wait(self) -> Formation:
        """Waits until the members are known and returns the formation. Raises PeerLostError if
        too few ranks are left."""
        if self.behind:
            _log.info("membership: rank %d waits for the end of a round", self._limits.rank)
        while True:
            until = self.advance()
            if self.formation is not None:
                return self.formation
            self._listen(until)

    def advance(self) -> float:
        """Decides from the present knowledge; returns the time to decide again if no message
        arrives before. Raises PeerLostError if too few ranks are left."""
        self._dial_missing()
        outcome = decide(self._knowledge(), self._clock()) if self.formation is None else None
        if isinstance(outcome, TooFew):
            del self._ready[self._limits.rank]
            missing = outcome.missing
            raise PeerLostError(outcome.text, rank=missing[0] if len(missing) == 1 else None)
        if isinstance(outcome, Go):
            self._announce(outcome)
        return outcome.until if isinstance(outcome, Wait) else self._clock()

    def failed(self, formation: Formation, blames: Sequence[int], text: str) -> None:
        """Notes that the formation failed on this rank; the decider tells the others."""
        if formation.decider == self._limits.rank:
            payload = messages.pack_failed(formation.go.epoch, blames, text)
            for rank in formation.go.members:
                self._control.send(rank, Kind.FAILED, payload)

    def entered(self, go: Go) -> None:
        """Notes that the round begins with the members of go."""
        del self._ready[self._limits.rank]
        self.formation = None
        self.members, self.epoch, self.origin = go.members, go.epoch, go.origin
        self.behind = False

    def _dial_missing(self) -> None:
        """Dials the lower ranks, and all ranks if this one is behind."""
        for rank in range(self._limits.world_size):
            if rank < self._limits.rank or (self.behind and rank != self._limits.rank):
                self._control.dial(rank, self._book.get(rank, ()))

    def _announce(self, go: Go) -> None:
        payload = messages.pack_go(go)  # before anything is noted
        if go.left:
            names = ", ".join(map(str, go.left))
            _log.warning("membership: round %d goes on without rank %s", go.number, names)
        latest = self._ready[go.leader].history
        for rank in go.joined:
            epoch, _, origin = self._ready[rank].history
            if epoch == latest[0] and origin != latest[2]:
                _log.warning(
                    "membership: rank %d and rank %d have gone on apart, in two formations of "
                    "epoch %d; rank %d gets the other's state",
                    rank,
                    go.leader,
                    epoch,
                    rank,
                )
        self._announced = go
        self._accept(Formation(self._control, self._limits.rank, self._limits.rank, go))
        self._control.send_all(Kind.GO, payload)

    def _listen(self, until: float) -> None:
        """Handles messages until the knowledge changes, or until the given time."""
        ready, connected = dict(self._ready), self._control.connected

        def changed() -> bool:
            return (
                self.formation is not None
                or self._ready != ready
                or self._control.connected != connected
            )

        self._control.loop.run(changed, min(until, self._clock() + _SLICE_S))

    def _knowledge(self) -> Knowledge:
        control = self._control
        others = (rank for rank in range(self._limits.world_size) if rank != self._limits.rank)
        gone = {rank: control.gone_since(rank) for rank in others}
        return Knowledge(
            **vars(self._limits),
            members=self.members,
            ready=self._ready,
            connected=control.connected,
            gone={rank: at for rank, at in gone.items() if at is not None},
            linger_until=self._linger_until,
            silent=control.silent,
            process=self._process,
        )

    # ---- sending ----

    def _renew_ready(self, ready: Ready) -> None:
        self._serial += 1
        self._ready[self._limits.rank] = dataclasses.replace(
            ready,
            serial=self._serial,
            epoch=self.epoch,
            origin=self.origin,
            seen=self._seen,
            behind=self.behind,
        )
        self._control.send_all(Kind.READY, self._packed_ready())

    def _repeat_ready(self, rank: int) -> None:
        if self._waits:
            self._control.send(rank, Kind.READY, self._packed_ready())

    @property
    def _waits(self) -> bool:
        return self._limits.rank in self._ready and self.formation is None

    def _packed_ready(self) -> bytes:
        return messages.pack_ready(self._ready[self._limits.rank], self._clock())

    # ---- receiving ----

    def _introduce(self, rank: int) -> None:
        """Introduces this rank on a new connection and repeats its READY, as the other rank does,
        which may be another process now: its READY of before does not count."""
        self._ready.pop(rank, None)
        self._control.send(rank, Kind.INTRO, messages.pack_intro(self._process, self._book))
        if rank not in self.members:
            self._lingers_in_vain = False
            self._linger_until = self._clock() + _LINGER_S
        self._repeat_ready(rank)

    def _receive(self, rank: int, kind: Kind, payload: bytes) -> None:
        source, world = f"rank {rank}", self._limits.world_size
        if kind == Kind.INTRO:
            self._receive_intro(rank, *messages.read_intro(source, payload, world))
        elif kind == Kind.READY:
            self._receive_ready(messages.read_ready(rank, payload, world, self._clock()))
        elif kind == Kind.GO:
            self._receive_go(rank, messages.read_go(source, payload, world))
        elif self.formation is not None:
            self.formation.receive(rank, kind, payload, world)

    def _receive_intro(self, rank: int, process: int, book: Book) -> None:
        """Takes a rank's INTRO: learns addresses, and forgets what was counted of an earlier
        process."""
        if self._processes.get(rank) != process:
            self._processes[rank] = process
            self._counted.pop(rank, None)
        elif self._announced is not None and rank in self._announced.members:
            self._repeat_go(rank, self._announced)
        # A rank's word counts for its own addresses; for others' where none are known.
        for other, listens in book.items():
            if other == rank or other not in self._book:
                self._book[other] = listens
            if self.behind and other != self._limits.rank:
                self._control.dial(other, listens)

    def _repeat_go(self, rank: int, go: Go) -> None:
        """Repeats a GO that may have been lost with a rank's connection; if this rank has given
        it up since, counts the other rank's READY again instead."""
        if _serial_in(go, self._limits.rank) == self._serial:
            self._control.send(rank, Kind.GO, messages.pack_go(go))
        else:
            self._counted.pop(rank, None)

    def _receive_ready(self, ready: Ready) -> None:
        if ready.serial <= self._counted.get(ready.rank, 0):
            return  # a copy, which was sent before its rank received the GO
        known = self._ready.get(ready.rank, ready)
        if known.serial > ready.serial:
            return
        if known.serial == ready.serial:
            ready = dataclasses.replace(ready, at=min(ready.at, known.at))
        self._ready[ready.rank] = ready
        self._seen = max(self._seen, ready.seen)
        if self.formation is not None:
            self.formation.gave_up(ready.rank, ready.serial)
        if ready.epoch > self.epoch and not self.behind:
            self._fall_behind()
        mine = self._ready.get(self._limits.rank)
        if mine is not None and (
            known.serial < ready.serial or mine.at < ready.at - _AGE_MATTERS_S
        ):
            self._repeat_ready(ready.rank)  # so that it knows that this rank waits, and since when

    def _receive_go(self, rank: int, go: Go) -> None:
        if self.formation is not None and self._is_before(rank, go, self.formation):
            self.formation.fail(f"rank {rank} has announced another formation")
        present = (self.epoch, self.origin)
        is_news = go.epoch > self._seen if go.is_new else (go.epoch, go.origin) == present
        self._seen = max(self._seen, go.epoch)
        counted = _serial_in(go, self._limits.rank)
        if counted is None:  # the others go on without this rank
            if go.epoch > self.epoch:
                self._count(go)
                self._fall_behind()
        elif counted == self._serial and self._waits:
            if is_news:
                self._accept(Formation(self._control, self._limits.rank, rank, go))
            else:  # so that the decider forms anew, by an epoch above those that this rank has seen
                self._renew_ready(self._ready[self._limits.rank])

    def _is_before(self, rank: int, go: Go, formation: Formation) -> bool:
        """True if a GO ends this formation: it is newer, or two deciders form one epoch, would wait
        for each other, and this rank is the higher."""
        is_rival = formation.decider == self._limits.rank > rank and go.is_new
        return go.epoch > formation.go.epoch or (is_rival and go.epoch == formation.go.epoch)

    def _fall_behind(self) -> None:
        """Notes that a newer formation went on without this rank; renews its READY, which a GO that
        was lost on its way may have counted."""
        self.behind = True
        if self._waits:
            self._renew_ready(self._ready[self._limits.rank])

    def _accept(self, formation: Formation) -> None:
        self.formation = formation
        self._seen = max(self._seen, formation.go.epoch)
        self._count(formation.go)

    def _count(self, go: Go) -> None:
        """Removes the others' READYs that a GO has counted; later copies of them are ignored."""
        for rank, serial in zip(go.members, go.serials, strict=True):
            if rank == self._limits.rank:
                continue
            self._counted[rank] = max(serial, self._counted.get(rank, 0))
            ready = self._ready.get(rank)
            if ready is not None and ready.serial <= serial:
                del self._ready[rank]


def _serial_in(go: Go, rank: int) -> int | None:
    """Returns the serial of the rank's READY that the GO counts; None if it counts none."""
    return dict(zip(go.members, go.serials, strict=True)).get(rank)
