"""What a call costs in Python alone: a world of one, where nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

ringcomm = pytest.importorskip("ringcomm")


@pytest.fixture
def comm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    made = ringcomm.Communicator.create(0, 1)
    yield made
    made.close()


def test_allreduce(comm: Any, measure: Callable[..., Any]) -> None:
    tensor = np.ones(1024, np.float32)
    measure("allreduce of numpy, world of 1", lambda: comm.allreduce(tensor))


def test_allreduce_async(comm: Any, measure: Callable[..., Any]) -> None:
    tensor = np.ones(1024, np.float32)
    measure("allreduce(async_op=True).wait(), world of 1",
            lambda: comm.allreduce(tensor, async_op=True).wait())


def test_allreduce_torch(comm: Any, measure: Callable[..., Any]) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.ones(1024)
    measure("allreduce of torch, world of 1", lambda: comm.allreduce(tensor))


def test_allreduce_many(comm: Any, measure: Callable[..., Any]) -> None:
    tensors = [np.ones(64, np.float32) for _ in range(100)]
    measure("allreduce_many, each of 100 tensors, world of 1",
            lambda: comm.allreduce_many(tensors), 100)


def test_barrier(comm: Any, measure: Callable[..., Any]) -> None:
    measure("barrier, world of 1", comm.barrier)
