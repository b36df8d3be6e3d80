"""GPU tensors where something is wrong: CUDA calls that fail, tensors and streams that cannot be
taken, machines without a GPU. Over a driver that is none (tests/cuda).
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu import LEGACY, Array, Gpu
from patience import until
from ranks import ROOT, World, run_processes, run_ranks

import ringcomm
from ringcomm import (
    AbortedError,
    CommTimeoutError,
    Communicator,
    ConfigError,
    DeviceError,
    RingcommError,
    TensorError,
)


def bits(array: np.ndarray[Any, Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


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
    """Two ranks, whose k-th call together fails; whether that made their collectives fail."""
    gpu.reset()
    stream = gpu.stream()
    arrays = [gpu.array(np.ones(2000, np.float32), stream) for _ in range(4)]
    gpu.fail("*", k)

    def body(comm: Communicator) -> RingcommError | None:
        try:
            for work in [comm.allreduce(a, async_op=True) for a in arrays[comm.rank :: 2]]:
                work.wait(timeout=20.0)
                while not work.done():  # the copies may still fail
                    time.sleep(1e-4)
            comm.barrier(timeout=20.0)
        except RingcommError as error:
            with contextlib.suppress(RingcommError):
                comm.abort(str(error))
            return error
        return None

    with World(2) as world:
        fell = world.run(body)
    assert (fell[0] is None) == (fell[1] is None), (k, fell)
    assert not any(isinstance(error, CommTimeoutError) for error in fell)
    assert gpu.leaks("pinned", "events", "modules") == 0
    assert gpu.leaks("streams", "contexts") == 2
    assert gpu.misuse() is None
    return fell[0] is not None


@pytest.mark.parametrize(
    "name", ["cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuEventSynchronize"]
)
def test_an_error_of_cuda_is_named_on_every_rank(gpu: Gpu, name: str) -> None:
    def body(comm: Communicator) -> None:
        array = gpu.array(np.ones(2000, np.float32), gpu.stream())
        work = comm.allreduce(array, async_op=True)
        assert until(work.done)  # its thread has made its last call, too
        comm.barrier()
        if comm.rank == 0:
            gpu.fail(name, 1, 700)
        comm.barrier()

        def use() -> None:
            for _ in range(3):
                comm.allreduce(array)
                comm.barrier()

        with pytest.raises((DeviceError, AbortedError), match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            use()

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
        driver.cuMemFree_v2(ctypes.c_uint64(managed))
        driver.cuMemFree_v2(ctypes.c_uint64(foreign))

    run_ranks(1, body)


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
            "shape": (3,),
            "typestr": "<f4",
            "data": (4096, False),
            "version": 3,
            "stream": 1,
        }
    )

    def body(comm: Communicator) -> None:
        with pytest.raises(DeviceError, match="a GPU tensor cannot be used here"):
            comm.allreduce(array)
        assert comm.allreduce(np.ones(2))[0] == 1

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("variable", "says"),
    [({"FAKE_CUDA_INIT": "100"}, "no CUDA-capable device"), ({"FAKE_CUDA_DEVICES": "0"}, "GPU")],
)
def test_a_driver_without_a_gpu(gpu_library: Path, variable: dict[str, str], says: str) -> None:
    run_processes(
        1,
        f"""
        import ringcomm
        assert not ringcomm.cuda.is_available()
        assert ringcomm.cuda.device_count() == 0
        assert {says!r} in ringcomm.cuda.why_not(), ringcomm.cuda.why_not()
        """,
        env={"RINGCOMM_LIBCUDA": str(gpu_library), **variable},
    )


# ---- the end of a process ----


def test_a_process_ends_with_flights_under_way(gpu_library: Path) -> None:
    """By leaving, and in a forked child; and what is imported opens no driver."""
    run_processes(
        1,
        """
        import os, sys
        import numpy as np
        import ringcomm
        assert "fakecuda" not in open("/proc/self/maps").read()
        sys.path.insert(0, "cuda")
        from gpu import Gpu
        gpu = Gpu(os.environ["RINGCOMM_LIBCUDA"])
        comm = ringcomm.init()
        stream = gpu.stream()
        array = gpu.array(np.ones(100_000, np.float32), stream)
        ringcomm.allreduce(array)
        child = os.fork()
        if child == 0:
            try:
                ringcomm.allreduce(array, comm=comm)
            except ringcomm.DeviceError:  # the driver does not survive a fork
                del comm, array
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        for _ in range(10):
            ringcomm.allreduce(array, async_op=True)
        """,
        env={"RINGCOMM_LIBCUDA": str(gpu_library)},
        timeout=30.0,
    )
