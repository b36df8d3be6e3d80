"""One round on its way: what this rank brings to it, and what has come back.

    Fragment    the units that travel together: parameters, and with the last fragment the buffers
    Unit        a block with its outer rule, that rule's memory, its wire and its merge
    Flight      the deltas of a fragment, their header, and the works that carry them

Invariants: a flight's header leaves before its deltas, on all ranks. A rank that flushes sends its
deltas only when it has seen the headers: if all flush and nobody has anything left, nothing
follows. So does one that does not know yet which weight counts as one. The deltas are kept until
the round is over where it may have to be repeated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ...communicator import Communicator
from ...errors import RingcommError
from ...work import Work
from .blocks import Block, Scratch
from .header import Header, Headers, scale
from .merges import Merge
from .rules import Memory, Rule
from .wires import Sent, Wire


@dataclasses.dataclass
class Unit:
    """A block with all that moves it."""

    name: str
    block: Block
    rule: Rule
    wire: Wire
    merge: Merge
    memory: Memory = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.memory = self.rule.memory(self.block.anchor)

    def land(self, mean: torch.Tensor, at_send: torch.Tensor | None) -> None:
        """Moves the anchor by a mean delta, and the local weights after it.

        Args:
            at_send: what the local weights were when the delta left; None: what they still are.
        """
        self.rule.step(self.block.anchor, mean, self.memory)
        self.follow(at_send)

    def follow(self, at_send: torch.Tensor | None) -> None:
        """Brings the local weights to the anchor."""
        if at_send is None:
            self.block.set_local(self.block.anchor)
            return
        self.block.merge(self.merge, at_send)


@dataclasses.dataclass
class Fragment:
    """Units that travel together.

    Attributes:
        iterations, tokens: what this rank has trained since their last round.
    """

    units: list[Unit]
    iterations: int = 0
    tokens: float = 0.0

    @property
    def nbytes(self) -> int:
        """Of its deltas."""
        return sum(unit.block.anchor.nbytes for unit in self.units)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a round has brought.

    Attributes:
        means: the mean delta of each unit; empty if all ranks flushed and nothing was left.
        is_moving: some rank brought something.
        headers: of all ranks; None in a flight that was restored.
    """

    means: Sequence[torch.Tensor]
    is_moving: bool
    headers: Headers | None


class Flight:
    """One rank's part in a round.

    Args:
        fragment: whose deltas.
        due: the iteration after which the result is to be applied.
        is_delayed: the rank trains on until then.
        keeps: the round may have to be repeated.
        scratch: of the flight before, which is over.
    """

    def __init__(
        self, fragment: Fragment, due: int, scratch: Scratch, *, is_delayed: bool, keeps: bool
    ) -> None:
        self.fragment, self.due = fragment, due
        blocks = [unit.block for unit in fragment.units]
        locals_ = [
            block.local(scratch.take(f"local {at}", block)) for at, block in enumerate(blocks)
        ]
        self.at_send = locals_ if is_delayed else None
        found = [
            block.delta(local, scratch.take(f"delta {at}", block))
            for at, (block, local) in enumerate(zip(blocks, locals_, strict=True))
        ]
        self._deltas = [delta for delta, _ in found]
        self.is_dropped = not all(is_finite for _, is_finite in found)
        if self.is_dropped:
            for delta in self._deltas:
                delta.zero_()
        self._keeps = keeps
        self._reference: float | None = None
        self._header: Header | None = None
        self._gathering: Work | None = None
        self._headers: Headers | None = None
        self._sent: list[Sent] = []
        self._outcome: Outcome | None = None
        self._error: RingcommError | None = None
        self._is_closed = False

    @classmethod
    def restored(
        cls, fragment: Fragment, due: int, at_send: list[torch.Tensor] | None,
        outcome: Outcome, is_dropped: bool,
    ) -> Flight:  # fmt: skip
        """One whose result had come when a checkpoint was written."""
        flight = cls.__new__(cls)
        flight.fragment, flight.due, flight.at_send = fragment, due, at_send
        flight.is_dropped, flight._sent, flight._outcome = is_dropped, [], outcome
        flight._is_closed = True
        return flight

    def post(
        self, comm: Communicator, header: Header, reference: float | None, timeout: float | None
    ) -> None:
        """Sends the header and, unless they have to wait for the others' headers, the deltas; or
        both once more. A failure is raised by ``wait``.

        Args:
            reference: the weight that counts as one; None: the mean of this round's.
        """
        self._comm, self._timeout = comm, timeout
        self._header, self._reference, self._headers, self._sent = header, reference, None, []
        self._error = None
        try:
            self._gathering = header.gathered(comm, timeout)
            if not header.is_ending and reference is not None:
                self._send()
        except RingcommError as error:
            self._error = error

    def _send(self) -> None:
        assert self._header is not None
        reference = self.reference
        for unit, delta in zip(self.fragment.units, self._deltas, strict=True):
            sent = delta.clone() if self._keeps else delta
            if unit.wire.is_weighted:
                scale(sent, self._header.weight / reference)
            self._sent.append(unit.wire.submit(self._comm, sent, self._timeout))

    @property
    def reference(self) -> float:
        """The weight that counts as one."""
        return self.headers().mean if self._reference is None else self._reference

    def headers(self) -> Headers:
        """Of all ranks, once they are there."""
        if self._headers is None:
            assert self._gathering is not None
            self._headers = Headers.of(self._gathering)
        return self._headers

    @property
    def is_over(self) -> bool:
        """Its outcome is final."""
        return self._is_closed

    @property
    def outcome(self) -> Outcome:
        """What the round has brought."""
        assert self._outcome is not None
        return self._outcome

    def close(self) -> None:
        """The round is over on all ranks; its deltas are not needed any more."""
        self._is_closed, self._deltas = True, []

    def wait(self) -> None:
        """Waits for what the round brings. Raises what a collective of it raises."""
        self._outcome = self._wait()

    def _wait(self) -> Outcome:
        if self._error is not None:
            raise self._error
        headers = self.headers()
        if headers.is_over:
            return Outcome([], False, headers)
        if not self._sent:
            self._send()
        means = [sent.wait() for sent in self._sent]
        if headers.total == 0:
            return Outcome(means, False, headers)
        factor = len(headers.rows) * self.reference / headers.total
        for unit, mean in zip(self.fragment.units, means, strict=True):
            if unit.wire.is_weighted:
                scale(mean, factor)
        return Outcome(means, True, headers)

    def undo(self) -> None:
        """Takes back what wires have learnt from a round that failed."""
        for sent in self._sent:
            try:
                sent.wait()
            except RingcommError:  # this one has learnt nothing
                continue
            sent.undo()

    def land(self) -> None:
        """Applies the result, which must have come."""
        outcome = self.outcome
        at_sends = self.at_send if self.at_send and not self.is_dropped else None
        for number, unit in enumerate(self.fragment.units):
            at_send = at_sends[number] if at_sends else None
            if outcome.is_moving:
                unit.land(outcome.means[number], at_send)
            else:
                unit.follow(at_send)

    @property
    def seconds(self) -> float:
        """That the transfer took, once it was waited for."""
        return max((sent.seconds for sent in self._sent), default=0.0)

    @property
    def sent_bytes(self) -> int:
        """Payload that this rank has sent."""
        return sum(sent.sent_bytes for sent in self._sent)

