"""Rounds: when fragments are sent, when results are applied, and how a flush ends.

    iterations   0 ......... 15 .. 17 ..... 30 .. 32 ..... 45      every 30, 2 fragments, delay 2
                             |      |        |     |
                         send 0  apply 0  send 1  apply 1          every None: only a flush

A flush brings all ranks to the anchor. A rank that flushes sets a flag in its header. As long as
some rank does not flush, as it counts iterations differently or trains longer, the flushing ranks
take part in its rounds. When all flush, each fragment with unsent training has one more round; a
round in which no rank has any left ends the flush.

Between a send and its application a thread of Rounds runs the round, while the caller's thread
continues training: it takes the deltas, sends and receives, and computes the next anchor. With a
delay of 0, and in a flush, the caller's thread does this.

    _form_round      members meet; ranks that lack the state are given it
    _launch          copies the weights, and makes the Round
    _run_round       prepare (deltas), travel (send, receive), close (next anchor)
    finish_round     waits, applies, counts

    RoundPace     at which iterations rounds are due
    FixedPeers    members that never change; a ringcomm.membership.Membership's may
    Rounds        the rounds of one rank

Invariants: one round at a time. The number of a round determines its fragment, on all ranks. A pace
counts its own rounds, not those that a flush adds, so a flush does not shift later rounds. Between
``begin_round`` and the next one the peers' communicator connects exactly the round's members. Ranks
that were away, or are behind, are given the state and send zeros in that round. Only one thread at
a time uses the peers and their communicator: the caller's does so when no round is on its way. The
caller's thread raises errors of the other one, and begins failed rounds anew.
"""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist

from ... import membership
from ...communicator import Communicator
from ...errors import ConfigError, PeerLostError, RingcommError
from ..argument_checks import require_whole
from ..guards import NOTHING, IdenticalDataWarning
from ..streams import side_streams, to_its_end
from ..sync.account import Account
from ..sync.kept import Kept
from ..worker import Worker
from .blocks import Block, Fragment, Scratch
from .report import OuterReport
from .round import Header, Hello, Hellos, Round

_log = logging.getLogger("ringcomm")

_SCALARS = 1024  # bytes of the message with a state's scalars
_REMEDY = "OuterStep(comm=Membership()) goes on without a rank that is lost: docs/LOSING_A_RANK.md"


# ---- when rounds are due ----


class RoundPace(Kept):
    """A round of each fragment every so many iterations; fragments take turns.

    Args:
        every: iterations between two rounds of one fragment; None: no round but those of a flush.
        fragments: number of fragments.

    Attributes:
        every: as given.

    Raises ConfigError unless ``every`` is None or an integer of at least 1, or if there are more
    fragments than iterations, or several and no rounds: they could not be staggered.
    """

    def __init__(self, every: int | None, fragments: int = 1) -> None:
        if isinstance(every, str):
            raise ConfigError(
                f"Invalid every: {every!r}; give a number of iterations, or None for one exchange "
                'at the end, by flush() or by leaving the "with"'
            )
        self.every = every if every is None else require_whole("every", every, 1)
        if fragments > (1 if every is None else every):
            most = "one exchange, of everything" if every is None else "at most that many"
            raise ConfigError(f"Invalid fragments: {fragments}; with every={every} there is {most}")
        self._fragments = fragments
        self._begin = 0  # iteration at which the present turn of all fragments began
        self._rounds = 0
        self.kept = () if every is None else ("_begin", "_rounds")

    def is_due(self, iteration: int) -> bool:
        """Returns whether a round is due after that many iterations."""
        return self.every is not None and (
            iteration >= self._begin + (self._rounds + 1) * self.every // self._fragments
        )

    def advance(self) -> None:
        """Notes that a round was entered."""
        self._rounds += 1
        if self.every is not None and self._rounds == self._fragments:
            self._begin, self._rounds = self._begin + self.every, 0

    def __repr__(self) -> str:
        return f"RoundPace({self.every})"


# ---- among whom ----


class NoChange:
    """Change between two rounds of peers that never change."""

    left: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()


class FixedPeers:
    """Makes all ranks of a communicator the members of every round; a failure is final."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.members = comm, tuple(range(comm.world_size))

    def begin_round(self, number: int, token: bytes = b"") -> NoChange:
        """Returns at once."""
        return NoChange()

    def end_round(self) -> None:
        """Does nothing: a failure is final, so no rank needs to know that the others have
        succeeded."""

    def lost(self, error: RingcommError) -> NoReturn:
        """Raises the error; if a peer was lost, its text names Membership."""
        if isinstance(error, PeerLostError) and _REMEDY not in str(error):  # it may be raised twice
            error.args = (f"{error}. {_REMEDY}",)
        raise error


Peers = FixedPeers | membership.Membership


# ---- the rounds ----


class Rounds(Kept):
    """The rounds of one rank.

    Args:
        fragments: fragments of the model.
        pace: when rounds are due.
        delay: iterations between a send and its application.
        timeout: seconds for a collective; None: the communicator's timeout.
        on_away: called when this rank has been given the state of others.
        on_dropped: called when this rank's deltas did not count, as its weights were not finite.

    Attributes:
        peers: members of the rounds, from ``start`` on.
        delay: as given.
        scratch: memory that rounds share.
        iteration: iterations made by this rank, added to those of the state that it began from.
        number: number of the next round.
        current: the round on its way, if any.
        has_state: whether its anchor is the job's: loaded, received or agreed on by ``start``.
        first_batch: digest of this rank's first batch, 16 bytes; NOTHING where it is unknown.
        kept: the numbers that a rank takes beside the blocks' states when others give it the
            state; state.py has the checkpoints.
    """

    kept = ("iteration", "number", "_entered", "pace")

    def __init__(
        self,
        fragments: list[Fragment],
        pace: RoundPace,
        delay: int,
        timeout: float | None,
        on_away: Callable[[], None],
        on_dropped: Callable[[], None],
    ) -> None:
        self.fragments, self.pace = fragments, pace
        self.iteration = self.number = 0
        self.current: Round | None = None
        self.has_state = False
        self.report, self.account = OuterReport(), Account()
        self.delay, self._setup, self._timeout = delay, b"", timeout
        self._on_away, self._on_dropped = on_away, on_dropped
        self.first_batch = NOTHING
        self.peers: Peers
        self._entered = 0  # rounds, the last one of a flush included, which ``number`` leaves out
        self.scratch = Scratch()
        self._is_data_checked = False
        self._worker = Worker("ringcomm outer step")
        self._job: Future[None] | None = None
        self._cut: Future[None] | None = None  # for which an interrupt has ended the waiting

    @property
    def blocks(self) -> list[Block]:
        """Blocks of all fragments."""
        return [block for fragment in self.fragments for block in fragment.blocks]

    @property
    def unsent(self) -> int:
        """Iterations of this rank that are in no round yet."""
        return max(fragment.iterations for fragment in self.fragments)

    @property
    def rank(self) -> int:
        """This rank's number among those of the job."""
        return self.peers.members[self.peers.comm.rank]

    @property
    def fragment(self) -> Fragment:
        """Fragment of the next round."""
        return self.fragments[self.number % len(self.fragments)]

    # ---- training ----

    def start(self, peers: Peers, setup: bytes) -> Hellos:
        """Joins the others: ranks without a state get the first rank's. If others are in a round
        already, this rank takes part in it.

        Args:
            setup: digest of all settings that must be the same on all ranks.
        """
        self.peers, self._setup, self.first_batch = peers, setup, NOTHING
        if not self.has_state:  # the weights may have been loaded since the anchor was made
            for block in self.blocks:
                block.local(block.anchor)
        hellos = self._form_round(is_starting=True)
        if not all(row.is_starting for row in hellos.rows):
            self._launch(is_ending=False)
            self.finish_round()
        self.has_state = True
        return hellos

    def stop(self, comm: Communicator | None) -> None:
        """Ends the thread, and closes the communicator that it uses; after a round that is on its
        way, for which this call does not wait."""
        is_on_its_way = self.current is not None or not (self._cut is None or self._cut.done())
        if is_on_its_way and comm is not None:
            self._worker.submit(comm.close)
        try:
            self._worker.close(0.0 if is_on_its_way else None)
        finally:  # after an interrupt, too: nobody calls this again
            if not is_on_its_way and comm is not None:
                comm.close()

    def tick(self) -> None:
        """Counts an iteration; applies a result that is due, and begins a round that is due."""
        self.iteration += 1
        self.report.iterations += 1
        for fragment in self.fragments:
            fragment.iterations += 1
        if self.current is not None and (self.iteration >= self.current.due or self._has_failed):
            self.finish_round()
        if self.pace.is_due(self.iteration):
            self.finish_round()
            self.pace.advance()
            self._form_round()
            self._launch(is_ending=False)
            if not self.delay:
                self.finish_round()

    def finish_round(self) -> None:
        """Waits for the round on its way, if there is one, and applies it."""
        self.wait_for_round()
        if self.current is None:
            return
        current, self.current = self.current, None
        current.apply()
        if current.is_dropped:
            for fragment in self.fragments:
                if not all(block.is_finite for block in fragment.blocks):
                    fragment.give_up()
        self.number += 1
        self._note(current)

    def flush(self) -> None:
        """Applies the round on its way, and exchanges all unsent training, until all ranks
        flush."""
        self.finish_round()
        while True:
            self._form_round()
            self._launch(is_ending=True)
            self.wait_for_round()
            assert self.current is not None
            headers = self.current.headers
            assert headers is not None
            if headers.ends_flush:
                self.current = None
                return
            if not headers.all_end:
                self.pace.advance()
            self.finish_round()

    def wait_for_round(self) -> None:
        """Waits for the round on its way, if there is one, without applying it. If a peer was lost,
        repeats it with the same deltas."""
        while self.current is not None:
            try:
                if self._job is not None:
                    with self.account.stall():
                        self._job.result()
                elif not self.current.is_over:
                    self._run_round(self.current, self.peers)
                self._job = None
                return
            except RingcommError as error:
                failed, self.current, self._job = self.current, None, None
                failed.undo()
                hellos = self._form_round(error)
                self.current = failed
            except BaseException:  # even an interrupt: the round cannot be used any more
                self._cut, self.current, self._job = self._job, None, None
                raise
            self.report.repeated += 1
            if hellos.own_need:  # the others have completed it: this rank sends zeros
                self._launch(is_ending=failed.header.is_ending)
            else:
                self._submit_if_delayed(failed)

    # ---- a round ----

    def _form_round(
        self, error: RingcommError | None = None, *, is_starting: bool = False
    ) -> Hellos:
        """Enters a round; or, given the error by which it has failed, the same one anew. Gives the
        state to ranks that need it."""
        if error is None:
            self._entered += 1
        with self.account.stall():
            change = (
                self.peers.begin_round(self._entered, self._setup)
                if error is None
                else self.peers.lost(error)
            )
            while True:
                self.report.left += change.left
                self.report.joined += change.joined
                try:
                    return self._exchange_hellos(self.rank in change.joined, is_starting)
                except RingcommError as again:
                    change = self.peers.lost(again)

    def _exchange_hellos(self, joins: bool, is_starting: bool) -> Hellos:
        default_rank = dist.get_rank() if dist.is_initialized() else -1
        comm = self.peers.comm
        # One who joins may have made as many rounds as the others, apart from them.
        has_state = self.has_state and not joins
        hello = Hello(is_starting, has_state, self.number, default_rank, self._setup)
        if isinstance(self.peers, FixedPeers) and not is_starting:
            return Hellos([hello] * comm.world_size, comm.rank)  # alike since the start
        hellos = Hellos(Hello.rows(hello.gathered(comm, self._timeout)), comm.rank)
        if any(hellos.needs_state):
            self.finish_round()  # a restored one, of which those that need the state know nothing
            self._share_state(hellos)
        return hellos

    def _share_state(self, hellos: Hellos) -> None:
        """Broadcasts the leader's state to the ranks that need it."""
        comm = self.peers.comm
        leads = hellos.leader == comm.rank
        adopts = hellos.own_need and not leads
        for block in self.blocks:
            for tensor in block.state.values():
                own = tensor if adopts or leads else tensor.clone()
                comm.broadcast(own, hellos.leader, timeout=self._timeout)
        scalars = json.dumps(self.saved()).encode().ljust(_SCALARS)
        packed = np.frombuffer(scalars, np.uint8).copy()
        comm.broadcast(packed, hellos.leader, timeout=self._timeout)
        if adopts:
            self.restore(json.loads(packed.tobytes()))
            for fragment in self.fragments:
                fragment.give_up()
            self._on_away()

    def _launch(self, *, is_ending: bool) -> None:
        """Starts this rank's part of the round that was entered."""
        fragment = self.fragment
        blocks = enumerate(fragment.blocks)
        self.current = Round(
            fragment,
            self.iteration + self.delay,
            self.header(is_ending),
            [block.local(self.scratch.take(f"local {at}", block)) for at, block in blocks],
            self.scratch,
            is_delayed=self.delay > 0 and not is_ending,
            keeps=not isinstance(self.peers, FixedPeers),
        )
        fragment.iterations = 0
        self._submit_if_delayed(self.current)

    def header(self, is_ending: bool) -> Header:
        """Returns this rank's header of the next round."""
        return Header(
            is_ending=is_ending,
            has_unsent=self.unsent > 0,
            is_dropped=False,
            counts=self.fragment.iterations > 0,
            first_batch=self.first_batch,
        )

    def _submit_if_delayed(self, current: Round) -> None:
        """Submits a delayed round to the other thread; ``wait_for_round`` runs any other one."""
        if current.is_delayed:
            peers, streams = self.peers, side_streams({b.device for b in current.fragment.blocks})

            def job() -> None:
                with torch.no_grad(), to_its_end(streams):
                    self._run_round(current, peers)

            self._job = self._worker.submit(job)

    def _run_round(self, current: Round, peers: Peers) -> None:
        """Runs a round with its peers; a delayed one in the other thread."""
        current.prepare()
        with contextlib.nullcontext() if current.is_delayed else self.account.stall():
            current.travel(peers.comm, self._timeout)
            peers.end_round()
        current.close()

    @property
    def _has_failed(self) -> bool:
        """Whether the round has failed, and there are no peers to repeat it with."""
        error = self._job.exception() if self._job is not None and self._job.done() else None
        is_final = isinstance(self.peers, FixedPeers) or not isinstance(error, RingcommError)
        return error is not None and is_final

    def _note(self, current: Round) -> None:
        """Counts a finished round, and warns of what its headers show."""
        if current.is_dropped:
            self.report.dropped += 1
            self._on_dropped()
        self.report.rounds += 1
        payload = sum(block.anchor.nbytes for block in current.fragment.blocks)
        self.account.note(payload, [one for sent in current.sent for one in sent.stats])
        self.account.end_step()
        headers, members = current.headers, self.peers.members
        if headers is None:
            return
        if headers.dropped:
            _log.warning(
                "outer step: round %d was without the deltas of ranks %s, whose weights "
                "were not finite",
                self.number - 1,
                [members[rank] for rank in headers.dropped],
            )
        same = None if self._is_data_checked else headers.same_data()
        self._is_data_checked = True
        if same is not None:
            warnings.warn(
                f"ranks {members[same[0]]} and {members[same[1]]} have trained on the same first "
                "batch: ranks that train on the same data are of no use to each other. Give each "
                "rank its own share, as by a torch.utils.data.DistributedSampler, or shuffle by a "
                "seed that has the rank in it",
                IdenticalDataWarning,
                stacklevel=2,
            )
