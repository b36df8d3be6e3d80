"""What torch's hooks, its flight recorder and its questions see of backend "ringcomm", and other
backends beside it in one group."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

from faults import watched
from faults.job import Job, Nursery
from faults.rank import Rank
from torch_versions import before

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(before(2, 14), reason="PyTorch has hooks of a process group from 2.14 on"),
]
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "RINGCOMM_INTERFACES": "lo"}


@pytest.fixture(scope="module")
def nursery(torch_nursery: Nursery) -> Nursery:
    return torch_nursery


@pytest.mark.parametrize("buffer", ["0", "2000"])
def test_hooks_and_the_recorder(nursery: Nursery, buffer: str) -> None:
    with Job(nursery, 3, {**LOOPBACK, "TORCH_FR_BUFFER_SIZE": buffer}) as job:
        job.start(watched.hooked)
        for event in job.expect_all("right"):
            records = buffer != "0" and not before(2, 15)
            assert ("ringcomm:all_reduce" in event["entries"]) == records, event
            assert ("ringcomm:_all_gather_base" in event["entries"]) == records, event
            assert event["alone"] != records, event  # the hooks are gone
        job.finish(quietly=False)


def test_backends_of_other_devices(nursery: Nursery) -> None:
    with Job(nursery, 2, LOOPBACK) as job:
        job.start(watched.mapped)
        for _ in range(2):
            for event in job.expect_all("split"):
                assert event["kind"] == "ConfigError"
                assert "dist.new_group(ranks, backend=...)" in event["text"]
        job.expect_all("right")
        job.finish(quietly=False)


def test_a_lost_rank_is_told(nursery: Nursery) -> None:
    with Job(nursery, 3, LOOPBACK) as job:
        job.start(watched.lost)
        job.expect_all("ready")
        job.signal(2, signal.SIGKILL)
        for rank in range(2):
            for name in ("failed", "again"):
                assert job.expect(rank, name)["kind"] == "PeerLostError"
            told = job.expect(rank, "told")
            assert (told["hooks"], told["error"]) == ([1], "REMOTE_ERROR")
        job.finish([0, 1], quietly=False)


def test_a_deadline_and_an_abort_are_told(nursery: Nursery) -> None:
    with Job(nursery, 2, LOOPBACK) as job:
        job.start(watched.late)
        assert job.expect(0, "failed")["kind"] == "CommTimeoutError"
        for name in ("told", "aborted"):
            assert job.expect(0, name)["error"] == "TIMEOUT"
        job.go(1)
        for name in ("told", "aborted"):
            assert job.expect(1, name)["error"] in ("TIMEOUT", "REMOTE_ERROR")
        job.finish(quietly=False)


@pytest.mark.parametrize("role", [watched.reconfigured, watched.shrunk])
def test_a_group_goes_on_without_a_rank(nursery: Nursery, role: Callable[[Rank], None]) -> None:
    with Job(nursery, 4, LOOPBACK) as job:
        job.start(role)
        if role is watched.reconfigured:
            for event in job.expect_all("early"):
                assert event["kind"] == "NotInitializedError"
        job.expect_all("ready")
        killed = job.signal(3, signal.SIGKILL)
        living = range(3)
        for event in job.expect_all("failed", living):
            assert event["kind"] == "PeerLostError"
        if role is watched.reconfigured:
            goes_on = max(event["at"] for event in job.expect_all("goes on", living))
            print(f"{goes_on - killed:.2f} s from the kill to the right sum of the others")
            for event in job.expect_all("stranger", living):
                assert event["kind"] == "ConfigError"
        job.expect_all("right", living)
        job.finish(living, quietly=False)
