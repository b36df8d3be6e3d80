"""What a user sees when a rank is killed, leaves, stops, or does not call."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from faults import deadlines, deaths
from faults.job import Job, Nursery, nursery_of
from patience import PROMPT


@pytest.fixture(scope="module", params=["memory", "links"])
def nursery(request: pytest.FixtureRequest) -> Iterator[Nursery]:
    """All-reduces go through memory that the ranks share, or over links as all else does."""
    with nursery_of("numpy", "ringcomm") as made:
        made.environment["RINGCOMM_SHARED_MEMORY"] = str(int(request.param == "memory"))
        yield made


@pytest.fixture(scope="module")
def recovering() -> Iterator[Nursery]:
    """Two rails, whose lanes are made anew; silence alone ends nothing."""
    with nursery_of("numpy", "ringcomm") as made:
        made.environment.update(
            RINGCOMM_INTERFACES="lo,lo",
            RINGCOMM_RECOVERY="on",
            RINGCOMM_PEER_TIMEOUT="600",
            RINGCOMM_SHARED_MEMORY="0",
        )
        yield made


over_links = pytest.mark.parametrize("nursery", ["links"], indirect=True)


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


@pytest.mark.parametrize("culprit", [0, 1])
def test_killed_where_lanes_are_made_anew(recovering: Nursery, culprit: int) -> None:
    """Whoever dials: nobody listens any more."""
    with Job(recovering, 2) as job:
        job.start(deaths.reduce_until_failure)
        job.expect_all("busy")
        since = job.signal(culprit, signal.SIGKILL)
        (event,) = job.expect_all("failed", [1 - culprit])
        check_lost(event, culprit, since)
        assert "does not listen any more" in event["text"]


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


# ---- leaving ----


@over_links
@pytest.mark.parametrize(
    ("how", "code", "kind", "words"),
    [
        ("raise", 1, "PeerLostError", "has shut down without taking part"),
        ("sys.exit", 3, "PeerLostError", "has shut down without taking part"),
        ("os._exit", 3, "PeerLostError", "rank 1 is lost: the connection"),
        ("return", 0, "PeerLostError", "has shut down without taking part"),
        ("close", 0, "PeerLostError", "has shut down without taking part"),
        ("sys.exit with a work in flight", 3, "AbortedError", "with collectives in flight"),
        ("with block", 1, "AbortedError", "KeyError: 'batch 7'"),
    ],
)
def test_leaving_while_others_call(
    nursery: Nursery, how: str, code: int, kind: str, words: str
) -> None:
    with Job(nursery, 3) as job:
        job.start(deaths.leave, how=how, leaver=1)
        job.expect_all("ready")
        job.go(1)
        since = job.expect(1, "leaving")["at"]
        for event in job.expect_all("failed", [0, 2]):
            assert event["kind"] == kind, event
            assert event["rank"] == 1
            assert "rank 1" in event["text"]
            assert words in event["text"]
            assert event["at"] - since < PROMPT, f"known after {event['at'] - since:.2f} s"
        assert job.wait_exit(1).code == code
        job.finish([0, 2])


# ---- silence ----


@over_links
def test_stopped_for_long_is_lost(nursery: Nursery) -> None:
    """As a whole: no lane is to blame."""
    limit = 2.5
    with Job(nursery, 3) as job:
        job.start(deaths.stop_and_go, heartbeat=0.2, peer_timeout=limit, lanes=2)
        job.expect_all("ready")
        since = job.signal(2, signal.SIGSTOP)
        for event in job.expect_all("failed", [0, 1]):
            assert event["kind"] == "PeerLostError", event
            assert event["rank"] == 2
            assert "no sign of life" in event["text"]
            took = event["at"] - since
            assert 0.4 * limit < took < limit + PROMPT, f"known after {took:.2f} s"
        job.finish([0, 1])
        job.signal(2, signal.SIGCONT)
        assert job.expect(2, "failed")["kind"] == "PeerLostError"
        job.finish([2])


@over_links
def test_a_short_stop_is_survived(nursery: Nursery) -> None:
    with Job(nursery, 3) as job:
        job.start(deaths.stop_and_go, heartbeat=0.1, peer_timeout=10.0, lanes=2)
        job.expect_all("ready")
        for rank in range(3):
            job.signal(rank, signal.SIGSTOP)
            time.sleep(0.3)
            job.signal(rank, signal.SIGCONT)
        job.go(0)
        for event in job.expect_all("failed"):
            assert event["kind"] is None, event
        job.finish()


# ---- abort ----


def test_abort_reaches_everyone(nursery: Nursery) -> None:
    reason = "loss is NaN at step 812"
    with Job(nursery, 3) as job:
        job.start(deadlines.aborted_by_another, aborter=2, reason=reason)
        job.expect_all("ready")
        job.go(2)
        since = job.expect(2, "aborting")["at"]
        for event in job.expect_all("failed"):
            assert event["kind"] == "AbortedError", event
            assert event["rank"] == 2
            assert f"rank 2 aborted: {reason}" in event["text"]
            assert event["at"] - since < PROMPT
        for event in [*job.expect_all("later"), *job.expect_all("again"), *job.expect_all("later")]:
            if event["event"] == "later":
                assert event["kind"] == "AbortedError"
                assert reason in event["text"]
        job.finish()
