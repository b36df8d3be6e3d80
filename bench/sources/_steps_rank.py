"""One rank of steps.py: training steps whose compute is emulated, by several ways in turn, timed.

    _steps_rank.py '{"layers": [[395, 395]], "compute_s": 0.2,
                     "ways": {"int8": {"kind": "gradients", "codec": "int8", "bucket_mb": 1}},
                     "runs": [{"way": "int8", "steps": 10, "untimed": 3}]}'

    kind        settings
    alone       nothing is exchanged
    gradients   DDP: bucket_mb (null: one bucket, which travels after backward), accumulate, and
                codec of ringcomm's hook, with "auto" what it is to allow; or over a backend,
                "gloo" or "ringcomm", by torch's hook null, "fp16", "bf16" or "powersgd", of a rank
    momentum    optimizer of ringcomm.torch.optim, settings of it
    apart       settings of OuterStep
    sparse      settings of an optimizer of ringcomm.torch.sparse (Adam)

All take "per", the iterations of a step. Rank 0 prints a line of JSON for each run: {"way": "int8",
"steps": [...]}.
The model's layers compute nothing: they sleep (_emulate.py), and their gradients lie in
DDP's buckets already, as a device's own memory traffic is no load of the host. So all processor
time is that of communication, and of optimizers that are part of it.

Invariants: a way lives from its first run to its last one, and begins each when all ranks are
there. Ranks make the same runs in the same order.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _emulate import EmulatedDevice
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringcomm.torch import HookState, OuterStep, allreduce_hook, optim, sparse
from ringcomm.torch.auto import Auto

ONE_BUCKET_MB = 1e6
POWERSGD_RANK = 4


class _Pass(torch.autograd.Function):
    """Backward leaves the weight's gradient as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class Layer(nn.Module):
    """A matrix with a gradient."""

    def __init__(self, rows: int, columns: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.zeros(rows, columns))
        self.weight.grad = torch.randn(rows, columns, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Pass.apply(x, self.weight)
        return out


class Alone:
    """Steps without an exchange; what all ways have."""

    def __init__(self, asked: dict[str, Any], settings: dict[str, Any], comm: Any) -> None:
        layers = asked["layers"]
        self.model = nn.Sequential(
            *(Layer(*shape, comm.rank * len(layers) + layer) for layer, shape in enumerate(layers))
        )
        self.comm, self.settings, self.per = comm, settings, settings.get("per", 1)
        self._through: nn.Module = self.model
        self.connect()
        EmulatedDevice(self.model, asked["compute_s"])

    def connect(self) -> None:
        """Before the device is emulated."""

    def iterate(self) -> None:
        """Forward and backward."""
        self._through(torch.ones(1)).sum().backward()

    def step(self) -> None:
        """All iterations of a step."""
        for _ in range(self.per):
            self.iterate()

    def start(self) -> None:
        """A run begins: the account starts anew."""

    def account(self, steps: int) -> dict[str, Any]:
        """Since then; seconds and bytes of a step."""
        return {}

    @property
    def sent(self) -> float:
        """Bytes by now, as the method counts them; else the ports do."""
        return port_bytes()

    @property
    def waited_s(self) -> float:
        """Seconds by now, where the method counts them."""
        return 0.0

    def close(self) -> None:
        """After the last run."""


class Gradients(Alone):
    """DDP."""

    def connect(self) -> None:
        settings = self.settings
        bucket_mb = settings["bucket_mb"] or ONE_BUCKET_MB
        group = gloo() if settings.get("over") == "gloo" else dist.group.WORLD
        ddp = DistributedDataParallel(
            self.model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, process_group=group
        )
        self._through, self._ddp = ddp, ddp
        self._state: HookState | None = None
        if "over" in settings:
            _torch_hook(ddp, group, settings.get("hook"), settings.get("rank", POWERSGD_RANK))
        else:
            if "allow" in settings:
                policy = Auto(self.model, allow=settings["allow"])
                self._state = HookState(policy, self.comm, model=self.model)
            else:
                self._state = HookState(
                    settings["codec"],
                    self.comm,
                    model=self.model,
                    force=settings["codec"] != "auto",
                )
            ddp.register_comm_hook(self._state, allreduce_hook)

    def step(self) -> None:
        for number in range(self.per):
            last = number == self.per - 1
            with contextlib.nullcontext() if last else self._ddp.no_sync():
                self.iterate()

    def start(self) -> None:
        if self._state is not None:
            self._state.reset()

    def account(self, steps: int) -> dict[str, Any]:
        if self._state is None:
            return {}
        report = self._state.report()
        sent = np.array([sum(float(step["wire_bytes"]) for step in report["steps"]) / steps])
        (mean,) = self.comm.allreduce(sent, "avg").tolist()
        return {"wire_bytes": mean, "codecs": report["codecs"]}


class Momentum(Alone):
    """An optimizer that exchanges its own state."""

    def connect(self) -> None:
        self._optimizer = self.kind()(
            self.model.parameters(), 1e-4, comm=self.comm, **self.settings["settings"]
        )

    def kind(self) -> Any:
        """The optimizer's class."""
        return getattr(optim, self.settings["optimizer"])

    def step(self) -> None:
        super().step()
        self._optimizer.step()

    @property
    def sent(self) -> float:
        return float(self._optimizer.carried)

    @property
    def waited_s(self) -> float:
        return float(self._optimizer.waited_s)

    def account(self, steps: int) -> dict[str, Any]:
        return {
            "frozen_at": self._optimizer.frozen_at,
            "renewals": self._optimizer.renewals if hasattr(self._optimizer, "renewals") else None,
        }


class Apart(Alone):
    """Weights are exchanged now and then."""

    def connect(self) -> None:
        settings = {
            "compression" if name == "codec" else name: value
            for name, value in self.settings["settings"].items()
        }
        self._outer = OuterStep(self.model, None, comm=self.comm, **settings)
        self._outer.attach()

    def iterate(self) -> None:
        super().iterate()
        self._outer.tick()

    @property
    def sent(self) -> float:
        return float(self._outer.report().sent_bytes)

    @property
    def waited_s(self) -> float:
        return float(self._outer.report().waited_s)

    def close(self) -> None:
        self._outer.detach()


class Sparse(Momentum):
    """StellaTrain's path: an optimizer on the CPU, of the blocks that are chosen."""

    def kind(self) -> Any:
        return getattr(sparse, self.settings.get("optimizer", "Adam"))

    @property
    def sent(self) -> float:
        return float(self._optimizer.carried)

    def account(self, steps: int) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._optimizer.close()


KINDS = {
    "alone": Alone,
    "gradients": Gradients,
    "momentum": Momentum,
    "apart": Apart,
    "sparse": Sparse,
}


def gloo() -> Any:
    """One group for all ways over it."""
    if not _GLOO:
        _GLOO.append(dist.new_group(backend="gloo"))
    return _GLOO[0]


_GLOO: list[Any] = []


def _torch_hook(ddp: DistributedDataParallel, group: Any, hook: str | None, rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=rank, start_powerSGD_iter=2
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook == "fp16":
        ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif hook == "bf16":
        ddp.register_comm_hook(group, _bf16_hook)


def _bf16_hook(group, bucket):  # type: ignore[no-untyped-def]
    """torch's bf16_compress_hook but for its check, which refuses gloo on a CPU; gloo can do it."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks._compress_hook(torch.bfloat16, group, bucket)


def port_bytes() -> int:
    """Sent by this host's network ports, link headers included."""
    return sum(
        int(path.read_text()) for path in Path("/sys/class/net").glob("eth*/statistics/tx_bytes")
    )


def run(way: Alone, one: dict[str, Any]) -> dict[str, Any]:
    """The steps of one run; what the ranks saw on average."""
    comm, steps = way.comm, one["steps"]

    def step() -> float:
        began = time.perf_counter()
        way.step()
        return time.perf_counter() - began

    untimed = [step() for _ in range(one["untimed"])]
    comm.barrier()
    way.start()
    sent, waited = [way.sent], way.waited_s
    cpu, port, began = time.process_time(), port_bytes(), time.perf_counter()
    taken = []
    for _ in range(steps):
        taken.append(step())
        sent.append(way.sent)
    took = time.perf_counter() - began
    figures = [took, time.process_time() - cpu, port_bytes() - port, way.waited_s - waited]
    means = comm.allreduce(np.array(figures) / steps, "avg").tolist()
    names = ("step_s", "cpu_s", "port_bytes", "waited_s")
    finite = all(bool(layer.weight.grad.isfinite().all()) for layer in way.model)  # type: ignore[union-attr,operator]
    return {
        "way": one["way"],
        "per": way.per,
        "steps": taken,
        "untimed": untimed,
        "sent": np.diff(sent).tolist(),
        "finite": finite,
        **dict(zip(names, means, strict=True)),
        **way.account(steps),
    }


def main() -> None:
    """The rank."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("ringcomm").setLevel(logging.INFO)
    dist.init_process_group("ringcomm")
    comm: Any = dist.group.WORLD.comm  # type: ignore[union-attr]
    ways: dict[str, Alone] = {}
    for number, one in enumerate(asked["runs"]):
        name = one["way"]
        if name not in ways:
            settings = asked["ways"][name]
            ways[name] = KINDS[settings["kind"]](asked, settings, comm)
        comm.barrier()
        told = run(ways[name], one)
        if comm.rank == 0:
            print(json.dumps(told), flush=True)
        if all(later["way"] != name for later in asked["runs"][number + 1 :]):
            ways.pop(name).close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
