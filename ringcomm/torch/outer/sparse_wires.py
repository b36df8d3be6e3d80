"""The wires of a sparse outer step: of each chunk of a decayed sum of deltas the largest elements.

Invariants: as wires.py has them. What has not travelled yet is kept by a SparseExchange for each
block, which is made anew, with the same residual, where the communicator is another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ...communicator import Communicator
from ...errors import ConfigError
from ...sparse import SparseExchange, SparseRound
from .rules import Sparse
from .wires import Sent, Wire

_KIND = "sparse"


class Chosen:
    """A sparse exchange in flight."""

    def __init__(
        self, wire: SparseWire, one: SparseRound, like: torch.Tensor, before: dict[str, Any] | None
    ) -> None:
        self._wire, self._round, self._like, self._before = wire, one, like, before
        self._mean: torch.Tensor | None = None
        self.sent_bytes = wire.sent_bytes

    def wait(self) -> torch.Tensor:
        """See Sent."""
        if self._mean is None:
            found = torch.from_numpy(self._round.wait().scatter())
            self._mean = found.to(self._like.device, self._like.dtype)
        return self._mean

    @property
    def seconds(self) -> float:
        """See Sent."""
        return self._round.elapsed

    def undo(self) -> None:
        """See Sent."""
        if self._before is not None:
            self._wire.restore(self._before)


class SparseWire:
    """One block's exchange.

    Args:
        rule: what it follows.
        count: elements of the block.
    """

    is_weighted = True

    def __init__(self, rule: Sparse, count: int) -> None:
        self._rule, self._count = rule, count
        self._exchange: SparseExchange | None = None

    @property
    def sent_bytes(self) -> int:
        """That a round sends."""
        return self._exchange.sent_bytes if self._exchange is not None else 0

    def submit(
        self, comm: Communicator, delta: torch.Tensor, timeout: float | None, *, may_undo: bool
    ) -> Sent:
        """See Wire."""
        exchange = self.exchange_on(comm)
        before = exchange.state_dict(exact=True) if may_undo else None
        host = delta.to("cpu", torch.float32)
        return Chosen(self, exchange.submit(host, timeout=timeout), delta, before)

    def exchange_on(self, comm: Communicator) -> SparseExchange:
        """The exchange, over this communicator."""
        before = self._exchange
        if before is None or before.comm is not comm:
            self._exchange = SparseExchange(
                comm, self._count, density=self._rule.density, decay=self._rule.decay,
                aggregate=self._rule.aggregate,
            )  # fmt: skip
            if before is not None:
                self._exchange.load_state_dict(_of_any_world(before.state_dict(exact=True)))
        assert self._exchange is not None
        return self._exchange

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state of the exchange."""
        assert self._exchange is not None
        self._exchange.load_state_dict(state)

    def forget(self) -> None:
        """Drops what has not travelled."""
        self._exchange = None


def _of_any_world(exact: Mapping[str, Any]) -> dict[str, Any]:
    """An exact state of another world as one that this rank goes on from, with what it has left."""
    state = {name: value for name, value in exact.items() if name != "exact"}
    start, owner = int(state["owner_start"]), np.asarray(state["owner"])
    whole = np.zeros(int(state["count"]), np.float32)
    whole[start : start + len(owner)] = owner
    return {**state, "owner_start": 0, "owner": whole}


class SparseWires:
    """See wires.Wires."""

    align = 1

    def __init__(self, rule: Sparse) -> None:
        self._rule = rule
        self._wires: dict[str, SparseWire] = {}

    def wire(self, name: str, count: int) -> Wire:
        """See Wires."""
        self._wires[name] = SparseWire(self._rule, count)
        return self._wires[name]

    def state_dict(self, comm: Communicator, *, exact: bool) -> dict[str, Any]:
        """See Wires."""
        blocks = {
            name: wire.exchange_on(comm).state_dict(exact=exact)
            for name, wire in self._wires.items()
        }
        return {"kind": _KIND, "blocks": blocks}

    def load_state_dict(self, state: Mapping[str, Any], comm: Communicator) -> None:
        """See Wires."""
        if state.get("kind") != _KIND or set(state["blocks"]) != set(self._wires):
            raise ConfigError("OuterStep: the state holds no residuals of a sparse outer step")
        for name, wire in self._wires.items():
            wire.exchange_on(comm).load_state_dict(state["blocks"][name])

    def forget(self) -> None:
        """See Wires."""
        for wire in self._wires.values():
            wire.forget()

    def __repr__(self) -> str:
        return f"SparseWires({self._rule!r})"
