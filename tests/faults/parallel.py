"""Ranks that train with what PyTorch builds on process groups: on backend "ringcomm", and the same
on gloo, and what becomes of the weights."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo  # which DDP imports when it is first used: here once for all ranks
import torch.distributed as dist
from faults.rank import Rank
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.join import Join
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

WIDTH, STEPS = 24, 50


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
def _job(backend: str) -> Iterator[None]:
    """The process group. No DDP on it may outlive the block: it would be the one to destroy the
    group, and holds the GIL meanwhile; gloo's destructor then waits for its thread, and that for
    the GIL, with which it gives up the last call's tensors (PyTorch issue 56297)."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    dist.init_process_group(backend)
    yield
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def _keep(rank: Rank, folder: str, backend: str, values: torch.Tensor) -> None:
    torch.save(values, f"{folder}/{backend}-{rank.number}.pt")
    rank.emit("trained")


OPTIONS = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")


def ddp(rank: Rank, backend: str, folder: str, mode: str) -> None:
    """Fifty steps of DDP in one of its modes."""
    with _job(backend):
        _keep(rank, folder, backend, _ddp(rank, backend, mode))


def _ddp(rank: Rank, backend: str, mode: str) -> torch.Tensor:
    options = {name: True for name in OPTIONS if name in mode}
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.005, **options)
    if mode == "hosts" and backend == "ringcomm":
        hosts = [dist.new_group([first, first + 1], backend="gloo") for first in (0, 2)]
        state = ringcomm.torch.HierarchicalState(local_group=hosts[rank.number // 2])
        model.register_comm_hook(state, ringcomm.torch.allreduce_hook)
    make: Any = torch.optim.SGD
    if mode == "zero":
        optimizer: Any = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, lr=0.01, overlap_with_ddp=False
        )
    else:
        optimizer = make(model.parameters(), lr=0.1, momentum=0.9)
    steps = STEPS + 3 * rank.number if mode == "join" else STEPS
    with Join([model]) if mode == "join" else contextlib.nullcontext():
        _train(model, optimizer, mode, steps, model.no_sync)
    return _flat(model)


def joined(rank: Rank, backend: str, folder: str) -> None:
    """Ranks of which one has fewer batches, and the others divide by how many are left."""
    with _job(backend):
        _keep(rank, folder, backend, _joined(rank))


def _joined(rank: Rank) -> torch.Tensor:
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.005)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with model.join(divide_by_initial_world_size=False):
        _train(model, optimizer, "join", STEPS + 3 * rank.number, model.no_sync)
    return _flat(model)


def low_rank(rank: Rank, backend: str, folder: str) -> None:
    """PyTorch's PowerSGD, whose callbacks of one all-reduce wait for two others, rank 0's for rank
    1. Of one bucket: of more, the order of its calls differs between ranks."""
    orthogonalize = powerSGD_hook._orthogonalize

    def late(*arguments: Any) -> None:
        time.sleep(0.03 * rank.number)
        orthogonalize(*arguments)

    powerSGD_hook._orthogonalize = late
    with _job(backend):
        _keep(rank, folder, backend, _low_rank(rank))


def _low_rank(rank: Rank) -> torch.Tensor:
    wide = [nn.Linear(8 * WIDTH, 8 * WIDTH) for _ in range(3)]
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), *wide))
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=16, start_powerSGD_iter=2, min_compression_rate=2
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(10):
        optimizer.zero_grad()
        time.sleep(0.03 * rank.number)
        model(_batch(step, rank.number)).square().sum().backward()
        optimizer.step()
    return _flat(model)


def compiled(rank: Rank) -> None:
    """A few steps of torch.compile(DDP(model)), which need no C++ compiler, beside the same without
    the compiler."""
    with _job("ringcomm"):
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


def sharded(rank: Rank, backend: str, folder: str) -> None:
    """Fifty steps of FSDP2."""
    with _job(backend):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = Net()
        for layer in model.row:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        _train(model, optimizer, "plain", STEPS, contextlib.nullcontext)
        _keep(rank, folder, backend, _flat(model))


def tensors(rank: Rank, backend: str, folder: str) -> None:
    """DTensor on a mesh of one or two dimensions: redistributions and a product."""
    with _job(backend):
        n = dist.get_world_size()
        mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("a", "b"))
        x = torch.arange(64.0).reshape(8, 8)
        rows = distribute_tensor(x, mesh, [Shard(0), Replicate()])
        columns = rows.redistribute(mesh, [Replicate(), Shard(1)])
        product = (rows @ columns).redistribute(mesh, [Replicate(), Replicate()])
        total = mesh["a"].get_group().size(), mesh["b"].get_group().size()
        _keep(rank, folder, backend, product.to_local())
        rank.emit("mesh", sizes=total, right=torch.equal(product.to_local(), x @ x))
