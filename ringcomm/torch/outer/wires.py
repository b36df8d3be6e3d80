"""Wires: exchanges of a block's deltas, whose result is their mean on all ranks.

    DenseWire     an all-reduce with a codec, and error feedback if the codec needs it
    LargestWire   the largest change of any rank, exactly: for integers, which have no mean

Invariants: a wire's residuals change only when its exchange has succeeded; ``undo`` restores them
if the round as a whole has not. A wire has one delta in flight at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ...codecs import BLOCK, CODECS, Codec, Compression, parse
from ...communicator import Communicator
from ...errors import ConfigError
from ...feedback import ErrorFeedback, FeedbackStore
from ..sync.pending import Pending


class Sent(Protocol):
    """A delta on its way: a Pending, or a SentSparse."""

    def wait(self) -> torch.Tensor:
        """Returns the mean of the ranks' deltas. Raises what the collective raises."""

    def undo(self) -> None:
        """Restores the wire's residuals of before."""

    @property
    def sent_bytes(self) -> int:
        """Payload that this rank has sent."""


class Wire(Protocol):
    """Exchange of one block's deltas.

    Attributes:
        is_mean: whether the result is the mean over all ranks, of which those count that sent
            zeros.
    """

    is_mean: bool

    def submit(self, comm: Communicator, delta: torch.Tensor, timeout: float | None) -> Sent:
        """Sends a delta, whose memory the wire may overwrite."""


class DenseWire:
    """Averages deltas by an all-reduce with a codec."""

    is_mean = True

    def __init__(self, codec: Codec, feedback: ErrorFeedback | None = None) -> None:
        self._codec, self._feedback = codec, feedback

    def submit(self, comm: Communicator, delta: torch.Tensor, timeout: float | None) -> Sent:
        return Pending(comm, delta, self._codec, self._feedback, timeout=timeout)


class LargestWire:
    """Takes the largest change of any rank: the minimum of the deltas, as each is the anchor less
    the local values."""

    is_mean = False

    def submit(self, comm: Communicator, delta: torch.Tensor, timeout: float | None) -> Sent:
        return Pending(comm, delta, CODECS["none"], op="min", timeout=timeout)


class Wires(Protocol):
    """Makes the wires of a model's fragments, and holds their residuals.

    Attributes:
        align: number of elements at a multiple of which each tensor of a block must begin.
        repeats: whether a codec scales a block by the mean of its elements.
    """

    align: int
    repeats: bool

    def wire(self, name: str, count: int) -> Wire:
        """Makes the wire of a block of ``count`` elements; each has its own name."""

    def state_dict(self, comm: Communicator) -> dict[str, Any]:
        """Residuals of this rank. Nothing is sent."""

    def gather_state_dict(self, comm: Communicator) -> dict[str, Any]:
        """Residuals of all ranks, for a world of any size. A collective."""

    def load_state_dict(self, state: Mapping[str, Any], comm: Communicator) -> None:
        """Restores what either has returned."""

    def reset_residuals(self) -> None:
        """Drops the residuals, as this rank has missed rounds."""


class DenseWires:
    """Makes all-reduces with one codec.

    Args:
        compression: the codec's name; None: none.
        feedback: None: error feedback if the codec needs it. True: with any codec that rounds in
            blocks. False: none.

    Raises ConfigError for an unknown codec, a wrong ``feedback``, and True with a codec that rounds
    each element by itself or not at all.
    """

    def __init__(self, compression: Compression | None, feedback: bool | None) -> None:
        parsed: Codec = parse(compression)
        if feedback not in (None, True, False):
            raise ConfigError(f"feedback={feedback!r}: give True, False or None")
        if feedback and not parsed.quantises:
            raise ConfigError(
                f"feedback=True: {parsed.name} keeps no rounding errors; leave it out, or take int8"
            )
        self._codec = parsed
        self._keeps = parsed.quantises and (parsed.needs_feedback if feedback is None else feedback)
        self._store = FeedbackStore()
        self.align = BLOCK if parsed.quantises else 1
        self.repeats = parsed.name == "onebit"

    def wire(self, name: str, count: int) -> Wire:
        return DenseWire(self._codec, self._store.add(name, count) if self._keeps else None)

    def state_dict(self, comm: Communicator) -> dict[str, Any]:
        return self._store.state_dict(comm) if self._keeps else {}

    def gather_state_dict(self, comm: Communicator) -> dict[str, Any]:
        return self._store.gather_state_dict(comm) if self._keeps else {}

    def load_state_dict(self, state: Mapping[str, Any], comm: Communicator) -> None:
        if state and self._keeps:
            self._store.load_state_dict(state, comm)

    def reset_residuals(self) -> None:
        """Sets all residuals to zero."""
        for name in self._store:
            one = self._store[name]
            empty = one.worker * 0
            one.load(empty, empty[:0], 0)

    def __repr__(self) -> str:
        return f"DenseWires({self._codec.name!r}, feedback={self._keeps})"
