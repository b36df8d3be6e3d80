"""The hook with several ranks per host: two hosts of two ranks each, joined inside by gloo."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from ddp_buckets import Bucket, Net, trained
from faults import training
from faults.job import Job, Nursery
from patience import PROMPT, until

from ringcomm import PeerLostError, RingcommError
from ringcomm.codecs import CODECS
from ringcomm.torch import HierarchicalState, allreduce_hook, trips
from ringcomm.torch.buckets import GradientBucket, Parts
from ringcomm.torch.named_feedback import NamedFeedback
from ringcomm.torch.trips import Rows

pytestmark = pytest.mark.torch

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
SUMS = 4 * 2**-24
"""What the order of four float32 summands can make, of their mean magnitude."""


@pytest.fixture(scope="module")
def nursery(torch_nursery: Nursery) -> Nursery:
    return torch_nursery


def test_a_bucket_without_elements() -> None:
    """As DDP makes one of empty parameters of another dtype."""
    residuals = NamedFeedback(None, 0, torch.Tensor.numel)
    parts = Parts(GradientBucket(torch.zeros(0), [], True), CODECS["int8"], residuals)
    rows = Rows([part.tensor for part in parts.travelling], 2)
    assert rows.table.shape == (2, 0)
    rows.unpack()
    parts.unpack()


@pytest.mark.parametrize(
    ("mode", "compression", "allowed"),
    [("no_sync", "bf16", 4 * 2**-8), ("find_unused_parameters", None, SUMS)],
)
def test_gradients_are_means(
    nursery: Nursery, mode: str, compression: str | None, allowed: float
) -> None:
    with Job(nursery, 4, LOOPBACK) as job:
        job.start(training.means, compression=compression, dtype="float32", mode=mode, local=2)
        for event in job.expect_all("means"):
            assert event["equal"], "the ranks' gradients differ"
            assert event["worst"] <= allowed, event
        job.finish(quietly=False)


def test_what_gradients_lack_is_kept_by_name(nursery: Nursery) -> None:
    """Though buckets change, and the run is taken up again."""
    with Job(nursery, 4, LOOPBACK) as job:
        job.start(training.feeds_back, compression="onebit", mode="plain", local=2)
        for event in job.expect_all("feeds_back"):
            assert event["names"] == ["aside.weight", *(f"row.{i}.weight" for i in range(6))]
            assert event["equal"], "the ranks' gradients differ"
            assert event["lacks"] > 1e-3, event
            assert event["worst"] < 1e-5, event
            assert event["buckets"][2] > event["buckets"][0], "the buckets were not rebuilt"
        job.finish(quietly=False)


def test_a_rank_that_goes_is_known_on_its_host_and_the_others(nursery: Nursery) -> None:
    with Job(nursery, 4, LOOPBACK) as job:
        job.start(training.lost, how="killed", local=2)
        since = job.expect(1, "going")["at"]
        for rank in (0, 2, 3):
            failed, state = job.expect(rank, "failed"), job.expect(rank, "state")
            assert failed["kind"] == "RuntimeError", failed
            assert state["kind"] in ("PeerLostError", "AbortedError"), state
            assert "rank 1" in failed["text"], failed
            assert failed["at"] - since < PROMPT, failed
        job.finish([0, 2, 3], quietly=False)


def test_a_bucket_that_is_refused_on_one_rank_fails_the_step_on_all(nursery: Nursery) -> None:
    with Job(nursery, 4, LOOPBACK) as job:
        job.start(training.refused_in_host)
        for rank in range(4):
            failed, state = job.expect(rank, "failed"), job.expect(rank, "state")
            assert failed["kind"] == "RuntimeError", failed
            assert state["kind"] == ("RingcommError" if rank == 2 else "AbortedError"), state
            assert "the local group failed: no more of it" in state["text"]
            assert state["rank"] != rank
        job.go(*range(4))
        job.finish(quietly=False)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("failure", [PeerLostError("rank 1 is lost"), MemoryError()], ids=repr)
def test_a_bucket_that_is_refused_ends_those_in_flight(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each later backward raises the same, and begins nothing."""
    starts, calls = trips._reduce_scatter, 0

    def refuses_the_second(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise failure
        return starts(*args, **kwargs)

    model = Net()
    every = [(p, torch.ones(p.shape)) for _, p in trained(model)[:2]]
    first, last = (Bucket([p], [g], bool(index), index) for index, (p, g) in enumerate(every))
    monkeypatch.setattr(trips, "_reduce_scatter", refuses_the_second)
    dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
    try:
        state = HierarchicalState("bf16", local_group=dist.group.WORLD)
        in_flight = allreduce_hook(state, first)  # type: ignore[arg-type]
        with pytest.raises(type(failure)):
            allreduce_hook(state, last)  # type: ignore[arg-type]
        assert until(in_flight.done)
        assert isinstance(state.error, RingcommError)
        with pytest.raises(RuntimeError, match=str(state.error)):
            in_flight.wait()
        with pytest.raises(type(state.error), match=str(state.error)):
            allreduce_hook(state, first)  # type: ignore[arg-type]
        assert calls == 2
        state.close()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("in_host", "by", "named"),
    [
        (False, 1, {3: "1, 3, its rank 0 being rank 1", 2: "2, 3, its rank 1 being rank 3"}),
        (True, 3, {2: "2, 3, its rank 1 being rank 3"}),
    ],
    ids=["between hosts", "in a host"],
)
def test_an_error_names_the_rank_of_the_job(
    nursery: Nursery, in_host: bool, by: int, named: dict[int, str]
) -> None:
    """Not its place in the row or column that has failed."""
    with Job(nursery, 4, LOOPBACK) as job:
        job.start(training.aborted_apart, by=by, in_host=in_host)
        job.expect(by, "aborted")
        job.go(*named)
        for rank, text in named.items():
            state = job.expect(rank, "state")
            assert f"in the group of ranks {text}: " in state["text"], state
            assert "had enough" in state["text"]
            assert (state["kind"], state["rank"]) == ("AbortedError", int(text[-1]))


def test_what_it_refuses_counts_and_saves(nursery: Nursery) -> None:
    with Job(nursery, 4, LOOPBACK) as job:
        job.start(training.hierarchy)
        for name, text in (
            ("unequal", "hosts have 1 or 3 ranks"),
            ("overlap", "hosts have 2 or 4 ranks"),
            ("stranger", "rank 2 is not in the group that it gave"),
            ("other model", "'aside.weight' has 4096 elements there and 2304 here"),
            ("flat", "the state belongs to place"),
            ("copy", "a copy of a HierarchicalState has no connections"),
        ):
            for event in job.expect_all(name):
                assert event["kind"] == "ConfigError", event
                assert text in event["text"], event
        for event in job.expect_all("report"):
            report, (step,) = event["report"], event["report"]["steps"]
            assert report["payload_bytes"] == step["payload_bytes"] == 4 * event["elements"]
            half = (event["elements"] - event["small"]) // 2  # crosses at one bit and a scale
            sent = step["wire_bytes"] + step["shared_bytes"]  # all ranks are on one host here
            assert half / 8 + event["small"] <= sent < half / 6 + event["small"] + 99
            assert step["hidden_s"] <= step["compute_s"]
        assert all(event["own"] for event in job.expect_all("exact"))
        for rank, event in enumerate(job.expect_all("other place")):
            (text,), there = event["told"], f"{rank // 2} of 2"
            assert f"belongs to place {1 - rank % 2} of 2 on host {there} alone, and" in text
            assert event["left"] == 0
        for event in job.expect_all("saved"):
            assert event["kept"], "a dropped step changed residuals"
            assert event["flat"], "HookState saves something else"
            assert event["back"]
        job.finish(quietly=False)
