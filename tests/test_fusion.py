"""allreduce_many: the same sums as one call for each tensor, in far fewer collectives."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE
from ranks import World
from reference import Array
from tensors import bits, elements

from ringcomm import CommTimeoutError, Communicator, TensorError, fusion

pytestmark = pytest.mark.usefixtures("nothing_left")

SHAPES = ((3,), (), (0,), (64, 3, 3), (70_000,), (257,), (5, 1), (100_003,))


def mixed(rank: int) -> list[Array]:
    """Small and large tensors of three dtypes, one of them strided."""
    made: list[Array] = []
    for index, shape in enumerate(SHAPES):
        for dtype in ("f32", "i32", "f64"):
            count = int(np.prod(shape))
            made.append(elements(dtype, count, rank, salt=index).reshape(shape))
    made.append(elements("f32", 400, rank, salt=99)[::2])
    return made


def sums(arrays: Sequence[Sequence[Array]]) -> list[Array]:
    return [
        np.sum([np.asarray(x, np.float64) for x in same], axis=0)
        for same in zip(*arrays, strict=True)
    ]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("wait", [False, True])
def test_sums_are_right_and_equal(n: int, wait: bool) -> None:
    def body(comm: Communicator) -> list[Array]:
        tensors = mixed(comm.rank)
        result = comm.allreduce_many(iter(tensors), async_op=wait)
        if wait:
            result = result.wait()
        assert all(ours is given for ours, given in zip(result, tensors, strict=True))
        return tensors

    with World(n) as ranks:
        results = ranks.run(body)
    expected = sums([mixed(rank) for rank in range(n)])
    for index, want in enumerate(expected):
        ours = [one[index] for one in results]
        assert len({bits(np.ascontiguousarray(one)) for one in ours}) == 1
        if ours[0].dtype.kind == "i":
            assert (ours[0] == want.astype(np.int64).astype(np.int32)).all()
        else:
            np.testing.assert_allclose(ours[0], want, rtol=1e-4, atol=1e-3)


def test_results_can_be_put_elsewhere() -> None:
    """With the bits that they have in place; what is read may be read-only, and named twice."""

    def body(comm: Communicator) -> None:
        tensors = mixed(comm.rank)
        tensors.append(tensors[0])
        for tensor in tensors:
            tensor.flags.writeable = False
        expected = comm.allreduce_many([tensor.copy() for tensor in tensors], "avg")
        out = [np.empty(tensor.shape, tensor.dtype) for tensor in tensors]
        results = fusion.allreduce_many(comm, tensors, "avg", None, None, False, None, out=out)
        assert all(ours is given for ours, given in zip(results, out, strict=True))
        assert list(map(bits, out)) == list(map(bits, expected))

    with World(3) as ranks:
        ranks.run(body)


def test_few_collectives() -> None:
    """A ResNet's worth of small tensors is one; a large tensor is one of its own."""

    def body(comm: Communicator) -> tuple[int, int]:
        small = [np.ones(100, np.float32) for _ in range(160)]
        comm.allreduce_many([*small, np.ones(1 << 20, np.float32)], "avg")
        assert all((x == 1).all() for x in small)
        first = comm.stats()["works"]
        comm.allreduce_many([np.ones(60_000, np.float32) for _ in range(100)])  # 24 MB
        return first, comm.stats()["works"] - first

    with World(2) as ranks:
        assert ranks.run(body) == [(2, 2)] * 2


def test_nothing_to_reduce() -> None:
    with World(2) as ranks:
        assert ranks.run(lambda comm: comm.allreduce_many([])) == [[], []]
        assert ranks.comms[0].stats()["works"] == 0


@pytest.mark.torch
def test_torch_and_compression() -> None:
    torch = pytest.importorskip("torch", reason="checks torch tensors")

    def body(comm: Communicator) -> list[Any]:
        tensors = [torch.full((7, 5), comm.rank + 1.0), torch.ones(300, 300).t()]
        return comm.allreduce_many(tensors, "avg", compression="bf16")

    with World(2) as ranks:
        for first, second in ranks.run(body):
            assert torch.equal(first, torch.full((7, 5), 1.5))
            assert torch.equal(second, torch.ones(300, 300))


@pytest.mark.parametrize(
    ("tensors", "compression", "says"),
    [
        ([np.ones(3), np.ones(3, np.complex64)], None, "dtype"),
        ([np.ones(3, np.float32), np.ones(3, np.int32)], "bf16", "takes float32 and float64"),
        ([np.ones(3), np.broadcast_to(np.ones(1), (4,))], None, "read-only"),
        (lambda x: [x, x], None, "share memory"),
        (lambda x: [x[2:], x[:3]], None, "share memory"),
    ],
)
def test_a_bad_tensor_is_refused_before_anything_is_sent(
    tensors: Any, compression: str | None, says: str
) -> None:
    if callable(tensors):
        tensors = tensors(np.ones(5, np.float32))
    with World(2) as ranks:
        for comm in ranks.comms:
            with pytest.raises(TensorError, match=says):
                comm.allreduce_many(tensors, compression=compression)
            assert comm.stats()["works"] == 0
        ranks.run(lambda comm: comm.barrier())


def test_wait_with_a_timeout() -> None:
    """It goes on, and its parts are done one after the other."""

    waited = threading.Event()

    def body(comm: Communicator) -> None:
        tensors = [np.ones(10, np.float32), np.ones(300_000, np.float32)]
        if comm.rank == 1:
            assert waited.wait(PATIENCE)
        works = comm.allreduce_many(tensors, async_op=True)
        if comm.rank == 0:
            assert not works.done()
            assert works.exception() is None
            with pytest.raises(CommTimeoutError, match=r"one of 2, is still in flight after 0\.05"):
                works.wait(timeout=0.05)
            waited.set()
        assert works.wait() is not None
        assert works.done()
        assert all((x == 2).all() for x in tensors)

    with World(2) as ranks:
        ranks.run(body)
