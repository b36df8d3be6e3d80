"""The hooks' gradients on a GPU, over a driver that is none: torch's tensors, streams and Futures
as tests/cuda/torch_gpu.py has them. Bits are those of host tensors; what was not waited for has not
happened; and no thread of ours has the host wait for a copy.
"""

from __future__ import annotations

import importlib.util
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
from patience import PATIENCE

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from ddp_buckets import ByStep
from gpu import Gpu
from ranks import run_ranks
from torch_gpu import LocalGroup, Meeting, Stream, TorchGpu

from ringcomm import Communicator, cuda
from ringcomm.core import pipe
from ringcomm.torch import HierarchicalState, HookState, allreduce_hook
from ringcomm.torch.options import Options
from ringcomm.torch.reducing import Reducing
from ringcomm.torch.works import RingWork

pytestmark = pytest.mark.torch

OURS = {pipe.CALLBACK_THREAD, "ringcomm courier"}
SHAPES = {"bias": (70,), "weight": (64, 50), "norm": (33,), "head": (41, 80)}
BUCKETS = (("bias", "weight", "norm"), ("head",))
STEPS, BROKEN = 3, 1


@pytest.fixture
def torch_gpu(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchGpu]:
    made = TorchGpu(gpu, monkeypatch)
    yield made
    made.close()
    assert made.problems == []


# ---- what DDP brings ----


class Parameter:
    """What the hook asks of a parameter."""

    requires_grad, dtype = True, torch.float32

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.shape, self.device = shape, device

    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())

    def element_size(self) -> int:
        return 4

    def dim(self) -> int:
        return len(self.shape)


class Bucket:
    """What it asks of a bucket: parameters' gradients, one after the other."""

    def __init__(
        self, flat: torch.Tensor, parameters: list[Parameter], last: bool, index: int = 0
    ) -> None:
        self._flat, self._parameters, self._last, self._index = flat, parameters, last, index

    def buffer(self) -> torch.Tensor:
        return self._flat

    def parameters(self) -> list[Parameter]:
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        sizes = [one.numel() for one in self._parameters]
        return list(self._flat.split(sizes))

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last


def slow(torch_gpu: TorchGpu, comm: Communicator, device: torch.device) -> None:
    """What comes back to the GPU takes its time, for who does not wait for it."""
    comm.allreduce(torch_gpu.tensor(torch.ones(1), device.index))
    assert comm._pipe is not None
    torch_gpu.linger(comm._pipe.stream)


def train(
    make: Any, rank: int, torch_gpu: TorchGpu | None, broken: bool, gpu: int = 0
) -> list[torch.Tensor]:
    """What the optimizer has after each step, and what is left in the end. make(model): a state."""
    device = torch.device("cpu") if torch_gpu is None else torch.device("cuda", gpu)
    named = {name: Parameter(shape, device) for name, shape in SHAPES.items()}
    state = make(types.SimpleNamespace(named_parameters=lambda: named.items()))
    random, results, buckets = torch.Generator().manual_seed(rank), [], []
    if torch_gpu is not None:
        slow(torch_gpu, state.comm, device)
    for step in range(STEPS):
        futures = []
        for index, names in enumerate(BUCKETS):
            parameters = [named[name] for name in names]
            values = torch.randn(sum(map(Parameter.numel, parameters)), generator=random)
            if broken and step == BROKEN and rank == 1 and names == BUCKETS[0]:
                values[3] = float("inf")
            flat = values.clone() if torch_gpu is None else torch_gpu.tensor(values, gpu)
            flat.add_(1.0)  # the last kernel of backward
            bucket: Any = Bucket(flat, parameters, names == BUCKETS[-1], index)
            buckets.append(bucket)  # whose memory is DDP's own
            futures.append(allreduce_hook(state, bucket))
        for future in futures:
            gradients = future.wait()
            gradients.mul_(0.5)  # the first of the optimizer
            results.append(gradients.clone())
        time.sleep(0.005)  # for other threads to let go of what they must not
    state.residuals.commit_or_undo()
    if torch_gpu is not None:
        results = [torch_gpu.read(one) for one in results]
    return results + [torch.from_numpy(state.feedback[name].worker) for name in state.feedback]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32)), index


# ---- the hook ----


@pytest.mark.parametrize(
    ("compression", "broken"),
    [("bf16", False), ("int4", False), ("onebit", True)],
)
def test_the_hook_has_the_bits_of_host_tensors(
    torch_gpu: TorchGpu, compression: str | None, broken: bool
) -> None:
    def body(comm: Communicator) -> None:
        def make(model: Any) -> HookState:
            return HookState(compression, comm, model=model, threshold=4096, force=True)

        with torch.cuda.stream(torch.cuda.Stream()):
            ours = train(make, comm.rank, torch_gpu, broken)
        same(ours, train(make, comm.rank, None, broken))

    run_ranks(2, body)
    assert not torch_gpu.waited & OURS


@pytest.mark.parametrize("compression", ["bf16", "onebit"])
def test_a_future_does_not_wait_for_the_copy_back(torch_gpu: TorchGpu, compression: str) -> None:
    """The optimizer is launched while the copy is still to come, and runs behind it."""
    go_on = threading.Event()

    def body(comm: Communicator) -> None:
        device = torch.device("cuda:0")
        head = Parameter(SHAPES["head"], device)
        model: Any = types.SimpleNamespace(named_parameters=lambda: [("head", head)])
        values = torch.randn(head.numel(), generator=torch.Generator().manual_seed(comm.rank))
        expected = comm.allreduce(values.clone(), "avg", compression=compression, feedback=False)

        def reduced() -> Any:
            bucket: Any = Bucket(torch_gpu.tensor(values), [head], True)
            state = HookState(compression, comm, model=model, threshold=4096, force=True)
            return allreduce_hook(state, bucket)

        with torch.cuda.stream(torch.cuda.Stream()):
            torch_gpu.read(reduced().wait())
            comm.barrier()
            assert comm._pipe is not None
            stuck = Stream(torch_gpu, device, comm._pipe.stream)
            torch_gpu.queue(stuck, lambda: go_on.wait(PATIENCE) and None)
            future = reduced()
            gradients = future.wait().mul_(2.0)
            assert not go_on.is_set()
            comm.barrier()
            go_on.set()
            assert torch.equal(torch_gpu.read(gradients), expected * 2)

    run_ranks(2, body)


def test_a_failure_fails_the_future(torch_gpu: TorchGpu, gpu: Gpu) -> None:
    def body(comm: Communicator) -> None:
        state = HookState(None, comm)
        parameter = Parameter((1000,), torch.device("cuda:0"))
        with torch.cuda.stream(torch.cuda.Stream()):
            flat = torch_gpu.tensor(torch.ones(1000))
            bucket: Any = Bucket(flat, [parameter], True)
            allreduce_hook(state, bucket).wait()
            comm.barrier()
            if comm.rank == 0:
                gpu.fail("cuMemcpyDtoHAsync_v2", 1, 999)
            comm.barrier()
            with pytest.raises(RuntimeError, match="CUDA_ERROR_UNKNOWN"):
                allreduce_hook(state, bucket).wait()
            with pytest.raises(type(state.error)):
                allreduce_hook(state, bucket)

    run_ranks(2, body)


def test_a_dropped_step_takes_back_nothing_older(torch_gpu: TorchGpu) -> None:
    """One at 16 bits, which leaves the residuals of what is not finite as they were."""

    def body(comm: Communicator) -> None:
        parameter = Parameter(SHAPES["head"], torch.device("cuda:0"))
        model: Any = types.SimpleNamespace(named_parameters=lambda: [("head", parameter)])
        state = HookState(ByStep("int4", "bf16"), comm, model=model, threshold=4096)

        def step(value: float) -> torch.Tensor:
            values = torch.randn(parameter.numel())
            values[0] = value
            bucket: Any = Bucket(torch_gpu.tensor(values), [parameter], True)
            allreduce_hook(state, bucket).wait()
            state.residuals.commit_or_undo()
            return torch.from_numpy(state.feedback["head"].worker)

        before = step(1.0)
        assert before.any()
        assert torch.equal(step(float("inf")), before)

    run_ranks(2, body)


# ---- several ranks per host ----


@pytest.fixture
def grid(torch_gpu: TorchGpu, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two hosts of two ranks: makes this rank's state."""
    here = threading.local()
    meetings = [Meeting(2), Meeting(2)]
    monkeypatch.setattr(
        "ringcomm.torch.grid.dist",
        types.SimpleNamespace(
            ProcessGroup=LocalGroup,
            get_rank=lambda: here.rank,
            get_process_group_ranks=lambda group: group.ranks,
        ),
    )
    monkeypatch.setattr(
        "ringcomm.torch.trips._reduce_scatter",
        lambda out, table, group, async_op: group.reduce_scatter(out, table),
    )
    monkeypatch.setattr(
        "ringcomm.torch.trips._all_gather",
        lambda table, shard, group, async_op: group.all_gather(table, shard),
    )

    def make(compression: str | None, comm: Communicator, model: Any) -> HierarchicalState:
        here.rank, host = comm.rank, comm.rank // 2
        group = LocalGroup(torch_gpu, [2 * host, 2 * host + 1], comm.rank % 2, meetings[host])
        return HierarchicalState(compression, comm, local_group=group, model=model, threshold=4096)

    return make


@pytest.mark.parametrize(
    ("compression", "broken"), [("bf16", False), ("int8", False), ("int4", True)]
)
def test_shards_that_cross_by_the_pipe_have_the_bits_of_host_tensors(
    torch_gpu: TorchGpu, grid: Any, compression: str, broken: bool
) -> None:
    def body(comm: Communicator) -> None:
        states = []

        def make(model: Any) -> HierarchicalState:
            states.append(grid(compression, comm, model))
            return states[-1]

        with torch.cuda.device(1), torch.cuda.stream(torch.cuda.Stream()):
            ours = train(make, comm.rank, torch_gpu, broken, gpu=1)
        same(ours, train(make, comm.rank, None, broken))
        comm.barrier()
        for state in states:
            assert state.error is None
            state.close()

    run_ranks(4, body)
    assert not torch_gpu.waited & OURS


# ---- the backend's Works ----


class Over(pipe.DeviceWork):
    """One whose result is on its way; it keeps which stream went on behind it."""

    def __init__(self) -> None:
        self.followed: list[int | None] = []

    def __del__(self) -> None:
        pass

    def wait(self, timeout: float | None = None, stream: Any = None) -> None:
        self.followed.append(cuda.chosen_stream())

    def done(self) -> bool:
        return False

    def exception(self) -> None:
        return None

    def call_back(self, callback: Any, elsewhere: bool = False) -> None:
        callback(self)


def test_a_future_is_torchs_whatever_stream_was_chosen() -> None:
    part, result = Over(), torch.zeros(1)
    work = RingWork([part], [result], lambda: None)
    with cuda.stream(7):
        assert work.get_future().wait() == [result]
        assert part.followed == [None, None]
        work.wait()
    assert part.followed == [None, None, 7]


def test_a_future_of_the_backend_orders_its_callbacks(torch_gpu: TorchGpu) -> None:
    def body(comm: Communicator) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            slow(torch_gpu, comm, torch.device("cuda:0"))
            tensor = torch_gpu.tensor(torch.ones(3000))
            tensor.add_(1.0)
            work = RingWork([comm.allreduce(tensor, async_op=True)], [tensor])
            doubled = work.get_future().then(lambda future: future.value()[0] * 2)
            assert torch.equal(torch_gpu.read(doubled.wait()), torch.full((3000,), 8.0))

    run_ranks(2, body)
    assert not torch_gpu.waited & OURS


@pytest.mark.parametrize("handle", [0, 1])
def test_the_default_stream_by_number_follows_what_is_left_to_do(
    torch_gpu: TorchGpu, handle: int
) -> None:
    def body(comm: Communicator) -> None:
        part, flat = (torch_gpu.tensor(torch.ones(100)) for _ in range(2))
        with torch.cuda.stream(torch.cuda.Stream()), cuda.stream(handle):
            work = RingWork([comm.allreduce(flat, async_op=True)], [part], lambda: part.copy_(flat))
            assert work.wait()
        assert torch.equal(torch_gpu.read(part + 1.0), torch.full((100,), 3.0))

    run_ranks(2, body)


def test_what_torch_makes_for_a_call_follows_the_stream_that_was_chosen(
    torch_gpu: TorchGpu,
) -> None:
    """Here a contiguous copy, and the result, whose memory's last use may be still to come."""

    def body(comm: Communicator) -> None:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            tensor = torch_gpu.tensor(torch.ones(40, 30))
            tensor.add_(1.0)
        with cuda.stream(side):
            rows = comm.allgather(tensor.t())
        assert rows.memory.home == side.cuda_stream
        with torch.cuda.stream(side):
            assert torch.equal(torch_gpu.read(rows + 1.0), torch.full((2, 30, 40), 3.0))

    run_ranks(2, body)


def test_what_a_group_makes_for_a_call_goes_before_the_stream_that_was_chosen(
    torch_gpu: TorchGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the copy of a list of tensors into one."""
    monkeypatch.setattr("ringcomm.torch.tensors.joined", lambda tensors: None)

    def body(comm: Communicator) -> None:
        group = Reducing()
        group._comm, group._options = comm, Options()
        group._coalescing, group._detailed, group._checks_nan = None, False, False
        parts = [torch_gpu.tensor(torch.full((500,), float(i))) for i in range(2)]
        out = torch_gpu.empty((500,), torch.float32)
        side = torch.cuda.Stream()
        with cuda.stream(side):
            assert group.reduce_scatter([out], [parts]).wait()
        with torch.cuda.stream(side):
            assert torch.equal(torch_gpu.read(out + 1.0), torch.full((500,), 2.0 * comm.rank + 1))

    run_ranks(2, body)


def test_what_is_left_to_do_is_launched_and_followed(torch_gpu: TorchGpu) -> None:
    """By the Future's stream, and by each that waits."""

    def body(comm: Communicator) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            slow(torch_gpu, comm, torch.device("cuda:0"))
            parts = [torch_gpu.empty((1000,), torch.float32) for _ in range(2)]

            def copied() -> RingWork:
                flat = torch_gpu.tensor(torch.ones(2000))

                def after() -> None:
                    for one in parts:
                        one.copy_(flat[:1000])

                return RingWork([comm.allreduce(flat, async_op=True)], parts, after, [flat])

            def landed() -> None:
                while comm._in_flight:
                    time.sleep(0.001)

            copied().get_future().wait()
            landed()  # and nobody keeps what is still to be copied from
            torch_gpu.read(parts[0])
            for how in (torch.cuda.stream, cuda.stream):
                for one in parts:
                    one.zero_()
                work, side = copied(), torch.cuda.Stream()
                future = work.get_future().wait()[0] + 1.0
                landed()
                with how(side):
                    assert work.wait()
                with torch.cuda.stream(side):
                    assert torch.equal(torch_gpu.read(parts[1] + 1.0), torch.full((1000,), 3.0))
                assert torch.equal(torch_gpu.read(future), torch.full((1000,), 3.0))
                assert work.is_completed()

    run_ranks(2, body)
    assert not torch_gpu.waited & OURS
