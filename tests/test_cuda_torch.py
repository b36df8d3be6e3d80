"""Torch's GPU tensors, as far as that can be seen without its CUDA build: by stand-ins with what is
asked of a tensor, and by torch's Work and Future around GPU arrays of the fake driver (tests/cuda).
"""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import numpy as np
import pytest
from gpu import LEGACY, Array, Gpu
from patience import PATIENCE
from ranks import run_ranks

from ringcomm import Communicator, TensorError, cuda

pytestmark = pytest.mark.torch


def bits(array: np.ndarray[Any, Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def test_torch_tensors_by_pointer_and_current_stream(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tensor:
        """What is asked of a torch tensor on a GPU."""

        layout, is_nested, requires_grad = "strided", False, False

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
    monkeypatch.setattr("ringcomm.core.faces.torch.guard", lambda _: None)  # it has no storages

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


def test_a_work_of_torch_orders_every_stream_that_waits(gpu: Gpu) -> None:
    torch = pytest.importorskip("torch")
    from ringcomm.torch.works import RingWork

    def body(comm: Communicator) -> None:
        own, other = gpu.stream(), gpu.stream()
        array = gpu.array(np.ones(1000, np.float32), own)
        result = torch.zeros(1)
        done: list[Any] = []
        work = RingWork([comm.allreduce(array, async_op=True)], [result], lambda: done.append(1))
        assert work.wait()
        with cuda.stream(other):
            assert work.wait()  # over by now, and another stream wants to go on behind it
        assert bits(array.read(other)) == bits(np.full(1000, 2, np.float32))
        assert done == [1]
        assert work.is_completed()
        assert work.exception() is None

    run_ranks(2, body)


def test_a_future_of_torch_is_told_when_it_is_over(gpu: Gpu) -> None:
    torch = pytest.importorskip("torch")
    from ringcomm.torch.works import RingWork

    def body(comm: Communicator) -> None:
        array = gpu.array(np.ones(1000, np.float32), gpu.stream())
        result, called = torch.zeros(1), threading.Event()
        work = RingWork([comm.allreduce(array, async_op=True)], [result])
        future = work.get_future()
        future.then(lambda _: called.set())
        assert future.wait() == [result]
        assert called.wait(PATIENCE)
        comm.barrier()
        if comm.rank == 0:
            gpu.fail("cuMemcpyDtoHAsync_v2", 1, 999)
        comm.barrier()
        failing = RingWork([comm.allreduce(array, async_op=True)], [result])
        with pytest.raises(RuntimeError, match="CUDA_ERROR_UNKNOWN"):
            failing.get_future().wait()
        with pytest.raises(RuntimeError, match="CUDA_ERROR_UNKNOWN"):
            failing.wait()

    run_ranks(2, body)


def test_tensors_of_a_call_go_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from ringcomm.core.views import DeviceView
    from ringcomm.torch import submit

    def staged(owner: Any, **how: bool) -> Any:
        return owner, how

    def piped(owner: str) -> DeviceView:
        return DeviceView(owner, owner, 64, "f32", (3,), 0, lambda: 1, lambda shape: None)

    monkeypatch.setattr(submit, "staged", staged)
    src, dst = piped("src"), piped("dst")
    same = submit.Call(0, src, dst, 3)
    assert submit.alike(same) is same
    host: Any = "host"
    assert submit.alike(submit.Call(0, host, dst, 3)).dst == (
        "dst",
        {"writable": True, "reads": False},
    )
    assert submit.alike(submit.Call(0, src, host, 3)).src == ("src", {"writable": False})
    alone = submit.Call(0, None, dst, 3)
    assert submit.alike(alone) is alone
