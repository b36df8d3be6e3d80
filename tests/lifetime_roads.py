"""Every way to start an asynchronous collective, for lifetimes.py: ROADS by name.

Invariant: a road keeps nothing of what it starts but in the Started that it returns.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ddp_buckets import Bucket

from ringcomm import Communicator, ErrorFeedback
from ringcomm.sparse import SparseExchange
from ringcomm.torch import HookState, Options, allreduce_hook
from ringcomm.torch.group import RingcommGroup


@dataclasses.dataclass
class Started:
    """A collective in flight.

    Attributes:
        works: to wait for.
        given: the tensors of the call, in- and outputs.
        results: which of them receive a result.
        expected: what all elements of the results become; None: whatever.
    """

    works: list[Any]
    given: list[Any]
    results: list[Any] = dataclasses.field(default_factory=list)
    expected: float | None = None

    def finish(self) -> None:
        for work in self.works:
            work.wait()
        for result in self.results:
            if self.expected is not None:
                values = _values(result)
                assert (values == self.expected).all(), (values, self.expected)


def _values(tensor: Any) -> Any:
    """Its elements as numpy's, of all kinds of tensors."""
    is_array = hasattr(tensor, "__array_interface__")
    return np.asarray(tensor) if is_array else torch.as_tensor(tensor).to(torch.float64).numpy()


class Side:
    """What a road has on each rank."""

    def __init__(self, comm: Communicator, count: int) -> None:
        self.comm, self.count = comm, count
        self.mine = float(comm.rank + 1)  # 1 and 2: the sum is 3
        self._groups: list[Any] = []

    def group(self, **options: Any) -> Any:
        """A group, which closes the communicator when it is dropped: it lives as long as this."""
        self._groups.append(RingcommGroup(None, self.comm, Options(**options)))
        return self._groups[-1]

    def torch(self, rows: int = 1, dtype: Any = torch.float32) -> torch.Tensor:
        return torch.full(self._shape(rows), self.mine, dtype=dtype)

    def numpy(self, rows: int = 1) -> Any:
        return np.full(self._shape(rows), self.mine, np.float32)

    def buffer(self, rows: int = 1) -> Any:
        return memoryview(bytearray(self.numpy(rows).tobytes())).cast("f", self._shape(rows))

    def strided(self, rows: int = 1) -> torch.Tensor:
        return torch.full((*self._shape(rows), 2), self.mine)[..., 0]

    def interface(self, rows: int = 1) -> Any:
        return _Interface(self.numpy(rows))

    def dlpack(self, rows: int = 1) -> Any:
        """Is read-only, as torch's DLPack for numpy is."""
        return _Capsules(self.torch(rows))

    def _shape(self, rows: int) -> list[int]:
        return [self.count] if rows == 1 else [rows, self.count]


class _Capsules:
    """A tensor that has its memory by DLPack alone."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **how: Any) -> Any:
        return self._tensor.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


class _Interface:
    """A tensor that has its memory by numpy's array interface alone."""

    def __init__(self, array: Any) -> None:
        self._array = array

    @property
    def __array_interface__(self) -> Any:
        return self._array.__array_interface__


Make = Callable[[Side, int], Any]
FACES: dict[str, tuple[Make, Make]] = {  # of a tensor, and of out
    "numpy": (Side.numpy, Side.numpy),
    "torch": (Side.torch, Side.torch),
    "strided torch": (Side.strided, Side.strided),
    "buffer": (Side.buffer, Side.buffer),
    "array interface": (Side.interface, Side.interface),
    "dlpack": (Side.dlpack, Side.numpy),
}
ROADS: dict[str, Callable[[Side], Started]] = {}


def road(name: str) -> Callable[[Callable[[Side], Started]], Callable[[Side], Started]]:
    def add(start: Callable[[Side], Started]) -> Callable[[Side], Started]:
        ROADS[name] = start
        return start

    return add


# ---- the methods of a communicator, of all kinds of tensors ----


def _native_roads() -> None:
    def in_place(side: Side, make: Make, _: Make) -> Started:
        x, y, z = make(side, 1), make(side, 1), make(side, 1)
        works = [
            side.comm.allreduce(x, async_op=True),
            side.comm.broadcast(y, 1, async_op=True),
            side.comm.reduce(z, 1, async_op=True),
        ]
        return Started(works, [x, y, z], [x], 3.0)

    def to_out(side: Side, make: Make, make_out: Make) -> Started:
        x, y, out, other = make(side, 1), make(side, 1), make_out(side, 1), make_out(side, 1)
        works = [
            side.comm.allreduce(x, out=out, async_op=True),
            side.comm.reduce(y, out=other if side.comm.rank == 0 else None, async_op=True),
        ]
        return Started(works, [x, y, out, other], [out], 3.0)

    def parts(side: Side, make: Make, make_out: Make) -> Started:
        works, given = [], []
        for name, rows_in, rows_out in (
            ("allgather", 1, 2),
            ("reduce_scatter", 2, 1),
            ("alltoall", 2, 2),
        ):
            x, out = make(side, rows_in), make_out(side, rows_out)
            works.append(getattr(side.comm, name)(x, out=out, async_op=True))
            given += [x, out]
        return Started(works, given)

    def of_a_root(side: Side, make: Make, make_out: Make) -> Started:
        here = side.comm.rank == 0
        x, gathered = make(side, 1), make_out(side, 2) if here else None
        rows, out = make(side, 2) if here else None, make_out(side, 1)
        works = [
            side.comm.gather(x, 0, out=gathered, async_op=True),
            side.comm.scatter(rows, 0, out=out, async_op=True),
        ]
        return Started(works, [t for t in (x, gathered, rows, out) if t is not None], [out], 1.0)

    def messages(side: Side, make: Make, make_out: Make) -> Started:
        sent, got, third = make(side, 1), make_out(side, 1), make_out(side, 1)
        other = 1 - side.comm.rank
        works = [
            side.comm.send(sent, other, async_op=True),
            side.comm.recv(got, other, async_op=True),
            side.comm.send(sent, other, tag=1, async_op=True),
            side.comm.recv(third, None, tag=1, async_op=True),
        ]
        return Started(works, [sent, got, third], [got, third], 3.0 - side.mine)

    kinds = {
        "allreduce, broadcast and reduce": in_place,
        "allreduce and reduce to out": to_out,
        "allgather, reduce_scatter and alltoall": parts,
        "gather and scatter": of_a_root,
        "send and receive": messages,
    }
    for (kind, start), (face, makes) in itertools.product(kinds.items(), FACES.items()):
        if start is not in_place or face != "dlpack":  # which cannot be written to
            ROADS[f"{kind} of {face}"] = lambda side, s=start, m=makes: s(side, *m)


_native_roads()


@road("allreduce at int4 with feedback")
def _(side: Side) -> Started:
    x = side.torch()
    feedback = ErrorFeedback()
    work = side.comm.allreduce(x, "avg", compression="int4", feedback=feedback, async_op=True)
    return Started([work], [x, feedback])


@road("allreduce of float64 at bf16")
def _(side: Side) -> Started:
    x = side.numpy().astype(np.float64)
    return Started([side.comm.allreduce(x, compression="bf16", async_op=True)], [x], [x], 3.0)


@road("allreduce_many")
def _(side: Side) -> Started:
    tensors = [side.torch(), side.numpy(), side.strided(), side.torch(2)]
    return Started([side.comm.allreduce_many(tensors, async_op=True)], tensors, tensors, 3.0)


@road("sparse exchange")
def _(side: Side) -> Started:
    exchange = SparseExchange(side.comm, side.count, density=1 / 4)
    return Started([exchange.submit(side.numpy())], [exchange])


# ---- a process group of torch ----


def _all_reduces() -> None:
    kind = dist.ReduceOp
    cases: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("sum", kind.SUM, torch.float32, {}),
        ("maximum", kind.MAX, torch.int64, {}),
        ("average at int8", kind.AVG, torch.float32, {"compression": "int8"}),
        ("complex sum", kind.SUM, torch.complex64, {}),
        ("bitwise or", kind.BOR, torch.int32, {}),
        ("truth values", kind.MAX, torch.bool, {}),
        ("half sum", kind.SUM, torch.float16, {}),
    ]
    for name, op, dtype, options in cases:

        def start(side: Side, op: Any = op, dtype: Any = dtype, options: Any = options) -> Started:
            x = side.torch(dtype=dtype)
            how = dist.AllreduceOptions()
            how.reduceOp = op
            return Started([side.group(**options).allreduce([x], how)], [x])

        ROADS[f"group: all_reduce, {name}"] = start


_all_reduces()


@road("group: all_reduce with a Future")
def _(side: Side) -> Started:
    x = side.torch()
    work = side.group().allreduce([x], dist.AllreduceOptions())
    return Started([work.get_future()], [x], [x], 3.0)


@road("group: all_reduce_coalesced")
def _(side: Side) -> Started:
    tensors = [side.torch(), side.torch(2)]
    how = dist.AllreduceCoalescedOptions()
    return Started([side.group().allreduce_coalesced(tensors, how)], tensors, tensors, 3.0)


@road("group: broadcast and reduce")
def _(side: Side) -> Started:
    group, x, y = side.group(), side.torch(), side.torch()
    source, target = dist.BroadcastOptions(), dist.ReduceOptions()
    source.rootRank = target.rootRank = 1
    return Started([group.broadcast([x], source), group.reduce([y], target)], [x, y], [x], 2.0)


@road("group: all_gather to lists and to ones, coalesced")
def _(side: Side) -> Started:
    group, x, y = side.group(), side.torch(), side.torch(2)
    lists, ones = [[side.torch(), side.torch(2)] for _ in range(2)], [side.torch(2), side.torch(4)]
    works = [
        group.allgather_coalesced(lists, [x, y]),
        group.all_gather_single_coalesced(ones, [x, y]),
    ]
    return Started(
        works, [x, y, *lists[0], *lists[1], *ones], lists[1 - side.comm.rank], 3.0 - side.mine
    )


@road("group: all_gather to a list and to one")
def _(side: Side) -> Started:
    group, x = side.group(), side.torch()
    rows, one = [side.torch(), side.torch()], side.torch(2)
    works = [group.allgather([rows], [x]), group.all_gather_single(one, x)]
    return Started(works, [x, *rows, one], [rows[1 - side.comm.rank]], 3.0 - side.mine)


@road("group: gather and scatter")
def _(side: Side) -> Started:
    group, x, y = side.group(), side.torch(), side.torch()
    root = side.comm.rank == 0
    rows = [side.torch(), side.torch()] if root else []
    parts = [side.torch(), side.torch()] if root else []
    whole = side.torch(2)
    works = [
        group.gather([rows] if root else [], [x], dist.GatherOptions()),
        group.gather_single(whole, x, dist.GatherOptions()),
        group.scatter([y], [parts] if root else [], dist.ScatterOptions()),
    ]
    return Started(works, [x, y, *rows, *parts, whole], [y], 1.0)


@road("group: reduce_scatter of a list and of one")
def _(side: Side) -> Started:
    group, out, other = side.group(), side.torch(), side.torch()
    parts, one = [side.torch(), side.torch()], side.torch(2)
    how = dist.ReduceScatterOptions()
    outs, ins = [side.torch(), side.torch(2)], [side.torch(2), side.torch(4)]
    works = [
        group.reduce_scatter([out], [parts], how),
        group.reduce_scatter_single(other, one),
        group.reduce_scatter_single_coalesced(outs, ins),
    ]
    return Started(works, [out, other, *parts, one, *outs, *ins], [out, other, *outs], 3.0)


@road("group: all_to_all of lists and of one")
def _(side: Side) -> Started:
    group, outs = side.group(), [side.torch(), side.torch()]
    ins, one, whole = [side.torch(), side.torch()], side.torch(2), side.torch(2)
    works = [group.alltoall(outs, ins), group.all_to_all_single(whole, one)]
    return Started(works, [*outs, *ins, one, whole], [outs[1 - side.comm.rank]], 3.0 - side.mine)


@road("group: send and receive")
def _(side: Side) -> Started:
    group, sent, got, third = side.group(), side.torch(), side.torch(), side.torch()
    other = 1 - side.comm.rank
    works = [
        *(group.send([sent], other), group.recv([got], other)),
        *(group.send([sent], other, 1), group.recv_anysource([third], 1)),
    ]
    return Started(works, [sent, got, third], [got, third], 3.0 - side.mine)


@road("DDP hook at int4")
def _(side: Side) -> Started:
    model = torch.nn.Linear(side.count, 1, bias=False)
    state = HookState("int4", side.comm, model=model, threshold=0)
    state._is_compared = True  # the comparison of settings would wait for the other rank
    bucket = Bucket([model.weight], [side.torch().reshape(1, -1)])
    future = allreduce_hook(state, bucket)
    return Started([future], [bucket.buffer(), *bucket.gradients(), model.weight])


# ---- JAX, whose arrays are only read: it takes over the memory of the results ----


class TreeStarted:
    """A TreeWork that looks at its results.

    Args:
        expected: what all elements become.
    """

    def __init__(self, work: Any, expected: float) -> None:
        self._work, self._expected = work, expected

    def wait(self, *timeout: float) -> None:
        import jax

        for leaf in jax.tree.leaves(self._work.wait(*timeout)):
            assert (np.asarray(leaf) == self._expected).all(), (leaf, self._expected)


def _jax_roads() -> None:
    def start(name: str, expected: float, **how: Any) -> Callable[[Side], Started]:
        def of(side: Side) -> Started:
            import jax.numpy as jnp

            import ringcomm.jax

            leaves = [jnp.full(size, side.mine, jnp.float32) for size in (side.count, 10, LARGE)]
            function = getattr(ringcomm.jax, name)
            work = function(list(leaves), comm=side.comm, async_op=True, **how)
            return Started([TreeStarted(work, expected)], leaves)

        return of

    ROADS["JAX: allreduce"] = start("allreduce", 3.0)
    ROADS["JAX: pmean at bf16"] = start("pmean", 1.5, compression="bf16")


LARGE = 100_000  # elements that fusion.py reduces alone
if importlib.util.find_spec("jax") is not None:  # not with every release of torch
    _jax_roads()
