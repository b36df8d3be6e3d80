"""Ranks of a torch process group on backend "ringcomm" that torch watches: its hooks, its flight
recorder, errors and numbers, and other backends beside ours."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from faults.groups import all_gather_single, open_group, reduce_scatter_single
from faults.rank import Rank
from torch.nn.parallel import DistributedDataParallel
from torch_versions import before as before_release

import ringcomm

torch_c10d: Any = dist.distributed_c10d
C10D: Any = torch._C._distributed_c10d


def _every_collective(me: int, n: int) -> list[str]:
    """Runs each of torch's collectives, and returns the names by which hooks hear of them."""
    x, rows = torch.full((n, 2), float(me)), [torch.zeros(n, 2) for _ in range(n)]
    dist.all_reduce(x)
    assert x[0, 0] == n * (n - 1) / 2
    dist.broadcast(x, 1)
    dist.reduce(x, 0)
    dist.all_gather(rows, torch.full((n, 2), float(me)))
    assert [row[0, 0].item() for row in rows] == [float(i) for i in range(n)]
    all_gather_single(torch.zeros(n * n, 2), x)
    dist.gather(x, rows if me == 1 else None, 1)
    dist.scatter(x, rows if me == 0 else None, 0)
    dist.reduce_scatter(x, rows)
    reduce_scatter_single(torch.zeros(1, 2), x)
    dist.all_to_all(rows, [row.clone() for row in rows])
    dist.all_to_all_single(torch.zeros(n, 2), x)
    dist.barrier()
    return [
        *("ALLREDUCE", "BROADCAST", "REDUCE", "ALLGATHER", "ALLGATHER_BASE", "GATHER", "SCATTER"),
        *("REDUCE_SCATTER", "REDUCE_SCATTER_BASE", "ALLTOALL", "ALLTOALL_BASE", "BARRIER"),
    ]


def hooked(rank: Rank) -> None:
    """Each collective passes torch's hooks once, and its caller has a Work of ours."""
    me, n = open_group()
    group: Any = dist.group.WORLD
    before: list[Any] = []
    after: list[Any] = []
    group.register_pre_hook(1, before.append)
    group.register_post_hook(1, after.append)
    names = _every_collective(me, n)
    assert group._get_sequence_number_for_group() == len(names)
    if me == 0:
        dist.send(torch.ones(1), 1)
    elif me == 1:
        dist.recv(torch.zeros(1), 0)
    assert group._get_sequence_number_for_group() == len(names)
    names += {0: ["SEND"], 1: ["RECV"]}.get(me, [])
    if before_release(2, 15):  # which have one name for both kinds
        names = [name.removesuffix("_BASE") for name in names]
    assert [args.name.name for args in before] == names
    assert [args.name.name for args in after] == names
    assert before[0].input_tensors[0].shape == (n, 2)
    assert all(args.work.wait() for args in after)
    x = torch.ones(3)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert work.is_completed()
    assert work.result()[0] is x
    ddp = DistributedDataParallel(torch.nn.Linear(3, 2))
    loss = ddp(torch.ones(1, 3)).sum()
    before.clear()
    loss.backward()  # in which C++ calls the group
    assert [args.name.name for args in before] == ["ALLREDUCE"]
    seen = len(before), len(after)
    group.unregister_pre_hook(1)
    group.unregister_post_hook(1)
    dist.all_reduce(x)
    assert (len(before), len(after)) == seen
    assert group.get_error() == C10D.ErrorType.SUCCESS
    assert x.tolist() == [float(n * n)] * 3
    rank.emit("right", entries=_recorded(), alone=group.is_alone)
    dist.barrier()
    dist.destroy_process_group()


def _recorded() -> list[str]:
    if before_release(2, 15):  # which records gloo and NCCL alone
        return []
    told = json.loads(C10D._dump_fr_trace_json(True, False, "ringcomm"))
    return [entry["profiling_name"] for entry in told.get("entries", [])]


def mapped(rank: Rank) -> None:
    """Other backends for other devices: before ours in the map, and behind it."""
    me, n = open_group(backend="cpu:ringcomm,cuda:gloo")
    whole: Any = dist.group.WORLD
    assert whole.comm.world_size == n
    assert whole._get_backend(torch.device("cuda")).name() == "gloo"
    assert _every_collective(me, n)
    assert whole._get_sequence_number_for_group() == 12
    for backend in ("cpu:gloo,cuda:ringcomm", "cuda:ringcomm,cpu:gloo"):
        group: Any = dist.new_group(backend=backend)
        x = torch.full((3,), float(me))
        dist.all_reduce(x, group=group)
        assert x.tolist() == [n * (n - 1) / 2] * 3
        assert dist.all_reduce(x, async_op=True, group=group).wait()
        gathered: list[Any] = [None] * n
        dist.all_gather_object(gathered, {"rank": me}, group=group)
        assert gathered == [{"rank": i} for i in range(n)]
        dist.barrier(group=group)
        assert group._get_backend(torch.device("cuda")) is group
        assert group._get_backend(torch.device("cpu")).name() == "gloo"
        assert group._get_sequence_number_for_group() == 0  # all of it went by gloo
        rank.attempt("split", lambda group=group: group.split_group([0]))
    dist.all_reduce(torch.ones(3), group=dist.new_group())  # of the default group's backends
    rank.emit("right")
    dist.barrier()
    dist.destroy_process_group()


def lost(rank: Rank) -> None:
    """The last rank dies in a collective; the others' abort hooks run, and their groups say why."""
    me, n = open_group()
    group: Any = dist.group.WORLD
    told: list[int] = []
    group.register_abort_hook(1, lambda: told.append(1))
    group.register_abort_hook(2, lambda: told.append(2))
    group.unregister_abort_hook(2)
    dist.all_reduce(torch.ones(3))
    work = dist.all_reduce(torch.ones(3), async_op=True) if me < n - 1 else None
    assert told == []
    rank.emit("ready")
    if work is None:
        rank.wait_for_go()
    rank.attempt("failed", work.wait)
    rank.attempt("again", lambda: dist.all_reduce(torch.ones(3)))
    rank.emit("told", hooks=sorted(set(told)), error=group.get_error().name)


def late(rank: Rank) -> None:
    """The last rank does not come."""
    me, n = open_group()
    group: Any = dist.group.WORLD
    if me < n - 1:
        options = dist.AllreduceOptions()
        options.timeout = datetime.timedelta(seconds=0.3)
        rank.attempt("failed", lambda: group.allreduce([torch.ones(3)], options).wait())
    else:
        rank.wait_for_go()
    rank.emit("told", error=group.get_error().name)
    group.abort()
    rank.emit("aborted", error=group.get_error().name)


def _join(uuid: int, ranks: Sequence[int], me: int, as_set: bool = False) -> None:
    """Reconfigures the default group to these ranks, which tell each other their handles."""
    store = torch_c10d._get_default_store()
    store.set(f"{uuid}/{me}", torch_c10d._get_reconfigure_handle())
    handles = [store.get(f"{uuid}/{rank}").decode() for rank in ranks]
    torch_c10d._reconfigure(uuid, set(handles) if as_set else handles).wait()
    assert (dist.get_rank(), dist.get_world_size()) == (ranks.index(me), len(ranks))


def reconfigured(rank: Rank) -> None:
    """The last of four ranks dies in a collective, and the others go on."""
    me, n = open_group(enable_reconfigure=True)
    assert torch_c10d._supports_reconfigure()
    rank.attempt("early", lambda: dist.all_reduce(torch.ones(3)))
    _join(1, range(n), me)
    dist.all_reduce(torch.ones(3))
    rank.emit("ready")
    if me == n - 1:
        rank.wait_for_go()
    rank.attempt("failed", lambda: dist.all_reduce(torch.ones(1 << 16)))
    living = list(range(n - 1))
    _join(2, living, me)
    x = torch.full((3,), float(1 << me))
    dist.all_reduce(x)
    assert x.tolist() == [2.0 ** (n - 1) - 1] * 3
    rank.emit("goes on")
    assert torch_c10d._get_default_group()._get_sequence_number_for_group() == 1
    _join(3, living, me, as_set=True)
    _join(4, living[::-1], me)
    root = torch.full((3,), float(me))
    dist.broadcast(root, 0)
    assert root.tolist() == [float(n - 2)] * 3
    stranger = torch_c10d.ReconfigureOptions()
    stranger.handles = ["another"]
    rank.attempt("stranger", lambda: dist.group.WORLD.reconfigure(stranger))
    rank.emit("right")
    dist.barrier()
    dist.destroy_process_group()


def shrunk(rank: Rank) -> None:
    """The last rank dies in a collective, and the others shrink the default group."""
    me, n = open_group()
    dist.all_reduce(torch.ones(3))
    rank.emit("ready")
    if me == n - 1:
        rank.wait_for_go()
    rank.attempt("failed", lambda: dist.all_reduce(torch.ones(1 << 16)))
    group = dist.shrink_group([n - 1], shrink_flags=torch_c10d.SHRINK_ABORT)
    assert group is dist.group.WORLD
    assert (dist.get_rank(), dist.get_world_size()) == (me, n - 1)
    assert len(_every_collective(me, n - 1)) == 12
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work.get_future().wait()[0].tolist() == [n - 1.0] * 3
    x = torch.ones(3)
    ringcomm.allreduce(x)  # by the default group, as ever
    assert x.tolist() == [n - 1.0] * 3
    if me < n - 2:  # once more, all alive
        dist.shrink_group([n - 2])
        dist.all_reduce(x)
        assert x.tolist() == [(n - 1.0) * (n - 2.0)] * 3
    rank.emit("right")
    if me < n - 2:
        dist.barrier()
    dist.destroy_process_group()
