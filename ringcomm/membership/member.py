"""Membership: the rounds of one rank, and its communicator, which is made anew when members change.

Invariants: ``comm`` connects exactly ``members``, and is used in no two formations; an error that
is not a lost or late member's fault is raised as it is. agreement.py decides the members.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from types import TracebackType
from typing import Any

import numpy as np

from ..bootstrap import mesh
from ..bootstrap.handshake_params import Key, job_hash
from ..bootstrap.join import Joined, identity_of, join
from ..bootstrap.launch import Identity
from ..bootstrap.secret import Secret, check_exposed, load
from ..bootstrap.system import typed_errors
from ..communicator import Communicator, gather_bytes
from ..config import Config, names_arguments
from ..core.calls import is_integer, is_number
from ..core.native import require_kernel_set
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
from . import listening
from .agreement import Agreement
from .control import Control
from .decision import NONE_YET, STARTED_AGAIN, Go, History, Limits, Ready
from .formation import Formation, FormationError
from .messages import MAX_NUMBER, MAX_TOKEN

_log = logging.getLogger("ringcomm")
_RECOVERABLE = (PeerLostError, CommTimeoutError, AbortedError, ProtocolError, BootstrapError)
_CLOSE_S = 0.1
"""Seconds to close a communicator whose members may not answer any more."""
_UNABLE_S = 1.0
"""Seconds until a rank whose own part has failed tries again."""
_LEAST_FORMING_S = 5.0
"""Least seconds for a formation: a port that is dead beside its sibling takes 3 s of them."""


@dataclasses.dataclass(frozen=True)
class Round:
    """Members of a round. Ranks are those of the whole job, but for leader.

    Attributes:
        number: of the round; on a rank that was left behind, the number the others are at.
        members: ranks in the order of the communicator.
        left: members of the round before that were lost or late.
        joined: members that lack rounds which others have completed, and so need the state.
        leader: rank in the communicator of a member that has the state.
        is_new: True if the communicator is another than in the round before.
        tokens: token that each member gave to begin_round, in the order of members.
    """

    number: int
    members: tuple[int, ...]
    left: tuple[int, ...]
    joined: tuple[int, ...]
    leader: int
    is_new: bool
    tokens: tuple[bytes, ...]


class Membership:
    """Ranks that work in rounds, continue without lost or late ones, and let ranks come back.

    All ranks make it at once, as ``ringcomm.init``. One thread uses it. Also a context manager.

    Args:
        min_peers: a round takes place with at least so many ranks, this one among them. Default:
            more than half. With fewer, both halves of a partitioned network continue separately.
            Same on all ranks, as is grace_s.
        grace_s: seconds that a round waits for late ranks once min_peers are ready, and seconds of
            silence after which a member is lost in mid-round (the communicators' peer_timeout).
        rejoin: this process takes the place of one that has ended, among members that continue
            without it. begin_round then waits for the end of their round; no longer than
            config.timeout where no member has answered, since another program may listen there.
            Takes what the members took of rank, world_size, init_method, mpi and store. (Jobs that
            meet by store or mpi have no names of their own: two on a host need two secrets.)
        hosts: with rejoin, names or addresses of hosts to look for members on, where the address of
            rank 0's host is not enough (rank 0 was lost).
        rank, world_size, init_method, config, timeout, mpi, store: as for ``ringcomm.init``. While
            fewer than min_peers are ready and the others live, a round waits config.timeout.

    Attributes:
        rank, world_size: this rank and the number of ranks in the whole job.
        members: ranks of the whole job, in the order of the communicator's ranks.
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
        if not is_number(grace_s) or not 0.5 <= grace_s <= 3600:
            raise ConfigError(f"grace_s={grace_s!r}: give seconds from 0.5 to 3600")
        if isinstance(hosts, str) or not all(isinstance(host, str) for host in hosts or ()):
            raise ConfigError(f'hosts={hosts!r}: give a list of names, as ["node1", "node2"]')
        self._grace_s = float(grace_s)
        settings = Config() if config is None else config
        if not isinstance(settings, Config):
            raise ConfigError(f"config={config!r}: give a ringcomm.Config, as Config(lanes=2)")
        self._config = settings.replaced(  # so that a member that is silent for grace_s is lost
            "grace_s",
            peer_timeout=self._grace_s,
            heartbeat=min(settings.heartbeat, self._grace_s / 4),
        )
        require_kernel_set(self._config.kernel_set)
        self._is_closed = False
        self._comm: Communicator | None = None
        self._agreement: Agreement | None = None
        self._history: History = STARTED_AGAIN
        self._number: int | None = None
        self._token = b""
        self.members: tuple[int, ...] = ()
        try:
            if rejoin:
                identity = identity_of(rank, world_size, init_method, mpi, store)
                self._start_again(identity, min_peers, hosts)
                return
            joined = join(self._config, rank, world_size, init_method, timeout, mpi, store)
            self._comm = Communicator(joined)
            self._start_with_all(joined, self._comm, min_peers)
        except BaseException:
            self.close()
            raise

    # ---- rounds ----

    @property
    def comm(self) -> Communicator:
        """Communicator of the round. Raises NotInitializedError after close(), and with rejoin
        before the first round."""
        if self._comm is None:
            raise NotInitializedError("this rank belongs to no communicator: call begin_round")
        return self._comm

    def begin_round(self, number: int, token: bytes = b"") -> Round:
        """Waits until the members of a round are known, and returns them.

        Args:
            number: of the round, counted upwards by all members alike. The round before counts as
                completed even if end_round was not called.
            token: up to 256 bytes, which all members get (Round.tokens).

        Raises:
            PeerLostError: fewer than min_peers came; the text names the missing ones and for how
                long. Or, with rejoin, no rank answers; the text names the ports.
        """
        self._require_open()
        if not is_integer(number) or abs(number) > MAX_NUMBER:
            raise ConfigError(f"number={number!r}: give the round's whole number")
        if not isinstance(token, (bytes, bytearray, memoryview)):
            raise ConfigError(f"token={token!r}: give bytes")
        if len(token) > MAX_TOKEN:
            raise ConfigError(f"token has {len(token)} bytes: give at most {MAX_TOKEN}")
        if self._number is not None and number > self._number:
            self._complete()
        self._token = bytes(token)
        return self._agree(int(number), None)

    def end_round(self) -> None:
        """Returns once all members have called it: then all have this rank's results. Call it after
        the round's last collective and before its result is used; give its errors to lost().
        Without it a peer that dies in a round's last collective may leave some members with its
        result and others without, which then get the state from the former."""
        self._require_open()
        self.comm.barrier()
        self._complete()

    def lost(self, error: RingcommError) -> Round:
        """Brings the remaining ranks together for the same round, after a collective failed.

        Raises the error itself if other members would not help, as for a wrong argument; else
        raises as begin_round.
        """
        self._require_open()
        if self._number is None or not isinstance(error, _RECOVERABLE):
            raise error
        return self._agree(self._number, error)

    def close(self) -> None:
        """Leaves the job, so that the other members see this rank as gone."""
        self._is_closed = True
        comm, self._comm = self._comm, None
        agreement, self._agreement = self._agreement, None
        try:
            if comm is not None:
                comm.close()
        finally:  # after an interrupt, too, as links that stay open say that this rank lives
            if agreement is not None:
                agreement.close()

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

    def _start_with_all(self, joined: Joined, comm: Communicator, min_peers: int | None) -> None:
        """Starts a job in which all ranks are members, and exchanges where they listen."""
        addresses = list(dict.fromkeys(rail.address for rail in comm.rails))
        self._set_up(comm.rank, comm.world_size, min_peers, joined.secret, joined.job)
        self.members = tuple(range(comm.world_size))
        self._history = NONE_YET
        if comm.world_size > 1:
            _require_alike(comm, self._min_peers)
            agreement = self._open(addresses)
            agreement.meet_all(
                gather_bytes(comm, agreement.own_places), self._config.connect_timeout
            )

    def _start_again(self, identity: Identity, min_peers: int | None, hosts: Sequence[str]) -> None:
        """Starts a process that takes another's place: looks for any member."""
        secret = load(self._config)
        self._set_up(identity.rank, identity.world_size, min_peers, secret, identity.job)
        asked = listening.contacts(hosts or [identity.master_addr or "localhost"])
        check_exposed(asked, secret, self._config.insecure)
        others = (rank for rank in range(self.world_size) if rank != self.rank)
        self._open(listening.own_addresses(self._config, asked)).look_for(
            {rank: list(product(asked, listening.ports_of(self._job, rank))) for rank in others}
        )

    def _set_up(
        self, rank: int, world_size: int, min_peers: int | None, secret: Secret | None, job: str
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._min_peers = _checked_min_peers(min_peers, world_size)
        self._secret, self._job = secret, job

    def _open(self, addresses: Sequence[str]) -> Agreement:
        insecure, job = self._config.insecure, job_hash(self._job)
        limits = Limits(
            self.rank, self.world_size, self._min_peers, self._grace_s, self._config.timeout
        )
        key = Key.derive(self._secret, job, insecure)
        with typed_errors(), contextlib.ExitStack() as opened:
            listeners = listening.listen_on(addresses, self._job, self.rank, self._secret, insecure)
            for listener in listeners:
                opened.enter_context(listener)
            self._agreement = Agreement(
                limits,
                [listener.getsockname()[:2] for listener in listeners],
                partial(Control, self.rank, self.world_size, key, job, listeners, self._grace_s),
            )
            opened.pop_all()  # the agreement closes them
        return self._agreement

    # ---- coming to a round ----

    def _agree(self, number: int, error: RingcommError | None) -> Round:
        agreement = self._agreement
        if agreement is None:  # a world of one
            self._number = number
            return Round(number, (0,), (), (), 0, False, (self._token,))
        agreement.catch_up()
        began = time.monotonic()
        broken = self._communicator_error()
        blames = {*self._blamed_by(error, self.members), *self._blamed_by(broken, self.members)}
        while True:
            is_well = error is None and broken is None and self._comm is not None
            agreement.send_ready(
                Ready(
                    self.rank,
                    history=self._history,
                    number=number,
                    healthy=is_well,
                    blames=tuple(sorted(blames)),
                    token=self._token,
                    at=began,
                )
            )
            formation = agreement.wait()
            go = formation.go
            try:
                if go.is_new:
                    self._form(formation)
            except RingcommError as failure:
                found = self._blamed_by(failure, go.members) | formation.unable - {self.rank}
                blames |= found
                agreement.failed(formation, sorted(found), str(failure))
                self._check_worth_repeating(failure, formation, time.monotonic() - began)
            else:
                agreement.entered(go)
                return self._enter(go)

    def _enter(self, go: Go) -> Round:
        self.members, self._number = go.members, go.number
        if go.is_new:
            _log.info(
                "membership: round %d, epoch %d: ranks %s",
                go.number,
                go.epoch,
                ", ".join(map(str, go.members)),
            )
        leader = go.members.index(go.leader)
        return Round(go.number, go.members, go.left, go.joined, leader, go.is_new, go.tokens)

    def _form(self, formation: Formation) -> None:
        """Closes the old communicator, which ranks that still use it see as this rank's loss, and
        makes the new one."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.close(_CLOSE_S)
        go = formation.go
        seconds = min(self._config.connect_timeout, max(self._grace_s, _LEAST_FORMING_S))
        settings = self._config.replaced(connect_timeout=seconds)
        job = f"{self._job}, epoch {go.epoch}"
        rank = go.members.index(self.rank)
        identity = Identity(rank, len(go.members), launcher="membership", job=job)
        with typed_errors():
            made = mesh.join(identity, settings, self._secret, formation, go.epoch)
        formation.unable.add(self.rank)  # until it has the communicator
        self._comm = Communicator(Joined(made, self._config, self._secret, job, go.epoch))

    def _check_worth_repeating(
        self, failure: RingcommError, formation: Formation, tried: float
    ) -> None:
        """Raises the failure if another attempt would fail the same way, or if this rank's own part
        has failed and enough others can go on without it."""
        _log.info("membership: the members did not come together: %s", failure)
        stands_alone = self._history == STARTED_AGAIN and isinstance(failure, ConfigError)
        is_own = self.rank in formation.unable
        able = len(formation.go.members) - len(formation.unable)
        if (
            stands_alone
            or (is_own and able >= self._min_peers)
            or tried > self._grace_s + self._config.timeout
        ):
            self.close()
            raise failure
        if is_own:
            time.sleep(_UNABLE_S)

    # ---- helpers ----

    def _complete(self) -> None:
        """Notes that this rank has the round's result."""
        assert self._number is not None
        if self._agreement is not None:
            self._history = (self._agreement.epoch, self._number, self._agreement.origin)

    def _communicator_error(self) -> RingcommError | None:
        """Returns the error of the communicator, if it has failed meanwhile."""
        try:
            return None if self._comm is None else self._comm.failure()
        except NotInitializedError as error:  # the caller has closed it
            return error

    def _blamed_by(self, error: RingcommError | None, members: tuple[int, ...]) -> set[int]:
        """Returns the ranks of the job that an error of these members' communicator names."""
        if isinstance(error, FormationError):
            return set(error.blames)
        if error is None or error.rank is None or error.rank >= len(members):
            return set()
        return {members[error.rank]} - {self.rank}

    def _require_open(self) -> None:
        if self._is_closed:
            raise NotInitializedError("the membership is closed")


def _checked_min_peers(min_peers: int | None, world_size: int) -> int:
    if min_peers is None:
        return world_size // 2 + 1
    if not is_integer(min_peers) or not 1 <= min_peers <= world_size:
        raise ConfigError(f"min_peers={min_peers!r}: give a whole number from 1 to {world_size}")
    if 2 * min_peers <= world_size:
        _log.warning(
            "min_peers=%d of %d ranks: if the network is cut in two, both halves go on, and part",
            min_peers,
            world_size,
        )
    return int(min_peers)


def _require_alike(comm: Communicator, min_peers: int) -> None:
    """Raises ConfigError on all ranks if they differ in min_peers. (A rank with a lower one could
    go on alone.)"""
    found = comm.allgather(np.array([min_peers], dtype=np.int64)).reshape(-1).tolist()
    if len(set(found)) > 1:
        raise ConfigError(
            f"min_peers differs between ranks: {', '.join(map(str, found))} on ranks 0 to "
            f"{len(found) - 1}. Make it the same on all"
        )
