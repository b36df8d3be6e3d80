"""What compare.py runs of each commit, through ringcomm's public names alone.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \\
        python tools/scenes.py bits FOLDER [PATTERN ...]
    python tools/scenes.py counts FOLDER ROUNDS [LIBRARY]

A scene is a method and its settings, under the name that the report has. ``bits`` is one rank of a
world: it makes 12 steps by each scene and writes this rank's parameters to FOLDER/RANK.npz. A scene
that raises leaves the text of its exception instead, so that a commit without a name or a setting
is told from one with other bits.

``counts`` is a world of two ranks, both threads of this process, for whoever counts what CALLS do.
Each has a section in every round, and nothing has one, too: what the others have more is theirs. A
section is marked behind its end by a system call that names it, which strace sees, and by
counting_mark of the LIBRARY (counting.c), whose own counters go to FOLDER/bytes.json. The first
round warms up.

Invariants: what a scene returns follows from its name, the rank and the world's size: gradients are
set by elementwise float32 operations, and nothing depends on time, on threads or on a matrix
product's order. HookState("auto") chooses by measured times, so it is no scene. Sizes are odd, and
two tensors are large enough to be compressed by hooks and optimizers (32 KiB). Every scene has
connections of its own, so that one that fails leaves the next alone.
"""

from __future__ import annotations

import ctypes
import fnmatch
import functools
import itertools
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import ringcomm

STEPS = 12
SHAPES = ((33, 257), (257,), (103, 96), (5, 7), (3,), ())
SIZES = (1, 1009, 40_013)  # elements of plain calls

Array = Any  # np.ndarray of float32
Scene = Callable[["ringcomm.Communicator"], "list[Array]"]


# ---- gradients ----


@functools.cache
def start(index: int, count: int) -> Array:
    """The values that tensor ``index`` has before the first step; not to be written."""
    return np.random.default_rng((1, index)).standard_normal(count).astype(np.float32)


def gradient(index: int, count: int, step: int, rank: int) -> Array:
    """A part that all ranks have in common and one of this rank's own, in sizes from 1e-3 to 1."""
    common = np.random.default_rng((2, index))
    size = 10.0 ** common.uniform(-3, 0, count)
    own = np.random.default_rng((3, index, step, rank)).standard_normal(count)
    return (size * (0.5 * common.standard_normal(count) + own)).astype(np.float32)


def make_model() -> Any:
    """A model whose gradient is g + p / 8 in each parameter p, g as of ``gradient``."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for index, shape in enumerate(SHAPES):
                values = start(index, int(np.prod(shape))).copy()
                self.register_parameter(
                    f"p{index}", torch.nn.Parameter(torch.from_numpy(values).view(shape))
                )

        def forward(self, step: int, rank: int) -> Any:
            terms = []
            for index, p in enumerate(self.parameters()):
                g = torch.from_numpy(gradient(index, p.numel(), step, rank)).view(p.shape)
                terms.append((p * g + p * p / 16).sum())
            return torch.stack(terms).sum()

    return Model()


def train(model: Any, optimizer: Any, rank: int, steps: range = range(1, STEPS + 1)) -> None:
    """Backward and step, for each number of a step."""
    for step in steps:
        optimizer.zero_grad()
        model(step, rank).backward()
        optimizer.step()


def weights(model: Any) -> list[Array]:
    """Of all parameters, flat."""
    return [p.detach().numpy().reshape(-1).copy() for p in model.parameters()]


# ---- plain calls ----


def by_calls(call: Callable[..., Array], keep: bool = False, **settings: Any) -> Scene:
    """Gradient descent by call(comm, tensor, **settings), which averages a gradient."""

    def run(comm: ringcomm.Communicator) -> list[Array]:
        more: list[dict[str, Any]] = [{} for _ in SIZES]
        if settings["compression"] in KEEP:
            more = [{"feedback": keep and ringcomm.ErrorFeedback()} for _ in SIZES]
        found = [start(index, count).copy() for index, count in enumerate(SIZES)]
        for step in range(1, STEPS + 1):
            for index, count in enumerate(SIZES):
                mean = gradient(index, count, step, comm.rank)
                mean = call(comm, mean, **settings, **more[index])
                found[index] -= np.float32(0.1) * mean
        return found

    return run


def allreduce(comm: Any, x: Array, **settings: Any) -> Array:
    """The average in place."""
    return comm.allreduce(x, "avg", **settings)


def allreduce_sum(comm: Any, x: Array, **settings: Any) -> Array:
    """The average by a sum, in float64 where nothing compresses."""
    return comm.allreduce(x.astype(np.float64), "sum", **settings).astype(np.float32)


def allreduce_many(comm: Any, x: Array, **settings: Any) -> Array:
    """The tensor in pieces, which travel together."""
    comm.allreduce_many(np.array_split(x, 5), "avg", **settings)
    return x


def scatter_gather(comm: Any, x: Array, **settings: Any) -> Array:
    """A reduce-scatter and an all-gather of what came of it."""
    padded = np.zeros(-(-x.size // comm.world_size) * comm.world_size, np.float32)
    padded[: x.size] = x
    part = comm.reduce_scatter(padded, "avg", **settings)
    if "feedback" in settings:
        settings["feedback"] = False
    return comm.allgather(part, **settings).reshape(-1)[: x.size]


def others(comm: Any, x: Array, **settings: Any) -> Array:
    """Collectives that do not compress, one after the other."""
    top = x.copy()
    comm.reduce(top, comm.world_size - 1, "max")
    comm.broadcast(top, root=comm.world_size - 1)
    turned = comm.alltoall(np.tile(x, comm.world_size)).reshape(comm.world_size, -1)
    return top + turned[0] - turned[-1]


# ---- training ----


def by_hook(optimizer: str = "SGD", state: str = "HookState", **settings: Any) -> Scene:
    """DistributedDataParallel with the hook, its process group gloo's."""

    def run(comm: ringcomm.Communicator) -> list[Array]:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        import ringcomm.torch as rt

        made = dict(settings)
        if "dense_steps" in made:
            made["pace"] = rt.Stale1(made.pop("dense_steps"), made.pop("correction"))
        model = make_model()
        if state == "HierarchicalState":
            made["local_group"] = dist.new_subgroups(1)[0]
        else:
            made["comm"] = comm
        hook = getattr(rt, state)(model=model, **made)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.05)
        ddp.register_comm_hook(hook, rt.allreduce_hook)
        rates = {"SGD": {"lr": 0.05, "momentum": 0.9}, "AdamW": {"lr": 0.01}}[optimizer]
        train(ddp, getattr(torch.optim, optimizer)(model.parameters(), **rates), comm.rank)
        found = weights(model)
        if "pace" in made:
            hook.flush()
            found += [p.grad.numpy().reshape(-1).copy() for p in model.parameters()]
        return found

    return run


def by_group(compression: str) -> Scene:
    """DistributedDataParallel over a process group of ringcomm's, which compresses."""

    def run(comm: ringcomm.Communicator) -> list[Array]:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        import ringcomm.torch as rt

        group = dist.new_group(backend="ringcomm", pg_options=rt.Options(compression=compression))
        model = make_model()
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.05)
        train(ddp, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), comm.rank)
        found = weights(model)
        del ddp
        dist.destroy_process_group(group)
        return found

    return run


def by_optimizer(module: str, name: str, **settings: Any) -> Scene:
    """An optimizer of ringcomm.torch.optim or .sparse, and no DDP."""

    def run(comm: ringcomm.Communicator) -> list[Array]:
        import importlib

        made = getattr(importlib.import_module(f"ringcomm.torch.{module}"), name)
        model = make_model()
        params = [p for p in model.parameters() if p.dim() == 2 or name != "Muon"]
        optimizer = made(params, comm=comm, **settings)
        train(model, optimizer, comm.rank)
        if hasattr(optimizer, "flush"):
            optimizer.flush()
        found = weights(model)
        if module == "sparse":
            optimizer.close()
        return found

    return run


def by_outer(inner: str = "AdamW", outer: Any = None, **settings: Any) -> Scene:
    """Ranks that train apart and meet every three steps: the anchor, and the model at the end."""

    def run(comm: ringcomm.Communicator) -> list[Array]:
        import torch

        import ringcomm.torch as rt

        model = make_model()
        optimizer = getattr(torch.optim, inner)(model.parameters(), lr=0.01)
        rule = rt.outer.Sparse(**outer) if isinstance(outer, dict) else outer
        made = {"every": 3, "comm": comm, **settings}
        with rt.OuterStep(model, optimizer, outer=rule, **made) as step:
            train(model, optimizer, comm.rank)
            with step.anchor():
                found = weights(model)
        return found + weights(model)

    return run


# ---- the list ----

CODECS = ("none", "bf16", "fp16", "int8", "fp8", "int4", "int2", "onebit")
KEEP = {*CODECS[3:]}  # that may have error feedback


def scenes() -> Iterator[tuple[str, Scene]]:
    """All of them, by name. Raises nothing: what a commit lacks is noticed when a scene runs."""
    fed = [(codec, keep) for codec in CODECS for keep in (False, True)[: 1 + (codec in KEEP)]]
    for codec, keep in fed:
        tail = codec + " with feedback" * keep
        yield f"allreduce {tail}", by_calls(allreduce, keep, compression=codec)
        yield f"reduce_scatter {tail}", by_calls(scatter_gather, keep, compression=codec)
        yield f"hook {tail}", by_hook(compression=codec, feedback=keep, force=True)
    for codec in ("none", "bf16", "int8"):
        yield f"allreduce_many {codec}", by_calls(allreduce_many, compression=codec)
        yield f"allreduce sum {codec}", by_calls(allreduce_sum, compression=codec)
        yield f"process group {codec}", by_group(codec)
    yield "other collectives", by_calls(others, compression="none")
    for codec in ("none", "bf16", "int8", "int4"):
        yield f"hook {codec} AdamW", by_hook("AdamW", compression=codec)
        for optimizer, corrects in itertools.product(("SGD", "AdamW"), (True, False)):
            tail = f"{codec} {optimizer}" + ", not corrected" * (not corrects)
            late = {"dense_steps": 3, "correction": corrects, "compression": codec, "force": True}
            yield f"hook stale1 {tail}", by_hook(optimizer, **late)
    yield "hook int4 warm-up", by_hook(compression="int4", warmup_steps=5)
    for codec in ("bf16", "int4"):
        yield f"hook hierarchical {codec}", by_hook(state="HierarchicalState", compression=codec)

    ways: dict[str, dict[str, Any]] = {
        "SGD": {"lr": 0.05, "weight_decay": 0.01},
        "SGD nesterov, int4, warm-up": {
            "lr": 0.05,
            "nesterov": True,
            "compression": "int4",
            "warmup_steps": 3,
        },
        "SGD overlapped": {"lr": 0.05, "overlap": True},
        "SGD max_norm": {"lr": 0.05, "max_norm": 1.0},
        "Lion": {"weight_decay": 0.01},
        "OneBitAdam": {"freeze": 4},
        "OneBitAdam stable": {"betas": (0.8, 0.9)},
        "OneBitAdam never renewed": {"freeze": 4, "refresh": None},
        "OneBitAdam int4": {"freeze": 4, "compression": "int4"},
        "OneBitAdam overlapped": {"freeze": 4, "overlap": True},
        "OneBitLamb": {"freeze": 4},
        "ZeroOneAdam": {"var_freeze_step": 6, "var_update_scaler": 2, "local_step_scaler": 3},
        "Muon": {"lr": 0.02},
        "Muon int4": {"lr": 0.02, "gradients": "int4"},
    }
    for name, settings in ways.items():
        yield f"optim {name}", by_optimizer("optim", name.split()[0], **settings)

    for name, rate in (("SGD", {"lr": 0.05, "momentum": 0.9}), ("Adam", {"lr": 0.01})):
        for more in (
            {"density": 0.1},
            {"density": 0.1, "staleness": 1},
            {"density": 0.1, "decay": 0.9},
            {"density": 0.1, "values": "fp32", "exchange": "owner", "aggregate": "senders"},
        ):
            words = ", ".join(f"{key}={value}" for key, value in more.items())
            yield f"sparse {name} {words}", by_optimizer("sparse", name, **rate, **more)

    for codec in ("none", "bf16", "int8", "int4", "int2", "onebit"):
        for rule in ("mean", "nesterov"):
            yield f"outer {rule} {codec}", by_outer(outer=rule, codec=codec)
    yield "outer int8 with feedback", by_outer(codec="int8", feedback=True)
    yield "outer at the end", by_outer(every=None)
    yield "outer two fragments, delayed", by_outer("SGD", every=4, fragments=2, delay=1)
    for rule in ({"density": 0.1}, {"density": 0.1, "decay": 0.5, "aggregate": "senders"}):
        words = ", ".join(f"{key}={value}" for key, value in rule.items())
        yield f"outer sparse {words}", by_outer(outer=rule)
    yield "outer sparse delayed", by_outer(outer={"density": 0.1}, every=4, fragments=2, delay=1)

    for algorithm in ("ring", "halving", "direct", "doubling", "one_shot"):
        for codec in ("none", "bf16", "int8", "int4", "onebit"):
            scene = by_calls(allreduce, codec in ("int4", "onebit"), compression=codec)
            yield f"allreduce {codec} by {algorithm}", with_config(scene, algorithm=algorithm)


def with_config(scene: Scene, **settings: Any) -> Scene:
    """The scene over a communicator of these settings."""

    def run(comm: ringcomm.Communicator) -> list[Array]:
        config = ringcomm.Config(**settings)
        address = f"tcp://127.0.0.1:{agreed_port(comm)}"
        with ringcomm.Communicator.create(
            comm.rank, comm.world_size, init_method=address, config=config
        ) as other:
            return scene(other)

    return run


# ---- one rank ----


def agreed_port(comm: ringcomm.Communicator) -> int:
    """A port of the loopback that nobody had on rank 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = np.array([probe.getsockname()[1]], np.int64)
    comm.broadcast(port, root=0)
    return int(port[0])


def set_up_torch(comm: ringcomm.Communicator) -> None:
    """One thread, and a process group of gloo for DDP."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{agreed_port(comm)}"
    dist.init_process_group("gloo", init_method=address, rank=comm.rank, world_size=comm.world_size)


def is_wanted(name: str, patterns: list[str]) -> bool:
    """Whether a pattern of the shell's matches the name, or there is none."""
    return not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def bits(folder: Path, patterns: list[str]) -> None:
    """See the head of this file."""
    wanted = [(name, scene) for name, scene in scenes() if is_wanted(name, patterns)]
    found: dict[str, Array] = {}
    ringcomm.init()
    world = ringcomm.default_communicator()
    if any(not name.startswith(("allreduce", "reduce", "other")) for name, _ in wanted):
        set_up_torch(world)
    for name, scene in wanted:
        with world.split(0) as comm:
            try:
                found[name] = np.concatenate(scene(comm))
            except Exception as error:  # is the result
                found[name] = np.array(f"{type(error).__name__}: {error}".splitlines()[0])
                comm.abort("the scene failed")
    np.savez(folder / f"{world.rank}.npz", **found)
    world.barrier()
    ringcomm.shutdown()


# ---- calls that are counted ----

KIB, MIB = 1 << 10, 1 << 20
CALLS: dict[str, tuple[int, dict[str, Any], int]] = {  # bytes, settings, calls in a section
    "4 KiB none": (4 * KIB, {}, 20),
    "4 KiB bf16": (4 * KIB, {"compression": "bf16"}, 20),
    "1 MiB none": (MIB, {}, 20),
    "1 MiB bf16": (MIB, {"compression": "bf16"}, 20),
    "64 MiB none": (64 * MIB, {}, 2),
    "64 MiB bf16": (64 * MIB, {"compression": "bf16"}, 2),
    "1 MiB int4 with feedback": (MIB, {"compression": "int4"}, 10),
    "barrier": (0, {}, 20),
}
NOTHING = "nothing"
MARK = "/ringcomm-compare/"
COUNTED = ("copies", "copied", "sent", "received")  # counting.c's counters


class Library:
    """counting.c, as compare.py has built it; it watches the package's extension."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        inside = str(Path(ringcomm.__file__).resolve().parent)
        with open("/proc/self/maps") as maps:
            ours = [line for line in maps if inside in line and ".so" in line]
        ends = [int(end, 16) for line in ours for end in line.split()[0].split("-")]
        self._library.counting_watch(ctypes.c_size_t(min(ends)), ctypes.c_size_t(max(ends)))

    def mark(self, name: str) -> None:
        """Ends a section."""
        self._library.counting_mark(name.encode())

    def counters(self) -> list[int]:
        """As COUNTED names them, since the start."""
        out = (ctypes.c_uint64 * len(COUNTED))()
        self._library.counting_read(out)
        return list(out)


def sections_of(comm: ringcomm.Communicator, gate: threading.Barrier) -> Iterator[str]:
    """Makes each section's calls on one rank; the gate has both ranks begin and end together."""
    tensor = np.ones(max(size for size, _, _ in CALLS.values()) // 4, np.float32)
    feedback = ringcomm.ErrorFeedback()
    while True:
        for name, (size, settings, times) in {NOTHING: (0, {}, 0), **CALLS}.items():
            more = {"feedback": feedback} if "feedback" in name else {}
            part = tensor[: size // 4]
            gate.wait()
            for _ in range(times):
                if size:
                    comm.allreduce(part, "avg", **settings, **more)
                else:
                    comm.barrier()
            gate.wait()
            yield name


def counts(folder: Path, rounds: int, path: str | None) -> None:
    """See the head of this file."""
    config = ringcomm.Config(
        timeout=900.0, connect_timeout=300.0, heartbeat=200.0, peer_timeout=900.0, spin_us=0
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    gate, library = threading.Barrier(2), Library(path) if path else None
    turns = rounds * (1 + len(CALLS))
    counted: dict[str, list[list[int]]] = {name: [] for name in (NOTHING, *CALLS)}

    def other() -> None:
        with ringcomm.Communicator.create(1, 2, init_method=address, config=config) as comm:
            for _ in itertools.islice(sections_of(comm, gate), turns):
                pass

    thread = threading.Thread(target=other)
    thread.start()
    with ringcomm.Communicator.create(0, 2, init_method=address, config=config) as comm:
        before = library.counters() if library else []
        for name in itertools.islice(sections_of(comm, gate), turns):
            os.access(MARK + name, os.F_OK)
            if library:
                library.mark(name)
                now = library.counters()
                counted[name].append([b - a for a, b in zip(before, now, strict=True)])
                before = now
    thread.join()
    (folder / "bytes.json").write_text(json.dumps(counted))


if __name__ == "__main__":
    if sys.argv[1] == "counts":
        counts(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] if sys.argv[4:] else None)
    else:
        bits(Path(sys.argv[2]), sys.argv[3:])
    sys.stdout.flush()
    os._exit(0)  # torch's gloo can hang where DDP is the last to hold its group
