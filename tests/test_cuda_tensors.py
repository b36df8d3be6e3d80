"""GPU tensors in every collective, over a driver that is none (tests/cuda): the bits that host
tensors give, in the order of streams, and clear errors for what cannot work.

The fake does all as late as streams and events allow, so what is not waited for has not happened.
"""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensors
from gpu import KERNELS, LEGACY, PER_THREAD, Array, Gpu
from patience import PATIENCE
from ranks import run_ranks
from reference import NUMPY

import ringcomm
from ringcomm import Communicator, ConfigError, ErrorFeedback, TensorError
from ringcomm.core import pipe


def on_gpu(gpu: Gpu, values: np.ndarray[Any, Any], dtype: str, stream: int | None = None) -> Array:
    array = gpu.array(values, gpu.stream() if stream is None else stream)
    array.dtype = "bfloat16" if dtype == "bf16" else values.dtype
    return array


def like(gpu: Gpu, other: Array, shape: tuple[int, ...]) -> Array:
    made = gpu.empty(shape, other.numpy_dtype, other.stream)
    made.dtype = other.dtype
    return made


def bits(array: np.ndarray[Any, Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


# ---- the bits of host tensors ----


def both(comm: Communicator, gpu: Gpu, dtype: str, count: int, call: Callable[..., Any]) -> None:
    """call(comm, tensor) in place, of a GPU tensor and of a host one: the same bits."""
    values = tensors.elements(dtype, count, comm.rank)
    array, host = on_gpu(gpu, values, dtype), values.copy()
    assert call(comm, array) is array
    call(comm, tensors.tensor(host, dtype))
    assert bits(array.read()) == bits(host)


OF_NUMPY = [name for name in NUMPY if name != "bf16"]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    "dtypes",
    [
        pytest.param(OF_NUMPY, id="native"),
        pytest.param(["bf16"], id="bf16", marks=pytest.mark.torch),
    ],
)
def test_allreduce_has_the_bits_of_host_tensors(gpu: Gpu, world: int, dtypes: list[str]) -> None:
    def body(comm: Communicator) -> None:
        for dtype in dtypes:
            for op in ("sum", "avg", "min", "max", "prod"):
                for count in (1, 1003):
                    both(comm, gpu, dtype, count, lambda c, x, op=op: c.allreduce(x, op))

    run_ranks(world, body)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=pytest.mark.torch), "i64"])
def test_every_collective(gpu: Gpu, world: int, dtype: str) -> None:
    def body(comm: Communicator) -> None:
        n, rank = comm.world_size, comm.rank
        values = tensors.elements(dtype, 6 * n, rank).reshape(n, 6)
        array, host = on_gpu(gpu, values, dtype), tensors.tensor(values.copy(), dtype)

        def compare(ours: Any, theirs: Any) -> None:
            if theirs is None:
                assert ours is None
            else:
                theirs = theirs.view(tensors_int16()).numpy() if dtype == "bf16" else theirs
                assert bits(ours.read()) == bits(theirs)

        def out(*shape: int) -> Array:
            return like(gpu, array, shape)

        compare(comm.allgather(array, out=out(n, n, 6)), comm.allgather(host))
        compare(comm.reduce_scatter(array, out=out(1, 6)), comm.reduce_scatter(host))
        compare(comm.alltoall(array, out=out(n, 6)), comm.alltoall(host))
        for root in range(n):
            here = rank == root
            compare(
                comm.gather(array, root, out=out(n, n, 6) if here else None),
                comm.gather(host, root),
            )
            compare(comm.scatter(array, root, out=out(6)), comm.scatter(host, root))
            ours, theirs = on_gpu(gpu, values, dtype), tensors.tensor(values.copy(), dtype)
            compare(comm.reduce(ours, root), comm.reduce(theirs, root))
            compare(comm.broadcast(ours, root), comm.broadcast(theirs, root))
        if n > 1:
            received = out(n, 6)
            work = comm.recv(received, (rank - 1) % n, async_op=True)
            comm.send(array, (rank + 1) % n)
            work.wait()
            sent = tensors.elements(dtype, 6 * n, (rank - 1) % n)
            assert bits(received.read()) == bits(sent)

    run_ranks(world, body)


def tensors_int16() -> Any:
    import torch

    return torch.int16


def test_many_at_once_are_packed_as_host_tensors_are(gpu: Gpu) -> None:
    sizes = [7, 0, 1000, 70_000, 3, 129]

    def body(comm: Communicator) -> None:
        for compression in (None, "int8"):
            hosts = [tensors.elements("f32", size, comm.rank, i) for i, size in enumerate(sizes)]
            stream = gpu.stream()
            arrays = [gpu.array(host, stream) for host in hosts]
            assert comm.allreduce_many(arrays, compression=compression) == arrays
            comm.allreduce_many(hosts, compression=compression)
            for array, host in zip(arrays, hosts, strict=True):
                assert bits(array.read()) == bits(host)
            with pytest.raises(TensorError, match="one tensor of the call lies on a GPU and"):
                comm.allreduce_many([arrays[0], hosts[1]])

    run_ranks(2, body)


# ---- order ----


@pytest.mark.parametrize("which", ["legacy", "side", "per thread"])
def test_a_call_follows_its_stream_and_is_followed_by_it(gpu: Gpu, which: str) -> None:
    def body(comm: Communicator) -> None:
        stream = {"legacy": LEGACY, "side": gpu.stream(), "per thread": PER_THREAD}[which]
        for _ in range(3):
            array = gpu.array(np.arange(5000, dtype=np.float32), stream)
            array.add(1.0)
            comm.allreduce(array)
            array.add(1.0)
            assert bits(array.read()) == bits(2 * np.arange(1, 5001, dtype=np.float32) + 1)

    run_ranks(2, body)


def test_several_in_flight_keep_their_order_and_their_tensors(gpu: Gpu) -> None:
    def body(comm: Communicator) -> None:
        stream = gpu.stream()
        arrays = [gpu.array(np.full(10_000, i, np.float32), stream) for i in range(12)]
        works = []
        for array in arrays:
            array.add(1.0)
            works.append(comm.allreduce(array, async_op=True))
        assert [work.seq for work in works if work.wait() is not None] == list(range(12))
        for i, array in enumerate(arrays):
            assert bits(array.read()) == bits(np.full(10_000, 2 * (i + 1), np.float32))
        for work in works:
            while not work.done():
                time.sleep(0.001)
            assert work.exception() is None

    run_ranks(2, body)


def test_a_stream_may_be_chosen_for_calls_and_for_waits(gpu: Gpu) -> None:
    def body(comm: Communicator) -> None:
        own, other = gpu.stream(), gpu.stream()
        array = gpu.array(np.ones(100, np.float32), own)
        array.add(1.0, other)
        with ringcomm.cuda.stream(other):
            work = comm.allreduce(array, async_op=True)
        work.wait(stream=types.SimpleNamespace(ptr=own))
        assert bits(array.read(own)) == bits(np.full(100, 4, np.float32))
        array.stream = None  # nothing is left to do to it, and so nothing may be left after it
        comm.allreduce(array)
        assert bits(array.peek()) == bits(np.full(100, 8, np.float32))
        with pytest.raises(ConfigError, match="'x' is no stream"), ringcomm.cuda.stream("x"):
            pass

    run_ranks(2, body)


def test_tensors_of_several_streams_need_one_to_follow(gpu: Gpu) -> None:
    """Else the call would follow that of one of them. What waits lets all go on behind it."""

    def body(comm: Communicator) -> None:
        first, second = gpu.stream(), gpu.stream()
        array, out = gpu.array(np.ones(5000, np.float32), first), gpu.empty((5000,), "f4", second)
        several = r"follow streams 0x.*, 0x.*; let one wait"
        with pytest.raises(TensorError, match=several):
            comm.allreduce(array, out=out)
        with pytest.raises(TensorError, match=several):
            comm.allreduce_many([array, out])
        array.add(1.0, first)
        with ringcomm.cuda.stream(first):
            work = comm.allreduce(array, out=out, async_op=True)
        work.wait()
        for stream in (first, second):
            assert bits(out.read(stream)) == bits(np.full(5000, 4, np.float32))
        out.stream = None
        array.add(1.0, first)
        comm.allreduce(array, out=out)
        assert bits(out.peek()) == bits(np.full(5000, 6, np.float32))

    run_ranks(2, body)


def test_host_tensors_between_gpu_tensors_keep_their_turn(gpu: Gpu) -> None:
    """Else ranks would find that they called different collectives."""

    def body(comm: Communicator) -> None:
        stream = gpu.stream()
        works = []
        for i in range(10):
            array = gpu.array(np.ones(100 + i, np.float32), stream)
            works.append(comm.allreduce(array, async_op=True))
            host = np.ones(7, np.float64)
            if (i + comm.rank) % 2:  # by the short way, and by the long one
                comm.allreduce(host)
            else:
                comm.allreduce(host, timeout=20.0)
            assert host[0] == 2
            comm.barrier()
        for work in works:
            work.wait()
        assert comm.stats()["works"] == 30

    run_ranks(2, body)


def test_a_receive_that_waits_holds_nothing_up(gpu: Gpu) -> None:
    def body(comm: Communicator) -> None:
        stream, other = gpu.stream(), 1 - comm.rank
        late = gpu.array(np.zeros(10, np.float32), stream)
        work = comm.recv(late, other, tag=5, async_op=True)
        array = gpu.array(np.ones(10, np.float32), stream)
        comm.allreduce(array)
        assert not work.done()
        comm.barrier()  # no rank has sent anything so far
        comm.send(array, other, tag=5)
        work.wait()
        assert bits(late.read()) == bits(np.full(10, 2, np.float32))

    run_ranks(2, body)


def test_on_done_is_called_when_the_result_is_there(gpu: Gpu) -> None:
    def body(comm: Communicator) -> None:
        array = gpu.array(np.ones(1000, np.float32), gpu.stream())
        called = threading.Event()
        found: list[Any] = []

        def callback(work: Any) -> None:
            found.extend((work.done(), array.peek()[0]))
            called.set()

        comm.allreduce(array, async_op=True, on_done=callback)
        assert called.wait(PATIENCE)
        assert found == [True, 2.0]
        over = threading.Event()
        work = comm.allreduce(array, async_op=True)
        work.call_back(lambda _: over.set())
        assert over.wait(PATIENCE)

    run_ranks(2, body)


def test_dropped_works_keep_their_tensors_until_they_have_landed(gpu: Gpu) -> None:
    class Owned(Array):
        def __del__(self) -> None:
            self.free()

    def body(comm: Communicator) -> None:
        def owned(*shape: int) -> Owned:
            made = gpu.array(np.ones(shape, np.float32), stream)
            array = Owned(gpu, made.address, made.shape, made.numpy_dtype, made.stream, 0)
            array.add(1.0)
            return array

        here, other, n = comm.rank == 0, 1 - comm.rank, 10_000
        calls: list[Callable[[], Any]] = [
            lambda: comm.allreduce(owned(n), async_op=True),
            lambda: comm.allreduce(owned(n), out=owned(n), async_op=True),
            lambda: comm.allreduce_many([owned(n), owned(7)], async_op=True),
            lambda: comm.broadcast(owned(n), async_op=True),
            lambda: comm.reduce(owned(n), async_op=True),
            lambda: comm.allgather(owned(n), out=owned(2, n), async_op=True),
            lambda: comm.reduce_scatter(owned(2, n), out=owned(1, n), async_op=True),
            lambda: comm.alltoall(owned(2, n), out=owned(2, n), async_op=True),
            lambda: comm.gather(owned(n), out=owned(2, n) if here else None, async_op=True),
            lambda: comm.scatter(owned(2, n) if here else None, out=owned(n), async_op=True),
            lambda: comm.send(owned(n), other, async_op=True),
            lambda: comm.recv(owned(n), other, async_op=True),
        ]
        for _ in range(5):
            for call in calls:
                stream = gpu.stream()
                call()
        comm.barrier()

    run_ranks(2, body)
    assert gpu.leaks("memory") == 0


def test_feedback_is_taken_from_the_call_on(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core refuses what another thread has taken since it was looked at."""
    called = threading.Event()

    def body(comm: Communicator) -> None:
        array, feedback = gpu.array(np.ones(1000, np.float32), gpu.stream()), ErrorFeedback()
        if comm.rank == 1:
            assert called.wait(PATIENCE)
        work = comm.allreduce(array, compression="int4", feedback=feedback, async_op=True)
        if comm.rank == 0:
            with pytest.raises(ConfigError, match=r"in use by allreduce\(f32\[1000\]\)"):
                comm.allreduce(array, compression="int4", feedback=feedback)
            with monkeypatch.context() as patch:
                patch.setattr(ErrorFeedback, "require_idle", lambda _: None)
                for other in (array, np.ones(1000, np.float32)):
                    with pytest.raises(ConfigError, match="in use by a collective in flight"):
                        comm.allreduce(other, compression="int4", feedback=feedback)
            called.set()
        work.wait()
        comm.allreduce(array, compression="int4", feedback=feedback)

    run_ranks(2, body)


# ---- memory ----


def test_memory_is_pinned_once(gpu: Gpu) -> None:
    def body(comm: Communicator) -> None:
        array = gpu.array(np.ones(100_000, np.float32), gpu.stream())
        for _ in range(20):
            comm.allreduce(array)

    run_ranks(2, body)
    assert gpu.calls("cuMemHostRegister_v2") == 2


def test_what_is_larger_than_the_arena(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringcomm.core.pipe.ARENA_BYTES", 8 << 20)

    def body(comm: Communicator) -> None:
        works, stream = [], gpu.stream()
        arrays = [gpu.array(np.ones(n, np.float32), stream) for n in (3 << 20, 1 << 20, 1 << 20)]
        for array in arrays:
            works.append(comm.allreduce(array, async_op=True))
        for work, array in zip(works, arrays, strict=True):
            work.wait()
            assert (array.read() == 2).all()

    run_ranks(2, body)


# ---- packing on the GPU ----


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("compression", ["bf16", "fp16"])
def test_what_the_gpu_packs_has_the_bits_of_what_the_cpu_packs(
    gpu: Gpu, world: int, compression: str
) -> None:
    def body(comm: Communicator) -> None:
        for op in ("sum", "avg", "min", "max", "prod"):
            for count in (1, 257, 9001):
                values = tensors.elements("f32", count, comm.rank)
                values[:100] = tensors.special("f32", len(values[:100]), comm.rank)
                array, host = on_gpu(gpu, values, "f32"), values.copy()
                comm.allreduce(array, op, compression=compression)
                comm.allreduce(host, op, compression=compression)
                assert bits(array.read()) == bits(host), (op, count)

    before = gpu.calls("cuLaunchKernel")
    run_ranks(world, body)
    kernels = gpu.calls("cuLaunchKernel") - before - KERNELS * world
    assert kernels == (2 * 15 * world if world > 1 else 0)


def test_packed_and_unpacked_ranks_go_together(gpu: Gpu) -> None:
    """One packs on its GPU, one has a GPU without room for it, one a host tensor; out of place, in
    place, and as parts of one."""
    values = [tensors.elements("f32", 5000, rank) for rank in range(3)]
    room = {"fails": 0}  # which of the pipes' allocations on a GPU fails

    def body(comm: Communicator) -> None:
        expected = values[comm.rank].copy()
        comm.allreduce(expected, "avg", compression="bf16")
        many = [values[comm.rank][:77].copy(), values[comm.rank][77:1000].copy()]
        comm.allreduce_many(many, "avg", compression="fp16")
        stream = gpu.stream()
        array, out = gpu.array(values[comm.rank], stream), gpu.empty((5000,), "f4", stream)
        parts = [
            gpu.array(values[comm.rank][:77], stream),
            gpu.array(values[comm.rank][77:1000], stream),
        ]
        comm.barrier()
        if comm.rank == 2:
            gpu.fail("cuMemAlloc_v2", room["fails"], 2)
        comm.barrier()
        if comm.rank == 2:
            for _ in range(2):
                comm.allreduce(values[2].copy(), "avg", compression="bf16")
            host = [values[2][:77].copy(), values[2][77:1000].copy()]
            comm.allreduce_many(host, "avg", compression="fp16")
            return
        comm.allreduce(array, "avg", compression="bf16", out=out)
        assert bits(out.read()) == bits(expected)
        assert bits(array.read()) == bits(values[comm.rank])
        comm.allreduce(array, "avg", compression="bf16")
        assert bits(array.read()) == bits(expected)
        comm.allreduce_many(parts, "avg", compression="fp16")
        assert [bits(part.read()) for part in parts] == [bits(part) for part in many]

    for room["fails"] in (1, 2, 3, 4):
        run_ranks(3, body)


def test_a_gpu_that_is_too_old_for_the_kernels_leaves_packing_to_the_cpu(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAKE_CUDA_CAPABILITY", "52")
    monkeypatch.setattr("ringcomm.core.pipe._logged_gpus", set())
    gpu.reset()

    def body(comm: Communicator) -> None:
        both(comm, gpu, "f32", 1000, lambda c, x: c.allreduce(x, compression="bf16"))

    for _ in range(2):
        run_ranks(2, body)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith("the CPU compresses the tensors of GPU 0: ")
    assert gpu.calls("cuLaunchKernel") == 0


def test_machine_code_that_a_gpu_does_not_take_is_replaced_by_ptx(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (ptx,) = pipe._images()
    monkeypatch.setattr(pipe, "_images", lambda: [b"\x50\xed\x55\xba of another GPU", ptx])
    monkeypatch.setattr(pipe, "_logged_gpus", set())

    def body(comm: Communicator) -> None:
        both(comm, gpu, "f32", 1000, lambda c, x: c.allreduce(x, compression="bf16"))

    run_ranks(2, body)
    assert gpu.calls("cuLaunchKernel") > 2 * KERNELS
    assert not caplog.records
