"""GPU tensors in every collective, over a driver that is none (tests/cuda): the bits that host
tensors give, in the order of streams, and clear errors for what cannot work.

The fake does all as late as streams and events allow, so what is not waited for has not happened.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensors
from ranks import ROOT, World, run_processes, run_ranks
from reference import NUMPY

import ringcomm
from ringcomm import (
    AbortedError,
    CommTimeoutError,
    Communicator,
    ConfigError,
    DeviceError,
    ErrorFeedback,
    RingcommError,
    TensorError,
)

sys.path.insert(0, str(Path(__file__).resolve().parent / "cuda"))
import fake
from gpu import LEGACY, PER_THREAD, Array, Gpu

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake.build(tmp_path_factory.mktemp("cuda") / "libfakecuda.so", ["-O1"])


@pytest.fixture
def gpu(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """Two GPUs. What the library makes on them must be gone at the end of the test."""
    monkeypatch.setenv("RINGCOMM_LIBCUDA", str(library))
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    made = Gpu(library)
    yield made
    assert made.misuse() is None
    assert made.leaks("pinned", "events", "modules") == 0
    made.reset()


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


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_allreduce_has_the_bits_of_host_tensors(gpu: Gpu, world: int) -> None:
    def body(comm: Communicator) -> None:
        for dtype in NUMPY:
            for op in ("sum", "avg", "min", "max", "prod"):
                for count in (1, 1003):
                    both(comm, gpu, dtype, count, lambda c, x, op=op: c.allreduce(x, op))

    run_ranks(world, body)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "compression", ["bf16", "fp16", "int8", "fp8", "int4", "onebit", "topk:0.1", "onebit-deepspeed"]
)
def test_compressed_allreduce_has_the_bits_of_host_tensors(
    gpu: Gpu, world: int, compression: str
) -> None:
    op = "avg" if compression == "onebit-deepspeed" else "sum"
    with_feedback = compression not in ("bf16", "fp16")

    def body(comm: Communicator) -> None:
        for dtype in ("f32", "f64"):
            here, there = ErrorFeedback(), ErrorFeedback()
            for step in range(2):
                values = tensors.elements(dtype, 3001, comm.rank, step)
                array, host = on_gpu(gpu, values, dtype), values.copy()
                for tensor, feedback in ((array, here), (host, there)):
                    comm.allreduce(tensor, op, compression=compression,
                                   feedback=feedback if with_feedback else None)  # fmt: skip
                assert bits(array.read()) == bits(host)
            if with_feedback:
                assert bits(here.worker) == bits(there.worker)

    run_ranks(world, body)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "i64"])
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
            compare(comm.gather(array, root, out=out(n, n, 6) if here else None),
                    comm.gather(host, root))  # fmt: skip
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
        assert [work.seq for work in works if not work.wait() is None] == list(range(12))
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
        assert called.wait(10.0)
        assert found == [True, 2.0]
        over = threading.Event()
        work = comm.allreduce(array, async_op=True)
        work.call_back(lambda _: over.set())
        assert over.wait(10.0)

    run_ranks(2, body)


def test_a_dropped_work_keeps_its_tensor_until_it_has_landed(gpu: Gpu) -> None:
    class Owned(Array):
        def __del__(self) -> None:
            self.free()

    def body(comm: Communicator) -> None:
        for _ in range(5):
            made = gpu.array(np.ones(10_000, np.float32), gpu.stream())
            array = Owned(gpu, made.address, made.shape, made.numpy_dtype, made.stream, 0)
            array.add(1.0)
            comm.allreduce(array, async_op=True)
            del array
        comm.barrier()

    run_ranks(2, body)
    assert gpu.leaks("memory") == 0


# ---- memory ----


def test_memory_is_pinned_once(gpu: Gpu) -> None:
    def body(comm: Communicator) -> None:
        array = gpu.array(np.ones(100_000, np.float32), gpu.stream())
        for _ in range(20):
            comm.allreduce(array)

    run_ranks(2, body)
    assert gpu.calls("cuMemHostRegister_v2") == 2


def test_what_is_larger_than_the_arena(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringcomm.pipe.ARENA_BYTES", 8 << 20)

    def body(comm: Communicator) -> None:
        works, stream = [], gpu.stream()
        arrays = [gpu.array(np.ones(n, np.float32), stream) for n in (3 << 20, 1 << 20, 1 << 20)]
        for array in arrays:
            works.append(comm.allreduce(array, async_op=True))
        for work, array in zip(works, arrays, strict=True):
            work.wait()
            assert (array.read() == 2).all()

    run_ranks(2, body)


# ---- failures ----


#: Those of the fake that can fail.
FUNCTIONS = re.findall(r"X\((cu\w+), (\w*),", (ROOT / "csrc/cuda/driver.h").read_text())


def test_a_failure_of_any_call_ends_the_communicator_on_every_rank(gpu: Gpu) -> None:
    """The k-th call of a run fails, whichever that is: no rank hangs, none goes on alone, and
    nothing is left behind."""
    assert not one_call_fails(gpu, 1 << 30)
    calls = sum(gpu.calls(name + version) for name, version in FUNCTIONS)
    assert calls > 60
    failed = sum(one_call_fails(gpu, k) for k in range(1, calls + 1))
    assert failed > calls // 2  # the others give something back, or come when all is over


def one_call_fails(gpu: Gpu, k: int) -> bool:
    """Two ranks, of which the k-th call together fails; whether that made their collectives fail."""
    gpu.reset()
    stream = gpu.stream()
    arrays = [gpu.array(np.ones(2000, np.float32), stream) for _ in range(4)]
    gpu.fail("*", k)

    def body(comm: Communicator) -> bool:
        try:
            for work in [comm.allreduce(a, async_op=True) for a in arrays[comm.rank :: 2]]:
                work.wait(timeout=20.0)
            comm.barrier(timeout=20.0)
        except RingcommError as error:
            assert not isinstance(error, CommTimeoutError)
            with contextlib.suppress(RingcommError):
                comm.abort(str(error))
            return True
        return False

    with World(2) as world:
        fell = world.run(body)
    assert fell[0] == fell[1], (k, fell)
    assert gpu.leaks("pinned", "events", "modules") == 0
    assert gpu.leaks("streams", "contexts") == 2
    assert gpu.misuse() is None
    return bool(fell[0])


@pytest.mark.parametrize(
    "name", ["cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuEventSynchronize"]
)
def test_an_error_of_cuda_is_named_on_every_rank(gpu: Gpu, name: str) -> None:
    def body(comm: Communicator) -> None:
        array = gpu.array(np.ones(2000, np.float32), gpu.stream())
        comm.allreduce(array)
        array.read()
        comm.barrier()
        if comm.rank == 0:
            gpu.fail(name, 1, 700)
        comm.barrier()
        with pytest.raises((DeviceError, AbortedError), match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            for _ in range(3):
                comm.allreduce(array)
                comm.barrier()

    run_ranks(2, body)


def test_an_op_that_the_core_refuses_or_fails(gpu: Gpu) -> None:
    def body(comm: Communicator) -> None:
        array = gpu.array(np.ones(100, np.float32), gpu.stream())
        with pytest.raises(TensorError, match="overlap"):
            comm.alltoall(array, out=array)
        with pytest.raises(ConfigError, match="rank 7 is not in a world of 2"):
            comm.broadcast(array, 7)
        comm.allreduce(array)
        if comm.rank == 0:
            with pytest.raises(RingcommError, match=r"allreduce\(f32\[100\]\)"):
                comm.allreduce(array)
        else:
            with pytest.raises(RingcommError):
                comm.allreduce(gpu.array(np.ones(90, np.float32), gpu.stream()))

    run_ranks(2, body)


def test_close_with_flights_under_way(gpu: Gpu) -> None:
    def body(comm: Communicator) -> None:
        array = gpu.array(np.ones(10, np.float32), gpu.stream())
        comm.barrier()
        if comm.rank == 0:
            work = comm.recv(array, 1, async_op=True)
            comm.close()
            with pytest.raises(RingcommError):
                work.wait()
            assert isinstance(work.exception(), RingcommError)

    run_ranks(2, body)


# ---- what cannot work ----


def test_wrong_memory_and_wrong_streams(gpu: Gpu) -> None:
    driver = gpu.driver

    def body(comm: Communicator) -> None:
        array = gpu.array(np.ones(10, np.float32), gpu.stream())
        comm.allreduce(array)

        def refused(says: str, error: type[RingcommError] = TensorError, **changes: Any) -> None:
            kept = dict(array.__dict__)
            array.__dict__.update(changes)
            with pytest.raises(error, match=says):
                comm.allreduce(array)
            array.__dict__.update(kept)

        managed, foreign = driver.fake_cuda_memory(0, 64, 1), driver.fake_cuda_memory(0, 64, 0)
        refused("managed", address=managed)
        refused("context", address=foreign)
        refused("of another GPU", stream=gpu.stream(1))
        refused("context", stream=driver.fake_cuda_foreign_stream(0))
        refused("names stream 0", stream=0)
        refused("host memory", address=np.ones(10).ctypes.data)
        refused("is not contiguous", more={"strides": (8,)})
        refused("has a mask", more={"mask": 1})
        refused("is read-only", more={"data": (array.address, True)})
        refused("dtype complex64 is not supported", numpy_dtype=np.dtype(np.complex64), dtype="")
        second = gpu.array(np.ones(10, np.float32), gpu.stream(1), ordinal=1)
        with pytest.raises(TensorError, match="on GPU 1, and this communicator works for GPU 0"):
            comm.allreduce(second)
        with pytest.raises(TensorError, match="one tensor of the call lies on a GPU"):
            comm.allreduce(array, out=np.ones(10, np.float32))
        with pytest.raises(TensorError, match="lie on GPUs"):
            comm.allreduce(array, out=second)
        with pytest.raises(TensorError, match="give out="):
            comm.allgather(array)
        gpu.capture(array.stream, True)
        with pytest.raises(TensorError, match="captured into a CUDA graph"):
            comm.allreduce(array)
        gpu.capture(array.stream, False)
        comm.allreduce(array)  # after all of this it goes on
        driver.cuMemFree_v2(ctypes_u64(managed))
        driver.cuMemFree_v2(ctypes_u64(foreign))

    run_ranks(1, body)


def ctypes_u64(value: int) -> Any:
    import ctypes

    return ctypes.c_uint64(value)


def test_an_empty_tensor_needs_no_gpu(gpu: Gpu) -> None:
    def body(comm: Communicator) -> None:
        array = Array(gpu, 0, (0, 3), np.dtype(np.float32), LEGACY, 0)
        assert comm.allreduce(array) is array
        assert comm._pipe is None

    run_ranks(2, body)
    assert gpu.calls("cuEventRecord") == 0


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCOMM_LIBCUDA", "/nowhere/libcuda.so.1")
    assert not ringcomm.cuda.is_available()
    assert "/nowhere/libcuda.so.1" in (ringcomm.cuda.why_not() or "")
    array = types.SimpleNamespace(
        __cuda_array_interface__={
            "shape": (3,), "typestr": "<f4", "data": (4096, False), "version": 3, "stream": 1,
        }
    )  # fmt: skip

    def body(comm: Communicator) -> None:
        with pytest.raises(DeviceError, match="a GPU tensor cannot be used here"):
            comm.allreduce(array)
        assert comm.allreduce(np.ones(2))[0] == 1

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("variable", "says"),
    [({"FAKE_CUDA_INIT": "100"}, "no CUDA-capable device"), ({"FAKE_CUDA_DEVICES": "0"}, "GPU")],
)
def test_a_driver_without_a_gpu(library: Path, variable: dict[str, str], says: str) -> None:
    run_processes(
        1,
        f"""
        import ringcomm
        assert not ringcomm.cuda.is_available()
        assert ringcomm.cuda.device_count() == 0
        assert {says!r} in ringcomm.cuda.why_not(), ringcomm.cuda.why_not()
        """,
        env={"RINGCOMM_LIBCUDA": str(library), **variable},
    )


# ---- torch, as far as that can be seen without its CUDA build ----


def test_torch_tensors_by_pointer_and_current_stream(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tensor:
        """What is asked of a torch tensor on a GPU."""

        layout, is_nested = "strided", False

        def __init__(self, array: Array, contiguous: bool = True) -> None:
            self.array, self.shape, self.contiguous = array, array.shape, contiguous
            self.device = types.SimpleNamespace(type="cuda", index=array.ordinal)
            self.dtype = "torch.float32"
            self.is_cpu = False

        def detach(self) -> Tensor:
            return self

        def is_contiguous(self) -> bool:
            return self.contiguous

        def is_neg(self) -> bool:
            return False

        resolve_neg = detach

        def contiguous(self) -> Tensor:
            return self

        def numel(self) -> int:
            return int(np.prod(self.shape))

        def data_ptr(self) -> int:
            return self.array.address

    side = gpu.stream()
    current = {"stream": 0}

    def empty(shape: tuple[int, ...], dtype: Any, device: Any) -> Tensor:
        return Tensor(gpu.empty(shape, np.float32, side))

    streams = types.SimpleNamespace(
        current_stream=lambda device: types.SimpleNamespace(cuda_stream=current["stream"])
    )
    stand_in = types.SimpleNamespace(Tensor=Tensor, strided="strided", cuda=streams, empty=empty)
    monkeypatch.setitem(sys.modules, "torch", stand_in)  # type: ignore[arg-type]

    def body(comm: Communicator) -> None:
        for stream in (0, side):
            current["stream"] = stream
            tensor = Tensor(gpu.array(np.ones(50, np.float32), stream or LEGACY))
            tensor.array.add(1.0)
            assert comm.allreduce(tensor) is tensor
            assert bits(tensor.array.read()) == bits(np.full(50, 2, np.float32))
            gathered = comm.allgather(tensor)
            assert bits(gathered.array.read(stream or LEGACY)) == bits(tensor.array.peek())
        with pytest.raises(TensorError, match="not contiguous, and the result would be written"):
            comm.allreduce(Tensor(tensor.array, contiguous=False))

    run_ranks(1, body)
