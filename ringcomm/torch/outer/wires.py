"""Wires: how a block's deltas become their mean on all ranks.

    DenseWire     an all-reduce with a codec, and error feedback where it leaves something over
    LargestWire   the largest change of any rank, exactly: of integers, which have no mean

Invariants: what a wire remembers between rounds changes only when a round has succeeded; ``undo``
takes it back where the round as a whole has not. A wire has one delta in flight at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, cast

import torch

from ...codecs import BLOCK, Codec, Compression, parse
from ...communicator import Communicator
from ...errors import ConfigError
from ...feedback import ErrorFeedback, FeedbackStore
from ...work import Work


class Sent(Protocol):
    """A delta in flight."""

    def wait(self) -> torch.Tensor:
        """The mean of what the ranks have sent. Raises what the collective raises."""

    def undo(self) -> None:
        """Takes back what the wire has learnt from it."""

    @property
    def sent_bytes(self) -> int:
        """Payload that this rank has sent."""


class Wire(Protocol):
    """How one block's deltas travel.

    Attributes:
        is_mean: what comes is the mean of all ranks' deltas.
    """

    is_mean: bool

    def submit(self, comm: Communicator, delta: torch.Tensor, timeout: float | None) -> Sent:
        """Sends a delta, whose memory is the wire's from then on."""


class Reduced:
    """An all-reduce in flight."""

    def __init__(
        self, work: Work, tensor: torch.Tensor, feedback: ErrorFeedback | Literal[False] | None
    ) -> None:
        self._work, self._tensor, self._feedback = work, tensor, feedback

    def wait(self) -> torch.Tensor:
        """See Sent."""
        self._work.wait()
        return self._tensor

    def undo(self) -> None:
        """See Sent."""
        if isinstance(self._feedback, ErrorFeedback):
            self._feedback.undo()

    @property
    def sent_bytes(self) -> int:
        """See Sent."""
        return self._work.stats().sent_bytes


class DenseWire:
    """An all-reduce to the mean, by a codec."""

    is_mean = True

    def __init__(
        self, compression: Compression | None, feedback: ErrorFeedback | Literal[False] | None
    ) -> None:
        self._compression, self._feedback = compression, feedback

    def submit(self, comm: Communicator, delta: torch.Tensor, timeout: float | None) -> Sent:
        """See Wire."""
        work = comm.allreduce(
            delta,
            "avg",
            compression=self._compression,
            feedback=self._feedback,
            async_op=True,
            timeout=timeout,
        )
        return Reduced(work, delta, self._feedback)


class LargestWire:
    """The largest change of any rank: as deltas are the anchor less the local values, their
    minimum."""

    is_mean = False

    def submit(self, comm: Communicator, delta: torch.Tensor, timeout: float | None) -> Sent:
        """See Wire."""
        return Reduced(comm.allreduce(delta, "min", async_op=True, timeout=timeout), delta, None)


class Wires(Protocol):
    """Makes the wires of a model's fragments, and keeps what they remember.

    Attributes:
        align: at which elements tensors are to begin within a block.
        repeats: whether a codec scales a block by the mean of its elements.
    """

    align: int
    repeats: bool

    def wire(self, name: str, count: int) -> Wire:
        """The wire of a block of so many elements; names differ."""

    def state_dict(self, comm: Communicator) -> dict[str, Any]:
        """What this rank has left. Nothing is sent."""

    def gather_state_dict(self, comm: Communicator) -> dict[str, Any]:
        """What all ranks have left, for a world of any size. A collective."""

    def load_state_dict(self, state: Mapping[str, Any], comm: Communicator) -> None:
        """Goes on from what either has returned."""

    def forget(self) -> None:
        """Drops what they remember: this rank has missed rounds."""


class DenseWires:
    """All-reduces by one codec.

    Args:
        compression: the codec's name; None: none.
        feedback: None: error feedback where the codec needs it. True: with any codec that rounds in
            blocks. False: none.

    Raises ConfigError for an unknown codec, or one that does not go with it.
    """

    def __init__(self, compression: Compression | None, feedback: bool | None) -> None:
        parsed: Codec = parse(compression)
        if feedback not in (None, True, False):
            raise ConfigError(f"feedback={feedback!r}: give True, False or None")
        self._codec = cast(Compression, parsed.name)
        self._keeps = parsed.quantises and (parsed.needs_feedback if feedback is None else feedback)
        self._store = FeedbackStore()
        self.align = BLOCK if parsed.quantises else 1
        self.repeats = parsed.name == "onebit"

    def wire(self, name: str, count: int) -> Wire:
        """See Wires."""
        if not self._keeps:
            return DenseWire(self._codec, False)
        return DenseWire(self._codec, self._store.add(name, count))

    def state_dict(self, comm: Communicator) -> dict[str, Any]:
        """See Wires."""
        return self._store.state_dict(comm) if self._keeps else {}

    def gather_state_dict(self, comm: Communicator) -> dict[str, Any]:
        """See Wires."""
        return self._store.gather_state_dict(comm) if self._keeps else {}

    def load_state_dict(self, state: Mapping[str, Any], comm: Communicator) -> None:
        """See Wires."""
        if state and self._keeps:
            self._store.load_state_dict(state, comm)

    def forget(self) -> None:
        """See Wires."""
        for name in self._store:
            one = self._store[name]
            empty = one.worker * 0
            one.load(empty, empty[:0], 0)

    def __repr__(self) -> str:
        return f"DenseWires({self._codec!r}, feedback={self._keeps})"
