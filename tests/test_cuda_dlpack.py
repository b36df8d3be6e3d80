"""GPU tensors that are so by DLPack alone, over a driver that is none (tests/cuda): their order
with the producer's stream, what is kept until when, what of the format is read, what is refused.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu import LEGACY, PER_THREAD, Array, Gpu
from patience import PATIENCE
from ranks import run_ranks

import ringcomm
from ringcomm import Communicator, DeviceError, TensorError
from ringcomm.core.faces import host_view, view
from ringcomm.core.faces.dlpack import read_capsule

HOST = np.ones(9)
NAME = b"dltensor"  # of a capsule, which keeps the pointer
CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)  # of a capsule that is going
)


class Managed(ctypes.Structure):
    """DLManagedTensor, as dlpack.h has it."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class Lent:
    """A library's tensor with DLPack and nothing else.

    Attributes:
        asked: the stream of every __dlpack__.
        given: the tensors that were lent, by address; one goes when it is given back.
        back: called when one is given back.
    """

    def __init__(self, array: Array, kind: int = 2, **fields: Any) -> None:
        self.array, self.kind, self.fields = array, kind, fields
        self.asked: list[int] = []
        given: dict[int, Any] = {}
        called: list[Callable[[], None]] = []
        self.given, self.back = given, called

        @ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
        def free(capsule: int) -> None:
            del given[_pointer(capsule, NAME)]  # a KeyError where it was given back before
            for call in called:
                call()

        FREED.append(free)
        self.free = ctypes.cast(free, ctypes.c_void_p).value

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, self.array.ordinal

    def __dlpack__(self, *, stream: int) -> Any:
        self.asked.append(stream)
        array, gpu = self.array, self.array.gpu
        if stream != array.stream:
            gpu.enter(array.ordinal)
            event = ctypes.c_void_p()
            gpu.call("cuEventCreate", ctypes.byref(event), 2)
            gpu.call("cuEventRecord", event, ctypes.c_void_p(array.stream))
            gpu.call("cuStreamWaitEvent", ctypes.c_void_p(stream), event, 0)
            gpu.call("cuEventDestroy_v2", event)
        shape = (ctypes.c_int64 * len(array.shape))(*array.shape)
        made = Managed(
            array.address,
            (self.kind, array.ordinal),
            len(array.shape),
            CODES[array.numpy_dtype.kind],
            array.numpy_dtype.itemsize * 8,
            1,
            ctypes.addressof(shape),
            None,
            0,
        )
        strides = self.fields.get("strides")
        numbers = (ctypes.c_int64 * len(array.shape))(*(strides or ()))
        if strides is not None:
            made.strides = ctypes.addressof(numbers)
        for name in self.fields.keys() - {"strides"}:
            setattr(made, name, self.fields[name])
        self.given[ctypes.addressof(made)] = made, shape, numbers
        return _new(ctypes.addressof(made), NAME, self.free)


FREED: list[Any] = []  # destructors, which may be called after all else


def lent(gpu: Gpu, values: Any, stream: int | None = None, **fields: Any) -> Lent:
    return Lent(gpu.array(np.asarray(values), gpu.stream() if stream is None else stream), **fields)


# ---- order ----


def test_a_call_follows_what_the_producer_still_does(gpu: Gpu) -> None:
    def body(comm: Communicator) -> None:
        values = np.arange(5000, dtype=np.float32)
        for own in (LEGACY, gpu.stream()):
            tensor = lent(gpu, values, own)
            tensor.array.add(1.0)
            assert comm.allreduce(tensor) is tensor
            assert tensor.asked == [LEGACY]
            tensor.array.add(1.0, LEGACY)
            assert tensor.array.read(LEGACY).tolist() == (2 * (values + 1) + 1).tolist()

    run_ranks(2, body)


@pytest.mark.parametrize("which", ["side", "per thread", "zero"])
def test_a_chosen_stream_is_passed_on_and_followed(gpu: Gpu, which: str) -> None:
    def body(comm: Communicator) -> None:
        side = {"side": gpu.stream(), "per thread": PER_THREAD, "zero": 0}[which]
        tensor = lent(gpu, np.ones(1000, np.float32))
        tensor.array.add(1.0)
        with ringcomm.cuda.stream(side):
            comm.allreduce(tensor)
            tensor.array.add(1.0, side)
            assert (tensor.array.read(side) == 5).all()
        assert tensor.asked == [side or LEGACY]

    run_ranks(2, body)


def test_a_wait_outside_follows_the_default_stream_or_the_one_given(gpu: Gpu) -> None:
    def body(comm: Communicator) -> None:
        side = gpu.stream()
        for follows in (None, gpu.stream()):
            tensor = lent(gpu, np.ones(1000, np.float32))
            with ringcomm.cuda.stream(side):
                work = comm.allreduce(tensor, async_op=True)
            work.wait(stream=follows)
            assert (tensor.array.read(follows or LEGACY) == 2).all()

    run_ranks(2, body)


# ---- how long ----


def test_it_is_given_back_once_and_when_the_result_is_there(gpu: Gpu) -> None:
    def body(comm: Communicator) -> None:
        for dropped in (False, True):
            tensor: Any = lent(gpu, np.ones(10_000, np.float32))
            array, given, found = tensor.array, tensor.given, []

            def back(array: Array = array, found: list[Any] = found) -> None:
                found.append(array.peek()[-1])

            tensor.back.append(back)
            array.add(1.0)
            work = comm.allreduce(tensor, async_op=True)
            assert len(given) == 1
            del tensor
            if dropped:
                del work
            else:
                work.wait()
                while not work.done():
                    time.sleep(1e-3)
                del work
            deadline = time.monotonic() + PATIENCE
            while not found and time.monotonic() < deadline:
                gc.collect()
                time.sleep(1e-3)
            assert found == [4.0]
            assert not given

    run_ranks(2, body)


# ---- what is read ----


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "int8", "uint8", "int32", "int64"]
)
def test_dtypes(gpu: Gpu, dtype: str) -> None:
    def body(comm: Communicator) -> None:
        tensor = lent(gpu, np.arange(1, 60).astype(dtype))
        comm.allreduce(tensor)
        assert tensor.array.read(LEGACY).tolist() == (2 * np.arange(1, 60)).tolist()

    run_ranks(2, body)


def test_bfloat16(gpu: Gpu) -> None:
    def body(comm: Communicator) -> None:
        tensor = lent(gpu, np.full(9, 0x3F80, np.uint16), code=4)  # 1.0
        comm.allreduce(tensor)
        assert tensor.array.read(LEGACY).tolist() == [0x4000] * 9

    run_ranks(2, body)


def test_offsets_and_strides(gpu: Gpu) -> None:
    def body(comm: Communicator) -> None:
        array = gpu.array(np.arange(9, dtype=np.float32), gpu.stream())
        whole, array.shape = array.shape, (3, 2, 1)
        for strides in (None, (2, 1, 1), (2, 1, 77)):  # of what has one element, any
            tensor = Lent(array, byte_offset=8, strides=strides)
            found = view(tensor, writable=True)
            assert (found.address, found.shape) == (array.address + 8, (3, 2, 1))
            assert comm.allreduce(tensor) is tensor
        array.shape = whole
        assert array.read(LEGACY).tolist() == [0, 1, 16, 24, 32, 40, 48, 56, 8]
        single = lent(gpu, np.float32(3))
        comm.allreduce(single)
        assert single.array.read(LEGACY) == 6

    run_ranks(2, body)


def test_no_elements(gpu: Gpu) -> None:
    def body(comm: Communicator) -> None:
        tensor = Lent(Array(gpu, 0, (0, 3), np.dtype(np.float32), LEGACY, 0), strides=(9, 9))
        assert comm.allreduce(tensor) is tensor
        assert comm._pipe is None

    run_ranks(2, body)


def test_others_and_results(gpu: Gpu) -> None:
    def body(comm: Communicator) -> None:
        tensor = lent(gpu, np.full(4, comm.rank, np.float32))
        out = lent(gpu, np.zeros((2, 4), np.float32))
        assert comm.allgather(tensor, out=out) is out
        assert out.array.read(LEGACY).tolist() == [[0] * 4, [1] * 4]
        with pytest.raises(TensorError, match=r"a result like .*Lent cannot be made here; give ou"):
            comm.allgather(tensor)
        many = [lent(gpu, np.ones(n, np.float32)) for n in (3, 0, 500)]
        comm.allreduce_many(many)
        assert all((one.array.read(LEGACY) == 2).all() for one in many)
        with pytest.raises(TensorError, match="one tensor of the call lies on a GPU"):
            comm.allreduce(tensor, out=np.ones(4, np.float32))

    run_ranks(2, body)


def test_capsules_of_libraries_are_read() -> None:
    """Of host tensors; those of a GPU differ by the device alone."""
    values = np.arange(24, dtype=np.int32).reshape(4, 6)[1:, ::2]
    found = read_capsule(values.__dlpack__())
    address = values.__array_interface__["data"][0]
    assert found == (address, "int32", (3, 3), (6, 2))
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    tensor = torch.ones(3, 4, dtype=torch.bfloat16)[:, 1:]
    assert read_capsule(tensor.__dlpack__()) == (tensor.data_ptr(), "bfloat16", (3, 3), (4, 1))


# ---- what is refused ----


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"code": 5, "bits": 64}, "dtype complex64 is not supported; .* or use float16"),
        ({"code": 6, "bits": 8}, "dtype bool8 is not supported"),
        ({"code": 10, "bits": 8}, "dtype of code 10, 8 bits is not supported"),
        ({"lanes": 2}, "dtype float32x2 is not supported"),
        ({"strides": (1, 3)}, r"Lent is not contiguous; pass a contiguous copy"),
        ({"strides": (4, 2)}, r"Lent is not contiguous"),
        ({"data": HOST.ctypes.data}, "says that it is on a GPU, and lies in host memory"),
    ],
)
def test_tensors_that_are_refused(gpu: Gpu, fields: dict[str, Any], says: str) -> None:
    def body(comm: Communicator) -> None:
        tensor = lent(gpu, np.ones((3, 2), np.float32), **fields)
        with pytest.raises(TensorError, match=says):
            comm.allreduce(tensor)
        gc.collect()
        assert not tensor.given

    run_ranks(1, body)


def test_managed_memory_is_refused(gpu: Gpu) -> None:
    def body(comm: Communicator) -> None:
        managed = gpu.driver.fake_cuda_memory(0, 64, 1)
        tensor = Lent(Array(gpu, managed, (3,), np.dtype(np.float32), LEGACY, 0), kind=13)
        with pytest.raises(TensorError, match="managed memory"):
            comm.allreduce(tensor)
        tensor.array.free()

    run_ranks(1, body)


def test_objects_that_are_refused(gpu: Gpu) -> None:
    class ReadOnly(Lent):
        def __dlpack__(self, *, stream: int) -> Any:
            raise BufferError("it is read-only")

    class NoStream(Lent):
        def __dlpack__(self) -> Any:  # type: ignore[override]
            raise AssertionError

    class NoCapsule(Lent):
        def __dlpack__(self, *, stream: int) -> Any:
            return "a capsule"

    class Consumed(Lent):
        def __dlpack__(self, *, stream: int) -> Any:
            return _new(1, b"used_dltensor", None)

    array = gpu.array(np.ones(3, np.float32), LEGACY)
    for kind, says in (
        (
            ReadOnly,
            r"ReadOnly lies on a GPU, and does not give its memory by DLPack; give a copy"
            r".*\(it is read-only\)",
        ),
        (NoStream, "by DLPack.*unexpected keyword argument 'stream'"),
        (NoCapsule, "by DLPack.*PyCapsule"),
        (Consumed, "by DLPack.*PyCapsule"),
    ):
        with pytest.raises(TensorError, match=says):
            view(kind(array), writable=True)
    with pytest.raises(TensorError, match="Lent lies on a GPU; give a copy in host memory"):
        host_view(Lent(array), writable=True)


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    tensor = lent(gpu, np.ones(3, np.float32), LEGACY)
    monkeypatch.setenv("RINGCOMM_LIBCUDA", "/nowhere/libcuda.so.1")
    with pytest.raises(DeviceError, match="a GPU tensor cannot be used here"):
        view(tensor, writable=True)
