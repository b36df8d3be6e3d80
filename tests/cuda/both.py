"""What tests of GPU tensors by codecs share: a tensor on a GPU and the same on the host, which must
stay alike bit for bit, residuals included; and how many kernels a run of all ranks launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensors
from gpu import KERNELS, Gpu
from ranks import run_ranks
from tensors import bits

from ringcomm import Communicator, ErrorFeedback


def launches(gpu: Gpu, world: int, body: Callable[[Communicator], Any]) -> int:
    """Kernels launched in a run of all ranks, with one pipe each, by their calls alone."""
    before = gpu.calls("cuLaunchKernel")
    run_ranks(world, body)
    return gpu.calls("cuLaunchKernel") - before - KERNELS * world


class Both:
    """A tensor of a GPU and the same on the host, each with its feedback, which must stay alike."""

    def __init__(self, gpu: Gpu, count: int, comm: Communicator) -> None:
        self.count, self.comm, self.step = count, comm, 0
        self.array: Any = gpu.empty((count,), "f4", gpu.stream())
        self.feedbacks = ErrorFeedback(), ErrorFeedback()

    def reduce(
        self, compression: str, op: str = "avg", values: np.ndarray[Any, Any] | None = None
    ) -> None:
        if values is None:
            values = tensors.elements("f32", self.count, self.comm.rank, self.step)
        self.step += 1
        host = values.copy()
        self.array.write(values)
        for tensor, feedback in zip((self.array, host), self.feedbacks, strict=True):
            self.comm.allreduce(tensor, op, compression=compression, feedback=feedback)
        assert bits(self.array.read()) == bits(host), self.step

    def each(self, do: Callable[[Any], Any]) -> None:
        here, there = map(do, self.feedbacks)
        assert repr(here) == repr(there)

    def check(self) -> None:
        here, there = self.feedbacks
        assert bits(here.worker) == bits(there.worker), self.step
        assert bits(here.owner) == bits(there.owner), self.step
        assert here.owner_start == there.owner_start
