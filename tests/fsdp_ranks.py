"""Ranks that train with FSDP2, its exchanges compressed or not; each a process of its own, which
prints what became of the weights as a line of JSON."""

from __future__ import annotations

import copy
import itertools
import json
import os
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ringcomm
from ringcomm.torch.fsdp import Compressed, compress

WIDTH, STEPS = 96, 6


class Net(nn.Module):
    """Layers in a row, whose biases do not divide by every number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        sizes = [WIDTH, WIDTH + 1, WIDTH, 5]
        self.row = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.row:
            x = torch.tanh(layer(x))
        return x


def sharded(mesh: Any = None, **settings: Any) -> Net:
    model = Net()
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.row:
        fully_shard(layer, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    return model


def train(model: nn.Module, optimizer: Any, first: int, steps: int, ranks: int) -> None:
    """Steps whose batches follow from the step and the rank, of so many ranks."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        forward_backward(model, step, ranks)
        optimizer.step()


def forward_backward(model: nn.Module, step: int, ranks: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + int(os.environ["RANK"]) % ranks)
    model(torch.randn(8, WIDTH, generator=generator)).float().square().sum().backward()


def made(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def trained(model: nn.Module, ranks: int) -> torch.Tensor:
    train(model, made(model), 0, STEPS, ranks)
    return flat(model)


def flat(model: nn.Module) -> torch.Tensor:
    """All parameters, whole."""
    whole: list[Any] = [p.full_tensor() for p in model.parameters()]
    return torch.cat([p.detach().float().reshape(-1) for p in whole])


def gathered(model: Any) -> torch.Tensor:
    """All parameters as FSDP gathers them for a forward, rounded or not."""
    found = []
    for module in [*model.row, model]:
        module.unshard()
    for parameter in model.parameters():
        found.append(parameter.detach().float().reshape(-1).clone())
    for module in [*model.row, model]:
        module.reshard()
    return torch.cat(found)


def alike(values: torch.Tensor) -> bool:
    """On all ranks, to the bit."""
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, values)
    return all(torch.equal(row, rows[0]) for row in rows)


def tell(**values: Any) -> None:
    print(json.dumps(values))
    sys.stdout.flush()


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """By how far training has moved the other one."""
    start = torch.cat([p.detach().reshape(-1) for p in Net().parameters()])
    return float((one - other).norm() / (other - start).norm())


def over_all_ranks() -> None:
    """Shards over all ranks, of backend ringcomm."""
    dist.init_process_group("ringcomm")
    world = dist.get_world_size()
    plain = trained(sharded(), world)
    for name, settings in {
        "none": {"gradients": None},
        "int8": {"gradients": "int8", "weights": "int8"},
        "narrow": {"gradients": "int8", "weights": "int8"},
    }.items():
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        model = sharded(**({"mp_policy": policy} if name == "narrow" else {}))
        compressed = compress(model, **settings)
        weights = trained(model, world)
        carried = compressed.sent.total
        tell(
            name=name,
            alike=alike(gathered(model)),
            distance=distance(weights, plain),
            rounded=distance(gathered(model), weights),
            carried=carried,
            count=weights.numel(),
        )
    dist.destroy_process_group()


def in_smaller_groups() -> None:
    """Shards over four ranks, of which two at a time gather for backward."""
    _trains_as_plain(smaller={"reshard_after_forward": 2})


def in_other_ways() -> None:
    """Ways that change what FSDP calls: sums in fp16 are scaled before and after, a factor is
    given, gradients add up."""
    in_half = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    _trains_as_plain(fp16={"mp_policy": in_half}, factor={}, accumulated={})


def _trains_as_plain(**ways: dict[str, Any]) -> None:
    """Trains in each of the ways without compress(), with it and no codec, and with int8."""
    dist.init_process_group("ringcomm")
    world = dist.get_world_size()
    for name, settings in ways.items():
        ends = []
        for codec in (None, "none", "int8"):
            model: Any = sharded(**settings)
            if codec is not None:
                compress(model, codec, "int8" if codec == "int8" else None)
            if name == "factor":
                for module in [*model.row, model]:
                    module.set_gradient_divide_factor(8.0)
            optimizer = made(model)
            for step in range(STEPS):
                accumulates = name == "accumulated" and step % 2 == 0
                model.set_requires_gradient_sync(not accumulates)
                forward_backward(model, step, world)
                if not accumulates:
                    optimizer.step()
                    optimizer.zero_grad()
            ends.append(flat(model))
        plain, exact, rounded = ends
        tell(
            name=name,
            alike=alike(exact) and alike(rounded),
            exact=distance(exact, plain),
            rounded=distance(rounded, plain),
        )
    dist.destroy_process_group()


def across_hosts() -> None:
    """Shards over two ranks of a host, by gloo; four ranks."""
    dist.init_process_group("gloo")
    comm = ringcomm.init()
    across = comm.split(comm.rank % 2)
    assert across is not None
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "ranks"))["ranks"]
    expected = trained(sharded(), 4)
    for gradients in (None, "int4"):
        model = sharded(mesh)
        compressed = compress(model, gradients, across=across)
        weights = trained(model, 4)
        tell(
            name=str(gradients),
            alike=alike(weights),
            distance=distance(weights, expected),
            residuals=len(compressed.feedback),
        )
    _resumes(mesh, across)
    across.close()
    ringcomm.shutdown()
    dist.destroy_process_group()


def _resumes(mesh: Any, across: Any) -> None:
    """Goes on to the bit with the residuals of a state, saved under a loss scale that has ended,
    and not without them."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def begin() -> tuple[nn.Module, Any, Compressed]:
        model = sharded(mesh)
        return model, made(model), compress(model, "int4", across=across)

    model, optimizer, compressed = begin()
    train(model, optimizer, 0, 3, 4)
    compressed.feedback.loss_scale = 8.0
    kept = compressed.state_dict()
    compressed.feedback.loss_scale = 1.0
    states = get_state_dict(model, optimizer)  # which share memory with these
    ends = []
    for residuals in (kept, {}):
        weights, momentum = copy.deepcopy(states)
        again, other, anew = begin()
        set_state_dict(again, other, model_state_dict=weights, optim_state_dict=momentum)
        anew.load_state_dict(residuals)
        train(again, other, 3, 3, 4)
        ends.append(flat(again))
    train(model, optimizer, 3, 3, 4)
    end = flat(model)
    with pytest.raises(ringcomm.ConfigError, match="each rank saves and loads its own"):
        compressed.load_state_dict({**kept, "shard": 1 - compressed.shard})
    with pytest.raises(ringcomm.ConfigError, match="no state of what compress"):
        compressed.load_state_dict({"row": 3})
    strange = {**kept["feedback"], "tensors": {"head": {}}}
    with pytest.raises(ringcomm.ConfigError, match="the state is of another model"):
        compressed.load_state_dict({**kept, "feedback": strange})
    again = sharded(mesh)
    compress(again, "onebit", across=across)
    adam = torch.optim.Adam(again.parameters())
    with pytest.raises(ringcomm.ConfigError, match="onebit' under Adam"):
        train(again, adam, 0, 1, 4)
    tell(name="resumes", same=torch.equal(ends[0], end), without=torch.equal(ends[1], end))


def _states(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": states}


def write_checkpoint() -> None:
    from torch.distributed import checkpoint

    dist.init_process_group("ringcomm")
    model = sharded()
    compress(model, weights="int8")
    optimizer = made(model)
    train(model, optimizer, 0, 3, 2)
    checkpoint.save(_states(model, optimizer), checkpoint_id=os.environ["FOLDER"])
    torch.save(flat(model), f"{os.environ['FOLDER']}/whole.pt")
    dist.destroy_process_group()


def read_checkpoint() -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import set_state_dict

    dist.init_process_group("ringcomm")
    model = sharded()
    compress(model, weights="int8")
    optimizer = made(model)
    states = _states(model, optimizer)
    checkpoint.load(states, checkpoint_id=os.environ["FOLDER"])
    set_state_dict(
        model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    same = torch.equal(flat(model), torch.load(f"{os.environ['FOLDER']}/whole.pt"))
    train(model, optimizer, 3, 2, 3)
    tell(same=same, finite=bool(flat(model).isfinite().all()))
    dist.destroy_process_group()


def refused() -> None:
    dist.init_process_group("gloo")
    whole, model = Net(), sharded()
    comm = ringcomm.init()
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("hosts", "ranks"))
    for text, call in {
        "after fully_shard": lambda: compress(whole),
        "as all gradients on each rank": lambda: compress(model, "int4"),
        "leave weights= out": lambda: compress(model, weights="int8", across=comm),
        "weights='int4' needs error feedback": lambda: compress(model, weights="int4"),
        "give a ringcomm.Communicator: 3": lambda: compress(model, across=3),  # type: ignore[arg-type]
        "one of several dimensions": lambda: compress(sharded(both)),
        "give a torch.nn.Module": lambda: compress([whole]),  # type: ignore[arg-type]
        'meshes of backend "ringcomm"': lambda: compress(model),
        "gradients='int3'": lambda: compress(model, "int3"),  # type: ignore[arg-type]
    }.items():
        with pytest.raises(ringcomm.ConfigError, match=text):
            call()
    with pytest.raises(ringcomm.MismatchError, match="shard is 0 on rank 0 and 1 on rank 1"):
        compress(model, across=comm)  # of all ranks, whose shards are not the same
    tell(ended=True)
    ringcomm.shutdown()
    dist.destroy_process_group()
