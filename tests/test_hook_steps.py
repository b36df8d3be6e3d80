"""What the DDP hook does step by step: the dense warm-up, loss scales, steps that are dropped,
and where the time of a step went."""

from __future__ import annotations

import gc
import importlib.util
import pickle
import re
import time
import weakref
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch._dynamo  # which an optimizer imports when it is first made: here, for all ranks
import torch.distributed as dist
from ddp_buckets import (
    LARGE,
    THRESHOLD,
    Bucket,
    Net,
    gradients_of,
    reduce,
    state_of,
    trained,
)
from quantised_reference import payload_bytes
from ranks import World, run_ranks
from torch import nn

from ringcomm import (
    AbortedError,
    Communicator,
    ConfigError,
    ErrorFeedback,
    MismatchError,
    PeerLostError,
    RingcommError,
    TensorError,
)
from ringcomm.codecs import CODECS
from ringcomm.torch import Auto, HookState, Stale1, allreduce_hook, attach
from ringcomm.torch import buckets as hook_buckets
from ringcomm.torch.buckets import GradientBucket
from ringcomm.torch.codec_policy import FixedCodec
from ringcomm.torch.exchange import CommExchange
from ringcomm.torch.sync.pending import Pending, Wire

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]


def wire_bytes(state: HookState, model: nn.Module, step: int, buckets: int = 2) -> int:
    state.reset()
    reduce(state, model, gradients_of(model, state.comm.rank, step), buckets)
    (told,) = state.report()["steps"]
    return int(told["wire_bytes"])


# ---- warm-up ----


@pytest.mark.parametrize("codec", ["int8", "onebit"])
def test_first_steps_travel_at_bf16(codec: str) -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        sizes = {name: p.numel() for name, p in trained(model)}
        dense = 2 * sum(sizes.values())
        packed = sum(
            payload_bytes(codec, n) if name in LARGE else 2 * n for name, n in sizes.items()
        )
        state = state_of(comm, model, codec, warmup_steps=3)
        sent = [wire_bytes(state, model, step) for step in range(2)]
        saved = state.gather_state_dict()
        assert saved["steps"] == 2
        state = state_of(comm, model, codec, warmup_steps=3)
        state.load_state_dict(saved)
        sent += [wire_bytes(state, model, step) for step in range(2, 5)]
        assert sent == [dense] * 3 + [packed] * 2
        again = pickle.loads(pickle.dumps(state))
        assert (again.warmup_steps, again.steps) == (3, 5)

    run_ranks(2, body)


def test_a_warm_up_is_a_number_of_steps() -> None:
    for bad in (-1, 0.5, True, None):
        with pytest.raises(ConfigError, match="warmup_steps: "):
            HookState("int8", warmup_steps=bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="steps in the state: '3'"):
        HookState("int8").load_state_dict({"steps": "3"})


# ---- loss scales, and steps that are dropped ----


@pytest.mark.parametrize("flushes", [False, True])
def test_residuals_follow_a_scaler(flushes: bool) -> None:
    """An overflow halves the scale, and what is left with it; the step itself leaves nothing. A
    flush follows the scaler at once."""

    def body(comm: Communicator) -> None:
        model = Net()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        state = state_of(comm, model, "onebit", scaler=scaler)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        kept = []
        for step in range(4):
            gradients = gradients_of(model, comm.rank, step)
            if step == 2 and comm.rank == 1:
                gradients["embed"][3, 4] = float("inf")
            scaler.scale(torch.ones(()))
            got = reduce(state, model, gradients, buckets=3)
            for name, parameter in trained(model):
                parameter.grad = got[name].reshape(parameter.shape)
            scaler.step(optimizer)
            scaler.update()
            if flushes:
                assert not state.flush()
            state.gather_state_dict()
            kept.append({name: state.feedback[name].worker for name in LARGE})
            assert state.loss_scale == (1024.0 if step < 3 - flushes else 512.0)
        for name in LARGE:
            assert kept[1][name].any()
            assert np.array_equal(kept[2][name], kept[1][name] * (0.5 if flushes else 1)), name
            assert not np.array_equal(kept[3][name], kept[2][name]), name
        assert scaler.get_scale() == 512.0

    run_ranks(2, body)


@pytest.mark.parametrize("place", [("embed", "head"), ("small", "embed")])
def test_a_dropped_step_leaves_all_residuals(place: tuple[str, str]) -> None:
    """Also those of other buckets, and where a value that travels at bf16 was not finite."""

    def body(comm: Communicator) -> None:
        spoilt, other = place
        model = Net()
        states = [state_of(comm, model, "int4") for _ in range(2)]
        for step in range(4):
            for dropped, state in enumerate(states):
                if step != 2:
                    last = reduce(state, model, gradients_of(model, comm.rank, step), 3)[other]
                    if not dropped:
                        expected = last.clone()
                elif dropped:
                    gradients = gradients_of(model, comm.rank, step)
                    gradients[spoilt].view(-1)[0] = float("nan") if comm.rank else 0.0
                    reduce(state, model, gradients, 3)
        assert torch.equal(last, expected)

    run_ranks(3, body)


def test_undo_takes_one_call_back() -> None:
    def body(comm: Communicator) -> None:
        feedback = ErrorFeedback()
        feedback.undo()
        kept = []
        for step in range(3):
            x = torch.randn(1000, generator=torch.Generator().manual_seed(10 * step + comm.rank))
            comm.allreduce(x, "avg", compression="onebit", feedback=feedback)
            kept.append((feedback.worker, feedback.owner))
        for _ in range(2):
            feedback.undo()
            assert np.array_equal(feedback.worker, kept[1][0])
            assert np.array_equal(feedback.owner, kept[1][1])
        comm.allreduce(torch.ones(1000), "avg", compression="onebit", feedback=feedback)
        feedback.rescale(2.0)
        before = feedback.worker
        feedback.undo()
        assert np.array_equal(feedback.worker, before)

    run_ranks(3, body)


def test_undo_is_of_the_last_call() -> None:
    """One at 16 bits, whose result was not finite, has brought no residuals."""

    def body(comm: Communicator) -> None:
        feedback = ErrorFeedback()
        x = torch.randn(1000, generator=torch.Generator().manual_seed(comm.rank))
        comm.allreduce(x, "avg", compression="onebit", feedback=feedback)
        x = torch.full((1000,), float("inf"))
        comm.allreduce(x, "avg", compression="bf16", feedback=feedback)
        kept = feedback.worker, feedback.owner
        assert kept[0].any()
        feedback.undo()
        assert np.array_equal(feedback.worker, kept[0])
        assert np.array_equal(feedback.owner, kept[1])

    run_ranks(3, body)


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"scaler": 1024.0}, "scaler=1024.0: give a torch.amp.GradScaler, or None"),
        ({"force": "no"}, "Invalid force: 'no'; give True or False"),
        ({"model": 5}, "model=5: give a torch.nn.Module, or None"),
        ({"model": nn.Linear}, "give a torch.nn.Module, or None"),
        ({"model": 5, "compression": "auto"}, "model=5: give a torch.nn.Module, or None"),
        ({"compression": 5}, 'compression=5: give a codec, "auto" or a CodecPolicy, such as'),
        ({"compression": Auto}, "a CodecPolicy, such as ringcomm.torch.Auto(model), or None"),
        ({"compression": torch.bfloat16}, "did you mean bf16?"),
        ({"policy": Auto()}, "policy= has been removed: give the CodecPolicy as compression="),
        ({"threshhold": 5}, "did you mean threshold?"),
        ({"comm": 5}, "comm=5: give a ringcomm.Communicator, or None"),
        ({"transport": 5}, "transport=5: give a Transport, or None"),
    ],
)
def test_what_is_no_such_thing_is_refused(settings: dict[str, Any], fix: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(fix)):
        HookState(**settings)
    if "model" in settings:
        with pytest.raises(ConfigError, match=r"give a torch\.nn\.Module, or None"):
            HookState().name_parameters(settings["model"])
        with pytest.raises(ConfigError, match=r"give the torch\.nn\.Module that is trained"):
            attach(settings["model"])


@pytest.mark.parametrize(
    ("here", "there", "says"),
    [
        ({"compression": "bf16"}, {}, "compression is bf16 on rank 0 and int8 on rank 1"),
        ({}, {"threshold": 64}, f"threshold is {THRESHOLD} on rank 0 and 64 on rank 1"),
        ({}, {"warmup_steps": 9}, "warmup_steps is 0 on rank 0 and 9 on rank 1"),
        ({}, {"feedback": True}, "feedback is False on rank 0 and True on rank 1"),
        ({}, {"pace": "stale1"}, "pace is every on rank 0 and Stale1("),
        ({"pace": "stale1"}, {"pace": Stale1(50)}, "Stale1(dense_steps=50"),
        (
            {"compression": "auto", "feedback": True},
            {"compression": Auto(allow=["int4"])},
            "is auto of none, bf16, int8 on rank 0 and auto of none, bf16, int8, int4 on rank 1",
        ),
    ],
)
def test_settings_that_differ_are_named_in_the_first_step(
    here: dict[str, Any], there: dict[str, Any], says: str
) -> None:
    def body(comm: Communicator) -> None:
        model, given = Net(), there if comm.rank else here
        common = {"compression": "int8", "threshold": THRESHOLD, "model": model}
        state = HookState(comm=comm, **{**common, **given})  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match=re.escape(says)):
            reduce(state, model, gradients_of(model, comm.rank, 0))
        assert isinstance(state.error, MismatchError)
        with pytest.raises(MismatchError, match=re.escape(says)):  # DDP lets it through
            reduce(state, model, gradients_of(model, comm.rank, 1))

    run_ranks(2, body)


def test_one_setting_in_two_forms_is_the_same() -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        pace = Stale1() if comm.rank else "stale1"
        reduce(state_of(comm, model, "int8", pace=pace), model, gradients_of(model, comm.rank, 0))

    run_ranks(2, body)


# ---- failures ----


def test_a_failed_step_ends_in_order_and_the_next_one_raises_the_error() -> None:
    """DDP must see all buckets of a step, or it speaks of unused parameters in the next."""

    def body(comm: Communicator) -> None:
        model = Net()
        state = state_of(comm, model, "bf16")
        every = [(p, torch.ones(p.shape)) for _, p in trained(model)]
        buckets = [Bucket([p], [g], bool(index), index) for index, (p, g) in enumerate(every[:2])]
        if comm.rank == 1:
            comm.abort("had enough")
        for bucket in buckets:
            future = allreduce_hook(state, bucket)  # type: ignore[arg-type]
            with pytest.raises(RuntimeError, match=r"AbortedError: .*had enough"):
                future.wait()
        assert isinstance(state.error, AbortedError)
        for _ in range(2):
            with pytest.raises(AbortedError, match="had enough"):
                allreduce_hook(state, buckets[0])  # type: ignore[arg-type]

    run_ranks(2, body)


@pytest.mark.parametrize("pace", ["every", Stale1(dense_steps=0)], ids=["every", "stale1"])
def test_a_backward_that_raised_midway(pace: Any) -> None:
    """Its bucket in flight is waited for, and the next backward is a step of its own."""

    def body(comm: Communicator) -> None:
        model = Net()
        state, other = (state_of(comm, model, "int4", pace=pace) for _ in range(2))
        for one in (state, other):
            reduce(one, model, gradients_of(model, comm.rank, 0), 2)
        saved = state.state_dict()
        half = [(p, torch.ones(p.shape)) for _, p in trained(model)[::2]]
        time.sleep(0.1 * comm.rank)  # the first has to wait
        allreduce_hook(state, Bucket(*map(list, zip(*half, strict=True)), last=False))  # type: ignore[arg-type]
        assert state.state_dict()
        state.load_state_dict(saved)
        for step in (1, 2):
            got, due = (
                reduce(one, model, gradients_of(model, comm.rank, step)) for one in (state, other)
            )
            assert all(torch.equal(got[name], due[name]) for name in due)
        for one in (state, other):
            one.flush()
        assert [step["buckets"] for step in state.report().steps] == [2, 1, 1]
        assert state.steps == 3

    run_ranks(2, body)


def test_a_model_that_was_moved_since() -> None:
    parameter = nn.Parameter(torch.ones(3, device="meta"))
    bucket = Bucket([parameter], [torch.ones(3)])
    with pytest.raises(TensorError, match="is on meta, and was on cpu when it was wrapped in DDP"):
        allreduce_hook(HookState(), bucket)  # type: ignore[arg-type]


def test_single_gradients_are_refused() -> None:
    parameter = nn.Parameter(torch.ones(3))
    with pytest.raises(ConfigError, match=r"takes buckets of gradients, and .*'python_reducer'"):
        allreduce_hook(HookState(), (torch.ones(3), parameter))  # type: ignore[arg-type]


def test_parameters_of_a_model_with_a_part_called_module() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("module", "head")})
    names = {"module.weight", "head.weight"}
    assert HookState("int4", model=model).residuals.named().keys() == names
    compiled = torch.compile(model)
    assert HookState("int4", model=compiled).residuals.named().keys() == names  # type: ignore[arg-type]


# ---- over the backend "ringcomm" ----


def test_the_process_groups_communicator_is_the_hooks() -> None:
    dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Net()
        state = HookState("bf16")
        reduce(state, model, gradients_of(model, 0, 0))
        assert state.comm is dist.group.WORLD.comm  # type: ignore[union-attr]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("backend", "ranks"), [("ringcomm", 2), ("gloo", 1), ("gloo", 2)])
def test_the_communicator_has_the_ranks_of_ddps_group(
    backend: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group([0], backend=backend)
        model = nn.Linear(2, 2)
        ddp = nn.parallel.DistributedDataParallel(model, process_group=group)
        state = HookState()
        ddp.register_comm_hook(state, allreduce_hook)
        monkeypatch.setattr(type(group), "size", lambda _: ranks)
        if ranks == 2:
            for _ in range(2):
                with pytest.raises(ConfigError, match=r"connects 1 ranks, .*give HookState\("):
                    reduce(state, model, gradients_of(model, 0, 0))
            return
        ddp(torch.ones(1, 2)).sum().backward()
        assert state.comm is dist.group.WORLD.comm
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()


def test_where_a_gradient_lies_in_its_bucket() -> None:
    """As the parameter lies in memory, if that has no gaps: as DDP brings it home."""
    dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        ddp = nn.parallel.DistributedDataParallel(model)
        seen: dict[torch.Tensor, torch.Tensor] = {}

        def look(_, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
            found = hook_buckets.GradientBucket.from_ddp(bucket)
            for one in found.slices:
                seen[one.tensor] = one.of(found.buffer).clone()
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(found.buffer)
            return future

        ddp.register_comm_hook(None, look)
        ddp(torch.randn(2, 3, 5, 5)).square().sum().backward()
        assert seen.keys() == set(model.parameters())
        assert all(torch.equal(own, parameter.grad) for parameter, own in seen.items())
    finally:
        dist.destroy_process_group()


# ---- the account ----


def test_memory_that_ranks_share_is_no_wire() -> None:
    """Two hosts of two ranks: what goes over ports is one host's part, not one rank's."""
    with World(4, memory=2, rails=2) as world:

        def body(comm: Communicator) -> None:
            model = Net()
            state = HookState("bf16", comm)
            reduce(state, model, gradients_of(model, comm.rank, 0), 2)
            before = comm.stats()
            state.reset()
            reduce(state, model, gradients_of(model, comm.rank, 1), 2)
            after, report = comm.stats(), state.report()
            shared = after["shared_bytes"] - before["shared_bytes"]
            sent = after["payload_bytes"] - before["payload_bytes"]
            assert report.wire_bytes == report.steps[0]["wire_bytes"] == sent - shared > 0
            assert report.shared_bytes == report.steps[0]["shared_bytes"] == shared > 0
            # each rank all-reduces its half with the other host, at half as many bits
            assert report.wire_bytes == pytest.approx(report.payload_bytes / 4, rel=0.05)
            assert len(report.rail_bytes) == 2
            assert 0 <= sum(report.rail_bytes) - report.wire_bytes < 48 * 20

        world.run(body)


def test_a_checkpoint_is_not_of_a_step() -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        state = state_of(comm, model, "int4")
        alone = wire_bytes(state, model, 0)
        state.reset()
        for step in range(2):
            reduce(state, model, gradients_of(model, comm.rank, step), 2)
            state.gather_state_dict()
            comm.allreduce(np.ones(10000, np.float32))
        report = state.report()
        assert [step["wire_bytes"] for step in report.steps] == [alone, alone]
        assert report.wire_bytes == 2 * alone

    run_ranks(2, body)


class BeginsAtTheSecond(FixedCodec):
    """A policy of a user's, with a mistake."""

    begun = 0

    def begin(self, step: int, exchange: CommExchange) -> None:
        self.begun += 1
        if self.begun == 1:
            raise ValueError("a mistake")


class Scaler:
    scale = 0.0

    def get_scale(self) -> float:
        return self.scale


def test_a_step_whose_begin_raises_is_begun_again() -> None:
    with Communicator.create(rank=0, world_size=1) as comm:
        model, policy, scaler = Net(), BeginsAtTheSecond(CODECS["bf16"]), Scaler()
        state = HookState(policy, comm, scaler=scaler)
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"loss_scale=0\.0"):
                reduce(state, model, gradients_of(model, 0, 0))
        scaler.scale = 1.0
        with pytest.raises(ValueError, match="a mistake"):
            reduce(state, model, gradients_of(model, 0, 0))
        reduce(state, model, gradients_of(model, 0, 0))
        assert policy.begun == 2


def test_a_bucket_that_cannot_be_sent_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise PeerLostError("rank 1 is lost")

    with Communicator.create(rank=0, world_size=1) as comm:
        monkeypatch.setattr(Wire, "submit", refuses)
        state = HookState("bf16", comm)
        parameters = [nn.Parameter(torch.zeros(5))]
        bucket = GradientBucket.from_ddp(Bucket(parameters, [torch.zeros(5)]))  # type: ignore[arg-type]
        with pytest.raises(PeerLostError):
            state.transport.launch(bucket, CODECS["bf16"])
        left = weakref.ref(state.transport)
        del state
        gc.collect()
        assert left() is None


@pytest.mark.parametrize("failure", [PeerLostError("rank 1 is lost"), MemoryError()], ids=repr)
def test_a_step_whose_second_bucket_cannot_be_sent_fails(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that fails on its way: the first bucket is in flight, and residuals have changed."""
    calls = 0

    with Communicator.create(rank=0, world_size=1) as comm:
        submit = Wire.submit

        def refuses(wire: Wire, comm: Communicator, tensor: torch.Tensor) -> Pending:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise failure
            return submit(wire, comm, tensor)

        model = Net()
        state = HookState("bf16", comm)
        monkeypatch.setattr(Wire, "submit", refuses)
        with pytest.raises(type(failure)):
            reduce(state, model, gradients_of(model, 0, 0), 2)
        assert calls == 2
        assert isinstance(state.error, RingcommError)
        with pytest.raises(type(state.error), match=str(state.error)):
            reduce(state, model, gradients_of(model, 0, 1), 2)
        assert calls == 2
