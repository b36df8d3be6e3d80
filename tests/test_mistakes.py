"""What new users get wrong, and what they are told: what is wrong, and what to do instead.

Every mistake is made by one rank of two; nothing is sent, and both go on.
"""

from __future__ import annotations

import array
import dataclasses
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from ranks import World

import ringcomm
from ringcomm import Communicator, ConfigError, ErrorFeedback, FeedbackStore, TensorError

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with World(2) as world:
        yield world


def x() -> Any:
    return np.ones(4, np.float32)


class MPIsSum:
    """As mpi4py's MPI.SUM; importing that would start MPI in this process."""

    name = "MPI_SUM"

    def __repr__(self) -> str:
        return "<mpi4py.MPI.Op object at 0x7f>"


class ReducesOp:
    """As torch's ReduceOp.MAX prints."""

    def __repr__(self) -> str:
        return "<RedOpType.MAX: 3>"


class MPIsCommunicator:
    """Has a method of the same name as ours, with other arguments."""

    def allreduce(self, sendobj: Any, op: Any = None) -> Any: ...


def bfloat16() -> Any:
    """As torch.bfloat16 prints."""

    class Dtype:
        def __repr__(self) -> str:
            return "torch.bfloat16"

    return Dtype()


Call = Callable[[Communicator], Any]
STORE = FeedbackStore()

CONFIG_MISTAKES: list[tuple[Call, str]] = [
    # another library's communicator, or none
    (
        lambda c: ringcomm.allreduce(x(), comm=MPIsCommunicator()),
        r"give a ringcomm.Communicator; Communicator.create\(mpi=\.\.\.\) makes one",
    ),
    (lambda c: ringcomm.barrier(comm=0), "comm=0: give a ringcomm.Communicator"),
    (lambda c: ringcomm.barrier(comm=Communicator), "comm=<class .*give a ringcomm.Communicator"),
    (lambda c: Communicator(c.config), r"is made by ringcomm.init\(\), Communicator.create\(\) or"),
    # ops
    (lambda c: c.allreduce(x(), "SUM"), "did you mean sum?"),
    (lambda c: c.allreduce(x(), "mean"), "op='mean' is unknown; .*: did you mean avg?"),
    (lambda c: c.allreduce(x(), "product"), "did you mean prod?"),
    (lambda c: c.allreduce(x(), "summ"), "did you mean sum?"),
    (lambda c: c.allreduce(x(), MPIsSum()), "did you mean sum?"),
    (lambda c: c.allreduce(x(), ReducesOp()), "did you mean max?"),
    (lambda c: c.allreduce(x(), np.add), "did you mean sum?"),
    (lambda c: c.allreduce(x(), max), "did you mean max?"),
    (lambda c: c.allreduce(x(), "xor"), "give one of sum, avg, min, max, prod$"),
    (lambda c: c.allreduce(x(), ["sum"]), r"op=\['sum'\] is unknown"),
    # codecs
    (lambda c: c.allreduce(x(), compression="bf61"), "did you mean bf16?"),
    (lambda c: c.allreduce(x(), compression="BF16"), "did you mean bf16?"),
    (lambda c: c.allreduce(x(), compression=np.float16), "did you mean fp16?"),
    (lambda c: c.allreduce(x(), compression=bfloat16()), "did you mean bf16?"),
    (lambda c: c.allreduce(x(), compression="1bit"), "give one of none, bf16.*onebit"),
    (lambda c: c.allreduce(x(), compression=["bf16"]), r"\['bf16'\] is unknown; give one of none"),
    # feedback
    (
        lambda c: c.allreduce(x(), compression="int4", feedback=STORE),
        r'which the store has by the name of the tensor, as store\["layer1.weight"\]',
    ),
    (
        lambda c: c.allreduce(x(), compression="int4", feedback=ErrorFeedback),
        r"ErrorFeedback\(\), made once and kept",
    ),
    (
        lambda c: c.allreduce_many([x()], compression="int4", feedback=STORE),
        r"of a FeedbackStore \[store\[name\] for name in names\]",
    ),
    (lambda c: STORE[x()], "give a name, as a string"),
    # ranks
    (lambda c: c.broadcast(x(), 2), "rank 2 is not in a world of 2: give root= a rank from 0 to 1"),
    (lambda c: c.broadcast(x(), True), "rank True is not in a world of 2"),
    (lambda c: c.broadcast(x(), 0.5), "rank 0.5 is not in a world of 2"),
    (lambda c: c.gather(x(), 9), "rank 9 is not in a world of 2"),
    (lambda c: c.scatter(np.ones((2, 2)), None), "rank None is not in a world"),
    (lambda c: c.reduce(x(), "avg"), "root= a rank from 0 to 1, and op='avg' by its name"),
    (lambda c: c.send(x(), c.rank), "cannot send to or receive from itself"),
    (lambda c: c.recv(x(), c.rank), "cannot send to or receive from itself"),
    (lambda c: c.send(x(), -1), "give dst= a rank from 0 to 1"),
    (lambda c: c.recv(x(), -1), "give src= a rank from 0 to 1, or None for any"),
    (lambda c: c.send(x(), 1 - c.rank, tag=True), "tag=True: give an integer"),
    # the rest
    (lambda c: c.allreduce(x(), timeout=True), "timeout=True: give seconds above 0"),
    (lambda c: c.allreduce(x(), timeout=0), "timeout=0: give seconds above 0"),
    (lambda c: c.allreduce(x(), timeout=-1.0), "timeout=-1.0"),
    (lambda c: c.allreduce(x(), timeout="1"), "timeout='1'"),
    (lambda c: c.set_timeout(-1), "timeout=-1"),
    (lambda c: c.allreduce(x(), timeout=float("nan")), "timeout=nan: give seconds above 0"),
    (lambda c: c.allreduce(x(), timeout=float("inf")), "timeout=inf: give seconds above 0"),
    (lambda c: c.allreduce(x(), timeout=5e6), "at most 4 million"),
    (lambda c: c.split("red"), "color='red': give an integer"),
    (lambda c: c.split(0, key=0.5), "key=0.5: give an integer"),
    (lambda c: c.split(2**64), "color=18446744073709551616"),
    (lambda c: c.allreduce(x(), async_op=True, on_done=3), "on_done=3: give a function that takes"),
]

TENSOR_MISTAKES: list[tuple[Call, str]] = [
    # one for several, and several for one
    (lambda c: c.allreduce_many(x()), "takes a list of tensors, and this is one; for one there is"),
    (lambda c: c.allreduce_many(np.ones((2, 2))), "takes a list of tensors, and this is one"),
    (lambda c: c.allreduce_many(np.float32(1)), "takes a list of tensors, and this is one"),
    (lambda c: c.allreduce_many(array.array("f", [1])), "takes a list of tensors, and this is one"),
    (lambda c: c.allreduce_many({"a": x()}), r"by \[d\[name\] for name in sorted\(d\)\]"),
    (lambda c: c.allreduce_many(None), "takes a list of tensors, not None"),
    (lambda c: c.allreduce_many(3), "takes a list of tensors, not 3"),
    (lambda c: c.allreduce([x(), x()]), "by numpy.stack or torch.stack, or use allreduce_many"),
    (lambda c: c.alltoall([x(), x()]), "by numpy.stack or torch.stack"),
    (lambda c: c.broadcast({"a": x()}), "or use allreduce_many"),
    (lambda c: c.allreduce(t for t in [x()]), "or use allreduce_many"),
    # what is no tensor
    (lambda c: c.allreduce([1.0, 2.0]), r"of numbers make one by np.array\(\.\.\.\)$"),
    (lambda c: c.allreduce(1.5), r"of a number make one by np.array\(\[1.5\]\)$"),
    (lambda c: c.broadcast(0, x()), r"by np.array\(\[0\]\)"),
    (lambda c: c.allreduce("abc"), "or DLPack$"),
    (lambda c: c.allreduce(None), "NoneType is not a tensor: .* or DLPack$"),
    (lambda c: c.allreduce(types.SimpleNamespace(parameters=list)), "of a module pass its tensors"),
    (lambda c: c.allreduce(np.float32(1)), r"is a number, .*; pass np.array\(\[x\]\), or out="),
    (lambda c: c.allreduce(np.float64(1)), r"pass np.array\(\[x\]\), or out="),
    (lambda c: c.allreduce(np.ma.masked_array([1.0, 2.0], [0, 1])), "has a mask, .*filled"),
    # dtypes
    (lambda c: c.allreduce(np.ones(3, bool)), "dtype bool is not supported; view it as uint8"),
    (lambda c: c.allreduce(np.ones(3, complex)), "dtype complex128 .* as real numbers, two for"),
    (lambda c: c.allreduce(np.ones(3, ">f4")), "dtype big-endian float32 .* machine's byte order"),
    (lambda c: c.allreduce(np.ones(3, np.int16)), "dtype int16 is not supported; convert it, or"),
    (lambda c: c.allreduce(np.array([1, "a"], object)), "dtype object is not supported"),
    (lambda c: c.allreduce(np.zeros(2, [("a", "f4")])), "dtype void32 is not supported"),
    (lambda c: c.allreduce(np.ones(2, np.int32), compression="bf16"), "not int32; leave it out"),
    # shapes and results
    (lambda c: c.scatter(np.ones((3, 2))), r"dimension must be 2 .*\(3, 2\)"),
    (lambda c: c.scatter(None, c.rank), "give root's tensor"),
    (lambda c: c.scatter(None, 1 - c.rank), "on the other ranks out="),
    (lambda c: c.reduce_scatter(np.ones(3)), r"must divide by 2 .*\(3,\)"),
    (lambda c: c.reduce_scatter(np.array(1.0)), r"must divide by 2 .*\(\)"),
    (lambda c: c.alltoall(np.ones(3)), "must divide by 2"),
    (lambda c: c.allreduce(x(), out=np.ones(5, np.float32)), "give one of its size and dtype, or"),
]


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [(call, ConfigError, says) for call, says in CONFIG_MISTAKES]
    + [(call, TensorError, says) for call, says in TENSOR_MISTAKES],
)
def test_a_mistake_is_told_with_what_to_do(
    call: Call, kind: type[Exception], says: str, pair: World
) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            before = comm.stats()["works"]
            for _ in range(2):  # the short way remembers what it has seen
                with pytest.raises(
                    kind, match=says.replace("?", r"\?") if "mean" in says else says
                ):
                    call(comm)
            assert comm.stats()["works"] == before
        assert comm.allreduce(np.ones(1)).tolist() == [2]

    pair.run(body)


def test_what_is_not_a_mistake(pair: World) -> None:
    def body(comm: Communicator) -> None:
        assert comm.allreduce_many(np.ones(1) for _ in range(2)) == [2, 2]
        assert comm.broadcast(np.float64(7) if comm.rank == 0 else np.zeros(())) == 7
        part = comm.split(comm.rank < 1)
        assert part is not None
        assert part.world_size == 1
        part.close()
        part = comm.split(np.bool_(comm.rank < 1))  # type: ignore[arg-type]
        assert part is not None
        part.close()
        assert comm.host_of("a") is None  # type: ignore[arg-type]

    pair.run(body)


def test_numpys_integers_are_ranks() -> None:
    with Communicator.create(np.int64(0), np.int32(1)) as comm:  # type: ignore[arg-type]
        assert type(comm.rank) is int


# ---- torch ----


def leaf() -> Any:
    import torch

    return torch.ones(3, requires_grad=True)


def ones() -> Any:
    import torch

    return torch.ones(3)


def computed() -> Any:
    return leaf() * 2


GRAD: list[Call] = [
    lambda c: c.allreduce(computed()),
    lambda c: c.allreduce(computed(), async_op=True),
    lambda c: c.allreduce(ones(), out=computed()),
    lambda c: c.allreduce_many([ones(), computed()]),
    lambda c: c.broadcast(computed(), root=0),
    lambda c: c.broadcast(computed(), root=1),
    lambda c: c.reduce(computed(), root=0),
    lambda c: c.recv(computed(), 1),
    lambda c: c.scatter(None, 1, out=computed()),
]


@pytest.mark.torch
@pytest.mark.parametrize("call", GRAD)
def test_what_autograd_would_not_see_is_refused(call: Call, pair: World) -> None:
    pytest.importorskip("torch")

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            before = comm.stats()["works"]
            for _ in range(2):  # the short way remembers what it has seen
                with pytest.raises(TensorError, match=r"x\.detach\(\), .*torch\.no_grad\(\)"):
                    call(comm)
            assert comm.stats()["works"] == before
        assert comm.allreduce(np.ones(1)).tolist() == [2]

    pair.run(body)


@pytest.mark.torch
def test_gradients_and_detached_tensors_are_taken(pair: World) -> None:
    torch = pytest.importorskip("torch")

    def body(comm: Communicator) -> None:
        weight = leaf()
        (weight * 3).sum().backward()
        assert comm.allreduce(weight.grad).tolist() == [6] * 3
        assert comm.allreduce(weight.detach()).tolist() == [2] * 3
        with torch.no_grad():
            assert comm.allreduce(weight).tolist() == [4] * 3
            assert comm.broadcast(weight).tolist() == [4] * 3
        assert comm.allgather(weight)[1].tolist() == [4] * 3  # is only read
        assert comm.broadcast(weight) is weight

    pair.run(body)


@pytest.mark.torch
def test_a_backward_pass_that_needs_what_a_leaf_was_raises(pair: World) -> None:
    pytest.importorskip("torch")

    def body(comm: Communicator) -> None:
        weight = leaf()
        loss = (weight * weight).sum()
        comm.broadcast(weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        (weight * weight).sum().backward()
        assert weight.grad.tolist() == [2] * 3

    pair.run(body)


TORCH_MISTAKES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda t: t.ones(3, dtype=t.bool), "dtype torch.bool is not supported; view it as uint8"),
    (lambda t: t.ones(3, dtype=t.complex64), "as real numbers, two for each"),
    (lambda t: t.ones(3, device="meta"), "has no memory; make it on the CPU or a GPU"),
    (lambda t: t.ones(3, 3).to_sparse(), "layout torch.sparse_coo is not supported; pass a dense"),
    (lambda t: t.nn.Linear(2, 2), "of a module pass its tensors"),
    (lambda t: t.nn.Linear(2, 2).parameters(), "or use allreduce_many"),
]


@pytest.mark.torch
@pytest.mark.parametrize(("make", "says"), TORCH_MISTAKES)
def test_a_mistake_with_torch(make: Callable[[Any], Any], says: str, pair: World) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TensorError, match=says):
        pair.comms[0].allreduce(make(torch))


@pytest.mark.torch
def test_options_of_a_process_group() -> None:
    pytest.importorskip("torch")
    from ringcomm.torch import Options

    for name, says in (("compresion", "did you mean compression?"), ("lane", "mean lanes?")):
        with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
            Options(**{name: 2})


@pytest.mark.torch
def test_a_store_needs_no_address_of_a_master() -> None:
    torch = pytest.importorskip("torch")
    from ranks import _in_threads

    store = torch.distributed.HashStore()

    def create(rank: int) -> list[float]:
        with Communicator.create(rank, 2, store=store) as comm:
            return comm.allreduce(np.ones(1)).tolist()  # type: ignore[no-any-return]

    assert _in_threads(create, [0, 1], 30.0, lambda: None) == [[2.0], [2.0]]


def test_what_is_looked_for_in_ringcomm_torch() -> None:
    ours = pytest.importorskip("ringcomm.torch")
    shown = dir(ours)
    assert set(ours.__all__) <= set(shown)
    assert {"optim", "outer", "sparse"} <= set(shown)
    assert not {"hooks", "backend", "settings", "annotations"} & set(shown)
    assert all(hasattr(ours, name) for name in shown)
    with pytest.raises(AttributeError, match=r"did you mean ringcomm\.torch\.optim\.OneBitAdam\?"):
        ours.OneBitAdam  # noqa: B018
    with pytest.raises(AttributeError, match="did you mean HookState"):
        ours.HokState  # noqa: B018


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("optim.OneBitAdam", {"freeze_step": 400}, "freeze"),
        ("optim.OneBitLamb", {"freeze_step": 400}, "freeze"),
        ("optim.ZeroOneAdam", {"maxnorm": 1.0}, "max_norm"),
        ("optim.SGD", {"overlaps": True}, "overlap"),
        ("optim.Lion", {"spanbytes": 4}, "span_bytes"),
        ("attach", {"treshold": 4}, "threshold"),
        ("Options", {"interface": ("lo",)}, "interfaces"),
    ],
)
def test_a_misspelt_setting_is_told_with_the_one_that_was_meant(
    name: str, given: dict[str, Any], meant: str
) -> None:
    made = operator.attrgetter(name)(pytest.importorskip("ringcomm.torch"))
    says = rf"{name.rpartition('.')[2]}\(\) has no argument .*: did you mean {meant}\?"
    with pytest.raises(ConfigError, match=says):
        made(**given)


def test_options_take_every_field_of_a_config() -> None:
    options = pytest.importorskip("ringcomm.torch.options")
    fields = {field.name for field in dataclasses.fields(ringcomm.Config)}
    assert set(options._ConfigFields.__annotations__) == fields
