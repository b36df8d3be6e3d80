"""Ranks of a torch process group on backend "ringcomm": every collective beside gloo's, and what
happens at the edges."""

from __future__ import annotations

import datetime
import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from faults.rank import Rank, describe
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch_versions import before

import ringcomm
import ringcomm.torch

NUMBERS = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.int8,
    torch.uint8,
)
MOVED = (torch.bool, torch.int16, torch.complex64, torch.complex128)
Ops = dist.ReduceOp
# torch's names from 2.13 on, and before
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def open_group(backend: str = "ringcomm", **options: Any) -> tuple[int, int]:
    torch.set_num_threads(1)
    dist.init_process_group(backend, **options)
    return dist.get_rank(), dist.get_world_size()


def _draw(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, 5, shape, generator=generator)
    return whole.to(dtype) if dtype != torch.bool else whole > 2


def _both(call: Any, tensors: list[torch.Tensor], groups: list[Any], what: str) -> None:
    """The call on copies of the tensors by both groups: the same results."""
    results = []
    for group in groups:
        copies = [t.clone() for t in tensors]
        call(copies, group)
        results.append(copies)
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs), f"{what}: {ours} and not {theirs}"


def collectives(rank: Rank) -> None:
    """Each of them on both backends, over dtypes, shapes, strides and roots."""
    me, n = open_group()
    groups = [dist.group.WORLD, dist.new_group(backend="gloo")]
    for number, dtype in enumerate((*NUMBERS, *MOVED)):
        everyones = [_draw(10 * number + r, (n, 6), dtype) for r in range(n)]
        _moves(everyones, me, n)
        if dtype in NUMBERS:
            _reductions(everyones[me], groups, me, n)
    _bits(groups, me)
    rank.emit("equal")
    dist.barrier()
    dist.destroy_process_group()


def _moves(everyones: list[torch.Tensor], me: int, n: int) -> None:
    x = everyones[me]
    for root in range(n):
        copy = x.t().clone().t() if root else x.clone()  # strided, too
        dist.broadcast(copy, root)
        assert torch.equal(copy, everyones[root])
        rows = [torch.zeros_like(x) for _ in range(n)]
        dist.gather(x, rows if me == root else None, root)
        assert me != root or _equal(rows, everyones)
        part = torch.zeros_like(x)
        dist.scatter(part, everyones if me == root else None, root)
        assert torch.equal(part, x)
    rows = [torch.zeros_like(x) for _ in range(n)]
    dist.all_gather(rows, x)
    assert _equal(rows, everyones)
    whole = torch.cat(rows).zero_()
    all_gather_single(whole, x)
    assert torch.equal(whole, torch.cat(everyones))
    exchanged = torch.zeros_like(x)
    dist.all_to_all_single(exchanged, x)
    assert torch.equal(exchanged, torch.stack([one[me] for one in everyones]))


def _equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def _reductions(x: torch.Tensor, groups: list[Any], me: int, n: int) -> None:
    for op in (Ops.SUM, Ops.PRODUCT, Ops.MIN, Ops.MAX):
        name = f"{x.dtype} {op}"
        _both(lambda c, g, o=op: dist.all_reduce(c[0], o, group=g), [x], groups, name)
        total, part = x.clone(), torch.zeros(1, 6, dtype=x.dtype)
        dist.all_reduce(total, op)
        reduce_scatter_single(part, x, op)  # of which some releases of gloo know only sums
        assert torch.equal(part[0], total[me]), name
        for root in range(n):
            mine = [dist.group.WORLD, groups[1]]
            results = []
            for group in mine:
                copy = x.clone()
                dist.reduce(copy, root, op, group=group)
                results.append(copy)
            assert me != root or torch.equal(*results), name


def _bits(groups: list[Any], me: int) -> None:
    x = torch.tensor([6 + me, 12 << me, 255])
    for op in (Ops.BAND, Ops.BOR, Ops.BXOR):
        _both(lambda c, g, o=op: dist.all_reduce(c[0], o, group=g), [x], groups, str(op))
    truth = torch.tensor([True, me == 0, False])
    for op, wanted in (
        (Ops.SUM, [True, True, False]),
        (Ops.PRODUCT, [True, False, False]),
        (Ops.BXOR, None),
    ):
        copy = truth.clone()
        dist.all_reduce(copy, op)
        assert wanted is None or copy.tolist() == wanted


def launched(rank: Rank) -> None:
    """A group by the variables of Open MPI's launcher alone."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    for scope in ("WORLD", "WORLD_LOCAL"):
        os.environ[f"OMPI_COMM_{scope}_RANK"] = str(rank.number)
        os.environ[f"OMPI_COMM_{scope}_SIZE"] = str(rank.world_size)
    _, n = open_group(init_method="ringcomm://")
    x = torch.ones(3)
    dist.all_reduce(x)
    assert (n, x[0]) == (2, 2)
    rank.emit("right")
    dist.destroy_process_group()


def by_functions(rank: Rank) -> None:
    """ringcomm's own functions use the default group, unless ringcomm.init has been called."""
    me, n = open_group()
    group = dist.group.WORLD
    assert ringcomm.is_initialized()
    assert ringcomm.default_communicator() is group.comm  # type: ignore[union-attr]
    assert (ringcomm.rank(), ringcomm.world_size()) == (me, n)
    assert ringcomm.allreduce(torch.ones(3)).tolist() == [float(n)] * 3
    with ringcomm.init(0, 1):
        assert ringcomm.world_size() == 1
        assert ringcomm.torch.HookState().comm is group.comm  # type: ignore[union-attr]
    ringcomm.shutdown()
    ringcomm.barrier()
    dist.destroy_process_group()
    assert not ringcomm.is_initialized()
    with pytest.raises(ringcomm.NotInitializedError, match=r'init_process_group\("ringcomm"\)'):
        ringcomm.barrier()
    rank.emit("right")


def check_compiled() -> None:
    """Collectives within compiled code."""
    me, n = dist.get_rank(), dist.get_world_size()
    calls = (_functional, _plain)
    wanted = [call(torch.full((2 * n,), 1.0 + me)) for call in calls]
    for call, results in zip(calls, wanted, strict=True):
        torch._dynamo.reset()
        made = torch.compile(call, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            ours = made(torch.full((2 * n,), 1.0 + me))
            assert _equal(ours, results), (call, ours)


def _functional(x: torch.Tensor) -> list[torch.Tensor]:
    group = dist.group.WORLD
    total = functional.all_reduce(x * 2, "sum", group)
    rows = functional.all_gather_tensor(total[:2] + x[:2], 0, group)
    part = functional.reduce_scatter_tensor(rows, "sum", 0, group)
    swapped = functional.all_to_all_single(rows + x, None, None, group)
    first = functional.broadcast(x + 1, 0, group)
    return [total + 1, rows, part, swapped, first]


def _plain(x: torch.Tensor) -> list[torch.Tensor]:
    total, rows = x * 3, torch.empty(dist.get_world_size() * len(x))
    dist.all_reduce(total)
    all_gather_single(rows, total + x)
    return [total, rows]


def shapes(rank: Rank) -> None:
    """Uneven exchanges, strides, averages, scaled and sparse sums, objects, functional ones."""
    me, n = open_group()
    sends, takes = [me + 1 + i for i in range(n)], [i + 1 + me for i in range(n)]
    out = torch.empty(sum(takes), 2)
    dist.all_to_all_single(out, torch.full((sum(sends), 2), float(me)), takes, sends)
    assert out[:, 0].tolist() == [float(i) for i in range(n) for _ in range(takes[i])]
    lists = [torch.empty(i + 1, dtype=torch.bool) for i in range(n)]
    dist.all_to_all(lists, [torch.full((me + 1,), i == me) for i in range(n)])
    assert [part.tolist() for part in lists] == [[i == me] * (i + 1) for i in range(n)]
    wide = torch.zeros(6, 6)
    column = wide[:, 1]
    column += me + 1
    dist.all_reduce(column)
    assert wide[:, 1].tolist() == [n * (n + 1) / 2] * 6
    assert wide.sum() == column.sum()
    mean = torch.full((3,), float(me))
    dist.all_reduce(mean, Ops.AVG)
    assert mean[0] == (n - 1) / 2
    scaled = torch.full((3,), 1.0)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    assert scaled[0] == n / 2
    sparse = torch.sparse_coo_tensor([[me, 5]], [1.0, 2.0], (8,))
    dist.all_reduce(sparse)
    assert sparse.to_dense()[5] == 2 * n
    with dist._coalescing_manager():
        ones = [torch.ones(4) * k for k in range(3)]
        for one in ones:
            dist.all_reduce(one)
    assert [float(one[0]) for one in ones] == [0, n, 2 * n]
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, {"rank": me})
    assert objects == [{"rank": i} for i in range(n)]
    told = [me, "x"]
    dist.broadcast_object_list(told, 1)
    assert told == [1, "x"]
    mesh = init_device_mesh("cpu", (n,))
    total = functional.all_reduce(torch.ones(5), "sum", mesh)
    assert total.tolist() == [n] * 5
    parts = functional.all_gather_tensor(torch.full((2,), float(me)), 0, mesh)
    assert parts.tolist() == [float(i) for i in range(n) for _ in range(2)]
    mine = functional.reduce_scatter_tensor(torch.ones(2 * n), "sum", 0, mesh)
    assert mine.tolist() == [n, n]
    exchanged = functional.all_to_all_single(torch.full((n,), float(me)), None, None, mesh)
    assert exchanged.tolist() == [float(i) for i in range(n)]
    rank.emit("right")
    dist.destroy_process_group()


def messages(rank: Rank) -> None:
    """Tags out of order, any source, a batch, and more in flight than a peer may run ahead."""
    me, n = open_group()
    if me == 0:
        big = torch.full((3 << 20,), 1.5)
        works = [dist.isend(big, 1, tag=1), dist.isend(torch.ones(3), 1, tag=2)]
        seen = set()
        for _ in range(2 * (n - 1)):
            got = torch.empty(2, dtype=torch.int64)
            source = dist.recv(got, tag=9)
            assert got.tolist() == [source, source]
            seen.add(source)
        assert seen == set(range(1, n))
        for work in works:
            assert work is not None
            work.wait()
    else:
        for _ in range(2):
            dist.send(torch.tensor([me, me]), 0, tag=9)
    if me == 1:
        small, large = torch.empty(3), torch.empty(3 << 20)
        dist.recv(small, 0, tag=2)
        dist.recv(large, 0, tag=1)
        assert small.sum() == 3
        assert large.eq(1.5).all()
    there, back = (me + 1) % n, (me - 1) % n
    taken = torch.empty(1 << 20)
    batch = [
        dist.P2POp(dist.isend, torch.full((1 << 20,), float(me)), there),
        dist.P2POp(dist.irecv, taken, back),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert taken.eq(float(back)).all()
    rank.emit("right")
    dist.barrier()
    dist.destroy_process_group()


def of_today(rank: Rank) -> None:
    """What torch's C++ and newer releases ask of a group."""
    me, n = open_group()
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        model = torch.nn.Linear(3, 2)
        torch.nn.init.ones_(model.weight)
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        ddp._register_builtin_comm_hook(kind)
        for _ in range(3):
            model.zero_grad()
            ddp(torch.full((1, 3), float(me))).sum().backward()
            assert (model.weight.grad == (n - 1) / 2).all(), kind
    half = dist.all_reduce(torch.ones(2, dtype=torch.float16), async_op=True).get_future()
    assert half.wait()[0].tolist() == [n, n]
    meta = torch.empty(n, device="meta")
    dist.all_reduce(meta)
    dist.broadcast(meta, 0)
    all_gather_single(torch.empty(n * n, device="meta"), meta)
    dist.all_to_all_single(torch.empty_like(meta), meta)
    assert dist.all_reduce(meta, async_op=True).wait()
    group: Any = dist.group.WORLD
    assert not group.supports_coalescing
    assert not group.supports_window
    assert group.supports_splitting
    assert group.supports_shrinking == group.supports_reconfigure == (not before(2, 14))
    assert not group.supports_tensor_alloc(torch.device("cpu"))
    whole = torch.zeros(n, 2) if me == 1 else torch.zeros(0)
    if hasattr(dist, "gather_single"):
        dist.gather_single(torch.full((2,), float(me)), whole, dst=1)
    else:
        options = dist.GatherOptions()
        options.rootRank = 1
        group.gather_single(whole, torch.full((2,), float(me)), options).wait()
    assert me != 1 or whole[:, 1].tolist() == [float(i) for i in range(n)]
    if before(2, 14):
        for backend in ("cpu:gloo,cuda:ringcomm", "cpu:ringcomm,cuda:gloo"):
            rank.attempt("map", lambda name=backend: dist.new_group(backend=name))
    bad = torch.tensor([1.0, float("nan")])
    for checked in (lambda: dist.all_reduce(bad), lambda: dist.broadcast(bad, me)):
        rank.attempt("nan", checked)
    fresh = torch.full((2,), float("nan") if me else 3.0)
    dist.broadcast(fresh, 0)
    assert fresh.tolist() == [3.0, 3.0]
    dist.all_reduce(torch.ones(2))
    rank.emit("right")
    dist.destroy_process_group()


def many_groups(rank: Rank) -> None:
    """Groups that overlap, used from several threads at once, and split."""
    me, n = open_group()
    rings = [dist.new_group(list(range(n))) for _ in range(3)]
    pairs = [dist.new_group([i, (i + 1) % n]) for i in range(n if n > 2 else 1)]
    failures: list[BaseException] = []

    def use(group: Any) -> None:
        try:
            for _ in range(50):
                x = torch.ones(1000)
                dist.all_reduce(x, group=group)
                assert x[0] == n
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(group,)) for group in rings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for number, group in enumerate(pairs):
        if me in (number, (number + 1) % n):
            x = torch.ones(3)
            dist.all_reduce(x, group=group)
            assert x[0] == 2
    half = dist.group.WORLD.split_group([0, 1], group_name="half")
    assert (half is None) == (me > 1)
    if half is not None:
        x = torch.ones(3)
        half.allreduce([x]).wait()
        assert x[0] == 2
        assert (half.rank(), half.size(), half.group_name) == (me, 2, "half")
        half.shutdown()
    dist.destroy_process_group(rings[0])
    x = torch.ones(3)
    dist.all_reduce(x, group=rings[1])
    dist.destroy_process_group()
    dist.init_process_group(  # once more, for both devices
        "cpu:ringcomm,cuda:ringcomm",
        init_method=f"tcp://127.0.0.1:{os.environ['AGAIN']}",
        rank=me,
        world_size=n,
    )
    dist.all_reduce(x)
    assert x[0] == n * n
    rank.emit("right", backend=dist.get_backend())
    dist.destroy_process_group()


def options(rank: Rank) -> None:
    """Compression and ports from Options, for the default group and its children."""
    chosen = ringcomm.torch.Options(compression="bf16", interfaces=("lo",))
    _me, n = open_group(pg_options=chosen)
    plain = dist.new_group(pg_options=ringcomm.torch.Options(compression="none"))
    for name, group in (("bf16", dist.group.WORLD), ("child", dist.new_group()), ("plain", plain)):
        before = group.comm.stats()["payload_bytes"]
        x = torch.full((100_000,), 1 + 2**-12)
        dist.all_reduce(x, group=group)
        sent = group.comm.stats()["payload_bytes"] - before
        rank.emit(name, sent=sent, first=float(x[0]), n=n)
    rank.emit("rails", names=[rail.interface for rail in dist.group.WORLD.comm.rails])
    rank.attempt("wrong", lambda: dist.new_group(pg_options={"compression": "bf16"}))
    dist.destroy_process_group()


def refused(rank: Rank) -> None:
    """What cannot work raises torch's error types, on this rank, and harms nothing."""
    _me, n = open_group()
    x = torch.ones(2 * n)
    tries: dict[str, Any] = {
        "sparse": lambda: dist.broadcast(x.to_sparse(), 0),
        "op": lambda: dist.all_reduce(x, Ops.BAND),
        "dtype": lambda: dist.all_reduce(x.to(torch.int16)),
        "list": lambda: dist.all_gather([x], x) if n > 1 else None,
        "size": lambda: all_gather_single(x, x),
        "part": lambda: reduce_scatter_single(x, x),
        "splits": lambda: dist.all_to_all_single(x, x.clone(), [1] * n, [1] * n),
        "rows": lambda: dist.all_to_all_single(x[:-1], x[:-1].clone()),
        "tag": lambda: dist.group.WORLD.send([x], (dist.get_rank() + 1) % n, -1),
        "expanded": lambda: dist.all_reduce(torch.ones(1).expand(5)),
    }
    for name, call in tries.items():
        rank.attempt(name, call)
    dist.all_reduce(x)
    rank.emit("fine", first=float(x[0]))
    dist.destroy_process_group()


def differ(rank: Rank) -> None:
    """Ranks that call different things both learn what both called."""
    me, _ = open_group()
    calls = {0: lambda: dist.all_reduce(torch.ones(5)), 1: lambda: dist.broadcast(torch.ones(5), 0)}
    rank.attempt("mismatch", calls[me])
    rank.attempt("again", dist.barrier)
    dist.destroy_process_group()


def shapes_differ(rank: Rank) -> None:
    """Ranks whose tensors have as many elements and other shapes, under DETAIL."""
    dist.set_debug_level_from_env()  # torch was imported before the variable was set
    me, n = open_group()
    x = torch.ones(2, 3)
    dist.all_reduce(x)
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, "x" * me)
    rank.attempt("shapes", lambda: dist.all_reduce(x if me else x.t().contiguous()))
    dist.all_reduce(x)
    rank.emit("fine", first=float(x[0, 0]))
    dist.destroy_process_group()


def timeouts(rank: Rank) -> None:
    """The group's timeout holds for every call; works pending do not keep a rank."""
    me, _ = open_group(timeout=datetime.timedelta(seconds=20))
    brief = dist.new_group(timeout=datetime.timedelta(milliseconds=1200))  # to meet in, too
    if me == 0:
        rank.attempt("late", lambda: dist.all_reduce(torch.ones(3), group=brief))
    dist.barrier()
    short = dist.new_group()
    short.set_timeout(datetime.timedelta(milliseconds=200))
    if me == 0:
        rank.attempt("shortened", lambda: dist.all_reduce(torch.ones(3), group=short))
    dist.barrier()
    other = dist.new_group()
    if me == 0:
        rank.attempt("monitored", lambda: other.monitored_barrier(datetime.timedelta(seconds=0.2)))
    dist.barrier()
    third = dist.new_group()
    pending = dist.all_reduce(torch.ones(3), group=third, async_op=True) if me == 0 else None
    future = pending.get_future() if pending is not None else None
    dist.barrier()
    began = time.monotonic()
    dist.destroy_process_group()
    rank.emit("destroyed", took=time.monotonic() - began)
    if future is not None and pending is not None:
        rank.attempt("future", future.wait)
        rank.attempt("work", pending.wait)
        rank.attempt("used", lambda: third.allreduce([torch.ones(3)]).wait())


def lost(rank: Rank) -> None:
    """Rank 1 dies while the others are in a collective."""
    me, _ = open_group()
    dist.barrier()
    rank.emit("ready")
    if me == 1:
        rank.wait_for_go()
        os._exit(9)
    rank.attempt("failed", lambda: dist.all_reduce(torch.ones(10)))
    rank.attempt("again", lambda: dist.all_reduce(torch.ones(10)))
    dist.destroy_process_group()


def lost_in_backward(rank: Rank) -> None:
    """Rank 1 dies while the others are in a backward of DDP. Reports what that raised, and the
    error as it is got otherwise."""
    me, _ = open_group()
    ddp = DistributedDataParallel(torch.nn.Linear(3, 2))
    for _ in range(2):  # after which DDP makes no more collectives of its own
        ddp(torch.ones(1, 3)).sum().backward()
    loss = ddp(torch.ones(1, 3)).sum()
    dist.barrier()
    if me == 1:
        os._exit(9)
    rank.attempt("failed", loss.backward)
    rank.emit("error", **describe(ringcomm.default_communicator().failure()))
    os._exit(0)


def profiled(rank: Rank) -> None:
    """The ranges that torch.profiler sees."""
    _, n = open_group()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        dist.all_reduce(torch.ones(10))
        dist.all_reduce(torch.ones(1 << 20), async_op=True).wait()
        dist.all_gather([torch.empty(3) for _ in range(n)], torch.ones(3))
        dist.barrier()
    names = {event.name for event in seen.events()}
    rank.emit("ranges", names=sorted(name for name in names if name.startswith("ringcomm:")))
    dist.destroy_process_group()
