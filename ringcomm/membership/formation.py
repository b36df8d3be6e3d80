"""Exchange between members that form a communicator, over the control connections.

    member --BLOB(step)--> decider, for each step of the bring-up
    member <--ALL(step)--- decider, or FAILED

Invariants: only the decider collects; as soon as a member is gone, sends READY anew (so it has
given up), or a newer formation is announced, every wait ends with a BootstrapError.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from ..bootstrap.join_failure import Lost
from ..bootstrap.loop import READ, Loop
from ..bootstrap.records import join_blobs, split_blobs
from ..bootstrap.settings_exchange import unable
from ..errors import BootstrapError
from .control import Control
from .decision import Go
from .messages import Kind, no_message, pack_part, read_failed, read_part


class FormationError(BootstrapError):
    """The members did not come together.

    Attributes:
        blames: ranks of the job that caused the failure.
    """

    def __init__(self, message: str, blames: tuple[int, ...] = ()) -> None:
        super().__init__(message, rank=blames[0] if len(blames) == 1 else None)
        self.blames = blames


class Formation:
    """One rank's part in one attempt of a Go's members to form a communicator.

    Attributes:
        go: as given.
        decider: rank that has sent it.
        unable: members that could not do their own part, as one whose port is down.
    """

    def __init__(self, control: Control, rank: int, decider: int, go: Go) -> None:
        self.go = go
        self.decider = decider
        self.unable: set[int] = set()
        self._control = control
        self._rank = rank
        self._step = 0
        self._blobs: defaultdict[int, dict[int, bytes]] = defaultdict(dict)
        self._all: dict[int, list[bytes]] = {}
        self._trouble: FormationError | None = None

    # ---- receiving ----

    def receive(self, rank: int, kind: Kind, payload: bytes, world_size: int) -> None:
        """Takes a BLOB, ALL or FAILED; ignores those of another epoch or of a rank that may not
        send them. Raises BootstrapError."""
        if kind == Kind.FAILED:
            epoch, blames, text = read_failed(f"rank {rank}", payload, world_size)
            if rank == self.decider and epoch == self.go.epoch:
                self.fail(text, blames)
            return
        epoch, step, rest = read_part(rank, payload)
        if epoch != self.go.epoch:
            return
        if kind == Kind.BLOB and rank in self.go.members:
            self._blobs[step][rank] = rest
        elif kind == Kind.ALL and rank == self.decider:
            blobs = split_blobs(rest, len(self.go.members))
            if blobs is None:
                raise no_message(rank)
            self._all[step] = blobs

    def fail(self, text: str, blames: tuple[int, ...] = ()) -> None:
        """Notes that the formation failed; the first reason counts."""
        if self._trouble is None:
            self._trouble = FormationError(text, blames)

    @property
    def is_nobodys_fault(self) -> bool:
        """Whether it failed, and no rank is to blame: another formation came between."""
        return self._trouble is not None and not self._trouble.blames

    def gave_up(self, rank: int, serial: int) -> None:
        """Fails the formation if this READY of a member is newer than the one the Go counts."""
        if self._counts(rank) and serial > self.go.serials[self.go.members.index(rank)]:
            self.fail(f"rank {rank} gave up on the formation of epoch {self.go.epoch}")

    # ---- rendezvous.Exchange ----

    def allgather(self, blob: bytes, deadline: float) -> list[bytes]:
        """Exchanges blobs by way of the decider; see rendezvous.Exchange."""
        self._step += 1
        share = self._collect if self._rank == self.decider else self._hand_in
        blobs = share(blob, deadline)
        self.unable = {self.go.members[at] for at in unable(blobs)}
        return blobs

    def alarm(self, loop: Loop, ring: Callable[[], None], _lost: Lost) -> None:
        """Rings once the formation has failed; see rendezvous.Exchange."""

        def look() -> None:
            self._control.loop.catch_up()
            if self._over(False):
                loop.forget(self._control.loop)
                ring()

        loop.watch(self._control.loop, READ, look)
        look()

    def close(self) -> None:
        """Does nothing: the connections stay open."""

    # ---- helpers ----

    def _hand_in(self, blob: bytes, deadline: float) -> list[bytes]:
        self._control.send(self.decider, Kind.BLOB, pack_part(self.go.epoch, self._step, blob))
        if not self._control.loop.run(lambda: self._over(self._step in self._all), deadline):
            self.fail(
                f"rank {self.decider}, which leads the formation, does not answer", (self.decider,)
            )
        if self._step not in self._all:  # else FAILED may have come right behind it
            self._raise_trouble()
        return self._all.pop(self._step)

    def _collect(self, blob: bytes, deadline: float) -> list[bytes]:
        blobs, members = self._blobs[self._step], self.go.members
        blobs[self._rank] = blob
        if not self._control.loop.run(lambda: self._over(len(blobs) == len(members)), deadline):
            silent = tuple(rank for rank in members if rank not in blobs)
            self.fail(
                f"rank {', '.join(map(str, silent))} said that it is ready for a round, and "
                "does not answer",
                silent,
            )
        self._raise_trouble()
        parts = [blobs[rank] for rank in members]
        answer = pack_part(self.go.epoch, self._step, join_blobs(parts))
        for rank in members:
            if rank != self._rank:
                self._control.send(rank, Kind.ALL, answer)
        del self._blobs[self._step]
        return parts

    def _counts(self, rank: int) -> bool:
        """True if the loss of this rank fails the formation here: any member's on the decider, only
        the decider's on a member."""
        if self._rank == self.decider:
            return rank in self.go.members
        return rank == self.decider

    def _over(self, done: bool) -> bool:
        if done or self._trouble is not None:
            return True
        for rank in self.go.members:
            if rank != self._rank and self._counts(rank) and not self._control.is_linked(rank):
                self.fail(f"rank {rank} was lost while the members met", (rank,))
                return True
        return False

    def _raise_trouble(self) -> None:
        if self._trouble is not None:
            raise self._trouble
