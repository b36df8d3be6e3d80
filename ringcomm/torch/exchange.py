"""Control messages: each rank sends a row of measurements to rank 0, which broadcasts its decision.

    CommExchange    over the communicator of all ranks
    GridExchange    where hosts have several ranks: the first of each host speaks for it

Invariants: each is a collective of all ranks, submitted by all before the same step. Gathering and
spreading are asynchronous, and small; the function they return waits for the result, at most the
communicator's timeout, and raises its error.
"""

from __future__ import annotations

import io
import timeit
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..adaptive.codec_agreement import Later
from ..communicator import Communicator
from .grid import Grid

_TEXT_BYTES = 1024
_PROBES = 4


class CommExchange:
    """Implements adaptive.codec_agreement.Collectives over one communicator.

    Attributes:
        decides: whether this rank decides, and ``spread`` sends its text.
        is_alone: whether it is the only rank.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.decides = comm.rank == 0
        self.is_alone = comm.world_size == 1

    def gather(self, row: Sequence[float]) -> Later[list[list[float]]]:
        """Starts to gather each rank's row of numbers; all ranks get all rows."""
        work = self._comm.allgather(np.array(row, np.float64), async_op=True)
        return lambda: work.wait().tolist()

    def spread(self, text: str) -> Later[str]:
        """Starts to send the deciding rank's text to all."""
        return _spread(self._comm, text)

    def shared(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the deciding rank's state, of tensors, strings and numbers, on all ranks. A
        collective that waits."""
        file = io.BytesIO()
        torch.save(state, file)
        packed = io.BytesIO(self._shared(file.getvalue()))
        return torch.load(packed, weights_only=True)  # type: ignore[no-any-return]

    def _shared(self, packed: bytes) -> bytes:
        return _from_first(self._comm, packed)

    def latency_s(self) -> float:
        """Measures the seconds of the smallest all-reduce. A collective that waits."""
        return min(
            timeit.repeat(
                lambda: self._comm.allreduce(np.zeros(1, np.float32)), repeat=_PROBES, number=1
            )
        )

    def cpu_s(self) -> float:
        """Returns the processor time of this process's engine so far, in seconds."""
        return self._comm.stats()["engine_cpu_s"]


class GridExchange(CommExchange):
    """Exchanges among the ranks of place 0 of each host; they pass texts and states to their
    rows."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid.column)
        self._row = grid.row
        self._speaks = grid.place == 0
        self.decides = self.decides and self._speaks

    def gather(self, row: Sequence[float]) -> Later[list[list[float]]]:
        """Starts to gather the rows of the ranks of place 0; other ranks get their own row only."""
        return super().gather(row) if self._speaks else lambda: [list(row)]

    def _shared(self, packed: bytes) -> bytes:
        return _from_first(self._row, super()._shared(packed) if self._speaks else packed)

    def spread(self, text: str) -> Later[str]:
        """Starts to send the deciding rank's text to the ranks of place 0; they pass it to their
        rows when the text is asked for."""
        result = super().spread(text) if self._speaks else lambda: ""
        return lambda: _spread(self._row, result())()


def _spread(comm: Communicator, text: str) -> Later[str]:
    buffer = np.zeros(_TEXT_BYTES, np.uint8)
    if comm.rank == 0:
        encoded = text.encode("ascii")
        buffer[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    # Other ranks send zeros. Frames of an all-reduce name their call; those of a broadcast do not.
    work = comm.allreduce(buffer, "max", async_op=True)

    def result() -> str:
        work.wait()
        return buffer.tobytes().rstrip(b"\0").decode("ascii")

    return result


def _from_first(comm: Communicator, packed: bytes) -> bytes:
    """Returns rank 0's bytes on all ranks."""
    size = comm.allgather(np.array([len(packed)]))[0]  # its frames name the call
    own = packed if comm.rank == 0 else bytes(int(size[0]))
    return bytes(comm.broadcast(np.frombuffer(own, np.uint8).copy()))
