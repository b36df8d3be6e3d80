"""Ranks that do not wait for their collectives on backend "ringcomm": Works and Futures in flight,
callbacks that wait, and what torch's users rely on where nobody waits."""

from __future__ import annotations

import datetime
import gc
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from faults.groups import open_group
from faults.rank import Rank
from patience import PATIENCE, until


def nested(rank: Rank) -> None:
    """Callbacks that wait for what other callbacks do, three deep: by a Future, by C++, and by what
    nobody but them knows. Rank 1 is late, so that nothing is over on rank 0 when it is asked for.
    """
    open_group()
    for wait in (_wait_for_future, _wait_in_cpp, _wait_for_event):
        assert _go_deeper(3, wait).tolist() == [2.0, 2.0]
    rank.emit("right")
    dist.barrier()
    dist.destroy_process_group()


def _go_deeper(depth: int, wait: Any) -> torch.Tensor:
    """The sum of ones, when the same was done in its callback so many times."""
    time.sleep(0.05 * dist.get_rank())
    total = torch.ones(2)
    future = dist.all_reduce(total, async_op=True).get_future()
    wait(future.then(lambda _: _go_deeper(depth - 1, wait) if depth else None))
    return total


def _wait_for_future(future: Any) -> None:
    future.wait()


def _wait_in_cpp(future: Any) -> None:
    torch.futures.wait_all([future])


def _wait_for_event(future: Any) -> None:
    told = threading.Event()
    future.add_done_callback(lambda _: told.set())
    assert told.wait(PATIENCE)


def asynchronous(rank: Rank) -> None:
    """Works and Futures: in flight, over, chained, and dropped."""
    me, n = open_group()
    tensors = [torch.full((1 << 16,), float(k + me)) for k in range(20)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    doubled = [w.get_future().then(lambda f: f.value()[0][0] * 2) for w in works]
    values = [float(f.wait()) for f in doubled]
    assert values == [2 * (n * k + n * (n - 1) / 2) for k in range(20)]
    assert all(w.is_completed() and w.is_success() and w.exception() is None for w in works)
    assert works[3].result()[0] is tensors[3] or torch.equal(works[3].result()[0], tensors[3])
    late, looked = torch.zeros(1), torch.zeros(1)
    if me == 0:
        dist.recv(looked, 1)
    work = dist.all_reduce(late, async_op=True)
    if me == 1:
        assert not work.is_completed()
        rank.attempt("in flight", lambda: work.wait(datetime.timedelta(milliseconds=20)))
        dist.send(looked, 0)
    work.wait()
    outputs = [torch.empty(3) for _ in range(n)]
    gathered = dist.all_gather(outputs, torch.full((3,), float(me)), async_op=True)
    assert gathered.get_future().wait()[n - 1][0] == n - 1
    assert [float(o[0]) for o in outputs] == [float(i) for i in range(n)]
    for _ in range(200):  # nobody waits for these
        dist.all_reduce(torch.ones(10), async_op=True)
    dist.barrier()
    rank.emit("right")
    dist.destroy_process_group()


def promises(rank: Rank) -> None:
    """What torch's users rely on: a barrier ends earlier works, and what is dropped arrives."""
    me, n = open_group()
    for asynchronous in (False, True):
        for number in range(5):
            tensors = [torch.full((2_000_000,), float(me + k)) for k in range(3)]
            for tensor in tensors:
                dist.all_reduce(tensor, async_op=True)
            barrier = dist.barrier(async_op=asynchronous)
            if asynchronous:
                barrier.wait()
            expected = [n * k + n * (n - 1) / 2 for k in range(3)]
            assert [float(t[-1]) for t in tensors] == expected, number
    rows, parts = [torch.zeros(5) for _ in range(n)], [torch.zeros(5) for _ in range(n)]
    bits, strided = torch.full((5,), 1 << me), torch.full((5, 2), float(me))[:, 0]
    wide = torch.zeros(n, 2)[:, 0]
    _drop_asynchronous(me, rows, parts, bits, strided, wide)
    arrived = (
        lambda: [float(row[4]) for row in rows] == [float(i) for i in range(n)],
        lambda: me != 0 or [float(part[4]) for part in parts] == [float(i) for i in range(n)],
        lambda: int(bits[4]) == (1 << n) - 1,
        lambda: float(strided[4]) == n * (n - 1) / 2,
        lambda: wide.tolist() == [float(i) for i in range(n)],
    )
    for number, has_arrived in enumerate(arrived):
        assert until(has_arrived, PATIENCE), number
    count = 262_139  # of no other tensor
    for _ in range(20):
        dist.all_gather([torch.empty(count) for _ in range(n)], torch.ones(count), async_op=True)
    dist.barrier()
    assert until(lambda: _alive(count) == 0, PATIENCE), _alive(count)
    last = torch.full((1000,), float(me))
    if me == 1:
        time.sleep(0.8)  # as long as the other waits for the end of what it has in flight
    work = dist.all_reduce(last, async_op=True)
    dist.destroy_process_group()
    assert work.wait()
    assert float(last[0]) == n * (n - 1) / 2
    rank.emit("right")


def _drop_asynchronous(
    me: int, rows: list[Any], parts: list[Any], bits: Any, strided: Any, wide: Any
) -> None:
    dist.all_gather(rows, torch.full((5,), float(me)), async_op=True)
    dist.gather(torch.full((5,), float(me)), parts if me == 0 else None, async_op=True)
    dist.all_reduce(bits, dist.ReduceOp.BOR, async_op=True)
    dist.all_reduce(strided, async_op=True)
    dist.all_to_all_single(wide, torch.full((len(rows),), float(me)), async_op=True)


def _alive(count: int) -> int:
    """Tensors of this many elements that Python holds."""
    gc.collect()
    return sum(type(o) is torch.Tensor and o.numel() == count for o in gc.get_objects())
