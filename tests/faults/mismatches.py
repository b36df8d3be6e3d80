"""Two ranks that call different things: what each gets to hear.

A case is the calls of rank 0 and those of rank 1, made one after the other on a communicator of
their own. World 3 adds a rank that does as rank 0 does. A barrier follows each: who has nothing to
receive is done before the other has called anything, and learns of it in the next call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from faults.rank import Rank, describe

import ringcomm

Call = Callable[[ringcomm.Communicator], Any]


def _tensor(count: int, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return np.ones(count, dtype=dtype)


def _allreduce(count: int = 64, op: str = "sum", dtype: str = "float32", **more: Any) -> Call:
    return lambda comm: comm.allreduce(_tensor(count, dtype), op, **more)


def _broadcast(root: int, count: int = 64) -> Call:
    return lambda comm: comm.broadcast(_tensor(count), root)


def _send(count: int, dtype: str = "float32") -> Call:
    return lambda comm: comm.send(_tensor(count, dtype), 1)


def _recv(count: int, dtype: str = "float32") -> Call:
    return lambda comm: comm.recv(_tensor(count, dtype), 0)


def _barrier(comm: ringcomm.Communicator) -> None:
    comm.barrier()


def _nothing(comm: ringcomm.Communicator) -> None:
    time.sleep(0.1)


#: name -> (rank 0's calls, rank 1's calls, words that both errors hold)
CASES: dict[str, tuple[list[Call], list[Call], tuple[str, ...]]] = {
    "order": (
        [_allreduce(), _broadcast(0)],
        [_broadcast(0), _allreduce()],
        ("allreduce", "broadcast"),
    ),
    "order, of which one is sent and done": (
        [_allreduce(), _broadcast(1)],
        [_broadcast(1), _allreduce()],
        ("allreduce",),
    ),
    "op": ([_allreduce(op="sum")], [_allreduce(op="max")], ("sum", "max")),
    "average": ([_allreduce(op="sum")], [_allreduce(op="avg")], ("sum", "avg")),
    "dtype": ([_allreduce(dtype="float32")], [_allreduce(dtype="int32")], ("f32", "i32")),
    "count": ([_allreduce(64)], [_allreduce(65)], ("64", "65")),
    "large count": ([_allreduce(1 << 21)], [_allreduce((1 << 21) + 1)], ("2097152", "2097153")),
    "little against much": ([_allreduce(1)], [_allreduce(1 << 21)], ("[1]", "2097152")),
    "nothing against something": ([_allreduce(0)], [_allreduce(7)], ("[0]", "[7]")),
    "something against nothing": ([_allreduce(7)], [_allreduce(0)], ("[7]", "[0]")),
    "compression": ([_allreduce()], [_allreduce(compression="bf16")], ("f32[64]", "bf16")),
    "other compression": (
        [_allreduce(compression="fp16")],
        [_allreduce(compression="bf16")],
        ("fp16", "bf16"),
    ),
    "root of a broadcast": ([_broadcast(0)], [_broadcast(1)], ("broadcast", "root")),
    "each for the other's broadcast": ([_broadcast(1)], [_broadcast(0)], ("broadcast", "root")),
    "root of a reduce": (
        [lambda c: c.reduce(_tensor(8), 0)],
        [lambda c: c.reduce(_tensor(8), 1)],
        ("reduce", "root"),
    ),
    "root of a gather": (
        [lambda c: c.gather(_tensor(8), 1)],
        [lambda c: c.gather(_tensor(8), 0)],
        ("gather", "root"),
    ),
    "root of a scatter": (
        [lambda c: c.scatter(_tensor(c.world_size), 1)],
        [lambda c: c.scatter(_tensor(c.world_size), 0)],
        ("scatter", "root"),
    ),
    "allreduce and reduce_scatter": (
        [_allreduce(6)],
        [lambda c: c.reduce_scatter(_tensor(6))],
        ("allreduce", "reduce_scatter"),
    ),
    "allgather and alltoall": (
        [lambda c: c.allgather(_tensor(6))],
        [lambda c: c.alltoall(_tensor(6))],
        ("allgather", "alltoall"),
    ),
    "barrier and allreduce": ([_barrier], [_allreduce()], ("barrier", "allreduce")),
    "allreduce and barrier": ([_allreduce()], [_barrier], ("barrier", "allreduce")),
    "barrier and empty allreduce": ([_barrier], [_allreduce(0)], ("barrier", "allreduce")),
    "after an equal one": (
        [_allreduce(), _allreduce(8)],
        [_allreduce(), _allreduce(9)],
        ("[8]", "[9]"),
    ),
    "a broadcast that was sent long ago": (
        [_broadcast(0, 8), _nothing],
        [_nothing, _broadcast(0, 9)],
        ("[8]", "[9]"),
    ),
    "size of a send": ([_send(8)], [_recv(9)], ("[8]", "[9]")),
    "size of a receive called first": ([_nothing, _send(9)], [_recv(8)], ("[9]", "[8]")),
    "size of a large send": ([_send(1 << 21)], [_recv(1 << 20)], ("2097152", "1048576")),
    "dtype of a send": ([_send(8)], [_recv(8, "int64")], ("f32", "i64")),
    "send of nothing": ([_send(0)], [_recv(8)], ("[0]", "[8]")),
    "receive of nothing": ([_send(8)], [_recv(0)], ("[8]", "[0]")),
}

#: the same for a rank 1 that calls one collective less and closes: rank 0 loses its peer
SHORT_CASES: dict[str, tuple[list[Call], list[Call]]] = {
    "allreduce": ([_allreduce(), _allreduce()], [_allreduce()]),
    "large allreduce": ([_allreduce(), _allreduce(1 << 21)], [_allreduce()]),
    "barrier": ([_allreduce(), _barrier], [_allreduce()]),
    "broadcast from the one that left": ([_barrier, _broadcast(1)], [_barrier]),
    "recv": ([lambda c: c.recv(_tensor(8), 1)], []),
    "large send": ([_send(1 << 24)], []),
}


def run_cases(rank: Rank) -> None:
    """All of CASES; an event of its own for each, of how its calls ended."""
    for name, (calls, other_calls, _) in CASES.items():
        _run(rank, name, [*(other_calls if rank.number == 1 else calls), _barrier])


def run_short_cases(rank: Rank) -> None:
    """All of SHORT_CASES."""
    for name, (calls, other_calls) in SHORT_CASES.items():
        _run(rank, name, other_calls if rank.number == 1 else calls)


def _run(rank: Rank, name: str, calls: list[Call]) -> None:
    comm = ringcomm.init()
    began = time.monotonic()
    error: BaseException | None = None
    try:
        for call in [_barrier, *calls]:
            call(comm)
    except ringcomm.RingcommError as caught:
        error = caught
    rank.emit(name, took=time.monotonic() - began, **describe(error))
    ringcomm.shutdown()
