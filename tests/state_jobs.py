"""Every kind of object that has a state, in use on one rank: for tests of what is saved and loaded.

Inputs follow from rank and number of the step, so two jobs that have the same state go on alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from ddp_buckets import gradients_of, reduce
from outer_training import net, train, weights
from tensors import stored
from torch import nn

from ringcomm import Communicator, FeedbackStore
from ringcomm.sparse import SparseExchange
from ringcomm.torch import HookState, OuterStep, sparse

COUNT, THRESHOLD = 5000, 4096
MATRICES = ((48, 31), (16, 100), (64, 64))
SHAPES = ((32, 256), (33, 257), (16, 16, 3, 3), (103, 96), (64,), ())  # blocks full and not
SIZES = (5, 32, 256, 33, 257, 3)


class Job:
    """An object in use on one rank.

    Attributes:
        obj: the object.
        comm: what its gather_state_dict() goes by.
    """

    obj: Any
    comm: Communicator
    known: tuple[Communicator, ...] = ()  # what its methods need

    def state_dict(self) -> Any:
        return stored(self.obj.state_dict(*self.known))

    def gather_state_dict(self) -> Any:
        return stored(self.obj.gather_state_dict(*self.known))

    def load_state_dict(self, state: Any) -> None:
        self.obj.load_state_dict(state, *self.known)

    def run(self, first: int, last: int) -> torch.Tensor:
        """Makes steps, whose inputs follow from rank and number. What they came to."""
        raise NotImplementedError

    def beside(self) -> Any:
        """What a checkpoint has beside the object's state."""
        return None

    def load_beside(self, kept: Any) -> None:
        """Takes it."""

    def close(self) -> None:
        """Ends it."""


def values(rank: int, step: int, count: int) -> Any:
    return np.random.default_rng([step, rank]).standard_normal(count).astype(np.float32)


class Feedback(Job):
    """An ErrorFeedback, or one of a store."""

    def __init__(self, comm: Communicator, obj: Any, count: int = COUNT) -> None:
        self.comm, self.obj, self.known, self._count = comm, obj, (comm,), count

    def run(self, first: int, last: int) -> torch.Tensor:
        one = self.obj["w"] if isinstance(self.obj, FeedbackStore) else self.obj
        out = []
        for step in range(first, last):
            x = values(self.comm.rank, step, self._count)
            self.comm.allreduce(x, "avg", compression="int4", feedback=one)
            out.append(torch.from_numpy(x))
        return torch.stack(out)


class Exchange(Job):
    """A SparseExchange."""

    def __init__(self, comm: Communicator, way: Any, count: int = COUNT) -> None:
        self.comm, self._count = comm, count
        self.obj = SparseExchange(comm, count, density=0.1, exchange=way)

    def run(self, first: int, last: int) -> torch.Tensor:
        steps = range(first, last)
        given = [values(self.comm.rank, step, self._count) for step in steps]
        return torch.stack([torch.from_numpy(self.obj.submit(x).wait().scatter()) for x in given])


class Shaped(nn.Module):
    """Parameters of the SHAPES."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for number, shape in enumerate(SHAPES):
            weight = nn.Parameter(torch.randn(shape, generator=generator))
            self.register_parameter(f"weight{number}", weight)


class Hooked(Job):
    """A HookState, given buckets of a model; None: one of the SHAPES."""

    def __init__(
        self,
        comm: Communicator,
        codec: Any,
        model: nn.Module | None = None,
        threshold: int = THRESHOLD,
        **settings: Any,
    ) -> None:
        self.comm, self._model = comm, Shaped() if model is None else model
        self.obj = HookState(codec, comm, model=self._model, threshold=threshold, **settings)

    def run(self, first: int, last: int) -> torch.Tensor:
        out = []
        for step in range(first, last):
            gradients = gradients_of(self._model, self.comm.rank, step)
            got = reduce(self.obj, self._model, gradients, 2)
            out += [part.reshape(-1) for part in got.values()]
        return torch.cat(out).clone()


class Trained(Job):
    """An optimizer that exchanges, with the parameters that it trains."""

    def __init__(
        self,
        comm: Communicator,
        kind: Any,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        **settings: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self._rank = comm.rank
        self.parameters = [
            nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes
        ]
        self.obj = kind(self.parameters, comm=comm, **settings)
        self.comm = self.obj.comm

    def run(self, first: int, last: int) -> torch.Tensor:
        for step in range(first, last):
            for number, parameter in enumerate(self.parameters):
                generator = torch.Generator().manual_seed(1000 * step + 10 * self._rank + number)
                gradient = torch.randn(parameter.shape, generator=generator)
                parameter.grad = gradient + (number + 1) * 0.1
            self.obj.step()
        return torch.cat([p.detach().reshape(-1) for p in self.parameters]).clone()

    def beside(self) -> Any:
        return [p.detach().clone() for p in self.parameters]

    def load_beside(self, kept: Any) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters, kept, strict=True):
                parameter.copy_(value)

    def close(self) -> None:
        if isinstance(self.obj, sparse.SparseOptimizer):
            self.obj.close()


class Apart(Job):
    """An OuterStep, over AdamW."""

    def __init__(self, comm: Communicator, sizes: tuple[int, ...] = SIZES, **settings: Any) -> None:
        self.comm, self._model = comm, net(sizes=sizes)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), 0.01)
        self.obj = OuterStep(self._model, self._optimizer, comm=comm, **settings)
        self._is_attached = False
        self._meets = isinstance(settings["every"], str)  # else rounds are where each rank has them

    def run(self, first: int, last: int) -> torch.Tensor:
        if not self._is_attached:
            self.obj.attach()
            self.comm, self._is_attached = self.obj._wires_comm, True
        train(self._model, self._optimizer, self.comm.rank, range(first, last))
        if self._meets:
            self.obj.flush()
        return weights(self._model)

    def beside(self) -> Any:
        return [self._model.state_dict(), self._optimizer.state_dict()]

    def load_beside(self, kept: Any) -> None:
        self._model.load_state_dict(kept[0])
        self._optimizer.load_state_dict(kept[1])

    def close(self) -> None:
        self.obj.detach()
