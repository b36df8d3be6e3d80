"""What counts as a tensor: every kind of memory that works, and a clear error for the others.

Most tests all-reduce a tensor in a world of two whose ranks hold the same values, so that the
result is twice the input; both ranks must see it, in place and in the tensor's own layout.
"""

from __future__ import annotations

import array
import ctypes
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE
from ranks import run_ranks

from ringcomm import Communicator, TensorError
from ringcomm.core.dispatch import plain_memory
from ringcomm.core.faces import view
from ringcomm.core.faces.torch import check_autograd
from ringcomm.exact import as_callers

pytestmark = pytest.mark.usefixtures("nothing_left")


def summed(make: Callable[[], Any]) -> Any:
    """The tensor of rank 0 after an all-reduce in place, whose result must be that very tensor."""

    def body(comm: Communicator) -> Any:
        tensor = make()
        assert comm.allreduce(tensor) is tensor
        return tensor

    first, second = run_ranks(2, body)
    assert np.array_equal(np.asarray(first), np.asarray(second))
    return first


def refused(tensor: Any, says: str, *, writable: bool = True) -> None:
    with pytest.raises(TensorError, match=says) as caught:
        view(tensor, writable=writable)
    assert isinstance(caught.value, TypeError)


# ---- numpy ----

COUNTING = np.arange(24, dtype=np.float32)

LAYOUTS: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
    "0-d": lambda: np.array(5, np.int32),
    "empty": lambda: np.zeros((3, 0, 2)),
    "3-d": lambda: COUNTING.reshape(2, 3, 4).copy(),
    "Fortran order": lambda: np.asfortranarray(COUNTING.reshape(4, 6)),
    "transposed": lambda: COUNTING.copy().reshape(2, 3, 4).transpose(2, 0, 1),
    "every second": lambda: COUNTING.copy()[1::2],
    "columns": lambda: COUNTING.copy().reshape(4, 6)[:, 2:4],
    "backwards": lambda: COUNTING.copy()[::-1],
    "backwards in one dimension": lambda: COUNTING.copy().reshape(4, 6)[:, ::-2],
    "unaligned": lambda: np.frombuffer(bytearray(41), np.float32, 10, 1),
    "part of a record": lambda: np.zeros(7, [("a", "i2"), ("b", "f8")])["b"],
    "dimensions of one": lambda: COUNTING.copy().reshape(1, 24, 1)[:, ::3],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numpy_layouts(layout: str) -> None:
    before = LAYOUTS[layout]()
    after = summed(lambda: LAYOUTS[layout]())
    assert after.shape == before.shape
    assert after.strides == before.strides
    assert np.array_equal(after, before * 2)


def test_elements_that_share_memory_are_only_read() -> None:
    def windows(strides: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return np.lib.stride_tricks.as_strided(np.arange(9.0), (3, 2), strides)

    for strides in ((8, 8), (0, 8), (8, 0), (16, 16)):
        refused(windows(strides), "elements of the tensor share memory")
        assert view(windows(strides), writable=False).count == 6
    for strides in ((16, 8), (8, 24)):
        assert view(windows(strides), writable=True).count == 6
    assert view(windows((0, 8))[:0], writable=True).count == 0


def test_what_lies_between_strided_elements_is_left_alone() -> None:
    wholes = []

    def body(comm: Communicator) -> None:
        whole = np.arange(12.0)
        wholes.append(whole)
        comm.allreduce(whole[::3])

    run_ranks(2, body)
    for whole in wholes:
        assert whole.tolist() == [0, 1, 2, 6, 4, 5, 12, 7, 8, 18, 10, 11]


def test_a_strided_result_is_there_when_the_work_says_so() -> None:
    def body(comm: Communicator) -> None:
        whole = np.ones((4, 4))
        work = comm.allreduce(whole[:, 1], async_op=True)
        while not work.done():
            time.sleep(0.001)
        assert whole[:, 1].tolist() == [2] * 4
        whole[:, 1] = 7  # and is not written a second time
        work.wait()
        assert whole[:, 1].tolist() == [7] * 4

    run_ranks(2, body)


def test_strided_input_with_out() -> None:
    def body(comm: Communicator) -> None:
        source, out = np.arange(8.0)[::2], np.zeros((2, 4)).T[:, 0]
        assert comm.allreduce(source, out=out) is out
        assert out.tolist() == [0, 4, 8, 12]
        assert source.tolist() == [0, 2, 4, 6]
        rows = comm.allgather(np.arange(6.0).reshape(2, 3).T)
        assert rows.tolist() == [[[0, 3], [1, 4], [2, 5]]] * 2

    run_ranks(2, body)


def test_read_only_memory_is_never_written() -> None:
    frozen = np.ones(3, np.float32)
    frozen.flags.writeable = False
    refused(frozen, "numpy.ndarray is read-only.*pass out= or a copy")
    refused(np.broadcast_to(np.ones(1), (4,)), "read-only")
    refused(b"abc", "builtins.bytes is read-only")
    refused(memoryview(b"abc"), "read-only")
    refused(np.float32(3), "numpy.float32 is a number, .* pass np.array")

    def body(comm: Communicator) -> None:
        out = np.zeros(3, np.float32)
        comm.allreduce(frozen, out=out)
        assert out.tolist() == [2, 2, 2]
        assert frozen.tolist() == [1, 1, 1]
        assert comm.allgather(b"ab").tolist() == [[97, 98]] * 2
        assert comm.allgather(np.float32(comm.rank)).tolist() == [0, 1]
        with pytest.raises(TensorError, match="read-only"):
            comm.allreduce(out, out=frozen)
        with pytest.raises(TensorError, match="read-only"):
            comm.recv(frozen, 1 - comm.rank)
        source = frozen if comm.rank == 0 else np.zeros(3, np.float32)
        assert comm.broadcast(source).tolist() == [1, 1, 1]  # root's may be read-only
        assert comm.allreduce(out).tolist() == [4, 4, 4]  # the refusals have cost nothing

    run_ranks(2, body)


@pytest.mark.parametrize(
    "dtype",
    [
        ">f4",
        ">i8",
        "bool",
        "uint16",
        "uint32",
        "uint64",
        "int16",
        "complex64",
        "object",
        "U3",
        "datetime64[s]",
        "longdouble",
        "f4,i4",
    ],
)
def test_other_dtypes_are_refused(dtype: str) -> None:
    refused(np.zeros(3, np.dtype(dtype)), "dtype .* is not supported; .* or use float16, bfloat16")


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "u1", "i4", "i8", "longlong", "intc"])
def test_dtypes_by_any_name(dtype: str) -> None:
    assert summed(lambda: np.arange(5).astype(dtype)).tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("thing", [[1.0], (1.0,), 1.0, 3, None, "abc", {}, object(), print])
def test_what_is_no_tensor(thing: Any) -> None:
    refused(thing, "is not a tensor: give a numpy array, a torch tensor, or an object with")


# ---- other memory ----


def test_the_buffer_protocol() -> None:
    assert summed(lambda: bytearray(b"\x01\x02")) == b"\x02\x04"
    assert summed(lambda: array.array("f", [1, 2])).tolist() == [2, 4]
    assert summed(lambda: array.array("q", [1, -2])).tolist() == [2, -4]
    assert list(summed(lambda: (ctypes.c_double * 2)(1, 2))) == [2, 4]
    assert summed(lambda: memoryview(bytearray(8)).cast("d")).tolist() == [0]
    assert summed(lambda: memoryview(array.array("i", range(6)))[::2]).tolist() == [0, 4, 8]
    refused(array.array("H", [1]), "dtype uint16 is not supported")


class ArrayInterface:
    """An object with __array_interface__ and nothing else."""

    def __init__(self, values: np.ndarray[Any, Any], read_only: bool = False) -> None:
        self._values = values
        self.__array_interface__ = dict(values.__array_interface__)
        self.__array_interface__["data"] = (values.ctypes.data, read_only)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray[Any, Any]:
        return self._values


class DLPack:
    """An object with DLPack and nothing else."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self._values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._values.__dlpack_device__()

    def __array__(self, *_: Any, **__: Any) -> np.ndarray[Any, Any]:
        return self._values


def test_the_array_interface() -> None:
    after = summed(lambda: ArrayInterface(np.arange(5.0)))
    assert np.asarray(after).tolist() == [0, 2, 4, 6, 8]
    after = summed(lambda: ArrayInterface(np.arange(6.0)[::2]))
    assert np.asarray(after).tolist() == [0, 4, 8]
    refused(ArrayInterface(np.zeros(3), read_only=True), "test_buffers.ArrayInterface is read-only")
    refused(ArrayInterface(np.zeros(3, ">f8")), "dtype big-endian float64 is not supported")


def writes_dlpack() -> bool:
    """Whether this numpy gives writable arrays through DLPack; older ones lend them to read."""
    return bool(np.from_dlpack(DLPack(np.zeros(1))).flags.writeable)


@pytest.mark.skipif(not writes_dlpack(), reason="this numpy takes DLPack for reading only")
def test_dlpack() -> None:
    after = summed(lambda: DLPack(np.arange(5, dtype=np.int32)))
    assert np.asarray(after).tolist() == [0, 2, 4, 6, 8]


def test_dlpack_for_reading_and_its_errors() -> None:
    assert view(DLPack(np.arange(4.0)), writable=False).count == 4
    refused(DLPack(np.zeros(3, np.complex64)), "dtype complex64 is not supported", writable=False)

    class Broken(DLPack):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("on another device")

    refused(Broken(np.zeros(3)), r"Broken is not a tensor: .*\(on another device\)")


# ---- torch ----


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.mark.torch
@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"]
)
def test_torch_dtypes(torch: Any, dtype: str) -> None:
    def body(comm: Communicator) -> None:
        tensor = torch.arange(5).to(getattr(torch, dtype))
        assert comm.allreduce(tensor) is tensor
        assert tensor.tolist() == [0, 2, 4, 6, 8]
        rows = comm.allgather(tensor)
        assert isinstance(rows, torch.Tensor)
        assert (rows.dtype, tuple(rows.shape)) == (tensor.dtype, (2, 5))

    run_ranks(2, body)


@pytest.mark.torch
def test_torch_layouts(torch: Any) -> None:
    def body(comm: Communicator) -> None:
        for make in (
            lambda: torch.tensor(3.0),
            lambda: torch.zeros(3, 0),
            lambda: torch.arange(24.0).reshape(4, 6).T,
            lambda: torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)[1:],
            lambda: torch.arange(10.0)[::3],
            lambda: torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last) + 1,
            lambda: torch.ones(3, 1).expand(3, 1),
            lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        ):
            tensor, before = make(), make().clone()
            assert comm.allreduce(tensor) is tensor
            assert tensor.stride() == make().stride()
            assert torch.equal(tensor, before * 2)

    run_ranks(2, body)


@pytest.mark.torch
def test_torch_parameters(torch: Any) -> None:
    """A leaf that requires grad is changed in place where autograd does not look."""

    def body(comm: Communicator) -> None:
        leaf = torch.nn.Parameter(torch.ones(3))
        with torch.no_grad():
            assert comm.allreduce(leaf, "avg", compression="bf16") is leaf
        assert leaf.requires_grad
        assert leaf.grad_fn is None
        (leaf * (comm.rank + 1)).sum().backward()
        comm.allreduce(leaf.grad)
        assert leaf.grad.tolist() == [3, 3, 3]
        view_of_leaf = (leaf * 2)[::2].detach()
        comm.allreduce(view_of_leaf)
        assert view_of_leaf.tolist() == [4, 4]

    run_ranks(2, body)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torch_tensors_that_cannot_be_taken(torch: Any) -> None:
    refused(torch.eye(3).to_sparse(), "layout torch.sparse_coo is not supported")
    refused(torch.empty(3, device="meta"), "device 'meta' has no memory")
    refused(torch.zeros(3, dtype=torch.bool), "dtype torch.bool is not supported")
    refused(torch.zeros(3, dtype=torch.complex64), "dtype torch.complex64 is not supported")
    refused(torch.zeros(1).expand(4), "elements of the tensor share memory")
    assert view(torch.ones(1).expand(4), writable=False).count == 4
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.strided)
    refused(nested, "layout nested is not supported")


@pytest.mark.torch
def test_a_tensor_of_another_device_is_refused_by_name(torch: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        tensor = torch.empty(3, device="xpu:0")
    refused(tensor, "device 'xpu:0' is not supported; pass tensor.cpu()")


# ---- lifetime ----


def test_a_strided_array_may_change_its_flags_and_shape_in_flight() -> None:
    changed = threading.Event()

    def body(comm: Communicator) -> None:
        memory = np.arange(10.0)
        array = memory[::2]
        if comm.rank == 1:
            assert changed.wait(PATIENCE)
        work = comm.allreduce(array, async_op=True)
        array.flags.writeable = False
        array.shape = (5, 1)
        changed.set()
        assert work.wait() is array
        assert memory[:5].tolist() == [0, 1, 4, 3, 8]

    run_ranks(2, body)


@pytest.mark.torch
def test_a_storage_is_not_resized_in_flight(torch: Any) -> None:
    gone = threading.Event()

    def body(comm: Communicator) -> None:
        tensor = torch.arange(10.0)[::2]
        if comm.rank == 1:
            assert gone.wait(PATIENCE)
        work = comm.allreduce(tensor, async_op=True)
        if comm.rank == 0:
            with pytest.raises(TensorError, match=r"allreduce\(f32\[5\]\) #0, .* wait for it"):
                tensor.untyped_storage().resize_(0)
            gone.set()
        work.wait()
        assert (tensor == torch.arange(0.0, 20.0, 4)).all()
        tensor.untyped_storage().resize_(0)

    run_ranks(2, body)


@pytest.mark.torch
def test_a_tensor_whose_storage_is_resized_in_flight(torch: Any) -> None:
    """By torch's C++, which does not ask. The core is not let near it here."""
    for writable in (False, True):
        tensor = torch.ones(100)
        seen = view(tensor, writable=writable)
        assert seen.finish is not None
        seen.finish()
        tensor.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="resized in flight"):
            seen.finish()


def test_a_buffer_cannot_be_resized_under_a_work() -> None:
    tried = threading.Event()

    def body(comm: Communicator) -> None:
        data = bytearray(b"\x01" * 1000)
        if comm.rank == 1:
            tried.wait(PATIENCE)
        work = comm.allreduce(data, async_op=True)
        if comm.rank == 0:
            with pytest.raises(BufferError):
                data.extend(b"more")
            tried.set()
        work.wait()
        del work
        data.extend(b"more")
        assert data[:3] == b"\x02\x02\x02"

    run_ranks(2, body)


# ---- imports ----


def test_importing_brings_no_heavy_library_along() -> None:
    code = (
        "import sys, numpy, ringcomm\n"
        "comm = ringcomm.init()\n"
        "assert comm.allreduce(numpy.ones(3)).tolist() == [1, 1, 1]\n"
        "heavy = {'torch', 'mpi4py', 'cupy', 'rich', 'matplotlib', 'sklearn', 'scipy'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_a_torch_that_another_thread_is_importing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is in sys.modules, and has nothing yet."""
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    given = {"list": [1.0], "array": np.ones(3, np.float32)[::-1]}
    for tensor in given.values():
        assert plain_memory(tensor) is None
        check_autograd(tensor)
    assert view(given["array"], writable=True).shape == (3,)
    with pytest.raises(TensorError):
        view(given["list"], writable=True)
    assert as_callers(given["array"]) is given["array"]
