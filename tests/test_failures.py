"""What a user sees when a rank is killed, leaves, stops, or calls something else."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from faults import deaths
from faults.job import Job, Nursery, nursery_of

PROMPT = 1.0
"""Seconds within which every rank must know."""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with nursery_of("numpy", "ringcomm") as made:
        yield made


def check_lost(event: dict[str, Any], culprit: int, since: float) -> None:
    """The event is a PeerLostError about the culprit, raised promptly."""
    assert event["kind"] == "PeerLostError", event
    assert "ConnectionError" in event["kinds"]
    assert event["rank"] == culprit, event
    assert event["host"] == socket.gethostname()
    assert f"rank {culprit}" in event["text"]
    assert socket.gethostname() in event["text"]
    assert event["at"] - since < PROMPT, f"known after {event['at'] - since:.2f} s"


def check_survivors(job: Job, culprit: int, since: float) -> None:
    """All others raise PeerLostError naming the culprit, now and later, and exit in order."""
    survivors = [rank for rank in range(job.world_size) if rank != culprit]
    for event in job.expect_all("failed", survivors):
        check_lost(event, culprit, since)
    for event in job.expect_all("later", survivors):
        assert event["kind"] == "PeerLostError", event
        assert event["rank"] == culprit
    for event in job.expect_all("closed", survivors):
        assert event["kind"] is None, event
        assert event["took"] < PROMPT
    job.finish(survivors)


# ---- death ----


@pytest.mark.parametrize("world_size", [2, 4])
def test_killed_in_the_middle_of_a_collective(nursery: Nursery, world_size: int) -> None:
    with Job(nursery, world_size) as job:
        job.start(deaths.reduce_until_failure)
        job.expect_all("busy")
        check_survivors(job, 1, job.signal(1, signal.SIGKILL))


def test_killed_while_all_are_idle(nursery: Nursery) -> None:
    with Job(nursery, 3) as job:
        job.start(deaths.idle_until_told)
        job.expect_all("ready")
        job.signal(2, signal.SIGKILL)
        time.sleep(0.2)
        check_survivors(job, 2, job.go(0, 1))


def test_killed_while_works_are_pending(nursery: Nursery) -> None:
    with Job(nursery, 3) as job:
        job.start(deaths.pending_works, absent=0)
        for event in job.expect_all("pending", [1, 2]):
            assert not any(event["done"])
        since = job.signal(0, signal.SIGKILL)
        for rank in (1, 2):
            for _ in range(3):
                check_lost(job.expect(rank, "failed"), 0, since)
            assert job.expect(rank, "settled")["errors"] == ["PeerLostError"] * 4
        check_survivors(job, 0, since)
