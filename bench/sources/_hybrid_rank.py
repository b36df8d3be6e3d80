"""One rank of hybrid.py: two pipeline stages by torch.distributed.pipelining, each data-parallel.

    _hybrid_rank.py '{"do": "train", ...}'    real training of k steps; weights go to a folder
    _hybrid_rank.py '{"do": "time", ...}'     steps with emulated compute, by several ways in turn

Ranks are a DeviceMesh of stages x replicas over backend "ringcomm". A stage's replicas share their
gradients by DDP with ringcomm's hook (1F1B), or by one all-reduce behind the schedule (GPipe). With
DDP the backward of the last micro-batch ends when the buckets are averaged, and only then does the
gradient of its activations leave for the stage before: the stages' exchanges follow each other. So
the times are those of GPipe.

Stages are told their shapes. Where torch's pipeline finds them out itself, it passes a sample
through DDP outside no_sync, and DDP then averages the first micro-batch's gradients, too (to the
same mean in another order), or fails an assertion of its reducer, over gloo as over ringcomm.

Invariants: all ways see the same micro-batches in the same order. Rank 0 prints a line of JSON for
each run.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _emulate import EmulatedDevice
from _hybrid_model import Emulated, Shape, batch, loss_of, pieces, shapes
from _steps_rank import gloo, port_bytes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from ringcomm.torch import HookState, allreduce_hook

STAGES = 2
CPU = torch.device("cpu")
UNTIMED = 2  # steps: DDP makes its buckets anew after the first
MOMENTUM = 0.9


class Staged:
    """This rank's stage of a pipeline with replicas.

    Args:
        layers: all of the model; those before ``at`` are the first stage.
        schedule: "1f1b" with DDP and ringcomm's hook, or "gpipe" with an all-reduce behind it.
        sample: inputs of one micro-batch.
        loss: of the last stage's output.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        layers: Sequence[nn.Module],
        at: int,
        schedule: str,
        micro: int,
        sample: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor],
        *,
        scale: bool = True,
    ) -> None:
        self.number = mesh.get_local_rank("stage")
        self.replica = mesh.get_local_rank("replica")
        self.model = nn.Sequential(*(layers[:at] if self.number == 0 else layers[at:]))
        self._replicas: Any = mesh.get_group("replica")
        self._is_shared = schedule == "1f1b"
        through = _shared(self.model, self._replicas) if self._is_shared else self.model
        with torch.no_grad():
            between = nn.Sequential(*layers[:at])(sample)
            ends = [sample, between, nn.Sequential(*layers[at:])(between)]
        for activations in ends[1:]:
            activations.requires_grad_()
        stage = PipelineStage(
            through,
            self.number,
            STAGES,
            CPU,
            input_args=ends[self.number],
            output_args=ends[self.number + 1],
            group=mesh.get_group("stage"),
        )
        kind = Schedule1F1B if schedule == "1f1b" else ScheduleGPipe
        self._schedule = kind(stage, micro, loss_fn=loss, scale_grads=scale)

    def step(self, inputs: Tensor, target: Tensor) -> None:
        """Forward, backward, and the mean of the replicas' gradients."""
        if self.number == 0:
            self._schedule.step(inputs)
        else:
            self._schedule.step(target=target)
        if not self._is_shared:
            gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
            self._replicas.comm.allreduce_many(gradients, op="avg")


def _shared(
    model: nn.Module, group: Any, bucket_mb: float = 25.0, over: str = "ringcomm"
) -> nn.Module:
    """The model in DDP, by ringcomm's hook or by gloo alone."""
    ddp = DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
    )
    if over == "ringcomm":
        state = HookState("none", group.comm, model=model, force=True)
        ddp.register_comm_hook(state, allreduce_hook)
    return ddp


def make_mesh() -> DeviceMesh:
    """Stages x replicas: neighbours in rank are replicas of a stage."""
    replicas = dist.get_world_size() // STAGES
    return init_device_mesh("cpu", (STAGES, replicas), mesh_dim_names=("stage", "replica"))


# ---- real training ----


def train(asked: dict[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    """Trains on this rank, and leaves the stage's weights in the folder."""
    layers = pieces(asked["kind"], asked["depth"], asked["width"], asked["seed"])
    at = len(layers) // 2
    sample, _ = batch(asked["kind"], asked["samples"] // asked["micro"], seed=0)
    staged = Staged(mesh, layers, at, asked["schedule"], asked["micro"], sample, loss_of)
    optimizer = sgd(staged.model, asked)
    began = time.perf_counter()
    for number in range(asked["steps"]):
        optimizer.zero_grad(set_to_none=False)
        staged.step(*batch(asked["kind"], asked["samples"], seed_of(asked, number, staged.replica)))
        optimizer.step()
    took = time.perf_counter() - began
    path = Path(asked["folder"], f"stage{staged.number}-replica{staged.replica}.pt")
    torch.save([weight.detach() for weight in staged.model.parameters()], path)
    return {"step_s": took / asked["steps"]}


def alone(asked: dict[str, Any], replicas: int, whole: bool) -> list[Tensor]:
    """The weights of the same training in one process.

    Args:
        whole: each step is one forward of all samples; else the micro-batches of the replicas pass
            one after the other, and are summed as the pipeline sums them.
    """
    layers = pieces(asked["kind"], asked["depth"], asked["width"], asked["seed"])
    model = nn.Sequential(*layers)
    optimizer = sgd(model, asked)
    for number in range(asked["steps"]):
        batches = [
            batch(asked["kind"], asked["samples"], seed_of(asked, number, replica))
            for replica in range(replicas)
        ]
        if whole:
            inputs, target = (torch.cat(parts) for parts in zip(*batches, strict=True))
            optimizer.zero_grad()
            loss_of(model(inputs), target).backward()
        else:
            _sum_in_order(model, batches, asked["micro"])
        optimizer.step()
    return [weight.detach() for weight in model.parameters()]


def _sum_in_order(model: nn.Module, batches: list[tuple[Tensor, Tensor]], micro: int) -> None:
    sums = []
    for inputs, target in batches:
        model.zero_grad()
        for part, wanted in zip(inputs.chunk(micro), target.chunk(micro), strict=True):
            loss_of(model(part), wanted).backward()
        sums.append([weight.grad for weight in model.parameters()])
    for weight, *parts in zip(model.parameters(), *sums, strict=True):
        weight.grad = sum(parts[1:], parts[0]) / len(parts) / micro


def compare(asked: dict[str, Any], replicas: int) -> dict[str, Any]:
    """The weights in the folder beside single-process training; in parts of the way they came."""
    ranks = [
        [
            weight
            for stage in range(STAGES)
            for weight in torch.load(Path(asked["folder"], f"stage{stage}-replica{replica}.pt"))
        ]
        for replica in range(replicas)
    ]
    start = alone({**asked, "steps": 0}, replicas, whole=True)
    in_order, whole = (alone(asked, replicas, way) for way in (False, True))
    moved = _distance(start, whole)
    return {
        "parameters": sum(weight.numel() for weight in start),
        "tensors": len(start),
        "replicas_same": all(_distance(ranks[0], rank) == 0 for rank in ranks),
        "same_bits": all(torch.equal(*pair) for pair in zip(ranks[0], in_order, strict=True)),
        "moved": moved,
        "apart": _distance(ranks[0], whole) / moved,
        "apart_in_order": _distance(ranks[0], in_order) / moved,
    }


def _distance(one: list[Tensor], other: list[Tensor]) -> float:
    squares = ((a - b).double().square().sum() for a, b in zip(one, other, strict=True))
    return float(sum(float(square) for square in squares) ** 0.5)


def sgd(model: nn.Module, asked: dict[str, Any]) -> torch.optim.SGD:
    """The optimizer of both."""
    return torch.optim.SGD(model.parameters(), lr=asked["lr"], momentum=MOMENTUM)


def seed_of(asked: dict[str, Any], step: int, replica: int) -> int:
    """Of a replica's samples in a step."""
    return int(1_000_000 * asked["seed"] + 100 * step + replica)


# ---- emulated compute ----


class Sharing:
    """Pure data parallel over all ranks, or one rank that has nobody to share with.

    Args:
        over: "ringcomm", by its hook; "gloo", by DDP alone; "" for nobody.
    """

    def __init__(self, asked: dict[str, Any], over: str, compute_s: float, samples: int) -> None:
        made = shapes(asked["kind"])
        self.model = nn.Sequential(*_emulated(made, dist.get_rank() * len(made)))
        self._through: nn.Module = self.model
        if over:
            group = gloo() if over == "gloo" else dist.group.WORLD
            self._through = _shared(self.model, group, asked["bucket_mb"], over)
        self._inputs = torch.zeros(samples, 1)
        for _ in range(UNTIMED):
            self.step()
        EmulatedDevice(self.model, compute_s, cost=_cost)

    def step(self) -> None:
        """Forward and backward."""
        self._through(self._inputs).sum().backward()


class Hybrid:
    """Two stages, each data-parallel. ``compute_s``: of a replica's samples on one device."""

    def __init__(self, asked: dict[str, Any], compute_s: float, samples: int) -> None:
        made, micro = shapes(asked["kind"]), asked["micro"]
        layers = _emulated(made, dist.get_rank() * len(made))
        self._inputs = torch.zeros(samples, 1)
        self._staged = Staged(
            make_mesh(),
            layers,
            asked["at"],
            asked["schedule"],
            micro,
            self._inputs[: samples // micro],
            lambda out, _: out.sum(),
            scale=False,
        )
        self.model = self._staged.model
        for _ in range(UNTIMED):
            self.step()
        share = sum(_cost(layer) for layer in self.model) / sum(piece.cost for piece in made)
        EmulatedDevice(self.model, compute_s * share / micro, cost=_cost)

    def step(self) -> None:
        """Forward, backward, and the mean of the replicas' gradients."""
        self._staged.step(self._inputs, self._inputs)


def _emulated(made: Sequence[Shape], seed: int) -> list[Emulated]:
    return [Emulated(piece, seed + number) for number, piece in enumerate(made)]


def _cost(module: nn.Module) -> float:
    assert isinstance(module, Emulated)
    return module.shape.cost


def measure(asked: dict[str, Any]) -> None:
    """Rounds of all ways by turns; rank 0 tells of each."""
    world, samples = dist.get_world_size(), asked["samples"]
    compute_s = asked["compute_s"]  # of all samples on one device
    make: dict[str, Callable[[], Any]] = {
        "sequential": lambda: Sharing(asked, "", compute_s, samples),
        "gloo": lambda: Sharing(asked, "gloo", compute_s / world, samples // world),
        "data parallel": lambda: Sharing(asked, "ringcomm", compute_s / world, samples // world),
        "hybrid": lambda: Hybrid(asked, compute_s * STAGES / world, samples * STAGES // world),
    }
    ways = {name: make[name]() for name in asked["ways"]}
    for _ in range(asked["rounds"]):
        for name, way in ways.items():
            dist.barrier()
            before, began = port_bytes(), time.perf_counter()
            for _ in range(asked["steps"]):
                way.step()
            finite = all(bool(one.grad.isfinite().all()) for one in way.model.parameters())
            dist.barrier()
            took = (time.perf_counter() - began) / asked["steps"]
            most = torch.tensor([port_bytes() - before], dtype=torch.float64)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            if dist.get_rank() == 0:
                sent = float(most) / asked["steps"]
                told = {"way": name, "step_s": took, "finite": finite, "port_bytes": sent}
                print(json.dumps(told), flush=True)


def main() -> None:
    """The rank."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("ringcomm")
    if asked["do"] == "time":
        measure(asked)
    else:
        mesh = make_mesh()
        told = train(asked, mesh)
        dist.barrier()
        if dist.get_rank() == 0:
            found = compare(asked, mesh.size(1))
            print(json.dumps({**told, **found}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
