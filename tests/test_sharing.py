"""Memory that the ranks of one host share: who uses it, what is left of it, and that waiting there
is asleep. What fails, fails as over links: test_failures.py runs over both."""

from __future__ import annotations

import os

import numpy as np
import pytest
from faults import memory
from faults.job import Job, Nursery
from ranks import World

import ringcomm


def test_every_group_has_its_own(nursery: Nursery) -> None:
    with Job(nursery, 4) as job:
        job.start(memory.share)
        for rank in range(4):
            for event, maps in (("whole", 1), ("half", 2), ("alone", 2)):
                said = job.expect(rank, event)
                assert said["right"]
                assert (said["shared"] > 0) == (event != "alone")
                assert said["maps"] == maps, event
            assert job.expect(rank, "after")["maps"] == 1
            assert job.expect(rank, "closed")["maps"] == 0
        job.finish()
    assert not [name for name in os.listdir("/dev/shm") if "ring" in name]


@pytest.mark.parametrize("unwilling", [0, 2])
def test_an_unwilling_rank(nursery: Nursery, unwilling: int) -> None:
    with Job(nursery, 3) as job:
        job.start(memory.share_unless_unwilling, unwilling=unwilling)
        for said in job.expect_all("whole"):
            assert (said["right"], said["shared"], said["maps"]) == (True, 0, 0)
        job.finish()


def test_processes_that_may_not_reach_each_other(nursery: Nursery) -> None:
    with Job(nursery, 3) as job:
        job.start(memory.share_out_of_reach)
        for said in job.expect_all("whole"):
            assert (said["right"], said["shared"], said["maps"]) == (True, 0, 0)
        job.finish(quietly=False)
        lines = job.printed(0).splitlines()
        assert len(lines) == 1, lines
        assert "rank 1 cannot open that of process" in lines[0]
        assert job.printed(1) == job.printed(2) == ""


@pytest.mark.parametrize("spin_us", [0, 50])
def test_waiting_is_asleep(nursery: Nursery, spin_us: int) -> None:
    """Less than a twentieth of a core while a rank is late, next to nothing when idle."""
    with Job(nursery, 2) as job:
        job.start(memory.wait_for_the_late, spin_us=spin_us, seconds=0.9)
        assert job.expect(1, "waited")["share"] < 0.05
        job.go(0)
        for said in job.expect_all("idle"):
            assert said["share"] < 0.02
        job.finish()


def test_counters_say_which_way() -> None:
    """All-reduces by an algorithm that memory has go through it, and broadcasts; others do not."""
    config = ringcomm.Config(timeout=30.0, algorithm="ring")
    for settings, shared in ((None, True), (config, False)):
        with World(3, memory=True, config=settings) as world:
            world.run(lambda comm: comm.reduce(np.ones(1000), 0))
            assert [comm.stats()["shared_bytes"] for comm in world.comms] == [0] * 3
            world.run(lambda comm: comm.broadcast(np.ones(1000), 0))
            assert [comm.stats()["shared_bytes"] for comm in world.comms] == [8000 * shared, 0, 0]
            world.run(lambda comm: comm.allreduce(np.ones(1000)))
            assert all((comm.stats()["shared_bytes"] > 0) == shared for comm in world.comms)
