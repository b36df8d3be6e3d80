"""One round on its way: this rank's deltas, and the round's result.

    Fragment    the units that travel together: parameters, and with the last fragment the buffers
    Unit        a block with its outer rule, the rule's memory, and the block's wire
    Round       the deltas of a fragment, their header, and the works that carry them

    training thread    copy weights | trains on ..................... | adopt, rebase
    another thread                  | delta, send, receive, outer rule |

Invariants: a round's header is sent before its deltas, on all ranks. A rank that flushes waits for
all headers first: if all flush and no rank has anything left, no deltas are sent. If the round may
have to be repeated, the deltas are kept until it is over.

``prepare``, ``travel`` and ``close`` change neither the model's tensors nor the anchor and memory
in use, so they may run beside the training. All else belongs to the training thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ...communicator import Communicator
from ...core.work import Work
from ...errors import RingcommError
from ..tensors import tiles
from .blocks import Block, Scratch
from .round_messages import Header, Headers
from .rules import Memory, Rule
from .wires import Sent, Wire


@dataclasses.dataclass(frozen=True)
class NextState:
    """Anchor and rule's memory of a unit after a round that is not applied yet."""

    anchor: torch.Tensor
    memory: Memory


@dataclasses.dataclass
class Unit:
    """A block with its outer rule, memory and wire."""

    name: str
    block: Block
    rule: Rule
    wire: Wire
    memory: Memory = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.memory = self.rule.memory(self.block.anchor)

    def step(self, mean: torch.Tensor) -> None:
        """Moves the anchor by a mean delta."""
        self.rule.step(self.block.anchor, mean, self.memory)

    def next_state(self, mean: torch.Tensor, scratch: Scratch, at: int) -> NextState:
        """Computes the anchor and memory after ``step``, in other tensors than those in use."""
        own = {"": self.block.anchor, **self.memory}
        after = {slot: scratch.like(f"{slot} {at}", tensor) for slot, tensor in own.items()}
        for *pieces, moves in tiles(*own.values(), *after.values(), mean):
            then = dict(zip(own, pieces[len(own) :], strict=True))
            for piece, tensor in zip(pieces, then.values(), strict=False):
                tensor.copy_(piece)
            self.rule.step(then.pop(""), moves.clone(), then)
        return NextState(after.pop(""), after)

    def adopt(self, state: NextState, scratch: Scratch, at: int) -> None:
        """Makes a computed anchor and memory the present ones."""
        scratch.keep(f" {at}", self.block.anchor)
        for slot, tensor in self.memory.items():
            scratch.keep(f"{slot} {at}", tensor)
        self.block.anchor, self.memory = state.anchor, state.memory

    def set_weights(self, at_send: torch.Tensor | None) -> None:
        """Sets the local weights to the anchor, plus their change since the send."""
        if at_send is None:
            self.block.scatter(self.block.anchor)
            return
        self.block.rebase(at_send)


@dataclasses.dataclass
class Fragment:
    """Units with a common round.

    Attributes:
        iterations: number of this rank's iterations since their last round.
    """

    units: list[Unit]
    iterations: int = 0

    @property
    def is_finite(self) -> bool:
        """Whether all local weights are finite."""
        return all(unit.block.is_finite for unit in self.units)

    def give_up(self) -> None:
        """Sets the weights to the anchor, and drops the training since the last round."""
        self.iterations = 0
        for unit in self.units:
            unit.set_weights(None)

    @property
    def devices(self) -> set[torch.device]:
        """Devices of its tensors."""
        return {unit.block.device for unit in self.units}

    @property
    def nbytes(self) -> int:
        """Bytes of its deltas, uncompressed."""
        return sum(unit.block.anchor.nbytes for unit in self.units)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a round.

    Attributes:
        means: the mean delta of each unit; empty if all ranks flushed and nothing was left.
        is_moving: whether any rank's deltas count.
        headers: of all ranks; None in a round that was restored.
    """

    means: Sequence[torch.Tensor]
    is_moving: bool
    headers: Headers | None


class Round:
    """One rank's part in a round.

    Args:
        fragment: the fragment whose deltas are sent.
        due: the iteration after which the result is applied.
        header: this rank's header; ``prepare`` corrects it if the deltas are not finite.
        scratch: memory of the round before, which is over.
        is_delayed: whether the rank continues training until ``due``.
        keeps: whether the round may have to be repeated.

    Attributes:
        at_send: copy of the local weights, if the rank continues training.
        is_dropped: this rank's weights are not finite, and do not count.
        is_over: its outcome is final.
    """

    def __init__(
        self,
        fragment: Fragment,
        due: int,
        header: Header,
        scratch: Scratch,
        *,
        is_delayed: bool,
        keeps: bool,
    ) -> None:
        self.fragment, self.due, self.is_delayed = fragment, due, is_delayed
        self.header = header
        self.is_dropped = self.is_over = False
        self._scratch, self._keeps = scratch, keeps
        blocks = [unit.block for unit in fragment.units]
        self._locals = [
            block.local(scratch.take(f"local {at}", block)) for at, block in enumerate(blocks)
        ]
        self.at_send = self._locals if is_delayed else None
        self._deltas: list[torch.Tensor] = []
        self._gathering: Work | None = None
        self._headers: Headers | None = None
        self._sent: list[Sent] = []
        self._outcome: Outcome | None = None
        self._next_states: list[NextState] = []

    @classmethod
    def restored(
        cls,
        fragment: Fragment,
        due: int,
        at_send: list[torch.Tensor] | None,
        outcome: Outcome,
        is_dropped: bool,
    ) -> Round:
        """Makes a round whose result had come when a checkpoint was written."""
        current = cls.__new__(cls)
        current.fragment, current.due, current.at_send = fragment, due, at_send
        current.is_dropped, current._sent, current._outcome = is_dropped, [], outcome
        current.is_over, current._next_states = True, []
        return current

    # ---- beside the training ----

    def prepare(self) -> None:
        """Takes the deltas; a second call does nothing."""
        if self._deltas:
            return
        for at, (unit, local) in enumerate(zip(self.fragment.units, self._locals, strict=True)):
            out = self._scratch.take(f"delta {at}", unit.block)
            delta, is_finite = unit.block.delta(local, out)
            self._deltas.append(delta)
            self.is_dropped |= not is_finite
        if self.is_dropped:
            self.header = dataclasses.replace(self.header, is_dropped=True, counts=False)
        for unit, delta in zip(self.fragment.units, self._deltas, strict=True):
            if not self.header.counts:
                delta.zero_()
            unit.block.fill_padding(delta)

    def travel(self, comm: Communicator, timeout: float | None) -> None:
        """Sends the header and the deltas, in a flush only once the others' headers require it, and
        waits for the result. May be called again. Raises what a collective of the round raises."""
        self._comm, self._timeout = comm, timeout
        self._headers, self._sent = None, []
        self._gathering = self.header.gathered(comm, timeout)
        if not self.header.is_ending:
            self._send()
        self._outcome = self._wait()

    def _send(self) -> None:
        for unit, delta in zip(self.fragment.units, self._deltas, strict=True):
            sent = delta.clone() if self._keeps else delta
            self._sent.append(unit.wire.submit(self._comm, sent, self._timeout))

    def headers(self) -> Headers:
        """Returns the headers of all ranks; waits until they have come."""
        if self._headers is None:
            assert self._gathering is not None
            self._headers = Headers(Header.rows(self._gathering))
        return self._headers

    def _wait(self) -> Outcome:
        headers = self.headers()
        if headers.is_over:
            return Outcome([], False, headers)
        if not self._sent:
            self._send()
        means = [sent.wait() for sent in self._sent]
        for unit, mean in zip(self.fragment.units, means, strict=True):
            unit.block.clear_padding(mean)
        if headers.counting == 0:
            return Outcome(means, False, headers)
        if headers.counting < len(headers.rows):
            for unit, mean in zip(self.fragment.units, means, strict=True):
                if unit.wire.is_mean:
                    mean.mul_(len(headers.rows) / headers.counting)
        return Outcome(means, True, headers)

    def close(self) -> None:
        """Makes the outcome final, as the round is over on all ranks, and drops the deltas. If the
        rank continues training, computes the next anchor."""
        if self.is_delayed and self.outcome.is_moving:
            self._next_states = [
                unit.next_state(mean, self._scratch, at)
                for at, (unit, mean) in enumerate(
                    zip(self.fragment.units, self.outcome.means, strict=True)
                )
            ]
        self.is_over, self._deltas = True, []

    # ---- in the training thread ----

    @property
    def outcome(self) -> Outcome:
        """Result of the round."""
        assert self._outcome is not None
        return self._outcome

    def undo(self) -> None:
        """Restores the wires' residuals, after a round that failed."""
        for sent in self._sent:
            try:
                sent.wait()
            except RingcommError:  # its residuals have not changed
                continue
            sent.undo()

    def apply(self) -> None:
        """Applies the result, which must have come."""
        at_sends = self.at_send if self.at_send and not self.is_dropped else None
        for at, unit in enumerate(self.fragment.units):
            if self._next_states:
                unit.adopt(self._next_states[at], self._scratch, at)
            elif self.outcome.is_moving:
                unit.step(self.outcome.means[at])
            unit.set_weights(at_sends[at] if at_sends else None)

    @property
    def sent_bytes(self) -> int:
        """Payload that this rank has sent."""
        return sum(sent.sent_bytes for sent in self._sent)
