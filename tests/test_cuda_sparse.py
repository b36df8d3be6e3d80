"""All-reduces of GPU tensors by topk, which the GPU packs and unpacks, over a driver that is none
(tests/cuda): the bits of host tensors, whoever packs, and residuals on the GPU.

Where a sample lies depends on a call's number; so each side has a communicator of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensors
from both import Both, launches
from gpu import KERNELS, Gpu
from ranks import run_ranks
from tensors import bits

from ringcomm import Communicator, Config, ErrorFeedback

Values = np.ndarray[Any, Any]
BY_LINKS = Config(timeout=30.0, shared_memory=False)  # of what is split off, too


class Apart(Both):
    """Each side with a communicator of its own."""

    def __init__(self, comm: Communicator, gpu: Gpu, count: int, feedback: bool = True) -> None:
        super().__init__(gpu, count, (comm.split(0), comm.split(0)), feedback)

    def close(self) -> None:
        for comm in self.comms:
            comm.close()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_what_the_gpu_packs_has_the_bits_of_what_the_cpu_packs(gpu: Gpu, world: int) -> None:
    """One of a hundred and one of ten, whose samples are not the whole; of all, and few tensors."""
    cases = [(1, "topk:1"), (300, "topk:0.1"), (9001, "topk:0.1"), (30_000, "topk"),
             (7000, "topk:0.001")]  # fmt: skip

    def body(comm: Communicator) -> None:
        for count, compression in cases:
            both = Apart(comm, gpu, count)
            for _ in range(3):
                both.reduce(compression)
            both.check()
            both.reduce(compression)
            both.check()
            both.close()

    made = launches(gpu, world, body, config=BY_LINKS)
    loaded = KERNELS * world * (len(cases) - 1)  # of more pipes than one each
    assert (made > loaded) == (world > 1)


def test_segments_of_many_lengths(gpu: Gpu) -> None:
    """All large elements in one segment, up to its limit, or of one size; and none at all."""
    count = 70_000

    def body(comm: Communicator) -> None:
        both = Apart(comm, gpu, count, feedback=False)
        values = tensors.elements("f32", count, comm.rank)
        values[: count // 2] *= np.float32(1e-6)
        values[count // 2 + 5000 :] *= np.float32(1e-6)
        both.reduce("topk:0.05", "sum", values)
        both.reduce("topk:0.05", "sum", np.where(values > 0, np.float32(2), np.float32(-2)))
        both.reduce("topk:0.05", "sum", np.zeros(count, np.float32))
        both.close()

    run_ranks(2, body, config=BY_LINKS)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_pack_and_ranks_that_do_not_go_together(gpu: Gpu, world: int) -> None:
    """One has a GPU without room for what is packed, is to be unpacked, or is left; one packs, one
    has a host tensor."""
    fails = {"k": 0}

    def body(comm: Communicator) -> None:
        both = Apart(comm, gpu, 6000)
        comm.barrier()
        if comm.rank == 0:
            gpu.fail("cuMemAlloc_v2", fails["k"], 2)
        comm.barrier()
        if comm.rank == 2:
            both.array = _OnHost(np.zeros(both.count, np.float32))
        for _ in range(3):
            both.reduce("topk:0.05")
        both.check()
        both.close()

    for fails["k"] in range(1, 6):
        gpu.reset()
        run_ranks(world, body, config=BY_LINKS)


class _OnHost(np.ndarray[Any, Any]):
    """A host tensor, as if it were one of a GPU."""

    def __new__(cls, values: Values) -> _OnHost:
        return values.view(cls)

    def write(self, values: Values) -> None:
        self[:] = values

    def read(self) -> Values:
        return np.array(self)


def test_tensors_that_are_joined(gpu: Gpu) -> None:
    sizes = [7, 0, 1000, 6000, 3, 129]

    def body(comm: Communicator) -> None:
        here, there = comm.split(0), comm.split(0)
        for poison in (0.0, np.inf):
            hosts = [tensors.elements("f32", n, comm.rank, i) for i, n in enumerate(sizes)]
            hosts[2][77] += poison
            stream = gpu.stream()
            arrays = [gpu.array(host, stream) for host in hosts]
            here.allreduce_many(arrays, "avg", compression="topk:0.1", feedback=False)
            there.allreduce_many(hosts, "avg", compression="topk:0.1", feedback=False)
            for array, host in zip(arrays, hosts, strict=True):
                assert bits(array.read()) == bits(host)
        here.close()
        there.close()

    run_ranks(3, body, config=BY_LINKS)


def test_whatever_is_done_with_residuals_they_are_the_same(gpu: Gpu) -> None:
    def body(comm: Communicator) -> None:
        both = Apart(comm, gpu, 9000)
        for compression in ("topk:0.1", "int4", "topk:0.1"):
            both.reduce(compression)
        both.each(lambda one: one.rescale(0.5))
        both.reduce("topk")
        both.each(lambda one: one.undo())
        both.reduce("topk")
        both.check()
        values = np.full(9000, np.nan if comm.rank == 1 else 1, np.float32)
        both.reduce("topk", values=values)
        both.check()
        states = [
            one.gather_state_dict(comm)
            for one, comm in zip(both.feedbacks, both.comms, strict=True)
        ]
        both.reduce("topk:0.1")
        for one, state, where in zip(both.feedbacks, states, both.comms, strict=True):
            one.load_state_dict(state, where)
        for _ in range(3):
            both.reduce("topk:0.1")
        both.reduce("bf16")  # all that is left goes
        both.check()
        both.close()

    run_ranks(3, body, config=BY_LINKS)


def test_a_collective_of_the_host_between_takes_its_number(gpu: Gpu) -> None:
    """Flights of calls that nobody waits for, and host tensors' calls among them."""
    count = 9000

    def body(comm: Communicator) -> None:
        results = []
        for on_gpu in (True, False):
            where, stream, works, tensors_ = comm.split(0), gpu.stream(), [], []
            for i in range(6):
                values = tensors.elements("f32", count, comm.rank, i)
                tensor: Any = gpu.array(values, stream) if on_gpu and i % 3 else values
                tensors_.append(tensor)
                works.append(where.allreduce(tensor, "sum", compression="topk:0.1", feedback=False,
                                             async_op=True))  # fmt: skip
                if i == 3:
                    where.barrier()
            for work in works:
                work.wait()
            results.append([bits(t if isinstance(t, np.ndarray) else t.read()) for t in tensors_])
            where.close()
        assert results[0] == results[1]

    run_ranks(3, body, config=BY_LINKS)


def test_nothing_but_lengths_and_payloads_crosses_the_bus(gpu: Gpu) -> None:
    """But for a rank's own part, which it contributes as it is."""
    steps, world = 5, 4

    def body(comm: Communicator) -> None:
        array, feedback = gpu.empty((9001,), "f4", gpu.stream()), ErrorFeedback()
        for step in range(steps):
            array.write(tensors.elements("f32", 9001, comm.rank, step))
            comm.allreduce(array, "avg", compression="topk:0.1", feedback=feedback)

    calls = steps * world
    assert launches(gpu, world, body, config=BY_LINKS) == calls * 4
    at_the_end = 2 * world  # residuals come home
    assert gpu.calls("cuMemcpyDtoHAsync_v2") <= calls * 2 + at_the_end
    assert gpu.calls("cuMemcpyHtoDAsync_v2") == calls
    assert gpu.calls("cuMemcpy2DAsync_v2") <= calls * 3
