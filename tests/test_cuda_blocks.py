"""All-reduces of GPU tensors by codecs of blocks, which the GPU packs and unpacks, over a driver
that is none (tests/cuda): the bits of host tensors, whoever packs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensors
from gpu import KERNELS, Gpu
from ranks import run_ranks
from tensors import bits

from ringcomm import Communicator, ErrorFeedback

CODECS = ["int8", "int4", "onebit", "fp8"]


def launches(gpu: Gpu, world: int, body: Callable[[Communicator], Any]) -> int:
    """Kernels launched in a run of all ranks, with one pipe each, by their calls alone."""
    before = gpu.calls("cuLaunchKernel")
    run_ranks(world, body)
    return gpu.calls("cuLaunchKernel") - before - KERNELS * world


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("compression", CODECS)
def test_what_the_gpu_packs_has_the_bits_of_what_the_cpu_packs(
    gpu: Gpu, world: int, compression: str
) -> None:
    counts = (1, 256, 3001, 20_000)

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
        assert made == 2 * 2 * len(counts) * 2 * 2  # one packs, one unpacks and adds
    else:
        assert made > 2 * 2 * len(counts) * world


def test_what_the_gpu_has_no_kernel_for_is_encoded_on_the_cpu(gpu: Gpu) -> None:
    def body(comm: Communicator) -> None:
        values = tensors.elements("f32", 3001, comm.rank)
        array, host = gpu.array(values, gpu.stream()), values.copy()
        comm.allreduce(host, compression="int2", feedback=False)
        comm.allreduce(array, compression="int2", feedback=False)
        assert bits(array.read()) == bits(host)

    assert launches(gpu, 3, body) == 0


@pytest.mark.parametrize("compression", CODECS)
def test_one_of_two_has_its_tensor_on_the_host(gpu: Gpu, compression: str) -> None:
    """The one adds on its GPU, the other on its CPU."""

    def body(comm: Communicator) -> None:
        array = gpu.empty((5001,), "f4", gpu.stream())
        for guest in range(2):
            host = tensors.elements("f32", 5001, comm.rank, guest)
            expected = host.copy()
            comm.allreduce(expected, "avg", compression=compression, feedback=False)
            array.write(host)
            tensor = host if comm.rank == guest else array
            comm.allreduce(tensor, "avg", compression=compression, feedback=False)
            assert bits(host if tensor is host else array.read()) == bits(expected)

    run_ranks(2, body)


def test_a_sum_that_is_too_large_is_seen_by_both(gpu: Gpu) -> None:
    """Of numbers that are finite, also as they are encoded."""

    def body(comm: Communicator) -> None:
        array = gpu.empty((5000,), "f4", gpu.stream())
        for guest in (None, 0, 1):  # who has its tensor on the host
            host = np.full(5000, 0.3, np.float32)
            host[4000] = 3e38
            array.write(host)
            tensor = host if guest == comm.rank else array
            comm.allreduce(tensor, "avg", compression="int8", feedback=False)
            result = host if tensor is host else array.read()
            assert (result.view(np.uint32) == 0x7FC00000).all()

    run_ranks(2, body)


@pytest.mark.parametrize(("world", "count"), [(2, 600_000), (3, 500_000)])
def test_large_tensors_have_several_segments(gpu: Gpu, world: int, count: int) -> None:
    """The last rank has its on the host."""

    def body(comm: Communicator) -> None:
        values = tensors.elements("f32", count, comm.rank)
        if comm.rank == world - 1:
            comm.allreduce(values, "avg", compression="int8", feedback=False)
            return
        array = gpu.array(values, gpu.stream())
        comm.allreduce(array, "avg", compression="int8", feedback=False)
        got[comm.rank] = array.read()

    got: dict[int, Any] = {}
    expected: dict[int, Any] = {}

    def on_hosts(comm: Communicator) -> None:
        expected[comm.rank] = tensors.elements("f32", count, comm.rank)
        comm.allreduce(expected[comm.rank], "avg", compression="int8", feedback=False)

    made = launches(gpu, world, body) + KERNELS  # the last rank has no pipe
    run_ranks(world, on_hosts)
    assert len(got) == world - 1
    for rank, result in got.items():
        assert bits(result) == bits(expected[rank])
    assert made == (2 if world == 2 else world - 1 + world) * (world - 1)


@pytest.mark.parametrize("world", [2, 3])
def test_tensors_that_are_joined(gpu: Gpu, world: int) -> None:
    sizes = [7, 0, 1000, 30_000, 3, 129]

    def body(comm: Communicator) -> None:
        for compression in CODECS:
            for poison in (0.0, np.inf):
                hosts = [tensors.elements("f32", n, comm.rank, i) for i, n in enumerate(sizes)]
                hosts[2][77] += poison
                stream = gpu.stream()
                arrays = [gpu.array(host, stream) for host in hosts]
                comm.allreduce_many(arrays, "avg", compression=compression, feedback=False)
                comm.allreduce_many(hosts, "avg", compression=compression, feedback=False)
                for array, host in zip(arrays, hosts, strict=True):
                    assert bits(array.read()) == bits(host), compression

    assert launches(gpu, world, body) > 0


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


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("compression", CODECS)
def test_with_feedback_the_cpu_packs(gpu: Gpu, world: int, compression: str) -> None:
    """Residuals are those of host tensors, and may go from the ones to the others."""

    def body(comm: Communicator) -> None:
        for count in (1, 9001):
            array = gpu.empty((count,), "f4", gpu.stream())
            on_gpu, at_home, mixed = ErrorFeedback(), ErrorFeedback(), ErrorFeedback()
            for step in range(4):
                host = tensors.elements("f32", count, comm.rank, step)
                expected = host.copy()
                comm.allreduce(expected, "avg", compression=compression, feedback=at_home)
                array.write(host)
                comm.allreduce(array, "avg", compression=compression, feedback=on_gpu)
                assert bits(array.read()) == bits(expected)
                array.write(host)
                tensor = array if step % 2 else host
                comm.allreduce(tensor, "avg", compression=compression, feedback=mixed)
                assert bits(array.read() if tensor is array else host) == bits(expected), step
            for one in (on_gpu, mixed):
                assert bits(one.worker) == bits(at_home.worker)
                assert bits(one.owner) == bits(at_home.owner)

    assert launches(gpu, world, body) == 0


def test_nothing_but_what_is_packed_crosses_the_bus(gpu: Gpu) -> None:
    """Each step packs what others own, and unpacks it all."""
    steps, world = 5, 4

    def body(comm: Communicator) -> None:
        array = gpu.empty((9001,), "f4", gpu.stream())
        for step in range(steps):
            array.write(tensors.elements("f32", 9001, comm.rank, step))
            comm.allreduce(array, "avg", compression="int4", feedback=False)

    assert launches(gpu, world, body) == steps * world * (world - 1 + world)
    assert gpu.calls("cuMemcpyDtoHAsync_v2") <= steps * world * 3
    assert gpu.calls("cuMemcpyHtoDAsync_v2") == steps * world


def test_two_ranks_copy_once_each_way(gpu: Gpu) -> None:
    """What one has packed; back, both contributions at once, for the kernel that adds them."""
    steps, count = 5, 9001

    def body(comm: Communicator) -> None:
        array = gpu.empty((count,), "f4", gpu.stream())
        for step in range(steps):
            array.write(tensors.elements("f32", count, comm.rank, step))
            comm.allreduce(array, "avg", compression="onebit", feedback=False)

    assert launches(gpu, 2, body) == steps * 2 * 2
    assert gpu.calls("cuMemcpyDtoHAsync_v2") == steps * 2
    assert gpu.calls("cuMemcpyHtoDAsync_v2") == steps * 2
