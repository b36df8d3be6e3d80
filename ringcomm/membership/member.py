"""Membership: the rounds of one rank, and its communicator, which is made anew when members change.

    IN_ROUND --begin_round, lost--> WAITING --GO of this epoch--> IN_ROUND
                                    | ^   \\--GO of a new epoch--> FORMING --made--> IN_ROUND
                                    | +---------- failed: READY anew ----+
                                    +-- too few, timeout, close() --> CLOSED

Invariants: ``comm`` connects exactly ``members`` and is used in no two formations; what others have
said while this rank was in a round is heard before it says that it is ready; a GO counts only if
its epoch is new and it counts this rank's latest READY; who learns of a newer formation without
itself is behind, and decides nothing until it is a member again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import math
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from ..bootstrap import mesh
from ..bootstrap.join import Joined, join
from ..bootstrap.launch import Identity, identify
from ..bootstrap.secret import Secret, check_exposed, load
from ..bootstrap.system import typed_errors
from ..bootstrap.terms import Key, job_hash
from ..communicator import Communicator
from ..config import TUNE_TABLE_OFF, Config, names_arguments
from ..errors import (
    AbortedError,
    BootstrapError,
    CommTimeoutError,
    ConfigError,
    NotInitializedError,
    PeerLostError,
    ProtocolError,
    RingcommError,
)
from . import messages, places
from .control import Control
from .decision import (
    NONE_YET,
    STARTED_AGAIN,
    Go,
    History,
    Ready,
    TooFew,
    View,
    Wait,
    decide,
)
from .formation import Formation, FormationError
from .messages import MAX_TOKEN, Book, Kind

_log = logging.getLogger("ringcomm")
_RECOVERABLE = (PeerLostError, CommTimeoutError, AbortedError, ProtocolError, BootstrapError)
_LINGER_S = 0.25
"""For a rank that comes back, while it is let in."""
_LEAST_FORMING_S = 5.0
"""A port that is dead beside its sibling takes 3 s of a bring-up."""
_AGE_MATTERS_S = 0.05
_SLICE_S = 60.0


class State(enum.Enum):
    """Of a rank."""

    IN_ROUND = enum.auto()
    WAITING = enum.auto()
    FORMING = enum.auto()
    CLOSED = enum.auto()


@dataclasses.dataclass(frozen=True)
class Round:
    """Who takes part in a round. Ranks are those of the whole job, but for leader.

    Attributes:
        number: the round's; for who was left behind, the others' number.
        members: in the order of the communicator.
        left: members of the round before that were lost or late.
        joined: members that need the state: what the others have completed, they have not.
        leader: rank in the communicator of a member that has the state.
        is_new: the communicator is another than in the round before.
        tokens: what each member gave to begin_round, in the order of members.
    """

    number: int
    members: tuple[int, ...]
    left: tuple[int, ...]
    joined: tuple[int, ...]
    leader: int
    is_new: bool
    tokens: tuple[bytes, ...]


class Membership:
    """Ranks that work in rounds, and go on without who is lost or late, and with who comes back.

    Made by all ranks at once, as ``ringcomm.init``. Used by one thread. Also a context manager.

    Args:
        min_peers: a round takes place with at least so many ranks, this one among them. Default:
            more than half. With fewer, both halves of a partitioned network go on by themselves.
        grace_s: how long a round waits for the late ones once min_peers are ready, and after what
            silence a member is lost in mid-round (the communicators' peer_timeout).
        rejoin: this process takes the place of one that has ended, among members that go on without
            it. begin_round then waits for the end of their round.
        hosts: with rejoin, names or addresses of hosts to look for members on, where the address of
            rank 0's host is not enough (rank 0 was lost).
        rank, world_size, init_method, config, timeout, mpi, store: as of ``ringcomm.init``. While
            fewer than min_peers are ready and the others live, config.timeout is waited for them.

    Attributes:
        rank, world_size: of the whole job.
        members: original ranks of the communicator's ranks, in their order.
    """

    @names_arguments
    def __init__(
        self,
        *,
        min_peers: int | None = None,
        grace_s: float = 30.0,
        rejoin: bool = False,
        hosts: Sequence[str] = (),
        rank: int | None = None,
        world_size: int | None = None,
        init_method: str | None = None,
        config: Config | None = None,
        timeout: float | None = None,
        mpi: Any = None,
        store: Any = None,
    ) -> None:
        self._grace_s = _checked_grace(grace_s)
        self._config = _fitted(Config() if config is None else config, self._grace_s)
        self.members: tuple[int, ...] = ()
        self._comm: Communicator | None = None
        self._state = State.IN_ROUND
        self._epoch = self._seen = -1
        self._history: History = STARTED_AGAIN
        self._behind = True
        self._number: int | None = None
        self._token = b""
        self._serial = 0
        self._ready: dict[int, Ready] = {}
        self._go: Formation | None = None
        self._forming: Formation | None = None
        self._linger_until = 0.0
        self._book: Book = {}
        self._control: Control | None = None
        if rejoin:
            identity = identify(rank, world_size, init_method)
            self._secret: Secret | None = load(self._config)
            self._job = identity.job
            self._set_up(identity.rank, identity.world_size, min_peers)
            self._look_for_members(identity, hosts)
        else:
            joined = join(self._config, rank, world_size, init_method, timeout, mpi, store)
            self._secret, self._job = joined.secret, joined.job
            self._comm = Communicator(joined)
            try:
                self._set_up(joined.mesh.rank, joined.mesh.world_size, min_peers)
                self._start_with_all()
            except BaseException:
                self.close()
                raise

    # ---- rounds ----

    @property
    def comm(self) -> Communicator:
        """The communicator of the round."""
        if self._comm is None:
            raise NotInitializedError("this rank belongs to no communicator: call begin_round")
        return self._comm

    def begin_round(self, number: int, token: bytes = b"") -> Round:
        """Waits until it is known who takes part in a round.

        Args:
            number: the round's, counted upwards by all members alike. That the round before was
                completed is taken for granted where end_round was not called.
            token: up to 256 bytes, which all members get (Round.tokens).

        Raises:
            PeerLostError: fewer than min_peers came; the text says who is missing and how long.
        """
        self._require_open()
        if len(token) > MAX_TOKEN:
            raise ConfigError(f"token has {len(token)} bytes: give at most {MAX_TOKEN}")
        if self._number is not None and number > self._number:
            self._complete()
        self._token = bytes(token)
        return self._agree(number, ())

    def end_round(self) -> None:
        """Returns once all members have called it: then all have what this rank has. Call it behind
        the round's last collective and before its result is used; what it raises is for lost().
        Without it a peer that dies in a round's last collective may leave some members with its
        result and others without; these then get the state from those."""
        self._require_open()
        self.comm.barrier()
        self._complete()

    def lost(self, error: RingcommError) -> Round:
        """A collective of the round failed: brings those together who are left, for the same round.

        Raises the error itself where it is none that other members would help against, as a
        wrong argument. Else as begin_round.
        """
        self._require_open()
        if self._number is None or not isinstance(error, _RECOVERABLE):
            raise error
        return self._agree(self._number, self._blamed_by(error))

    def close(self) -> None:
        """Leaves the job: to the other members this rank is gone."""
        self._state = State.CLOSED
        comm, self._comm = self._comm, None
        control, self._control = self._control, None
        if comm is not None:
            comm.close()
        if control is not None:
            control.close()

    def __enter__(self) -> Membership:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- start ----

    def _set_up(self, rank: int, world_size: int, min_peers: int | None) -> None:
        self.rank, self.world_size = rank, world_size
        self._min_peers = _checked_min_peers(min_peers, world_size)

    def _open_control(self, addresses: Sequence[str]) -> Control:
        with typed_errors():
            listeners = places.listen_on(
                addresses, self._job, self.rank, self._secret, self._config.insecure
            )
        job = job_hash(self._job)
        self._book[self.rank] = [sock.getsockname()[:2] for sock in listeners]
        self._control = Control(
            self.rank, self.world_size, Key.derive(self._secret, job, self._config.insecure), job,
            listeners, self._grace_s, self._hear, self._meet,
        )  # fmt: skip
        return self._control

    def _start_with_all(self) -> None:
        """Of a job that begins: all are members, and tell each other where they listen."""
        comm = self.comm
        self.members = tuple(range(self.world_size))
        self._epoch = self._seen = 0
        self._history, self._behind = NONE_YET, False
        if self.world_size == 1:
            return
        control = self._open_control(list(dict.fromkeys(rail.address for rail in comm.rails)))
        mine = messages.pack_book({self.rank: self._book[self.rank]})
        for rank, blob in enumerate(_gather(comm, mine)):
            self._book.update(messages.read_book(f"rank {rank}", blob, self.world_size))
        for rank in range(self.rank):
            control.dial(rank, self._book.get(rank, ()))
        others = [rank for rank in self.members if rank != self.rank]
        deadline = time.monotonic() + self._config.connect_timeout
        if not control.run(lambda: all(map(control.is_linked, others)), deadline):
            missing = [rank for rank in others if not control.is_linked(rank)]
            raise BootstrapError(
                f"no control connection to rank {', '.join(map(str, missing))} within "
                f"{self._config.connect_timeout:g} s: {control.troubles()}"
            )

    def _look_for_members(self, identity: Identity, hosts: Sequence[str]) -> None:
        asked = places.contacts(list(hosts) or [identity.master_addr or "localhost"])
        check_exposed(asked, self._secret, self._config.insecure)
        control = self._open_control(places.own_addresses(self._config, asked))
        for rank in range(self.world_size):
            if rank != self.rank:
                control.dial(rank, places.candidates(asked, self._job, rank))

    # ---- what is heard ----

    def _meet(self, rank: int) -> None:
        """A connection was made."""
        assert self._control is not None
        self._control.send(rank, Kind.INTRO, messages.pack_book(self._book))
        self._ready.pop(rank, None)  # of a process that was there before
        if rank not in self.members:
            self._linger_until = time.monotonic() + _LINGER_S
        self._tell(rank)

    def _hear(self, rank: int, kind: Kind, payload: bytes) -> None:
        source = f"rank {rank}"
        if kind == Kind.INTRO:
            self._hear_book(rank, messages.read_book(source, payload, self.world_size))
        elif kind == Kind.READY:
            now = time.monotonic()
            self._hear_ready(messages.read_ready(rank, payload, self.world_size, now))
        elif kind == Kind.GO:
            self._hear_go(rank, messages.read_go(source, payload, self.world_size))
        elif kind == Kind.FAILED:
            epoch, blames, text = messages.read_failed(source, payload, self.world_size)
            formation = self._formation(epoch)
            if formation is not None and formation.decider == rank:
                formation.fail(text, blames)
        else:
            self._hear_part(rank, kind, payload)

    def _hear_book(self, rank: int, book: Book) -> None:
        """What a rank says of itself counts; of others, where nothing is known."""
        assert self._control is not None
        for other, listens in book.items():
            if other == rank or other not in self._book:
                self._book[other] = listens
            if self._behind and other != self.rank:
                self._control.dial(other, listens)

    def _hear_ready(self, ready: Ready) -> None:
        known = self._ready.get(ready.rank)
        if known is not None and known.serial > ready.serial:
            return
        if known is not None and known.serial == ready.serial:
            ready = dataclasses.replace(ready, at=min(ready.at, known.at))
        self._ready[ready.rank] = ready
        self._seen = max(self._seen, ready.seen)
        if self._forming is not None:
            self._forming.gave_up(ready.rank, ready.serial)
        mine = self._ready.get(self.rank)
        if mine is not None and mine.at < ready.at - _AGE_MATTERS_S:
            self._tell(ready.rank)  # since when we are waiting

    def _hear_go(self, rank: int, go: Go) -> None:
        mine = self._ready.get(self.rank)
        counted = dict(zip(go.members, go.serials, strict=True)).get(self.rank)
        if self._forming is not None and go.epoch > self._forming.go.epoch:
            self._forming.fail(f"rank {rank} has announced a newer formation")
        if counted is None:
            self._miss(go)
        elif mine is not None and mine.serial == counted and self._is_news(go):
            self._accept(Formation(self._require_control(), self.rank, rank, go))
        self._seen = max(self._seen, go.epoch)

    def _hear_part(self, rank: int, kind: Kind, payload: bytes) -> None:
        part = messages.read_blob(payload)
        if part is None:
            raise BootstrapError(f"rank {rank} sent what no ringcomm sends", rank=rank)
        epoch, step, rest = part
        formation = self._formation(epoch)
        if formation is None:
            return
        if kind == Kind.BLOB and formation.decider == self.rank:
            formation.blob(rank, step, rest)
        elif kind == Kind.ALL and formation.decider == rank:
            formation.all(step, rest)

    def _formation(self, epoch: int) -> Formation | None:
        one = self._forming
        return one if one is not None and one.go.epoch == epoch else None

    def _is_news(self, go: Go) -> bool:
        return go.epoch > self._seen if go.is_new else go.epoch == self._epoch

    def _miss(self, go: Go) -> None:
        """The others go on without this rank."""
        if not go.is_new or go.epoch <= self._epoch:
            return
        self._behind = True
        for rank, serial in zip(go.members, go.serials, strict=True):
            self._count(rank, serial)
        if self._state == State.WAITING and self._go is not None:
            self._go = None
        if self._state == State.WAITING:
            self._renew()

    def _accept(self, formation: Formation) -> None:
        go = formation.go
        self._go = self._forming = formation
        self._seen = max(self._seen, go.epoch)
        for rank, serial in zip(go.members, go.serials, strict=True):
            self._count(rank, serial)

    def _count(self, rank: int, serial: int) -> None:
        """A READY has had its consequence."""
        ready = self._ready.get(rank)
        if ready is not None and ready.serial <= serial and rank != self.rank:
            del self._ready[rank]

    # ---- coming to a round ----

    def _agree(self, number: int, blames: tuple[int, ...]) -> Round:
        if self.world_size == 1:
            self._number = number
            return Round(number, (0,), (), (), 0, False, (self._token,))
        control = self._require_control()
        control.catch_up()
        began = time.monotonic()
        blames += self._blamed_by(self._failure())
        while True:
            self._state = State.WAITING
            self._say_ready(number, blames, began)
            go = self._wait_for_go()
            try:
                if go.is_new:
                    self._form(go)
                return self._enter(go)
            except RingcommError as error:
                blames = self._formation_failed(go, error, began)

    def _say_ready(self, number: int, blames: tuple[int, ...], since: float) -> None:
        self._serial += 1
        self._ready[self.rank] = Ready(
            self.rank, self._serial, self._epoch, self._seen, self._behind, self._history, number,
            self._failure() is None and self._comm is not None, tuple(sorted(set(blames))),
            self._token, since,
        )  # fmt: skip
        self._go = self._forming = None
        self._tell_all()
        control = self._require_control()
        for rank in range(self.world_size):
            if rank < self.rank or (self._behind and rank != self.rank):
                control.dial(rank, self._book.get(rank, ()))
        if len(self.members) < self.world_size:
            control.catch_up()
            if control.letting_in:
                self._linger_until = time.monotonic() + _LINGER_S

    def _renew(self) -> None:
        """Says again that this rank is ready, now that it is behind."""
        self._serial += 1
        mine = self._ready[self.rank]
        self._ready[self.rank] = dataclasses.replace(
            mine, serial=self._serial, behind=self._behind, seen=self._seen
        )
        self._tell_all()

    def _tell_all(self) -> None:
        mine = messages.pack_ready(self._ready[self.rank], time.monotonic())
        self._require_control().send_all(Kind.READY, mine)

    def _tell(self, rank: int) -> None:
        mine = self._ready.get(self.rank)
        if mine is not None and self._state == State.WAITING:
            payload = messages.pack_ready(mine, time.monotonic())
            self._require_control().send(rank, Kind.READY, payload)

    def _wait_for_go(self) -> Go:
        control = self._require_control()
        told = False
        while self._go is None:
            heard = len(self._ready), control.connected
            now = time.monotonic()
            outcome = decide(self._view(), now)
            if isinstance(outcome, Go):
                self._announce(outcome)
            elif isinstance(outcome, TooFew):
                self._give_up(outcome)
            else:
                if self._behind and not told:
                    told = True
                    _log.info("membership: rank %d waits for the end of a round", self.rank)
                self._listen(outcome, now, heard)
        assert self._go is not None
        return self._go.go

    def _listen(self, wait: Wait, now: float, heard: Any) -> None:
        """Until something is heard, or the time comes."""
        control = self._require_control()
        before = dict(self._ready)
        control.run(
            lambda: (
                self._go is not None or self._ready != before or control.connected != heard[1]
            ),
            min(wait.until, now + _SLICE_S) if wait.until < math.inf else now + _SLICE_S,
        )

    def _view(self) -> View:
        control = self._require_control()
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        gone = {rank: control.gone_since(rank) for rank in others}
        return View(
            self.rank, self.world_size, self._min_peers, self._grace_s, self._config.timeout,
            self.members, self._ready, control.connected,
            {rank: at for rank, at in gone.items() if at is not None}, self._linger_until,
        )  # fmt: skip

    def _announce(self, go: Go) -> None:
        control = self._require_control()
        if go.left:
            names = ", ".join(map(str, go.left))
            _log.warning("membership: round %d goes on without rank %s", go.number, names)
        self._accept(Formation(control, self.rank, self.rank, go))
        control.send_all(Kind.GO, messages.pack_go(go))

    def _give_up(self, outcome: TooFew) -> None:
        self._ready.pop(self.rank, None)
        self._state = State.IN_ROUND
        missing = outcome.missing
        raise PeerLostError(outcome.text, rank=missing[0] if len(missing) == 1 else None)

    # ---- forming ----

    def _form(self, go: Go) -> None:
        self._state = State.FORMING
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.close()
        seconds = min(self._config.connect_timeout, max(self._grace_s, _LEAST_FORMING_S))
        all_there = len(go.members) == self.world_size
        settings = dataclasses.replace(
            self._config, connect_timeout=seconds,
            tune_table=self._config.tune_table if all_there else TUNE_TABLE_OFF,
        )  # fmt: skip
        identity = Identity(
            rank=go.members.index(self.rank), world_size=len(go.members), local_rank=None,
            local_world_size=None, master_addr="", master_ports=(), launcher="membership",
            job=self._job,
        )  # fmt: skip
        with typed_errors():
            made = mesh.join(identity, settings, self._secret, self._forming, go.epoch)
        self._comm = Communicator(
            Joined(made, self._config, self._secret, f"{self._job}, epoch {go.epoch}", go.epoch)
        )

    def _enter(self, go: Go) -> Round:
        self._state = State.IN_ROUND
        self._ready.pop(self.rank, None)
        self._go = self._forming = None
        self.members, self._epoch = go.members, go.epoch
        self._number, self._behind = go.number, False
        if go.is_new:
            _log.info("membership: round %d, epoch %d: ranks %s", go.number, go.epoch,
                      ", ".join(map(str, go.members)))  # fmt: skip
        return Round(
            go.number, go.members, go.left, go.joined, go.members.index(go.leader), go.is_new,
            go.tokens,
        )  # fmt: skip

    def _formation_failed(
        self, go: Go, error: RingcommError, began: float
    ) -> tuple[int, ...]:
        """Whom to blame in the next attempt. Raises where there shall be none."""
        assert self._forming is not None
        blames = self._blamed_by(error, go.members)
        if self._forming.decider == self.rank:
            payload = messages.pack_failed(go.epoch, blames, str(error))
            for rank in go.members:
                if rank != self.rank:
                    self._require_control().send(rank, Kind.FAILED, payload)
        _log.info("membership: the formation of epoch %d failed: %s", go.epoch, error)
        too_late = time.monotonic() - began > self._grace_s + self._config.timeout
        if too_late or (self._behind and isinstance(error, ConfigError)):
            self.close()
            raise error
        return blames

    # ---- helpers ----

    def _complete(self) -> None:
        assert self._number is not None
        if not self._behind:
            self._history = (self._epoch, self._number)

    def _failure(self) -> RingcommError | None:
        if self._comm is None:
            return None
        with contextlib.suppress(NotInitializedError):
            return self._comm.failure()
        return None

    def _blamed_by(
        self, error: RingcommError | None, members: tuple[int, ...] | None = None
    ) -> tuple[int, ...]:
        """Original ranks that an error of a communicator names."""
        if isinstance(error, FormationError):
            return error.blames
        members = self.members if members is None else members
        if error is None or error.rank is None or not error.rank < len(members):
            return ()
        return () if members[error.rank] == self.rank else (members[error.rank],)

    def _require_open(self) -> None:
        if self._state == State.CLOSED:
            raise NotInitializedError("the membership is closed")

    def _require_control(self) -> Control:
        self._require_open()
        assert self._control is not None
        return self._control


def _fitted(config: Config, grace_s: float) -> Config:
    """A member that is silent for the grace time is lost."""
    if not isinstance(config, Config):
        raise ConfigError(f"config={config!r}: give a ringcomm.Config, as Config(lanes=2)")
    return dataclasses.replace(
        config, peer_timeout=grace_s, heartbeat=min(config.heartbeat, grace_s / 4)
    )


def _checked_grace(grace_s: float) -> float:
    is_number = isinstance(grace_s, (int, float)) and not isinstance(grace_s, bool)
    if not is_number or not 0.5 <= grace_s <= 3600:
        raise ConfigError(f"grace_s={grace_s!r}: give seconds from 0.5 to 3600")
    return float(grace_s)


def _checked_min_peers(min_peers: int | None, world_size: int) -> int:
    if min_peers is None:
        return world_size // 2 + 1
    whole = isinstance(min_peers, int) and not isinstance(min_peers, bool)
    if not whole or not 1 <= min_peers <= world_size:
        raise ConfigError(f"min_peers={min_peers!r}: give a whole number from 1 to {world_size}")
    if 2 * min_peers <= world_size:
        _log.warning(
            "min_peers=%d of %d ranks: if the network is cut in two, both halves go on, and part",
            min_peers, world_size,
        )  # fmt: skip
    return min_peers


def _gather(comm: Communicator, part: bytes) -> list[bytes]:
    """Every rank's bytes."""
    sizes = comm.allgather(np.array([len(part)], dtype=np.int64)).reshape(-1)
    padded = np.zeros(int(sizes.max()), dtype=np.uint8)
    padded[: len(part)] = np.frombuffer(part, dtype=np.uint8)
    rows = comm.allgather(padded)
    return [bytes(rows[rank][: int(size)]) for rank, size in enumerate(sizes)]
