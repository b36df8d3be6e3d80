"""Rounds: when fragments are sent, when results are applied, and how a flush ends.

    iterations   0 ......... 15 .. 17 ..... 30 .. 32 ..... 45      every 30, 2 fragments, delay 2
                             |      |        |     |
                         send 0  apply 0  send 1  apply 1

A flush brings all ranks to the anchor. A rank that flushes sets a flag in its header. As long as
some rank does not flush, as it counts iterations differently or trains longer, the flushing ranks
take part in its rounds. When all flush, each fragment with unsent training has one more round; a
round in which no rank has any left ends the flush.

Between a send and its application a thread of this object runs the round, while the caller's thread
continues training: it takes the deltas, sends and receives, and computes the next anchor. With a
delay of 0, and in a flush, the caller's thread does this.

Invariants: one round at a time. The number of a round determines its fragment, on all ranks. Ranks
that were away, or are behind, are given the state and send zeros in that round. Only one thread at
a time uses the peers and their communicator: the caller's does so when no round is on its way. The
caller's thread raises errors of the other one, and begins failed rounds anew.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...communicator import Communicator
from ...errors import RingcommError
from ..guards import IdenticalDataWarning
from ..streams import side_streams, to_its_end
from ..worker import Worker
from .blocks import Scratch
from .peers import Change, FixedPeers, Peers
from .report import OuterReport, Stopwatch
from .round import Fragment, Round
from .round_messages import Header, Headers, Hello, Hellos
from .schedule import Pace

_log = logging.getLogger("ringcomm")

_SCALARS = 1024  # bytes of the message with a state's scalars


class Rounds:
    """The rounds of one rank.

    Args:
        fragments: fragments of the model.
        pace: when rounds are due.
        delay: iterations between a send and its application.
        digest: returns the first batch's digest, 16 bytes.
        timeout: seconds for a collective; None: the communicator's timeout.
        on_away: called when this rank has been given the state of others.
        on_dropped: called when this rank's deltas did not count, as its weights were not finite.

    Attributes:
        iteration: iterations made by this rank, added to those of the state that it began from.
        number: number of the next round.
        current: the round on its way, if any.
        has_state: whether it has loaded a state, or taken part in a round.
    """

    def __init__(
        self,
        fragments: list[Fragment],
        pace: Pace,
        delay: int,
        digest: Callable[[], bytes],
        timeout: float | None,
        on_away: Callable[[], None],
        on_dropped: Callable[[], None],
    ) -> None:
        self.fragments, self.pace = fragments, pace
        self.iteration = self.number = 0
        self.current: Round | None = None
        self.has_state = False
        self.report = OuterReport()
        self.watch = Stopwatch(self.report)
        self._delay, self._setup, self._timeout = delay, b"", timeout
        self._digest, self._on_away, self._on_dropped = digest, on_away, on_dropped
        self._peers: Peers | None = None
        self._entered = 0
        self._scratch = Scratch()
        self._is_checked = False
        self._worker = Worker("ringcomm outer step")
        self._job: Future[None] | None = None

    @property
    def peers(self) -> Peers:
        """Members of the rounds."""
        assert self._peers is not None
        return self._peers

    @property
    def unsent(self) -> int:
        """Iterations of this rank that are in no round yet."""
        return max(fragment.iterations for fragment in self.fragments)

    @property
    def comm(self) -> Communicator:
        """Communicator of the latest round."""
        return self.peers.comm

    # ---- training ----

    def start(self, peers: Peers, setup: bytes) -> Hellos:
        """Joins the others: ranks without a state get the first rank's. If others are in a round
        already, this rank takes part in it.

        Args:
            setup: digest of all settings that must be the same on all ranks.
        """
        self._peers, self._setup = peers, setup
        hellos = self._form_round(is_starting=True)
        if not hellos.all_start:
            self._launch(is_ending=False)
            self.finish_round()
        self.has_state = True
        return hellos

    def use(self, peers: Peers) -> None:
        """Uses other peers, of the same ranks, from the next round on."""
        self._peers = peers

    def stop(self, own: Communicator | None) -> None:
        """Ends the thread, and closes the communicator that it uses; after a round that is on its
        way, for which this call does not wait."""
        is_on_its_way = self.current is not None
        if is_on_its_way and own is not None:
            self._worker.submit(own.close)
        self._worker.close(0.0 if is_on_its_way else None)
        if not is_on_its_way and own is not None:
            own.close()

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
            if not self._delay:
                self.finish_round()

    def finish_round(self) -> None:
        """Waits for the round on its way, if there is one, and applies it."""
        if self.current is None:
            return
        self._complete()
        current, self.current = self.current, None
        current.apply()
        if current.is_dropped:
            for fragment in self.fragments:
                if not fragment.is_finite:
                    fragment.give_up()
        self.number += 1
        self._note(current, current.outcome.headers)

    def flush(self) -> None:
        """Applies the round on its way, and exchanges all unsent training, until all ranks
        flush."""
        self.finish_round()
        while True:
            self._form_round()
            self._launch(is_ending=True)
            self._complete()
            assert self.current is not None
            headers = self.current.outcome.headers
            assert headers is not None
            if headers.is_over:
                self.current = None
                return
            if not headers.all_end:
                self.pace.advance()
            self.finish_round()

    def wait_for_round(self) -> None:
        """Waits for the round on its way without applying it."""
        if self.current is not None:
            self._complete()

    def drop_round(self) -> None:
        """Waits for the round on its way, and drops its result: weights, anchor and all that
        belongs to them are replaced."""
        self.wait_for_round()
        self.current = None

    # ---- a round ----

    @property
    def _fragment(self) -> Fragment:
        return self.fragments[self.number % len(self.fragments)]

    def _form_round(self, *, is_starting: bool = False) -> Hellos:
        """Enters a round, and gives the state to ranks that need it."""
        with self._waiting():
            self._entered += 1
            return self._retry_until_formed(
                self.peers.begin_round(self._entered, self._setup), is_starting
            )

    def _retry_until_formed(self, one: Change, is_starting: bool) -> Hellos:
        while True:
            self.report.left += one.left
            self.report.joined += one.joined
            try:
                return self._exchange_hellos(one, is_starting)
            except RingcommError as error:
                one = self.peers.lost(error)

    def _exchange_hellos(self, one: Change, is_starting: bool) -> Hellos:
        place = dist.get_rank() if dist.is_initialized() else -1
        # One who joins may have made as many rounds as the others, apart from them.
        has_state = self.has_state and self.peers.members[self.comm.rank] not in one.joined
        hello = Hello(is_starting, has_state, self.number, place, self._setup)
        if isinstance(self.peers, FixedPeers) and not is_starting:
            return Hellos([hello] * self.comm.world_size, self.comm.rank)
        hellos = hello.exchanged(self.comm, self._timeout)
        if any(hellos.needs_state):
            self.finish_round()  # a restored one, of which those that need the state know nothing
            self._share_state(hellos)
        return hellos

    def _share_state(self, hellos: Hellos) -> None:
        """Broadcasts the leader's state to the ranks that need it."""
        adopts = hellos.own_need and hellos.leader != self.comm.rank
        leads = hellos.leader == self.comm.rank
        for fragment in self.fragments:
            for unit in fragment.units:
                for tensor in (unit.block.anchor, *unit.memory.values()):
                    own = tensor if adopts or leads else tensor.clone()
                    self.comm.broadcast(own, hellos.leader, timeout=self._timeout)
        scalars = {
            "iteration": self.iteration,
            "number": self.number,
            "entered": self._entered,
            "pace": self.pace.saved(),
        }
        packed = np.frombuffer(json.dumps(scalars).encode().ljust(_SCALARS), np.uint8).copy()
        self.comm.broadcast(packed, hellos.leader, timeout=self._timeout)
        if adopts:
            self._adopt(json.loads(packed.tobytes()))

    def _adopt(self, scalars: dict[str, Any]) -> None:
        self.iteration, self.number = scalars["iteration"], scalars["number"]
        self._entered = scalars["entered"]
        self.pace.restore(scalars["pace"])
        for fragment in self.fragments:
            fragment.give_up()
        self._on_away()

    def _launch(self, *, is_ending: bool) -> None:
        """Starts this rank's part of the round that was entered."""
        fragment = self._fragment
        self.current = Round(
            fragment,
            self.iteration + self._delay,
            self._header(is_ending),
            self._scratch,
            is_delayed=self._delay > 0 and not is_ending,
            keeps=not isinstance(self.peers, FixedPeers),
        )
        fragment.iterations = 0
        self._begin(self.current)

    def _header(self, is_ending: bool) -> Header:
        return Header(
            is_ending=is_ending,
            has_unsent=self.unsent > 0,
            is_dropped=False,
            counts=self._fragment.iterations > 0,
            data=self._digest(),
        )

    def _begin(self, current: Round) -> None:
        """Hands a delayed round to the other thread."""
        if current.is_delayed:
            streams = side_streams(current.fragment.devices)
            job = functools.partial(self._run_in_thread, current, self.peers, streams)
            self._job = self._worker.submit(job)

    def _run_in_thread(self, current: Round, peers: Peers, streams: Sequence[Any]) -> None:
        """Runs a round in the other thread, with its peers."""
        with torch.no_grad(), to_its_end(streams):
            self._run_round(current, peers)

    def _run_round(self, current: Round, peers: Peers) -> None:
        current.prepare()
        with contextlib.nullcontext() if current.is_delayed else self._waiting():
            current.travel(peers.comm, self._timeout)
            peers.end_round()
        current.close()

    def _join(self, current: Round) -> None:
        """Returns when the round is over. Raises its error."""
        if not current.is_delayed:
            self._run_round(current, self.peers)
            return
        assert self._job is not None
        with self._waiting():
            self._job.result()

    @property
    def _has_failed(self) -> bool:
        """Whether the round has failed, and there are no peers to repeat it with."""
        error = self._job.exception() if self._job is not None and self._job.done() else None
        is_final = isinstance(self.peers, FixedPeers) or not isinstance(error, RingcommError)
        return error is not None and is_final

    def _complete(self) -> None:
        """Waits for the round; if a peer was lost, repeats it with the same deltas."""
        while True:
            assert self.current is not None
            try:
                if not self.current.is_over:
                    self._join(self.current)
                self._job = None
                return
            except RingcommError as error:
                failed, self.current, self._job = self.current, None, None
                failed.undo()
                with self._waiting():
                    hellos = self._retry_until_formed(self.peers.lost(error), is_starting=False)
                self.current = failed
            except BaseException:  # even an interrupt: the round cannot be used any more
                self.current = self._job = None
                raise
            self.report.repeated += 1
            if hellos.own_need:  # the others have completed it: this rank sends zeros
                self._launch(is_ending=failed.header.is_ending)
            else:
                self._begin(failed)

    def _note(self, current: Round, headers: Headers | None) -> None:
        """Counts a finished round, and warns of what its headers show."""
        if current.is_dropped:
            self.report.dropped += 1
            self._on_dropped()
        self.report.rounds += 1
        self.report.sent_bytes += current.sent_bytes
        self.report.payload_bytes += current.fragment.nbytes
        if headers is None:
            return
        if headers.dropped:
            _log.warning(
                "outer step: round %d was without the deltas of ranks %s, whose weights "
                "were not finite",
                self.number - 1,
                [self.peers.members[rank] for rank in headers.dropped],
            )
        if not self._is_checked:
            self._is_checked = True
            _warn_of(headers.same_data(), self.peers.members)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.report.waited_s += time.perf_counter() - began


def _warn_of(pairs: list[tuple[int, int]], members: tuple[int, ...]) -> None:
    if pairs:
        first, second = (members[rank] for rank in pairs[0])
        warnings.warn(
            f"ranks {first} and {second} have trained on the same first batch: ranks that train on "
            "the same data are of no use to each other. Give each rank its own share, as by a "
            "torch.utils.data.DistributedSampler, or shuffle by a seed that has the rank in it",
            IdenticalDataWarning,
            stacklevel=2,
        )
