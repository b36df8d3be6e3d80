"""Pending: the mean of one tensor over all ranks, on its way, and the residuals that it changes.

Invariants: the mean replaces the tensor's values. A collective that fails leaves residuals as they
were; ``undo`` restores those that a successful one has changed.
"""

from __future__ import annotations

import torch

from ...codecs import Codec
from ...communicator import Communicator
from ...core.native import lib
from ...core.work import Work, WorkStats
from ...feedback import ErrorFeedback
from ..tensors import all_finite, memory_of


class Pending:
    """Submits an all-reduce of a tensor, in place. A GPU's tensor takes the device pipeline, if it
    can.

    Args:
        feedback: residuals of the codec; None: none are kept.
        op: "avg", or another op of the core.
        timeout: seconds; None: the communicator's.

    Attributes:
        tensor: this rank's contribution; the mean once the work is over.
        work: the collective.
        changed: the residuals that it changes if it succeeds: those of a codec of few bits. Others
            deliver residuals, which cannot be undone.
    """

    def __init__(
        self,
        comm: Communicator,
        tensor: torch.Tensor,
        codec: Codec,
        feedback: ErrorFeedback | None = None,
        op: str = "avg",
        timeout: float | None = None,
    ) -> None:
        self.tensor = tensor
        self._codec = codec
        self.changed = feedback if codec.quantises else None
        found = memory_of(tensor, writable=True)
        self.work: Work = comm.run_collective(
            lib.RC_ALLREDUCE,
            found,
            found,
            found.count,
            op=op,
            compression=codec.name,
            feedback=False if feedback is None else feedback,
            async_op=True,
            timeout=timeout,
        )

    def wait(self) -> torch.Tensor:
        """Returns the mean. Raises what the collective raises."""
        self.work.wait()
        return self.tensor

    def undo(self) -> None:
        """Restores the residuals of before. Only after the collective has succeeded."""
        if self.changed is not None:
            self.changed.undo()

    @property
    def probe(self) -> torch.Tensor:
        """Elements of the mean that are finite only if all of it is: a codec of few bits makes all
        of a tensor NaN that has a value which is not finite."""
        return self.tensor[:1] if self._codec.quantises else self.tensor

    @property
    def is_finite(self) -> bool:
        """Whether the mean, which must have come, is finite."""
        return all_finite(self.probe)

    @property
    def stats(self) -> list[WorkStats]:
        """Counters of its collective."""
        return [self.work.stats()]
