"""What a call costs: in Python alone, in a world of one, where nothing is sent; and between two
ranks of this host, many small tensors one by one and together."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

ringcomm = pytest.importorskip("ringcomm")


SMALL, MANY = 64, 100

OTHER_RANK = """
import sys, numpy, ringcomm
address, many, count = sys.argv[1], sys.argv[2] == "many", int(sys.argv[3])
comm = ringcomm.Communicator.create(1, 2, init_method=address)
tensors = [numpy.ones(64, numpy.float32) for _ in range(count)]
try:
    while True:
        if many:
            comm.allreduce_many(tensors)
        else:
            for tensor in tensors:
                comm.allreduce(tensor)
except ringcomm.RingcommError:
    pass  # rank 0 has left
"""


@pytest.fixture
def comm() -> Iterator[Any]:
    made = ringcomm.Communicator.create(0, 1)
    yield made
    made.close()


def test_allreduce(comm: Any, measure: Callable[..., Any]) -> None:
    tensor = np.ones(1024, np.float32)
    measure("allreduce of numpy, world of 1", lambda: comm.allreduce(tensor))


def test_allreduce_async(comm: Any, measure: Callable[..., Any]) -> None:
    tensor = np.ones(1024, np.float32)
    measure(
        "allreduce(async_op=True).wait(), world of 1",
        lambda: comm.allreduce(tensor, async_op=True).wait(),
    )


def test_allreduce_torch(comm: Any, measure: Callable[..., Any]) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.ones(1024)
    measure("allreduce of torch, world of 1", lambda: comm.allreduce(tensor))


def test_part_of_a_bucket(comm: Any, measure: Callable[..., Any]) -> None:
    torch = pytest.importorskip("torch")
    pending = pytest.importorskip("ringcomm.torch.sync.pending")
    tensor, wire = torch.ones(1024), pending.Wire(ringcomm.codecs.parse("int8"))
    measure("part of a DDP bucket at int8, world of 1", lambda: wire.submit(comm, tensor).wait())


def test_allreduce_many(comm: Any, measure: Callable[..., Any]) -> None:
    tensors = [np.ones(SMALL, np.float32) for _ in range(MANY)]
    measure(
        f"allreduce_many, each of {MANY} tensors, world of 1",
        lambda: comm.allreduce_many(tensors),
        MANY,
    )


def test_barrier(comm: Any, measure: Callable[..., Any]) -> None:
    measure("barrier, world of 1", comm.barrier)


@contextlib.contextmanager
def pair(how: str, count: int) -> Iterator[Any]:
    """Rank 0 of two; rank 1 is a process that makes the same calls until this one leaves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    other = subprocess.Popen([sys.executable, "-c", OTHER_RANK, address, how, str(count)])
    try:
        made = ringcomm.Communicator.create(0, 2, init_method=address)
        try:
            yield made
        finally:
            made.close()
        other.wait(60)
    finally:
        other.kill()
        other.wait()


def test_one_by_one(measure: Callable[..., Any]) -> None:
    tensors = [np.ones(SMALL, np.float32) for _ in range(MANY)]
    with pair("one by one", MANY) as comm:
        measure(
            f"allreduce, each of {MANY} tensors of 256 B, 2 ranks",
            lambda: [comm.allreduce(tensor) for tensor in tensors],
            MANY,
        )


def test_together(measure: Callable[..., Any]) -> None:
    tensors = [np.ones(SMALL, np.float32) for _ in range(MANY)]
    with pair("many", MANY) as comm:
        measure(
            f"allreduce_many, each of {MANY} tensors of 256 B, 2 ranks",
            lambda: comm.allreduce_many(tensors),
            MANY,
        )
