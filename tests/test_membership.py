"""Rounds that outlive a peer: who takes part, decided with a clock of the test's own; and ranks as
processes that are killed, stopped and started again."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import rounds
from faults.job import Job, Nursery, nursery_of
from patience import PATIENCE, PROMPT, until
from ports import free_port

import ringcomm
from ringcomm import communicator
from ringcomm.bootstrap.bringup import Bringup
from ringcomm.bootstrap.mesh import Mesh
from ringcomm.bootstrap.sockets import listen
from ringcomm.membership import Membership, listening, member
from ringcomm.membership.agreement import Agreement

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS.parent / "bench"))

import netlab  # noqa: E402


@pytest.mark.parametrize("taken", [False, True])
def test_an_address_that_cannot_be_listened_on_leaves_none_open(
    taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def listens(address: str, port: int = 0) -> socket.socket:
        if address != "127.0.0.1":
            raise OSError(errno.EADDRNOTAVAIL, "no such address here")
        if port and taken:
            raise OSError(errno.EADDRINUSE, "taken")
        opened.append(listen(address))
        return opened[-1]

    monkeypatch.setattr(listening, "listen", listens)
    with pytest.raises(OSError, match="no such address"):
        listening.listen_on(["127.0.0.1", "192.0.2.1"], "job", 0, None, True)
    assert [one.fileno() for one in opened] == [-1]


@pytest.mark.parametrize(("owner", "name"), [(Agreement, "look_for"), (member, "Control")])
def test_a_rejoin_that_is_interrupted_leaves_no_address_open(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def listens(address: str, port: int = 0) -> socket.socket:
        opened.append(listen(address, port))
        return opened[-1]

    def is_interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(listening, "listen", listens)
    monkeypatch.setattr(owner, name, is_interrupted)
    with pytest.raises(KeyboardInterrupt):
        Membership(rank=0, world_size=2, rejoin=True, init_method="tcp://127.0.0.1:1")
    assert {one.fileno() for one in opened} == {-1}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"grace_s": 0}, "grace_s=0: give seconds from 0.5 to 3600"),
        ({"grace_s": True}, "grace_s=True: give seconds from 0.5 to 3600"),
        ({"min_peers": 0}, "min_peers=0: give a whole number from 1 to 1"),
        ({"min_peers": 2}, "min_peers=2: give a whole number from 1 to 1"),
        ({"rejoin": True, "config": ringcomm.Config(kernel_set="mmx")}, "kernel_set='mmx': this"),
        ({"hosts": "localhost"}, "hosts='localhost': give a list of names"),
        ({"init_method": 5}, 'init_method=5: give "tcp://host:port"'),
    ],
    ids=str,
)
def test_bad_settings(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ringcomm.ConfigError) as caught:
        Membership(rank=0, world_size=1, **given)
    assert text in str(caught.value)


class Mpi:
    """An mpi4py communicator, as far as its ranks go."""

    def Get_rank(self) -> int:  # noqa: N802 - MPI's name
        return 1

    def Get_size(self) -> int:  # noqa: N802
        return 3


@pytest.mark.parametrize(
    ("given", "job"),
    [
        ({"mpi": Mpi()}, "mpi4py"),
        ({"store": object(), "rank": np.int64(1), "world_size": np.int64(3)}, "store"),
    ],
    ids=["mpi", "store"],
)
def test_who_is_started_again_has_the_place_and_job_it_had(given: dict[str, Any], job: str) -> None:
    with Membership(rejoin=True, hosts=["127.0.0.1"], min_peers=np.int64(2), **given) as again:
        assert (again.rank, again.world_size, again._job) == (1, 3, job)


def test_bad_rounds() -> None:
    with Membership(rank=0, world_size=1) as alone:
        for number in (1.0, "1", True, 2**63):
            with pytest.raises(ringcomm.ConfigError, match="give the round's whole number"):
                alone.begin_round(number)  # type: ignore[arg-type]
        with pytest.raises(ringcomm.ConfigError, match="token='a': give bytes"):
            alone.begin_round(0, "a")  # type: ignore[arg-type]
        assert type(alone.begin_round(np.int64(1)).number) is int


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("min_peers", "min_peers differs between ranks: 2, 1 on ranks 0 to 1"),
        ("grace_s", "peer_timeout differs between ranks: 2 on rank 0, 1 on rank 1"),
    ],
)
def test_settings_that_differ(given: str, text: str) -> None:
    with socket.socket() as probe, ThreadPoolExecutor(2) as threads:
        probe.bind(("127.0.0.1", 0))
        method = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        probe.close()
        for made in [
            threads.submit(
                Membership, rank=rank, world_size=2, init_method=method, **{given: 2 - rank}
            )
            for rank in range(2)
        ]:
            with pytest.raises(ringcomm.ConfigError, match=text):
                made.result()


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


def test_paused_in_mid_round_and_back(nursery: Nursery) -> None:
    """The others go on after the grace time. When it wakes up it has been left behind, and gets the
    state at the end of their round."""
    victim, grace_s = 0, 2.0
    with Job(nursery, 3) as job:
        for rank in range(3):
            hold = 3 if rank == victim else -1
            job.start(rounds.work, ranks=[rank], hold=hold, grace_s=grace_s, work_s=0.02)
        job.expect(victim, "holds")
        since = job.signal(victim, signal.SIGSTOP)
        others = [rank for rank in range(3) if rank != victim]
        for rank in others:
            one = round_where(job, rank, is_new=True)
            assert (one["number"], one["members"], one["left"]) == (3, others, [victim])
            assert grace_s / 2 < one["at"] - since < grace_s + PROMPT
        job.go(victim)
        job.signal(victim, signal.SIGCONT)
        assert job.expect(victim, "lost")["kind"] == "PeerLostError"
        back = round_where(job, victim, is_new=True)
        assert back["members"] == [0, 1, 2]
        assert back["joined"] == [victim]
        assert back["number"] > 3
        for rank in others:
            one = round_where(job, rank, number=back["number"])
            assert {**one, "at": 0, "waited": 0} == {**back, "at": 0, "waited": 0}
        stop(job, *others)


def test_late_and_back(nursery: Nursery) -> None:
    """Who is paused between two rounds is waited for the grace time, once."""
    with Job(nursery, 3) as job:
        job.start(rounds.work, grace_s=1.0, work_s=0.3)
        round_where(job, 1, number=1)
        job.signal(1, signal.SIGSTOP)
        for rank in (0, 2):
            one = round_where(job, rank, is_new=True)
            assert (one["members"], one["left"]) == ([0, 2], [1])
            assert one["waited"] > 0.2
            one = job.expect(rank, "round")
            assert one["members"] == [0, 2]
            assert one["waited"] < 0.9, "it is waited for again"
        job.signal(1, signal.SIGCONT)
        back = round_where(job, 1, is_new=True)
        assert back["joined"] == [1]
        for rank in (0, 2):
            assert round_where(job, rank, number=back["number"])["state"] == back["state"]
        stop(job, 0, 2)


def test_short_pause_is_no_loss(nursery: Nursery) -> None:
    """The state of who comes within the grace time is as good as that of the others."""
    with Job(nursery, 3) as job:
        job.start(rounds.work, grace_s=20.0, work_s=0.05)
        round_where(job, 2, number=1)
        job.signal(2, signal.SIGSTOP)
        time.sleep(0.3)
        job.signal(2, signal.SIGCONT)
        job.go(0)
        for rank in range(3):
            last = round_where(job, rank, tokens=["stop", "", ""])
            assert last["members"] == [0, 1, 2]
        job.finish()


def test_started_again(nursery: Nursery) -> None:
    """Another process takes the place of one that was killed; whose child does not hold it."""
    with Job(nursery, 3) as job:
        for rank in range(3):
            job.start(rounds.work, ranks=[rank], work_s=0.1, forks=rank == 1)
        round_where(job, 1, number=1)
        job.signal(1, signal.SIGKILL)
        job.wait_exit(1)
        for rank in (0, 2):
            assert round_where(job, rank, is_new=True)["left"] == [1]
        job.start(rounds.work, ranks=[1], rejoin=True, work_s=0.1)
        back = round_where(job, 1, is_new=True)
        assert (back["members"], back["joined"]) == ([0, 1, 2], [1])
        for rank in (0, 2):
            assert round_where(job, rank, number=back["number"])["state"] == back["state"]
        stop(job, 0, 2)


def test_another_rank_0_started_again(nursery: Nursery) -> None:
    """Where rank 0 has ended, the others are found on a host that is named."""
    with Job(nursery, 3) as job:
        job.start(rounds.work, work_s=0.1)
        round_where(job, 0, number=1)
        job.signal(0, signal.SIGKILL)
        job.wait_exit(0)
        assert round_where(job, 1, is_new=True)["left"] == [0]
        job.start(rounds.work, ranks=[0], rejoin=True, hosts=["localhost"], work_s=0.1)
        assert round_where(job, 0, is_new=True)["joined"] == [0]
        stop(job, 1, 2)


@pytest.mark.parametrize("member_lives", [False, True])
def test_started_again_where_others_have_the_ports(member_lives: bool) -> None:
    """Programs that say nothing have a member's ports, whether the member listens elsewhere or has
    ended: the wait is bounded, and the error names the ports."""
    config = ringcomm.Config(timeout=1.0)
    with contextlib.ExitStack() as open_ones:
        (probe := socket.socket()).bind(("127.0.0.1", 0))
        method = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        probe.close()
        back: dict[str, Any] = {"rank": 1, "rejoin": True, "hosts": ["127.0.0.1"]}
        job: dict[str, Any] = {
            "world_size": 2,
            "init_method": method,
            "min_peers": 1,
            "grace_s": 0.5,
            "config": config,
        }
        with Membership(**job, **back) as first:
            ports = listening.ports_of(first._job, 0)
        for port in ports:
            open_ones.enter_context(listen("127.0.0.1", port))
        if member_lives:
            with ThreadPoolExecutor(2) as threads:
                zero, one = threads.map(lambda rank: Membership(**job, rank=rank), range(2))
            open_ones.enter_context(zero)
            one.close()
        again = open_ones.enter_context(Membership(**job, **back))
        with pytest.raises(ringcomm.PeerLostError, match="where rank 0 may be") as failure:
            again.begin_round(0)
        for port in ports:
            assert f"127.0.0.1:{port}" in str(failure.value)


def test_an_interrupted_close_closes_the_links(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Links:
        def close(self) -> None:
            closed.append(self)

    def interrupted(_: ringcomm.Communicator) -> None:
        raise KeyboardInterrupt

    with Membership(rank=0, world_size=1) as alone:
        comm, links = alone.comm, Links()
        alone._agreement = links  # type: ignore[assignment]
        with monkeypatch.context() as patch:
            patch.setattr(ringcomm.Communicator, "close", interrupted)
            with pytest.raises(KeyboardInterrupt):
                alone.close()
    assert closed == [links]
    comm.close()


@pytest.mark.parametrize("part", ["offer", "open"])
@pytest.mark.parametrize("world", [3, 2])
def test_who_cannot_do_its_own_part(part: str, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port of rank 1 has no carrier when members meet anew, or the limit of its memory is
    reached. It leaves where the others are enough; else it tries again."""
    trouble = ringcomm.RingcommError("as if")
    troubles = [trouble]
    offer, open_handle = Bringup._offer, communicator.open_handle

    def cannot_offer(self: Bringup, deadline: float) -> Any:
        if self._epoch and self._rank == 1 and troubles:
            raise troubles.pop()
        return offer(self, deadline)

    def cannot_open(mesh: Mesh, config: ringcomm.Config, epoch: int, engine: Any) -> Any:
        if epoch and mesh.rank == 1 and troubles:
            raise troubles.pop()
        return open_handle(mesh, config, epoch, engine)

    if part == "offer":
        monkeypatch.setattr(Bringup, "_offer", cannot_offer)
    else:
        monkeypatch.setattr(communicator, "open_handle", cannot_open)

    def rank(number: int) -> Any:
        with Membership(
            rank=number, world_size=world, init_method=method, min_peers=2, config=config
        ) as one:
            one.begin_round(0)
            try:
                found = one.lost(ringcomm.PeerLostError("as if"))
                while True:
                    try:
                        one.end_round()
                        return found.members
                    except ringcomm.PeerLostError as error:
                        found = one.lost(error)
            except ringcomm.RingcommError as error:
                return error

    config, method = ringcomm.Config(timeout=30.0), f"tcp://127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(world) as threads:
        found = list(threads.map(rank, range(world)))
    assert found == ([(0, 2), trouble, (0, 2)] if world == 3 else [(0, 1), (0, 1)])


@pytest.mark.netns
def test_of_two_halves_the_larger_goes_on() -> None:
    """One host of three is cut off without a word."""
    victim = 0
    reason = netlab.why_unavailable()
    if reason:
        pytest.skip(reason)
    program = "import os; from faults import rounds; rounds.alone()"
    environment = {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    with netlab.NetLab(3, [1000]) as lab:
        job = lab.start([sys.executable, "-c", program], env=environment, quiet=True)
        others = [rank for rank in range(3) if rank != victim]
        assert until(lambda: all('"number": 5' in job.output(rank) for rank in range(3)))
        lab.blackhole(victim, 0)
        for rank in others:
            assert until(lambda rank=rank: f'"left": [{victim}]' in job.output(rank))
        assert until(lambda: "of at least 2 ranks are here" in job.output(victim))
        before = job.output(others[0]).count('"members": ' + str(others))
        assert until(lambda: job.output(others[0]).count('"members": ' + str(others)) > before)
        job.stop()


def test_too_few(nursery: Nursery) -> None:
    """Every rank that is left hears who is missing."""
    with Job(nursery, 4) as job:
        job.start(rounds.work, grace_s=1.0, work_s=0.05)
        round_where(job, 3, number=1)
        for victim in (0, 3):
            job.signal(victim, signal.SIGKILL)
        for rank in (1, 2):
            failed = job.expect(rank, "failed")
            assert failed["kind"] == "PeerLostError"
            assert "of at least 3 ranks are here" in failed["text"]
            assert "rank 0 has been gone for" in failed["text"]
            assert "rank 3 has been gone for" in failed["text"]
