"""All-reduces of GPU tensors by codecs of blocks, which the GPU packs and unpacks, over a driver that
is none (tests/cuda): the bits of host tensors, whoever packs, and what crosses the bus.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensors
from gpu import Gpu
from ranks import run_ranks

from ringcomm import Communicator

CODECS = ["int8", "int4", "onebit", "fp8"]
KERNELS = 12  # each is launched once when it is loaded


def bits(array: np.ndarray[Any, Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def launches(gpu: Gpu, world: int, body: Any) -> int:
    """Kernels launched in a run of all ranks, by their calls alone."""
    before = gpu.calls("cuLaunchKernel")
    run_ranks(world, body)
    return gpu.calls("cuLaunchKernel") - before - KERNELS * world


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("compression", CODECS)
def test_what_the_gpu_packs_has_the_bits_of_what_the_cpu_packs(
    gpu: Gpu, world: int, compression: str
) -> None:
    counts = (1, 255, 256, 3001, 70_000)

    def body(comm: Communicator) -> None:
        for op in ("sum", "avg"):
            for count in counts:
                values = tensors.elements("f32", count, comm.rank)
                array, host = gpu.array(values, gpu.stream()), values.copy()
                out = gpu.empty((count,), "f4", array.stream)
                comm.allreduce(host, op, compression=compression, feedback=False)
                comm.allreduce(array, op, compression=compression, feedback=False, out=out)
                assert bits(out.read()) == bits(host), (op, count)
                assert bits(array.read()) == bits(values)
                comm.allreduce(array, op, compression=compression, feedback=False)
                assert bits(array.read()) == bits(host), (op, count)

    made = launches(gpu, world, body)
    if world == 1:
        assert made == 0
    elif world == 2:
        assert made == 2 * 2 * len(counts) * 2  # the sum is the CPU's
    else:
        assert made > 2 * 2 * len(counts) * world


@pytest.mark.parametrize("world", [2, 3])
def test_a_value_that_is_not_finite_makes_all_of_it_nan(gpu: Gpu, world: int) -> None:
    def body(comm: Communicator) -> None:
        for guilty in range(world):
            values = tensors.elements("f32", 5000, comm.rank)
            if comm.rank == guilty:
                values[4999 * guilty // world] = np.inf
            array, host = gpu.array(values, gpu.stream()), values.copy()
            comm.allreduce(host, compression="int8")
            comm.allreduce(array, compression="int8")
            assert bits(array.read()) == bits(host)

    run_ranks(world, body)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_pack_and_ranks_that_do_not_go_together(gpu: Gpu, world: int) -> None:
    """One has a GPU without room for what is packed, or for what is to be unpacked; one packs, one
    has a host tensor."""
    values = [tensors.elements("f32", 9000, rank) for rank in range(world)]
    fails = {"k": 0}

    def body(comm: Communicator) -> None:
        expected = values[comm.rank].copy()
        comm.allreduce(expected, "avg", compression="int8")
        array = gpu.array(values[comm.rank], gpu.stream())
        comm.barrier()
        if comm.rank == 0:
            gpu.fail("cuMemAlloc_v2", fails["k"], 2)
        comm.barrier()
        for _ in range(2):
            tensor = values[2].copy() if comm.rank == 2 else array
            comm.allreduce(tensor, "avg", compression="int8")
            got = tensor if comm.rank == 2 else array.read()
            assert bits(got) == bits(expected)
            array.write(values[comm.rank])

    for fails["k"] in (1, 2, 3, 4):
        gpu.reset()
        run_ranks(world, body)


def test_a_tensor_between_elements_is_left_to_the_cpu(gpu: Gpu) -> None:
    def body(comm: Communicator) -> None:
        values = tensors.elements("f32", 3000, comm.rank)
        whole = gpu.array(np.zeros(12_004, np.uint8), gpu.stream())
        part = gpu.array(values, whole.stream)
        part.address = whole.address + 2
        part.write(values)
        comm.allreduce(part, compression="int8")
        comm.allreduce(values, compression="int8")
        assert bits(part.read()) == bits(values)

    assert launches(gpu, 2, body) == 0
