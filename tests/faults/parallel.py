"""Ranks that train with what PyTorch builds on process groups: on backend "ringcomm", and the same
on gloo, and what becomes of the weights."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo  # which DDP imports when it is first used: here once for all ranks
import torch.distributed as dist
from faults import groups
from faults.rank import Rank
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import ringcomm.torch

try:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
except ImportError:  # before 2.6
    from torch.distributed._composable.fsdp import fully_shard
    from torch.distributed._tensor import DTensor, Replicate, Shard, distribute_tensor

WIDTH, STEPS = 24, 8


class Net(nn.Module):
    """Layers in a row, one beside them that only some calls use, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.aside = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, aside: bool) -> torch.Tensor:
        for layer in self.row:
            x = torch.tanh(layer(x))
        x = self.norm(x)
        return self.aside(x) + x if aside else x


def _batch(step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + part)
    return torch.randn(8, WIDTH, generator=generator)


def _train(
    model: nn.Module, optimizer: Any, mode: str, steps: int, context: Callable[..., Any]
) -> None:
    rank = dist.get_rank()
    for step in range(steps):
        optimizer.zero_grad()
        aside = mode != "find_unused_parameters" or (rank == 1 and step % 2 == 1)
        if mode == "no_sync":
            with context():
                model(_batch(step + 100, rank), aside).square().mean().backward()
        model(_batch(step, rank), aside).square().mean().backward()
        optimizer.step()


def _flat(model: nn.Module) -> torch.Tensor:
    parts = []
    for tensor in [*model.parameters(), *model.buffers()]:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        parts.append(whole.detach().reshape(-1).double())
    return torch.cat(parts)


@contextlib.contextmanager
def _job(rank: Rank, backend: str, folder: str) -> Iterator[None]:
    """The process group. No DDP on it may outlive the block: it would be the one to destroy the
    group, and holds the GIL meanwhile; gloo's destructor then waits for its thread, and that for
    the GIL, with which it gives up the last call's tensors (PyTorch issue 56297)."""
    torch.set_num_threads(1)
    store = f"file://{folder}/{backend}.store"
    dist.init_process_group(
        backend, init_method=store, rank=rank.number, world_size=rank.world_size
    )
    yield
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def trainings(rank: Rank, folder: str, names: list[str]) -> None:
    """Each of the TRAININGS of these names, on gloo and on ringcomm; keeps what the rank has at the
    end of each."""
    for backend in ("gloo", "ringcomm"):
        with _job(rank, backend, folder):
            for name in names:
                torch.manual_seed(3)
                values = TRAININGS[name](rank, backend)
                torch.save(values, f"{folder}/{name}-{backend}-{rank.number}.pt")
    rank.emit("trained")


def _ddp(
    rank: Rank, backend: str, *, mode: str = "plain", zero: bool = False, **options: Any
) -> torch.Tensor:
    """DDP in one of its modes; zero: with an optimizer whose states are shared out."""
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.005, **options)
    if mode == "hosts" and backend == "ringcomm":
        hosts = [dist.new_group([first, first + 1], backend="gloo") for first in (0, 2)]
        state = ringcomm.torch.HierarchicalState(local_group=hosts[rank.number // 2])
        model.register_comm_hook(state, ringcomm.torch.allreduce_hook)
    if zero:
        optimizer: Any = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, lr=0.01, overlap_with_ddp=False
        )
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    _train(model, optimizer, mode, STEPS, model.no_sync)
    return _flat(model)


def _joined(rank: Rank, backend: str, *, by_how_many_are_left: bool) -> torch.Tensor:
    """DDP whose rank 0 has fewer batches."""
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.005)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with model.join(divide_by_initial_world_size=not by_how_many_are_left):
        _train(model, optimizer, "join", STEPS + 3 * rank.number, model.no_sync)
    return _flat(model)


def _low_rank(rank: Rank, backend: str) -> torch.Tensor:
    """PyTorch's PowerSGD, whose callbacks of one all-reduce wait for two others, rank 0's for rank
    1. Of one bucket: of more, the order of its calls differs between ranks."""
    orthogonalize = powerSGD_hook._orthogonalize

    def late(*arguments: Any) -> None:
        time.sleep(0.03 * rank.number)
        orthogonalize(*arguments)

    powerSGD_hook._orthogonalize = late
    wide = [nn.Linear(8 * WIDTH, 8 * WIDTH) for _ in range(3)]
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), *wide))
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=16, start_powerSGD_iter=2, min_compression_rate=2
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        time.sleep(0.03 * rank.number)
        model(_batch(step, rank.number)).square().sum().backward()
        optimizer.step()
    powerSGD_hook._orthogonalize = orthogonalize
    return _flat(model)


def _sharded(rank: Rank, backend: str) -> torch.Tensor:
    """FSDP2."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Net()
    for layer in model.row:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    _train(model, optimizer, "plain", STEPS, contextlib.nullcontext)
    return _flat(model)


def _tensors(rank: Rank, backend: str) -> torch.Tensor:
    """DTensor on a mesh of two dimensions: redistributions and a product."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))
    x = torch.arange(64.0).reshape(8, 8)
    rows = distribute_tensor(x, mesh, [Shard(0), Replicate()])
    columns = rows.redistribute(mesh, [Replicate(), Shard(1)])
    product = (rows @ columns).redistribute(mesh, [Replicate(), Replicate()]).to_local()
    assert torch.equal(product, x @ x)
    return product


TRAININGS: dict[str, Callable[[Rank, str], torch.Tensor]] = {
    "plain": _ddp,
    "no_sync": functools.partial(_ddp, mode="no_sync"),
    "find_unused_parameters": functools.partial(
        _ddp, mode="find_unused_parameters", find_unused_parameters=True
    ),
    "static_graph": functools.partial(_ddp, static_graph=True),
    "gradient_as_bucket_view": functools.partial(_ddp, gradient_as_bucket_view=True),
    "zero": functools.partial(_ddp, zero=True),
    "hosts": functools.partial(_ddp, mode="hosts"),
    "join": functools.partial(_joined, by_how_many_are_left=False),
    "join_by_how_many_are_left": functools.partial(_joined, by_how_many_are_left=True),
    "low_rank": _low_rank,
    "fully_shard": _sharded,
    "dtensor": _tensors,
}


def compiled(rank: Rank, folder: str) -> None:
    """Collectives, and a few steps of DDP, within torch.compile, which here needs no C++ compiler:
    beside the same without it."""
    with _job(rank, "ringcomm", folder):
        groups.check_compiled()
        rank.emit("collectives")
        for mode in ("plain", "norm", "static_graph", "hook"):
            results = [_steps(rank, mode, call) for call in (_as_it_is, _compiled)]
            torch.testing.assert_close(*results)
            rank.emit(mode)


def _as_it_is(model: nn.Module) -> nn.Module:
    return model


def _compiled(model: nn.Module) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager")


def _steps(rank: Rank, mode: str, change: Callable[[nn.Module], Any]) -> torch.Tensor:
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)]
    inner = nn.Sequential(*(layers if mode == "norm" else layers[:2] + layers[3:]))
    model = DistributedDataParallel(inner, static_graph=mode == "static_graph")
    if mode == "hook":
        model.register_comm_hook(ringcomm.torch.HookState(), ringcomm.torch.allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    call = change(model)
    for step in range(3):
        optimizer.zero_grad()
        call(_batch(step, rank.number)).square().sum().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
