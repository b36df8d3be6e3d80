"""What the ranks tell each other beside the gradients: a row of numbers of each to one that
decides, and its text to all.

    CommExchange    over the communicator of all ranks
    GridExchange    where hosts have several ranks: the first of each host speaks for it

Invariants: each is a collective of all ranks, submitted by all before the same step. Gathering and
spreading are asynchronous, and small; who asks for what came waits, as long as the communicator
does at most, and gets its error.
"""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..adaptive.agreement import Later
from ..communicator import Communicator
from .grid import Grid

_TEXT_BYTES = 1024
_PROBES = 4


class CommExchange:
    """See adaptive.agreement.Exchange.

    Attributes:
        decides: this is the rank whose texts are spread.
        is_alone: there is nobody to agree with.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.decides = comm.rank == 0
        self.is_alone = comm.world_size == 1

    def gather(self, row: Sequence[float]) -> Later[list[list[float]]]:
        """See Exchange."""
        work = self._comm.allgather(np.array(row, np.float64), async_op=True)

        def rows() -> list[list[float]]:
            gathered: list[list[float]] = work.wait().tolist()
            return gathered

        return rows

    def spread(self, text: str) -> Later[str]:
        """See Exchange."""
        return _spread(self._comm, text)

    def shared(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state of the rank that decides, of tensors, strings and numbers, on all. Collective,
        and waited for."""
        return _unpacked(_shared(self._comm, _packed(state)))

    def latency_s(self) -> float:
        """What the smallest all-reduce takes. Collective, and waited for."""
        taken = []
        for _ in range(_PROBES):
            began = time.perf_counter()
            self._comm.allreduce(np.zeros(1, np.float32))
            taken.append(time.perf_counter() - began)
        return min(taken)

    def cpu_s(self) -> float:
        """Processor time of this process's engine so far."""
        return self._comm.stats()["engine_cpu_s"]


class GridExchange(CommExchange):
    """The ranks of place 0 exchange among hosts, and tell their rows."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid.column)
        self._row = grid.row
        self._speaks = grid.place == 0
        self.decides = self.decides and self._speaks

    def gather(self, row: Sequence[float]) -> Later[list[list[float]]]:
        """Of the ranks of place 0."""
        return super().gather(row) if self._speaks else lambda: [list(row)]

    def shared(self, state: dict[str, Any]) -> dict[str, Any]:
        """See CommExchange."""
        packed = _packed(state)
        if self._speaks:
            packed = _shared(self._comm, packed)
        return _unpacked(_shared(self._row, packed))

    def spread(self, text: str) -> Later[str]:
        """See Exchange."""
        told = super().spread(text) if self._speaks else lambda: ""
        return lambda: _spread(self._row, told())()


def _spread(comm: Communicator, text: str) -> Later[str]:
    buffer = np.zeros(_TEXT_BYTES, np.uint8)
    if comm.rank == 0:
        encoded = text.encode("ascii")
        buffer[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    # Zeros come from the others. Unlike a broadcast's, its frames say what call they are part of.
    work = comm.allreduce(buffer, "max", async_op=True)

    def told() -> str:
        work.wait()
        return buffer.tobytes().rstrip(b"\0").decode("ascii")

    return told


def _packed(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _unpacked(packed: bytes) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(io.BytesIO(packed), weights_only=True)
    return state


def _shared(comm: Communicator, packed: bytes) -> bytes:
    """Rank 0's bytes on all."""
    size = comm.allgather(np.array([len(packed)]))[0]  # which tells others what it is part of
    own = packed if comm.rank == 0 else bytes(int(size[0]))
    return bytes(comm.broadcast(np.frombuffer(own, np.uint8).copy()))
