"""Calls of a process group of backend "ringcomm", whose ranks are threads of this process: with
single values, on tensors that lie differently on the ranks, and what a barrier waits for."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from patience import PATIENCE
from ranks import run_ranks

from ringcomm import Communicator, ConfigError, MismatchError, TensorError
from ringcomm.torch import Options, detail
from ringcomm.torch.group import RingcommGroup, connect

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]

MAX, LONG = dist.ReduceOp.MAX, datetime.timedelta(seconds=600)
UNARY: Any = torch


def two_ranks(body: Callable[[RingcommGroup, int], None]) -> None:
    def on_rank(comm: Communicator) -> None:
        body(RingcommGroup(None, comm, Options()), comm.rank)

    run_ranks(2, on_rank)


@pytest.mark.parametrize("is_watched", [False, True])
def test_single_values_count_as_options_do(is_watched: bool) -> None:
    """Also of a group with hooks, whose calls take another way."""

    def body(group: RingcommGroup, me: int) -> None:
        seen: list[dict[str, Any]] = []
        run = group.comm.run_collective

        def spied(*args: Any, **named: Any) -> Any:
            seen.append(named)
            return run(*args, **named)

        group.comm.run_collective = spied  # type: ignore[method-assign]
        if is_watched:
            group.register_abort_hook(1, lambda: None)

        def called(name: str, *args: Any, **named: Any) -> tuple[set[Any], set[Any]]:
            """Ops and roots of the calls that it makes, all with this time to go."""
            seen.clear()
            getattr(group, name)(*args, **named).wait()
            assert {one["timeout"] for one in seen} == {LONG.total_seconds()}, name
            return {one["op"] for one in seen}, {one["root"] for one in seen}

        x, y, rows = torch.ones(2), torch.ones(2), [torch.ones(2), torch.ones(2)]
        assert called("allreduce", x, MAX, LONG) == ({"max"}, {0})
        assert called("allreduce", [x], op=MAX, timeout=LONG) == ({"max"}, {0})
        assert called("reduce", x, 1, MAX, LONG) == ({"max"}, {1})
        assert called("broadcast", x, 1, LONG)[1] == {1}
        assert called("broadcast", x, root=1, timeout=LONG)[1] == {1}
        assert called("reduce_scatter", x, rows, MAX, LONG) == ({"max"}, {0})
        uneven = [torch.ones(2), torch.ones(3)]
        assert called("reduce_scatter", uneven[me].clone(), uneven, MAX, LONG)[0] == {"max"}
        assert called("gather", rows if me else [], x, 1, LONG)[1] == {1}
        assert called("scatter", x, rows if me else [], 1, timeout=LONG)[1] == {1}
        called("allgather", rows, x, LONG)
        called("all_to_all_single", x, y, [], [], LONG)
        called("alltoall_base", x, y, [1, 1], [1, 1], timeout=LONG)
        called("barrier", LONG)
        called("barrier", timeout=LONG)
        with pytest.raises(TypeError):
            group.allreduce(x, MAX, LONG, 3)
        with pytest.raises(TypeError):
            group.barrier(timeouts=LONG)

    two_ranks(body)


def test_no_rank_goes_by_where_its_own_tensors_lie() -> None:
    def body(group: RingcommGroup, me: int) -> None:
        tensors = [torch.ones(4), torch.ones(4)] if me else list(torch.ones(2, 4).unbind())
        group.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions()).wait()
        assert [one.tolist() for one in tensors] == [[2.0] * 4] * 2

    two_ranks(body)


def test_a_barrier_waits_for_no_receive() -> None:
    """Of which the result is copied, too, as the tensor is not contiguous."""

    def body(group: RingcommGroup, me: int) -> None:
        go, wide = torch.ones(1), torch.zeros(3, 2)
        if me == 0:
            taken = group.recv([wide[:, 0]], 1)
            group.barrier().wait()
            group.send([go], 1).wait()
            taken.wait()
            assert wide.tolist() == [[1.0, 0.0]] * 3
        else:
            group.barrier().wait()
            group.recv([go], 0).wait()
            group.send([torch.ones(3)], 0).wait()

    two_ranks(body)


@pytest.mark.parametrize("sizes", [[], [2, 2]])
def test_parts_are_exchanged_within_one_memory(sizes: list[int]) -> None:
    """In their own places, a little further on, and in others' places."""

    def body(group: RingcommGroup, me: int) -> None:
        parts, want = torch.arange(4.0) + 10 * me, [2.0 * me, 2.0 * me + 1]
        want += [one + 10 for one in want]
        for ahead in (0, 1):
            memory = torch.cat([parts, parts])
            there = memory[ahead : ahead + 4]
            group.all_to_all_single(there, memory[:4], sizes, sizes).wait()
            assert there.tolist() == want
        halves = list(parts.clone().split(2))
        group.alltoall(halves[::-1], halves).wait()
        assert torch.cat(halves[::-1]).tolist() == want

    two_ranks(body)


def test_an_exchange_with_sizes_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """In detail it is told at once."""
    monkeypatch.setattr(detail, "is_on", lambda: True)

    def on_rank(comm: Communicator) -> None:
        group = RingcommGroup(None, comm, Options())
        sizes = [1, 1] if comm.rank == 0 else []
        with pytest.raises(MismatchError, match="split sizes, but rank 1 is"):
            group.all_to_all_single(torch.zeros(2), torch.ones(2), sizes, sizes).wait()

    run_ranks(2, on_rank)


def test_unequal_parts_are_reduced_within_one_memory() -> None:
    def body(group: RingcommGroup, me: int) -> None:
        memory = torch.tensor([1.0, 2.0, 2.0, 4.0, 4.0]) * (me + 1)
        there = memory[1:4] if me else memory[:2]
        group.reduce_scatter([there], [[memory[:2], memory[2:]]]).wait()
        assert there.tolist() == ([6.0, 12.0, 12.0] if me else [3.0, 6.0])

    two_ranks(body)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_factor_of_a_larger_dtype(dtype: torch.dtype) -> None:
    def body(group: RingcommGroup, me: int) -> None:
        how, x = dist.AllreduceOptions(), torch.full((1000,), 3.0, dtype=dtype)
        factor = torch.tensor([0.5], dtype=torch.float64)
        how.reduceOp = dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]
        group.allreduce([x], how).wait()
        assert x.eq(3.0).all()

    two_ranks(body)


@pytest.mark.parametrize("lazily", [torch.conj, UNARY._neg_view])
def test_parts_of_a_tensor_of_which_one_is_changed_lazily(lazily: Any) -> None:
    def body(group: RingcommGroup, me: int) -> None:
        memory = torch.zeros(2, 3, dtype=torch.complex64)
        own = torch.full((3,), complex(1, 2 + me), dtype=torch.complex64)
        rows = [memory[0], lazily(memory[1])]
        group.allgather([rows], [own]).wait()
        assert [row[2].item() for row in rows] == [1 + 2j, 1 + 3j]
        part = torch.zeros(3, dtype=torch.complex64)
        group.scatter([part], [rows] if me == 0 else []).wait()
        assert part[2].item() == complex(1, 2 + me)

    two_ranks(body)


def test_no_result_is_written_to_a_lazily_conjugated_tensor() -> None:
    def body(group: RingcommGroup, me: int) -> None:
        z = torch.full((3,), 1 + 2j, dtype=torch.complex64)
        if me == 0:
            with pytest.raises(TensorError, match=r"resolve_conj\(\)"):
                group.recv([z.conj()], 1)
            group.recv([z], 1).wait()
            assert z.tolist() == [1 - 2j] * 3
        else:
            group.send([z.conj()], 0).wait()

    two_ranks(body)


def test_a_timeout_of_months_is_the_longest() -> None:
    def body(group: RingcommGroup, me: int) -> None:
        months = datetime.timedelta(days=60)
        group.set_timeout(months)
        assert group.comm.config.timeout == 1e6
        group.allreduce(torch.ones(1), MAX, months).wait(months)
        group.monitored_barrier(months)

    two_ranks(body)


def test_a_forked_child_leaves_with_a_call_in_flight() -> None:
    forked = threading.Event()

    def body(group: RingcommGroup, me: int) -> None:
        rows, own = [torch.zeros(3), torch.zeros(3)], torch.ones(3)
        if me:
            assert forked.wait(PATIENCE)
        work = group.allgather([rows], [own])
        if me == 0:
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException):
                    group.shutdown()
                    os._exit(0)
                os._exit(1)
            forked.set()
            assert os.waitpid(child, 0)[1] == 0
        work.wait()

    two_ranks(body)


def test_a_timeout_of_the_environment_is_said_not_to_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RINGCOMM_TIMEOUT", "7")
    with pytest.warns(UserWarning, match="RINGCOMM_TIMEOUT does not count here"):
        comm = connect(dist.HashStore(), 0, 1, datetime.timedelta(0, 9), Options(), "group")
    with comm:
        assert comm.config.timeout == 9


def test_a_kernel_set_that_is_not_here_is_refused_before_ranks_meet() -> None:
    with pytest.raises(ConfigError, match="kernel_set='mmx'"):
        connect(
            dist.HashStore(), 0, 2, datetime.timedelta(0, 0.1), Options(kernel_set="mmx"), "group"
        )


def test_a_reconfigured_groups_timeout_is_that_of_all_it_does() -> None:
    group = RingcommGroup(dist.HashStore(), None, Options())

    def reconfigure(number: int, timeout: datetime.timedelta | None) -> None:
        handles = [group.get_reconfigure_handle()]
        group.reconfigure(SimpleNamespace(uuid=number, handles=handles, timeout=timeout))

    reconfigure(1, LONG)
    child = group.split_group([0])
    assert child is not None
    assert child.comm.config.timeout == LONG.total_seconds()
    child.shutdown()
    reconfigure(2, None)
    assert group.comm.config.timeout == LONG.total_seconds()
    group.shutdown()
