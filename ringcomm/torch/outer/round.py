"""One round on its way: what a rank tells the others, its deltas, and the round's result.

    Hello     setup and progress: who needs the state, and who sends it       before the round
    Header    whether it flushes, and whether its deltas count                beside the deltas
    Round     the deltas of a fragment, their header, and the works that carry them

    training thread    copy weights | trains on ..................... | adopt, rebase
    another thread                  | delta, send, receive, outer rule |

Messages are gathered on all ranks, so decisions from them are the same everywhere. Hellos are
exchanged at the start, and before each round if ranks may come back.

Invariants: a message has a fixed size. A rank that is set up differently is refused on all alike. A
round's header is sent before its deltas, on all ranks; a delta that does not count is zero, so that
it can be sent before the others' headers are known. A rank that flushes waits for all headers
first: if all flush and no rank has anything left, no deltas are sent. If the round may have to be
repeated, the deltas are kept until it is over.

``prepare``, ``travel`` and ``close`` change neither the model's tensors nor the anchor and memory
in use, so they may run beside the training. All else belongs to the training thread.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import ClassVar, TypeVar

import torch

from ...communicator import Communicator
from ...core.work import Work
from ...errors import MismatchError, RingcommError
from .blocks import Fragment, Scratch
from .rules import Memory
from .wires import Sent

M = TypeVar("M", bound="Message")


@dataclasses.dataclass(frozen=True)
class Message:
    """Numbers and bytes of one rank.

    Attributes:
        layout: the fields, in their order.
    """

    layout: ClassVar[struct.Struct]

    def gathered(self, comm: Communicator, timeout: float | None) -> Work:
        """Submits the exchange of these messages."""
        packed = bytearray(self.layout.pack(*dataclasses.astuple(self)))
        own = torch.frombuffer(packed, dtype=torch.uint8)
        return comm.allgather(own, async_op=True, timeout=timeout)

    @classmethod
    def rows(cls: type[M], work: Work) -> list[M]:
        """Returns the messages of all ranks. Raises what the collective raises."""
        return [cls(*cls.layout.unpack(bytes(row))) for row in work.wait().tolist()]


@dataclasses.dataclass(frozen=True)
class Hello(Message):
    """Setup and progress of one rank.

    Attributes:
        is_starting: it has just been attached, and is in no round.
        has_state: it has loaded a state or taken part in a round. False for a rank that comes
            back: it may have made rounds apart from the others.
        number: number of its next round.
        default_rank: its rank in torch.distributed's default group; -1 without one.
        setup: digest of all settings that must be the same on all ranks.
    """

    layout = struct.Struct("<??6xqq16s")
    is_starting: bool
    has_state: bool
    number: int
    default_rank: int
    setup: bytes


class Hellos:
    """Hellos of all ranks, in the order of the communicator.

    Attributes:
        leader: rank that sends the state.
        needs_state: whether each rank must be given the state: it has none, or is behind.
        own_need: whether this rank must be.

    Raises MismatchError if the ranks are set up differently.
    """

    def __init__(self, rows: Sequence[Hello], rank: int) -> None:
        self.rows = list(rows)
        other = [at for at, row in enumerate(self.rows) if row.setup != self.rows[0].setup]
        if other:
            raise MismatchError(
                f"OuterStep is set up differently on ranks 0 and {other[0]}: model, weights that "
                "are not trained, every, outer, compression, fragments and delay must be "
                "the same on all",
                rank=other[0],
            )
        progress = [row.number if row.has_state else -1 for row in self.rows]
        self.leader = progress.index(max(progress))
        self.needs_state = [one < max(0, *progress) for one in progress]
        self.own_need = self.needs_state[rank]


@dataclasses.dataclass(frozen=True)
class Header(Message):
    """One rank's flags in a round.

    Attributes:
        is_ending: it flushes.
        has_unsent: it has trained since its last rounds.
        is_dropped: its delta is not finite, and does not count.
        counts: its delta counts; else it is zero.
        first_batch: digest of its first batch; zeros if unknown.
    """

    layout = struct.Struct("<4?4x16s")
    is_ending: bool
    has_unsent: bool
    is_dropped: bool
    counts: bool
    first_batch: bytes = bytes(16)


class Headers:
    """Headers of all ranks of a round, in the order of its communicator.

    Attributes:
        all_end: whether all ranks flush.
        ends_flush: whether all ranks flush and none has anything left to send: the flush is over.
        dropped: ranks of the communicator whose deltas were not finite.
        counting: number of deltas that count.
    """

    def __init__(self, rows: Sequence[Header]) -> None:
        self.rows = list(rows)
        self.all_end = all(row.is_ending for row in rows)
        self.ends_flush = self.all_end and not any(row.has_unsent for row in rows)
        self.dropped = [rank for rank, row in enumerate(rows) if row.is_dropped]
        self.counting = sum(row.counts for row in rows)

    def same_data(self) -> tuple[int, int] | None:
        """Returns the first two ranks of the communicator that have trained on the same first
        batch, if any have."""
        known: dict[bytes, int] = {}
        for rank, row in enumerate(self.rows):
            if any(row.first_batch) and known.setdefault(row.first_batch, rank) != rank:
                return known[row.first_batch], rank
        return None


class Round:
    """One rank's part in a round.

    Args:
        fragment: the fragment whose deltas are sent.
        due: the iteration after which the result is applied.
        header: this rank's header; ``prepare`` corrects it if the deltas are not finite.
        local: copies of the local weights; empty in a round of another rank's checkpoint.
        scratch: memory of the round before, which is over.
        is_delayed: whether the rank continues training until ``due``.
        keeps: whether the round may have to be repeated.

    Attributes:
        is_dropped: this rank's weights are not finite, and do not count.
        headers: of all ranks; None until they have come, and in a round that was restored.
        sent: the deltas on their way.
        means: the mean delta of each block; empty if all ranks flushed and nothing was left.
        is_moving: whether any rank's deltas count.
        next_states: of each block after the round, if it is over, delayed and moving.
        is_over: its result is final.
    """

    def __init__(
        self,
        fragment: Fragment,
        due: int,
        header: Header,
        local: Sequence[torch.Tensor],
        scratch: Scratch,
        *,
        is_delayed: bool,
        keeps: bool,
    ) -> None:
        self.fragment, self.due, self.header, self.local = fragment, due, header, local
        self.is_delayed, self._keeps, self._scratch = is_delayed, keeps, scratch
        self.is_dropped = self.is_moving = self.is_over = False
        self._deltas: list[torch.Tensor] = []
        self.headers: Headers | None = None
        self.sent: list[Sent] = []
        self.means: Sequence[torch.Tensor] = []
        self.next_states: list[Memory] = []

    # ---- beside the training ----

    def prepare(self) -> None:
        """Takes the deltas; a second call does nothing."""
        if self._deltas:
            return
        for at, (block, local) in enumerate(zip(self.fragment.blocks, self.local, strict=True)):
            delta, is_finite = block.delta(local, self._scratch.take(f"delta {at}", block))
            self._deltas.append(delta)
            self.is_dropped |= not is_finite
        if self.is_dropped:
            self.header = dataclasses.replace(self.header, is_dropped=True, counts=False)
        for block, delta in zip(self.fragment.blocks, self._deltas, strict=True):
            if not self.header.counts:
                delta.zero_()
            if block.fills_padding:
                block.fill_padding(delta)

    def travel(self, comm: Communicator, timeout: float | None) -> None:
        """Sends the header and the deltas, in a flush only once the others' headers require it, and
        waits for the result. May be called again. Raises what a collective of the round raises."""
        self.sent = []
        gathering = self.header.gathered(comm, timeout)
        if not self.header.is_ending:
            self._send(comm, timeout)
        self.headers = headers = Headers(Header.rows(gathering))
        self.is_moving, self.means = headers.counting > 0, []
        if headers.ends_flush:
            return
        if not self.sent:
            self._send(comm, timeout)
        self.means = [sent.wait() for sent in self.sent]
        for block, mean in zip(self.fragment.blocks, self.means, strict=True):
            block.clear_padding(mean)
            if block.wire.is_mean and 0 < headers.counting < len(headers.rows):
                mean.mul_(len(headers.rows) / headers.counting)

    def _send(self, comm: Communicator, timeout: float | None) -> None:
        for block, delta in zip(self.fragment.blocks, self._deltas, strict=True):
            sent = delta.clone() if self._keeps else delta
            self.sent.append(block.wire.submit(comm, sent, timeout))

    def close(self) -> None:
        """Makes the result final, as the round is over on all ranks, and drops the deltas. If the
        rank continues training, computes the next anchor."""
        if self.is_delayed and self.is_moving:
            self.next_states = [
                block.next_state(mean, self._scratch, at)
                for at, (block, mean) in enumerate(
                    zip(self.fragment.blocks, self.means, strict=True)
                )
            ]
        self.is_over, self._deltas = True, []

    # ---- in the training thread ----

    def undo(self) -> None:
        """Restores the wires' residuals, after a round that failed."""
        for sent in self.sent:
            try:
                sent.wait()
            except RingcommError:  # its residuals have not changed
                continue
            sent.undo()

    def apply(self) -> None:
        """Applies the result, which must have come: sets the weights to the anchor, plus their
        change since the send if the rank has continued training."""
        rebases = self.is_delayed and self.local and not self.is_dropped
        for at, block in enumerate(self.fragment.blocks):
            if self.next_states:
                block.adopt(self.next_states[at], self._scratch, at)
            elif self.is_moving:
                block.rule.step(block.anchor, self.means[at], block.memory)
            if rebases:
                block.rebase(self.local[at])
            else:
                block.scatter(block.anchor)
