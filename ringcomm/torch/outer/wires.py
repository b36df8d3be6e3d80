"""Wires: exchanges of a block's deltas, whose result is their mean on all ranks.

    Wire          an all-reduce with a codec, and error feedback if it needs that    pending.py
    SparseWire    the largest elements of each chunk of a decayed sum
    DenseWires, SparseWires    make one for each block, and keep their residuals for checkpoints
    Pending, SentSparse        one delta on its way

Invariants: a wire's residuals change only when its exchange has succeeded; ``undo`` of what was
sent restores them if the round as a whole has failed. A wire has one delta in flight at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...codecs import BLOCK, Compression, parse
from ...communicator import Communicator
from ...core.work import WorkStats
from ...errors import ConfigError
from ...feedback import FeedbackStore
from ...sparse import SparseExchange, SparseRound
from ..sync.pending import Pending, Wire
from .rules import Sparse


class SentSparse:
    """Sparse exchange of one delta on its way; used as a Pending."""

    def __init__(self, one: SparseRound, like: torch.Tensor) -> None:
        self._round, self._like = one, like

    def wait(self) -> torch.Tensor:
        """Returns the mean, made anew by each call. Raises what the collective raises."""
        return torch.from_numpy(self._round.wait().scatter()).to(self._like)

    def undo(self) -> None:
        """Restores the wire's residuals of before."""
        self._round.undo()

    @property
    def stats(self) -> list[WorkStats]:
        """Counters of its collectives, once it has been waited for."""
        return self._round.stats


class SparseWire:
    """Exchange of the largest elements of one block. A SparseExchange keeps the unsent ones, and
    changes to another communicator when the members of rounds change.

    Args:
        rule: density, decay and aggregate.
        count: elements of the block.

    Attributes:
        is_mean: as of a Wire; ``Round.travel`` corrects for ranks that sent zeros.
    """

    def __init__(self, rule: Sparse, count: int) -> None:
        self._rule, self._count = rule, count
        self.is_mean = rule.aggregate == "mean"
        self._exchange: SparseExchange | None = None

    def submit(self, comm: Communicator, delta: torch.Tensor, timeout: float | None) -> SentSparse:
        """Sends a delta."""
        host = delta.to("cpu", torch.float32)
        return SentSparse(self.exchange_on(comm).submit(host, timeout=timeout), delta)

    def exchange_on(self, comm: Communicator) -> SparseExchange:
        """Returns the block's exchange, over this communicator."""
        if self._exchange is None:
            self._exchange = SparseExchange(
                comm,
                self._count,
                density=self._rule.density,
                decay=self._rule.decay,
                aggregate=self._rule.aggregate,
            )
        elif self._exchange.comm is not comm:
            self._exchange.use(comm)
        return self._exchange

    def reset_residuals(self) -> None:
        """Drops the unsent elements."""
        self._exchange = None


Sent = Pending | SentSparse


class DenseWires:
    """Makes all-reduces with one codec for the blocks of a model, and holds their residuals.

    Args:
        compression: the codec's name; None: none.
        feedback: None: error feedback if the codec needs it. True: with any codec that rounds in
            blocks. False: none.
        op: "avg"; or "min", for integers, which have no mean: the largest change of any rank, as
            each delta is the anchor less the local values.

    Attributes:
        align: number of elements at a multiple of which each tensor of a block must begin.
        fills_padding: whether padding repeats elements, for a codec that scales its blocks by a
            mean.

    Raises ConfigError for an unknown codec, a wrong ``feedback``, and True with a codec that rounds
    each element by itself or not at all.
    """

    def __init__(
        self, compression: Compression | None, feedback: bool | None, op: str = "avg"
    ) -> None:
        parsed = parse(compression)
        if feedback not in (None, True, False):
            raise ConfigError(f"feedback={feedback!r}: give True, False or None")
        if feedback and not parsed.quantises:
            raise ConfigError(
                f"feedback=True: {parsed.name} keeps no rounding errors; leave it out, or take int8"
            )
        self._codec, self._op = parsed, op
        self._keeps = parsed.quantises and (parsed.needs_feedback if feedback is None else feedback)
        self._store = FeedbackStore()
        self.align = BLOCK if parsed.quantises else 1
        self.fills_padding = parsed.name == "onebit"

    def wire(self, name: str, count: int) -> Wire:
        """Makes the wire of a block of ``count`` elements; each has its own name."""
        feedback = self._store.add(name, count) if self._keeps else None
        return Wire(self._codec, feedback, self._op)

    def saved(self, comm: Communicator, *, own: bool) -> dict[str, Any]:
        """Returns residuals: this rank's own; or, by a collective, those of all ranks, for a world
        of any size."""
        return self._store.saved(comm, own=own) if self._keeps else {}

    def restore(self, state: Mapping[str, Any], comm: Communicator) -> None:
        """Takes what ``saved`` returned; where it has no residuals, they begin at zero."""
        if state and self._keeps:
            self._store.load_state_dict(state, comm)
        else:
            self.reset_residuals()

    def reset_residuals(self) -> None:
        """Drops the residuals, as this rank has missed rounds."""
        self._store.rescale(0.0)

    def __repr__(self) -> str:
        return f"DenseWires({self._codec.name!r}, feedback={self._keeps})"


class SparseWires:
    """Makes a SparseWire for each block; used as DenseWires."""

    align = 1
    fills_padding = False

    def __init__(self, rule: Sparse) -> None:
        self._rule = rule
        self._wires: dict[str, SparseWire] = {}

    def wire(self, name: str, count: int) -> SparseWire:
        """Makes the wire of a block of ``count`` elements; each has its own name."""
        self._wires[name] = SparseWire(self._rule, count)
        return self._wires[name]

    def saved(self, comm: Communicator, *, own: bool) -> dict[str, Any]:
        """Returns the unsent elements, as DenseWires return residuals."""
        blocks = {name: wire.exchange_on(comm).saved(own=own) for name, wire in self._wires.items()}
        return {"kind": "sparse", "blocks": blocks}

    def restore(self, state: Mapping[str, Any], comm: Communicator) -> None:
        """Takes the unsent elements. Raises ConfigError for a state of other wires."""
        if state.get("kind") != "sparse" or set(state["blocks"]) != set(self._wires):
            raise ConfigError("OuterStep: the state holds no residuals of a sparse outer step")
        for name, wire in self._wires.items():
            wire.exchange_on(comm).load_state_dict(state["blocks"][name])

    def reset_residuals(self) -> None:
        """Drops the unsent elements."""
        for wire in self._wires.values():
            wire.reset_residuals()

    def __repr__(self) -> str:
        return f"SparseWires({self._rule!r})"


Wires = DenseWires | SparseWires
