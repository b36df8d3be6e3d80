"""Ranks that train under DDP with ringcomm's hook. torch's own process group (gloo) builds the DDP
object and checks the results; the gradients travel by ringcomm."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
import warnings
from typing import Any

import torch
import torch._dynamo  # which DDP imports when it is first used: here once for all ranks
import torch.distributed as dist
from faults.rank import Rank, describe
from patience import PROMPT, until
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import ringcomm
from ringcomm.errors import ConfigError
from ringcomm.torch import HierarchicalState, HookState, Stale1, allreduce_hook, trips
from ringcomm.torch.worker import Worker

WIDTH = 48
SMALL_BUCKETS = {"bucket_cap_mb": 0.02}


class Net(nn.Module):
    """Layers in a row, and one beside them that only some calls use."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.row = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.aside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, aside: bool = False) -> torch.Tensor:
        for layer in self.row:
            x = torch.tanh(layer(x))
        return self.aside(x) + x if aside else x


def _start(rank: Rank) -> ringcomm.Communicator:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    comm = rank.open()
    torch.manual_seed(7)
    return comm


def _state(compression: str | None, local: int = 0, **settings: Any) -> HookState:
    """A hook's state; local: so many ranks in succession are a host, joined by gloo."""
    if not local:
        return HookState(compression, **settings)
    group, _ = dist.new_subgroups(local)
    return HierarchicalState(compression, local_group=group, **settings)


def _wrap(model: nn.Module, state: HookState, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, **{**SMALL_BUCKETS, **options})
    ddp.register_comm_hook(state, allreduce_hook)
    return ddp


def _batch(rank: Rank, step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank.number)
    return torch.randn(8, WIDTH, generator=generator).to(dtype)


def _gradients(model: nn.Module) -> torch.Tensor:
    return (
        torch.cat(
            [
                torch.zeros(p.numel(), dtype=p.dtype) if p.grad is None else p.grad.reshape(-1)
                for p in model.parameters()
            ]
        )
        .detach()
        .clone()
    )


def _everyones(gradients: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(gradients) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, gradients)
    return parts


def means(rank: Rank, compression: str | None, dtype: str, mode: str, local: int = 0) -> None:
    """Four steps, each compared with the mean of what every rank computes by itself.

    Reports the worst difference in units of the mean of the magnitudes (less than 2**-24 counts as
    nothing: fp16 ends there), whether all ranks have the same bits, and the buckets of each step.
    """
    _start(rank)
    kind = getattr(torch, dtype)
    alone, model = Net().to(kind), Net().to(kind)
    model.load_state_dict(alone.state_dict())
    state = _state(compression, local)
    options = {mode: True} if mode in ("find_unused_parameters", "static_graph") else {}
    ddp = _wrap(model, state, **options)
    worst, equal, buckets = 0.0, True, []
    for step in range(4):
        # Of the ranks, only the second uses all parameters, and only in every other step.
        aside = mode != "find_unused_parameters" or (rank.number == 1 and step % 2 == 1)
        state.reset()
        alone.zero_grad()
        ddp.zero_grad()
        if mode == "no_sync":
            x = _batch(rank, 100 + step, kind)
            _backward(alone, x, aside)
            with ddp.no_sync():
                _backward(ddp, x, aside)
            assert state.report()["buckets"] == 0
        x = _batch(rank, step, kind)
        _backward(alone, x, aside)
        _backward(ddp, x, aside)
        got = _gradients(ddp)
        worst = max(worst, _distance(got, _everyones(_gradients(alone))))
        equal = equal and all(torch.equal(part, got) for part in _everyones(got))
        buckets.append(state.report()["buckets"])
    rank.emit("means", worst=worst, equal=equal, buckets=buckets)
    _end()


def stale(rank: Rank, mode: str, local: int = 0) -> None:
    """Seven steps of SGD with one step of staleness, the first two dense, and a flush.

    Reports how far what was handed out is from the mean, one step earlier, of what every rank
    computes by itself at the weights that backward was done at; how far the sum of all is from
    their sum; whether all ranks end with the same weights, and whether the model held its own
    after each backward. Every other rank's courier rests after each of its jobs.
    """
    _start(rank)
    if rank.number % 2:
        submit = Worker.submit
        Worker.submit = lambda self, job: submit(self, lambda: (job(), time.sleep(0.01)))
    alone, model = Net(), Net()
    model.load_state_dict(alone.state_dict())
    state = _state(None, local, model=model, pace=Stale1(dense_steps=2))
    options = {} if mode in ("plain", "no_sync") else {mode: True}
    ddp = _wrap(model, state, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4, momentum=0.9)
    made, got, back = [], [], True
    for step in range(7):
        own = _weights(model)
        alone.zero_grad()
        ddp.zero_grad()
        for half in range(2 if mode == "no_sync" else 1):
            x = _batch(rank, 100 * half + step, torch.float32)
            with ddp.no_sync() if mode == "no_sync" and half == 0 else contextlib.nullcontext():
                loss = ddp(x, True).float().square().sum()
                _take_weights(alone, model)  # those of this backward
                loss.backward()
            _backward(alone, x, True)
        back = back and torch.equal(own, _weights(model))
        made.append(torch.stack(_everyones(_gradients(alone))).double().mean(0))
        got.append(_gradients(ddp).double())
        optimizer.step()
    ddp.zero_grad()
    assert state.flush()
    got.append(_gradients(ddp).double())
    optimizer.step()
    own = _weights(model)
    scale = torch.stack(made).abs().max()
    late = [got[0] - made[0], got[1] - made[1], got[2]]
    late += [there - mean for there, mean in zip(got[3:], made[2:], strict=True)]
    total = torch.stack(got).sum(0) - torch.stack(made).sum(0)
    rank.emit(
        "stale",
        late=float(torch.stack(late).abs().max() / scale),
        back=back,
        total=float(total.abs().max() / scale),
        equal=all(torch.equal(one, own) for one in _everyones(own)),
    )
    _end()


def refuses_stale(rank: Rank) -> None:
    """A backward of a DDP that looks for unused parameters; reports how it ends."""
    _start(rank)
    model, text = Net(), ""
    ddp = _wrap(model, _state(None, 0, model=model, pace="stale1"), find_unused_parameters=True)
    try:
        _backward(ddp, _batch(rank, 0, torch.float32), True)
    except ConfigError as error:
        text = str(error)
    rank.emit("refused", text=text)
    _end()


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@torch.no_grad()
def _take_weights(target: nn.Module, source: nn.Module) -> None:
    for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
        mine.copy_(theirs)


def feeds_back(rank: Rank, compression: str, mode: str, local: int = 0) -> None:
    """Six steps with error feedback, a checkpoint and a new DDP object after the third.

    Reports, over the large parameters, the most that the sum of all gradients lacks, and how far
    that is from what the checkpoint says; whether all ranks have the same bits; and the buckets of
    each step.
    """
    _start(rank)
    alone, model = Net(), Net()
    model.load_state_dict(alone.state_dict())
    options = {mode: True} if mode in ("find_unused_parameters", "static_graph") else {}
    out, exact = 0.0, 0.0
    equal, buckets, saved = True, [], {}
    for step in range(6):
        if step % 3 == 0:
            state = _state(compression, local, model=model, feedback=True, threshold=4096)
            state.load_state_dict(saved)
            ddp = _wrap(model, state, **options)
        state.reset()
        alone.zero_grad()
        ddp.zero_grad()
        aside = mode != "find_unused_parameters" or rank.number == 1
        if mode == "no_sync":
            x = _batch(rank, 100 + step, torch.float32)
            _backward(alone, x, aside)
            with ddp.no_sync():
                _backward(ddp, x, aside)
        x = _batch(rank, step, torch.float32)
        _backward(alone, x, aside)
        _backward(ddp, x, aside)
        got = _gradients(ddp)
        equal = equal and all(torch.equal(part, got) for part in _everyones(got))
        buckets.append(state.report()["buckets"])
        out = out + got.double()
        exact = exact + torch.stack(_everyones(_gradients(alone))).double().mean(0)
        saved = state.gather_state_dict()
    tensors = saved["feedback"]["tensors"]
    left, large = [], []
    for name, p in model.named_parameters():
        mine = tensors.get(name)
        left.append(mine["worker"] + mine["owner"] if mine else torch.zeros(p.numel()))
        large.append(torch.full((p.numel(),), mine is not None))
    lacks = (exact - out) * torch.cat(large)
    worst = float((lacks - torch.cat(left)).abs().max() / exact.abs().max())
    rank.emit(
        "feeds_back",
        names=sorted(tensors),
        lacks=float(lacks.abs().max()),
        worst=worst,
        equal=equal,
        buckets=buckets,
    )
    _end()


def _backward(model: nn.Module, x: torch.Tensor, aside: bool) -> None:
    model(x, aside).float().square().sum().backward()


def _distance(got: torch.Tensor, own: list[torch.Tensor]) -> float:
    """How far from the mean, relative to the mean magnitude; 0.0 for the mean's very bits."""
    # Of two ranks the double mean is exact, so this rounds once, as the sum itself does.
    mean = (sum(part.double() for part in own) / len(own)).to(got.dtype)
    scale = sum(part.double().abs() for part in own) / len(own)
    error = (got.double() - mean.double()).abs()
    return float((error * (error > 2**-24) / (scale + 1e-300)).max()) if error.any() else 0.0


def _end() -> None:
    """Leaves in order, but for the seconds in which the interpreter would take torch apart."""
    dist.barrier()
    dist.destroy_process_group()
    ringcomm.shutdown()
    os._exit(0)


def account(rank: Rank) -> None:
    """What HookState.report() says of three steps, and after a reset."""
    comm = _start(rank)
    model = Net()
    state = HookState("bf16", comm=comm)
    ddp = _wrap(model, state)
    elements = sum(p.numel() for p in model.parameters())
    before = time.perf_counter()
    for step in range(3):
        ddp(_batch(rank, step, torch.float32), True).sum().backward()
    report = state.report()
    after = time.perf_counter()
    in_order = all(before < submitted < done < after for submitted, done in report.pop("works"))
    state.reset()
    again = pickle.loads(pickle.dumps(state))
    rank.emit(
        "account",
        elements=elements,
        in_order=in_order,
        report=report,
        rest=state.report(),
        error=state.error is not None,
        pickled=again.compression,
    )
    _end()


def profiled(rank: Rank) -> None:
    """What torch.profiler has of the hook in a backward, and the hook's own report of it."""
    _start(rank)
    state = HookState("bf16")
    ddp = _wrap(Net(), state)
    for step in range(2):
        ddp(_batch(rank, step, torch.float32), True).sum().backward()
    state.reset()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ddp(_batch(rank, 3, torch.float32), True).sum().backward()
    ranges = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.name.startswith("ringcomm:bucket")
    ]
    rank.emit("profiled", ranges=ranges, report=state.report())
    _end()


def overlap(rank: Rank) -> None:
    """Holds backward up in front of its last layers: the other buckets are completed meanwhile, by
    another thread."""
    _start(rank)
    model = Net(layers=12)
    state = HookState("bf16")
    ddp = _wrap(model, state)
    expected = early = 0

    def hold_up(*_: object) -> None:
        nonlocal early
        until(lambda: state.report()["buckets"] >= expected, PROMPT)
        early = state.report()["buckets"]

    model.row[1].register_full_backward_hook(hold_up)
    for step in range(3):  # the last one counts: the buckets are laid out anew after the first
        expected = state.report()["buckets"] - 2 if step == 2 else 0
        state.reset()
        ddp(_batch(rank, step, torch.float32), True).sum().backward()
    rank.emit("overlap", buckets=state.report()["buckets"], early=early)
    _end()


def lost(rank: Rank, how: str, local: int = 0) -> None:
    """Rank 1 goes, in this manner, in the midst of its third backward."""
    comm = _start(rank)
    model = Net()
    state = _state("bf16", local)
    ddp = _wrap(model, state)
    step = 0

    def go(*_: object) -> None:
        if rank.number == 1 and step == 2:
            rank.emit("going")
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("cannot go on")

    model.row[1].register_full_backward_hook(go)

    def train() -> None:
        nonlocal step
        for step in range(50):
            ddp(_batch(rank, step, torch.float32), True).sum().backward()

    error = rank.attempt("failed", train)
    if isinstance(error, ValueError):
        raise error
    assert state.error is not None
    rank.emit("state", kind=type(state.error).__name__, rank=state.error.rank)
    x = _batch(rank, 0, torch.float32)
    rank.attempt("again", lambda: ddp(x, True).sum().backward())
    rank.attempt("direct", (state.comm if local else comm).barrier)
    ringcomm.shutdown()
    os._exit(0)  # gloo would wait for the one that is gone


class _Numbers(Dataset[torch.Tensor]):
    def __init__(self, rank: Rank, wrong: bool) -> None:
        self._rank = rank
        self._wrong = wrong

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._wrong:
            ringcomm.allreduce(torch.ones(4))
        return _batch(self._rank, index, torch.float32)[0]


def with_loader(rank: Rank, wrong: bool) -> None:
    """Trains on what forked workers bring; wrong: they try to use ringcomm."""
    _start(rank)
    state = HookState("bf16")
    ddp = _wrap(Net(), state)
    loader = DataLoader(
        _Numbers(rank, wrong), batch_size=4, num_workers=2, multiprocessing_context="fork"
    )

    def epochs() -> None:
        for _ in range(2):
            for batch in loader:
                ddp.zero_grad()
                ddp(batch, True).sum().backward()

    rank.attempt("epochs", epochs)
    mine = _gradients(ddp)
    rank.emit("equal", equal=all(torch.equal(part, mine) for part in _everyones(mine)))
    _end()


def lost_with_loader(rank: Rank) -> None:
    """As lost, killed by the test, with forked workers that outlive the one that is killed."""
    _start(rank)
    ddp = _wrap(Net(), HookState())
    dataset = _Numbers(rank, False)
    loader = DataLoader(
        dataset,
        batch_size=4,
        num_workers=2,
        multiprocessing_context="fork",
        persistent_workers=True,
    )

    def epochs() -> None:
        while True:
            for batch in loader:
                ddp(batch, True).sum().backward()
                rank.emit("step")

    rank.attempt("failed", epochs)
    ringcomm.shutdown()
    os._exit(0)


def unprepared(rank: Rank) -> None:
    """Backward without ringcomm.init."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ddp = _wrap(Net(), HookState())
    rank.attempt("refused", lambda: HookState("int3"))
    x = _batch(rank, 0, torch.float32)
    rank.attempt("failed", lambda: ddp(x, True).sum().backward())
    dist.destroy_process_group()
    os._exit(0)


class _Looks(nn.Module):
    """A layer whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.long().clamp(0, WIDTH - 1))


def refused(rank: Rank, what: str) -> None:
    """A backward of a model, or with a hook, that cannot work."""
    _start(rank)
    width = WIDTH + (8 * rank.number if "shapes" in what else 0)
    model = _Looks() if what == "sparse" else nn.Linear(WIDTH, width)
    x = torch.ones(4, WIDTH)
    if what == "meta":
        model, x = model.to("meta"), x.to("meta")
    codec = "fp16" if what == "codecs" and rank.number else "bf16"
    state = None if what == "no state" else HookState(codec)

    def train() -> None:
        unchecked = what in ("meta", "unchecked shapes")
        ddp = DistributedDataParallel(model, **({"init_sync": False} if unchecked else {}))
        ddp.register_comm_hook(state, allreduce_hook)
        ddp(x).sum().backward()

    rank.attempt("refused", train)
    ringcomm.shutdown()
    os._exit(0)


def refused_in_host(rank: Rank) -> None:
    """The second bucket of rank 2's second backward is refused by the process group of its host."""
    _start(rank)
    state = _state("bf16", 2)
    ddp = _wrap(Net(), state)
    ddp(_batch(rank, 0, torch.float32), True).sum().backward()
    starts, calls = trips._reduce_scatter, 0

    def refuses_the_second(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if rank.number == 2 and calls == 2:
            raise RuntimeError("no more of it")
        return starts(*args, **kwargs)

    trips._reduce_scatter = refuses_the_second
    rank.attempt("failed", lambda: ddp(_batch(rank, 1, torch.float32), True).sum().backward())
    rank.emit("state", **describe(state.error))
    rank.wait_for_go()
    os._exit(0)  # gloo would wait for what one rank has not begun


def aborted_apart(rank: Rank, by: int, in_host: bool) -> None:
    """This rank aborts what it shares with its host or, else, with its place on the other host.
    Then go backward those that the test tells to."""
    torch.set_num_threads(1)
    dist.init_process_group("ringcomm" if in_host else "gloo")
    state = _state("bf16", 2) if in_host else _state("bf16", 2, comm=rank.open())
    ddp = _wrap(Net(), state)
    if rank.number == by:
        shared = state.grid.group.comm if in_host else state.comm  # type: ignore[attr-defined]
        shared.abort("had enough")
        rank.emit("aborted")
    rank.wait_for_go()
    x = _batch(rank, 0, torch.float32)
    rank.attempt("failed", lambda: ddp(x, True).sum().backward())
    rank.emit("state", **describe(state.error))
    rank.wait_for_go()  # which the test ends


def hierarchy(rank: Rank) -> None:
    """What a HierarchicalState refuses, counts, keeps of a step that is dropped, and saves."""
    comm = _start(rank)
    three, all_ranks = dist.new_group([0, 1, 2]), dist.group.WORLD
    lone = dist.new_group([3])
    pairs = [dist.new_group([first, first + 1]) for first in (0, 2)]
    wrong = {
        "unequal": three if rank.number < 3 else lone,
        "overlap": all_ranks if rank.number < 2 else pairs[1],
        "stranger": pairs[0],
    }
    for name, group in wrong.items():
        rank.attempt(name, lambda group=group: HierarchicalState("bf16", local_group=group))
    model = Net()
    state = HierarchicalState(
        "onebit", comm, local_group=pairs[rank.number // 2], model=model, threshold=4096
    )
    ddp = _wrap(model, state)
    for step in range(3):
        state.reset()
        ddp(_batch(rank, step, torch.float32), True).square().sum().backward()
    elements = sum(p.numel() for p in model.parameters())
    rank.emit("report", elements=elements, small=7 * WIDTH, report=state.report())
    before = state.gather_state_dict()
    x = _batch(rank, 3, torch.float32)
    if rank.number == 3:
        x[0, 0] = float("nan")
    ddp(x, True).square().sum().backward()
    kept = _same(before, state.gather_state_dict())
    flat = HookState("onebit", comm, model=model, threshold=4096)
    flat.load_state_dict(before)
    alike = _same(before, flat.gather_state_dict())
    state.load_state_dict(flat.gather_state_dict())
    rank.emit("saved", kept=kept, flat=alike, back=_same(before, state.gather_state_dict()))
    exact = state.state_dict()
    state.load_state_dict(exact)
    own = _bits(exact) == _bits(state.state_dict()) != _bits(before)
    rank.emit("exact", own=own)
    exact["feedback"]["exact"]["place"] = 1 - rank.number % 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state.load_state_dict(exact)
    left = sum(float(abs(state.feedback[name].worker).sum()) for name in state.feedback)
    rank.emit("other place", told=[str(one.message) for one in caught], left=left)
    rank.attempt("flat", lambda: flat.load_state_dict(exact))
    other = HookState("onebit", comm, model=nn.Linear(64, 64), threshold=4096)
    stranger = other.gather_state_dict()
    stranger["feedback"]["tensors"]["aside.weight"] = stranger["feedback"]["tensors"].pop("weight")
    rank.attempt("other model", lambda: state.load_state_dict(stranger))
    again = pickle.loads(pickle.dumps(state))
    ddp = _wrap(Net(), again)
    rank.attempt("copy", lambda: ddp(x, True).sum().backward())
    state.close()
    _end()


def _bits(state: dict[str, Any]) -> list[bytes]:
    tensors = state["feedback"]["tensors"]
    return [one[kind].numpy().tobytes() for one in tensors.values() for kind in ("worker", "owner")]


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two states hold the same residuals, up to what a restart rounds."""
    parts, others = (state["feedback"]["tensors"] for state in (one, other))
    return parts.keys() == others.keys() and all(
        part["worker"].any() and torch.allclose(part[kind], others[name][kind], 1e-6, 1e-7)
        for name, part in parts.items()
        for kind in ("worker", "owner")
    )
