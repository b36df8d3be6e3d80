"""All-reduce of one tensor, in place.

    Wire       its settings: the codec, the residuals, the op
    Pending    one in flight, and the residuals that it changes

Invariants: the result replaces the tensor's values. A collective that fails leaves residuals as
they were; ``undo`` restores those that a successful one has changed.
"""

from __future__ import annotations

import dataclasses

import torch

from ...codecs import Codec
from ...communicator import Communicator
from ...core.calls import Feedback
from ...core.native import lib
from ...core.work import Work, WorkStats
from ...feedback import ErrorFeedback
from ..tensors import memory_of
from .bucket import all_finite


@dataclasses.dataclass(frozen=True)
class Wire:
    """Way of a tensor to the other ranks and back.

    Attributes:
        codec: the codec.
        feedback: its residuals; None: none are kept, even where the codec needs them.
        op: "avg", or another op of the core.
    """

    codec: Codec
    feedback: ErrorFeedback | None = None
    op: str = "avg"

    @property
    def is_mean(self) -> bool:
        """Whether the result is the sum divided by the number of ranks, those that sent zeros
        included."""
        return self.op == "avg"

    def submit(
        self, comm: Communicator, tensor: torch.Tensor, timeout: float | None = None
    ) -> Pending:
        """Submits an all-reduce of a tensor, in place. A GPU's tensor takes the device pipeline, if
        it can. ``timeout``: seconds; None: the communicator's."""
        return Pending(self, comm, tensor, timeout)


class Pending:
    """All-reduce of one tensor.

    Attributes:
        tensor: this rank's contribution; the mean once the work is over.
        work: the collective.
        changed: the residuals that it changes if it succeeds: those of a codec of few bits. Others
            deliver residuals, which cannot be undone.
    """

    def __init__(
        self, wire: Wire, comm: Communicator, tensor: torch.Tensor, timeout: float | None
    ) -> None:
        self.tensor = tensor
        self._quantises = wire.codec.quantises
        self.changed = wire.feedback if self._quantises else None
        residuals: Feedback = False if wire.feedback is None else wire.feedback
        op, name = wire.op, wire.codec.name
        work = comm.submit_in_place(
            tensor, lib.RC_ALLREDUCE, op, name, feedback=residuals, timeout=timeout
        )
        if work is None:
            found = memory_of(tensor, writable=True)
            work = comm.run_collective(
                lib.RC_ALLREDUCE,
                found,
                found,
                found.count,
                op=op,
                compression=name,
                feedback=residuals,
                async_op=True,
                timeout=timeout,
            )
        self.work: Work = work

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
        return self.tensor[:1] if self._quantises else self.tensor

    @property
    def is_finite(self) -> bool:
        """Whether the mean, which must have come, is finite."""
        return all_finite(self.probe)

    @property
    def stats(self) -> list[WorkStats]:
        """Counters of its collective."""
        return [self.work.stats()]
