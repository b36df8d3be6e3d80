"""How processes join, and what happens if that cannot work.

Errors come at once where this rank can see them, and on all ranks by the deadline of the bring-up;
whatever was wrong, the same process can join properly afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any

import pytest
from faults import joining
from faults.job import Job, Nursery
from faults.rank import Rank
from patience import PROMPT
from ports import free_port


def check_joined(job: Job, *, quietly: bool = True) -> None:
    """All ranks are in one world that sums right, and leave it in order."""
    for rank, event in enumerate(job.expect_all("joined")):
        assert event["right"], event
        assert (event["rank"], event["world_size"]) == (rank, job.world_size)
    job.finish(quietly=quietly)


# ---- ways to join ----


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_explicit_address(nursery: Nursery, host: str) -> None:
    if host == "[::1]":
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine's loopback has no IPv6")
    with Job(nursery, 2) as job:
        job.start(joining.explicit, address=f"tcp://{host}:{free_port()}")
        check_joined(job)


@pytest.mark.torch
def test_a_store_of_torch(torch_nursery: Nursery) -> None:
    with Job(torch_nursery, 2) as job:
        job.start(joining.by_store, port=free_port())
        check_joined(job)


def test_two_jobs_at_once(nursery: Nursery) -> None:
    """Their MASTER_PORTs are neighbours, so each tries ports that the other may have."""
    with Job(nursery, 3) as first, Job(nursery, 3) as second:
        second.port = first.port + 1
        for rank in range(3):
            first.start(joining.by_environment, ranks=[rank], tag=1)
            second.start(joining.by_environment, ranks=[2 - rank], tag=3)
        check_joined(first)
        check_joined(second)


# ---- what cannot work ----

OK: dict[str, Any] = {}
WAITS = {"connect_timeout": 1.5}
"""Settings of a bring-up that waits until its time is over."""


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"interfaces": ("nosuch7",)}, "ConfigError", "nosuch7"),
        ({"lanes": 2}, "ConfigError", "lanes"),
        ({"secret_file": "/nonexistent/secret"}, "ConfigError", "/nonexistent/secret"),
    ],
    ids=["an interface that does not exist", "settings that differ", "no such secret file"],
)
def test_settings_of_one_rank(
    nursery: Nursery, settings: dict[str, Any], kind: str, words: str
) -> None:
    """Rank 1 cannot go on, and says why; rank 0 is told at the latest when its time is over."""
    with Job(nursery, 2) as job:
        job.start(joining.badly, arguments=[OK, OK], settings=[WAITS, {**WAITS, **settings}])
        event = job.expect(1, "refused")
        assert event["kind"] == kind, event
        assert words in event["text"]
        event = job.expect(0, "refused")
        assert event["kind"] in ("BootstrapError", "JoinError", kind), event
        assert event["took"] < WAITS["connect_timeout"] + PROMPT
        for event in job.expect_all("left"):
            assert not event["initialized"]
        job.go()
        check_joined(job)


def test_a_port_in_use(nursery: Nursery) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken, Job(nursery, 2) as job:
        port = taken.getsockname()[1]
        arguments = [
            {"rank": rank, "world_size": 2, "init_method": f"tcp://127.0.0.1:{port}"}
            for rank in (0, 1)
        ]
        job.start(joining.badly, arguments=arguments, settings=[WAITS] * 2)
        event = job.expect(0, "refused")
        assert event["kind"] == "ConfigError", event
        assert str(port) in event["text"]
        event = job.expect(1, "refused")
        assert "BootstrapError" in event["kinds"], event
        assert str(port) in event["text"]
        job.go()
        check_joined(job)


def test_world_sizes_that_differ(nursery: Nursery) -> None:
    with Job(nursery, 2) as job:
        address = {"init_method": f"tcp://127.0.0.1:{free_port()}"}
        arguments = [{"rank": rank, "world_size": 2 + rank, **address} for rank in (0, 1)]
        job.start(joining.badly, arguments=arguments, settings=[WAITS] * 2)
        for event in job.expect_all("refused"):
            assert "BootstrapError" in event["kinds"], event
            assert "world" in event["text"], event
            assert event["took"] < WAITS["connect_timeout"] + PROMPT
        job.go()
        check_joined(job, quietly=False)  # rank 0 logs whom it turned away


def test_secrets(nursery: Nursery) -> None:
    right, wrong = secrets.token_hex(32), secrets.token_hex(32)
    with Job(nursery, 3) as job:
        job.start(joining.with_secrets, secrets=[right] * 3, timeout=30.0)
        for event in job.expect_all("refused"):
            assert event["kind"] is None, event
        check_joined(job)
    with Job(nursery, 2) as job:
        job.start(joining.with_secrets, secrets=[right, wrong], timeout=WAITS["connect_timeout"])
        for event in job.expect_all("refused"):
            assert "BootstrapError" in event["kinds"], event
            assert "authentication failed" in event["text"], event
            assert right not in event["text"]
            assert event["took"] < WAITS["connect_timeout"] + PROMPT
        job.finish(quietly=False)
    with Job(nursery, 2) as job:
        job.start(joining.with_secrets, secrets=["too short", "too short"], timeout=30.0)
        for event in job.expect_all("refused"):
            assert event["kind"] == "ConfigError", event
            assert "too short" not in event["text"].replace("is too short", "")
            assert event["took"] < PROMPT
        job.finish()


@pytest.mark.parametrize(
    ("how", "who"),
    [(joining.dies_in_init, 0), *((joining.dies_in_split, who) for who in range(3))],
)
def test_a_rank_dies_while_lanes_are_made(
    nursery: Nursery, how: Callable[[Rank, int], None], who: int
) -> None:
    """The others know at once, and not when the time of the bring-up is over."""
    with Job(nursery, 3) as job:
        job.start(how, who=who)
        died = job.expect(who, "dies")["at"]
        for rank in {0, 1, 2} - {who}:
            event = job.expect(rank, "told")
            assert "ConnectionError" in event["kinds"], event
            assert f"rank {who}" in event["text"], event
            assert event["rank"] == who
            assert event["at"] - died < PROMPT


def test_few_descriptors(nursery: Nursery) -> None:
    """Rank who says which limit it is and how much is needed, and the others blame no secret."""
    cases = list(itertools.product((0, 1), (0, 1, 3, 5)))
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(Job(nursery, 3)) for _ in cases]  # they wait at the same time
        for job, (who, left) in zip(jobs, cases, strict=True):
            job.start(joining.with_few_descriptors, who=who, left=left, timeout=6.0)
        for job, (who, _) in zip(jobs, cases, strict=True):
            for rank, event in enumerate(job.expect_all("refused")):
                assert "BootstrapError" in event["kinds"], event
                assert "secret" not in event["text"]
                if rank == who:
                    assert "ulimit -n" in event["text"]
            assert all(event["kind"] is None for event in job.expect_all("closed"))
            job.finish(quietly=False)


NOBODY = 65534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")


@AS_ROOT
def test_another_user_without_a_secret(nursery: Nursery) -> None:
    """The job's name, which anybody can know, lets no other user in; both ends are told why."""
    worlds = [[0, NOBODY], [NOBODY, 0], [NOBODY, NOBODY, 65533]]
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(Job(nursery, len(uids))) for uids in worlds]
        for job, uids in zip(jobs, worlds, strict=True):
            job.start(joining.as_users, uids=uids, timeout=3.0)
            job.expect_all("here")
        for job in jobs:  # they wait at the same time
            job.go()
        for job, uids in zip(jobs, worlds, strict=True):
            for rank, event in enumerate(job.expect_all("refused")):
                assert "BootstrapError" in event["kinds"], event
                if rank == 0 or uids[rank] != uids[0]:
                    assert "other user" in event["text"], event
                    assert "python -m ringcomm keygen FILE" in event["text"]
            job.finish(quietly=False)  # rank 0 logs whom it turned away


@AS_ROOT
@pytest.mark.parametrize("how", ["same user", "secret", "insecure"])
def test_users_that_may_join(nursery: Nursery, how: str) -> None:
    uids = [NOBODY, NOBODY if how == "same user" else 0]
    secret = {"RINGCOMM_SECRET": secrets.token_hex(32)} if how == "secret" else {}
    with Job(nursery, 2, secret) as job:
        job.start(joining.as_users, uids=uids, timeout=30.0, insecure=how == "insecure")
        job.expect_all("here")
        job.go()
        check_joined(job, quietly=False)  # who may not open the other's memory says so


def test_one_life_after_another(nursery: Nursery) -> None:
    with Job(nursery, 2) as job:
        job.start(joining.twice)
        for rank in (0, 1):
            assert job.expect(rank, "before")["kind"] == "NotInitializedError"
            event = job.expect(rank, "twice")
            assert event["kind"] == "RingcommError"
            assert "shutdown" in event["text"]
            assert job.expect(rank, "joined")["right"]
            for name in ("after", "closed"):
                assert job.expect(rank, name)["kind"] == "NotInitializedError"
        check_joined(job)
