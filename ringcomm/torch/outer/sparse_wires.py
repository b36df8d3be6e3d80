"""The wires of a sparse outer step: they send the largest elements of each chunk of a decayed sum.

Invariants: those of wires.py. A SparseExchange for each block keeps the unsent elements, and
changes to another communicator when the members of rounds change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...communicator import Communicator
from ...errors import ConfigError
from ...sparse import SparseExchange, SparseRound
from .rules import Sparse
from .wires import Sent, Wire

_KIND = "sparse"


class SentSparse:
    """Sparse exchange of one delta in flight."""

    def __init__(self, one: SparseRound, like: torch.Tensor) -> None:
        self._round, self._like = one, like
        self._mean: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        if self._mean is None:
            found = torch.from_numpy(self._round.wait().scatter())
            self._mean = found.to(self._like.device, self._like.dtype)
        return self._mean

    @property
    def sent_bytes(self) -> int:
        return self._round.sent_bytes

    def undo(self) -> None:
        self._round.undo()


class SparseWire:
    """Exchange of the largest elements of one block.

    Args:
        rule: density, decay and aggregate.
        count: elements of the block.
    """

    def __init__(self, rule: Sparse, count: int) -> None:
        self._rule, self._count = rule, count
        self.is_mean = rule.aggregate == "mean"
        self._exchange: SparseExchange | None = None

    def submit(self, comm: Communicator, delta: torch.Tensor, timeout: float | None) -> Sent:
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


class SparseWires:
    """Makes a SparseWire for each block."""

    align = 1
    repeats = False

    def __init__(self, rule: Sparse) -> None:
        self._rule = rule
        self._wires: dict[str, SparseWire] = {}

    def wire(self, name: str, count: int) -> Wire:
        self._wires[name] = SparseWire(self._rule, count)
        return self._wires[name]

    def state_dict(self, comm: Communicator) -> dict[str, Any]:
        return {
            "kind": _KIND,
            "blocks": {
                name: wire.exchange_on(comm).state_dict() for name, wire in self._wires.items()
            },
        }

    def gather_state_dict(self, comm: Communicator) -> dict[str, Any]:
        return {
            "kind": _KIND,
            "blocks": {
                name: wire.exchange_on(comm).gather_state_dict()
                for name, wire in self._wires.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any], comm: Communicator) -> None:
        """Restores the unsent elements. Raises ConfigError for a state of other wires."""
        if state.get("kind") != _KIND or set(state["blocks"]) != set(self._wires):
            raise ConfigError("OuterStep: the state holds no residuals of a sparse outer step")
        for name, wire in self._wires.items():
            wire.exchange_on(comm).load_state_dict(state["blocks"][name])

    def reset_residuals(self) -> None:
        for wire in self._wires.values():
            wire.reset_residuals()

    def __repr__(self) -> str:
        return f"SparseWires({self._rule!r})"
