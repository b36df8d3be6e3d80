"""Every way to start an asynchronous collective, for lifetimes.py: ROADS by name.

Invariant: a road keeps nothing of what it starts but in the Started that it returns.
"""

from __future__ import annotations

import dataclasses
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
                values = np.asarray(torch.as_tensor(result).to(torch.float64))
                assert (values == self.expected).all(), (values, self.expected)


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
        return torch.full((rows * self.count,), self.mine, dtype=dtype)

    def numpy(self, rows: int = 1) -> Any:
        return np.full(rows * self.count, self.mine, np.float32)

    def buffer(self, rows: int = 1) -> Any:
        return memoryview(bytearray(self.numpy(rows).tobytes())).cast("f")

    def strided(self, rows: int = 1) -> torch.Tensor:
        return torch.full((rows * self.count, 2), self.mine)[:, 0]

    def dlpack(self) -> Any:
        """Is read-only, as torch's DLPack for numpy is."""
        return _Capsules(self.torch())


class _Capsules:
    """A tensor that has its memory by DLPack alone."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **how: Any) -> Any:
        return self._tensor.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


FACES: dict[str, Callable[[Side, int], Any]] = {
    "numpy": Side.numpy,
    "torch": Side.torch,
    "strided torch": Side.strided,
    "buffer": Side.buffer,
}
ROADS: dict[str, Callable[[Side], Started]] = {}


def road(name: str) -> Callable[[Callable[[Side], Started]], Callable[[Side], Started]]:
    def add(start: Callable[[Side], Started]) -> Callable[[Side], Started]:
        ROADS[name] = start
        return start

    return add


# ---- the methods of a communicator, of all kinds of tensors ----


def _native_roads() -> None:
    def allreduce(make: Any) -> Callable[[Side], Started]:
        def start(side: Side) -> Started:
            x = make(side, 1)
            return Started([side.comm.allreduce(x, async_op=True)], [x], [x], 3.0)

        return start

    def with_out(make: Any) -> Callable[[Side], Started]:
        def start(side: Side) -> Started:
            x, out = make(side, 1), make(side, 1)
            work = side.comm.allreduce(x, out=out, async_op=True)
            return Started([work], [x, out], [out], 3.0)

        return start

    def broadcast(make: Any) -> Callable[[Side], Started]:
        def start(side: Side) -> Started:
            x = make(side, 1)
            return Started([side.comm.broadcast(x, 1, async_op=True)], [x], [x], 2.0)

        return start

    def parts(name: str, rows_in: int, rows_out: int) -> Callable[[Any], Any]:
        def of(make: Any) -> Callable[[Side], Started]:
            def start(side: Side) -> Started:
                x, out = make(side, rows_in), make(side, rows_out)
                work = getattr(side.comm, name)(x, out=out, async_op=True)
                return Started([work], [x, out])

            return start

        return of

    kinds = {
        "allreduce": allreduce,
        "allreduce to out": with_out,
        "broadcast": broadcast,
        "allgather": parts("allgather", 1, 2),
        "reduce_scatter": parts("reduce_scatter", 2, 1),
        "alltoall": parts("alltoall", 2, 2),
    }
    for (kind, of), (face, make) in itertools.product(kinds.items(), FACES.items()):
        ROADS[f"{kind} of {face}"] = of(make)


_native_roads()


@road("allreduce of dlpack to out")
def _(side: Side) -> Started:
    x, out = side.dlpack(), side.numpy()
    return Started([side.comm.allreduce(x, out=out, async_op=True)], [x, out], [out], 3.0)


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


@road("reduce, gather and scatter")
def _(side: Side) -> Started:
    x, y, z = side.torch(), side.torch(), side.torch()
    all_y, all_z = None, None
    if side.comm.rank == 0:
        all_y, all_z = side.torch(2), side.torch(2).reshape(2, -1)
    comm = side.comm
    works = [
        comm.reduce(x, root=0, async_op=True),
        comm.gather(y, 0, out=all_y, async_op=True),
        comm.scatter(all_z, 0, out=z, async_op=True),
    ]
    return Started(works, [t for t in (x, y, z, all_y, all_z) if t is not None])


@road("send and receive")
def _(side: Side) -> Started:
    sent, got = side.torch(), side.numpy()
    other, third = 1 - side.comm.rank, side.torch()
    works = [
        side.comm.send(sent, other, async_op=True),
        side.comm.recv(got, other, async_op=True),
        side.comm.send(sent, other, tag=1, async_op=True),
        side.comm.recv(third, None, tag=1, async_op=True),
    ]
    return Started(works, [sent, got, third], [got, third], 3.0 - side.mine)


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
    works = [
        group.gather([rows] if root else [], [x], dist.GatherOptions()),
        group.scatter([y], [parts] if root else [], dist.ScatterOptions()),
    ]
    return Started(works, [x, y, *rows, *parts], [y], 1.0)


@road("group: reduce_scatter of a list and of one")
def _(side: Side) -> Started:
    group, out, other = side.group(), side.torch(), side.torch()
    parts, one = [side.torch(), side.torch()], side.torch(2)
    how = dist.ReduceScatterOptions()
    works = [group.reduce_scatter([out], [parts], how), group.reduce_scatter_single(other, one)]
    return Started(works, [out, other, *parts, one], [out, other], 3.0)


@road("group: all_to_all of lists and of one")
def _(side: Side) -> Started:
    group, outs = side.group(), [side.torch(), side.torch()]
    ins, one, whole = [side.torch(), side.torch()], side.torch(2), side.torch(2)
    works = [group.alltoall(outs, ins), group.all_to_all_single(whole, one)]
    return Started(works, [*outs, *ins, one, whole], [outs[1 - side.comm.rank]], 3.0 - side.mine)


@road("group: send and receive")
def _(side: Side) -> Started:
    group, sent, got = side.group(), side.torch(), side.torch()
    other = 1 - side.comm.rank
    works = [group.send([sent], other), group.recv([got], other)]
    return Started(works, [sent, got], [got], 3.0 - side.mine)


@road("DDP hook at int4")
def _(side: Side) -> Started:
    model = torch.nn.Linear(side.count, 1, bias=False)
    state = HookState("int4", side.comm, model=model, threshold=0)
    state._is_compared = True  # the comparison of settings would wait for the other rank
    bucket = Bucket([model.weight], [side.torch().reshape(1, -1)])
    future = allreduce_hook(state, bucket)
    return Started([future], [bucket.buffer(), *bucket.gradients(), model.weight])
