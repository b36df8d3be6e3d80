"""Rounds that outlive a peer: who takes part, decided with a clock of the test's own; and ranks as
processes that are killed, stopped and started again."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from faults import rounds
from faults.job import Job, Nursery, nursery_of
from patience import PATIENCE, PROMPT

# ---- processes ----


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with nursery_of("numpy", "ringcomm", "ringcomm.membership", "faults.rounds") as made:
        yield made


def round_where(job: Job, rank: int, **wanted: Any) -> dict[str, Any]:
    """The rank's next round of which this holds."""
    give_up = time.monotonic() + PATIENCE
    while time.monotonic() < give_up:
        one = job.expect(rank, "round")
        if all(one[name] == value for name, value in wanted.items()):
            return one
    raise AssertionError(f"rank {rank} had no round with {wanted}\n{job.story()}")


def stop(job: Job, *ranks: int) -> None:
    """Ends the rounds of these ranks, which ends those of all members."""
    job.go(*ranks)
    for rank in ranks:
        assert job.wait_exit(rank).code == 0, job.story()


def test_all_there(nursery: Nursery) -> None:
    """No communicator is made anew, and tokens reach everyone."""
    with Job(nursery, 3) as job:
        job.start(rounds.work)
        for rank in range(3):
            one = round_where(job, rank, number=5)
            assert one["members"] == [0, 1, 2]
            assert not one["is_new"]
            assert one["left"] == one["joined"] == []
        job.go(1)
        last = {rank: round_where(job, rank, tokens=["", "stop", ""]) for rank in range(3)}
        assert len({one["state"] for one in last.values()}) == 1
        job.finish()


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_in_mid_round(nursery: Nursery, victim: int) -> None:
    """The others repeat the round without it, at once: the grace time is not waited."""
    with Job(nursery, 3) as job:
        for rank in range(3):
            job.start(rounds.work, ranks=[rank], hold=3 if rank == victim else -1)
        job.expect(victim, "holds")
        since = job.signal(victim, signal.SIGKILL)
        others = [rank for rank in range(3) if rank != victim]
        states = set()
        for rank in others:
            one = round_where(job, rank, is_new=True)
            assert (one["number"], one["members"], one["left"]) == (3, others, [victim])
            assert one["at"] - since < PROMPT
            states.add(one["state"])
        assert len(states) == 1
        stop(job, *others)
