"""A port of a host fails as a job runs: every rank ends, in time, and names the lane, or goes on.

Each rank is a thread on a host of its own (test_netns.Lab), with a port on each of two switches.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE, PROMPT, SILENCE, until
from test_netns import Lab

import ringcomm
from ringcomm import Communicator, Config, PeerLostError

pytestmark = [
    pytest.mark.netns,
    pytest.mark.usefixtures("no_leaked_fds"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]

SECRET = bytes(range(32)).hex()
HEARTBEAT, LIMIT = 0.2, 1.5


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """Three hosts."""
    monkeypatch.setenv("RINGCOMM_SECRET", SECRET)
    with contextlib.closing(Lab()) as built:
        for host in (1, 2, 3):
            built.host((0, f"10.7.0.{host}/24"), (1, f"10.8.0.{host}/24"))
        yield built


class Job:
    """A rank on each host of a lab, calling all-reduces until one fails."""

    def __init__(
        self, lab: Lab, count: int, pause: float = 0.0, master: str = "10.7.0.1", **settings: Any
    ) -> None:
        self.errors: dict[int, ringcomm.RingcommError] = {}
        self.failed_at: dict[int, float] = {}
        self.calls = [0] * len(lab.hosts)
        self._over = threading.Event()
        self._lab, self._count, self._pause = lab, count, pause
        self._method = f"tcp://{master}:29500"
        self.comms: dict[int, Communicator] = {}
        defaults = {"interfaces": ("eth0", "eth1"), "peer_timeout": LIMIT, "probe": False}
        self._config = Config(heartbeat=HEARTBEAT, timeout=PATIENCE, **defaults | settings)
        self._threads = [
            threading.Thread(target=self._rank, args=(rank,)) for rank in range(len(lab.hosts))
        ]
        for thread in self._threads:
            thread.start()
        assert until(lambda: all(calls > 3 for calls in self.calls))

    def _rank(self, rank: int) -> None:
        world = len(self.calls)
        with self._lab.enter(rank):
            comm = Communicator.create(rank, world, init_method=self._method, config=self._config)
        self.comms[rank] = comm
        try:
            data = np.ones(self._count, dtype=np.float32)
            told = np.zeros(1, dtype=np.int64)
            while not told[0]:
                comm.allreduce(data, "avg")
                self.calls[rank] += 1
                time.sleep(self._pause)
                told[0] = self._over.is_set()
                comm.allreduce(told, "max")
        except ringcomm.RingcommError as error:
            self.errors[rank] = error
            self.failed_at[rank] = time.monotonic()
        finally:
            comm.close()

    def end(self) -> None:
        """In order, if it has not failed."""
        self._over.set()
        self.join()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(2 * PATIENCE)
            assert not thread.is_alive(), "a rank hangs"


def check_named(job: Job, rail: int, *words: str) -> None:
    """Every rank has failed by the loss of this rail, and says these words."""
    job.join()
    assert sorted(job.errors) == [0, 1, 2]
    for error in job.errors.values():
        assert isinstance(error, PeerLostError), error
        assert (error.rail, error.lane) == (rail, rail), error
        assert error.rank in (0, 1, 2)
        for word in words:
            assert word in str(error), error


DARK = ("rail 1 between rank ", "is dark: ", "eth1 10.8.0.2 on ", "switch port", "firewall")


def test_blackhole(lab: Lab) -> None:
    """Host 1's second port sends and gets nothing, and its carrier stays."""
    job = Job(lab, 250_000, recovery="off")
    began = time.monotonic()
    lab.blackhole(1, 1)
    check_named(job, 1, *DARK)
    assert all(at - began > LIMIT for at in job.failed_at.values())
    for error in job.errors.values():  # rank 1, by all its lanes of the port, or who was first
        ends = map(int, re.findall(r"between rank (\d) .* and rank (\d) ", str(error))[0])
        assert {1, error.rank} <= set(ends), error


def test_blackhole_beside_small_messages(lab: Lab) -> None:
    """These need not travel on the dark lane at all."""
    job = Job(lab, 8, pause=0.05, recovery="off")
    lab.blackhole(1, 1)
    check_named(job, 1, *DARK)


def test_one_way(lab: Lab) -> None:
    """What host 0 sends to host 1 over the second switch is lost, and nothing else."""
    job = Job(lab, 250_000, recovery="off")
    lab.inside(0, "ip neigh replace 10.8.0.2 lladdr 02:00:00:00:00:99 dev eth1 nud permanent")
    check_named(job, 1, *DARK, "eth1 10.8.0.1 on ")
    assert (job.errors[0].rank, job.errors[1].rank) == (1, 0)  # each end names the other


def test_slow_port_is_not_dark(lab: Lab) -> None:
    """Busy for longer than peer_timeout with what it is given, and losing packets all the time."""
    for host in range(3):
        lab.shape(host, 0, "1gbit")
        lab.shape(host, 1, "10mbit")
    job = Job(lab, 4_000_000)
    calls, began = min(job.calls), time.monotonic()
    assert until(lambda: job.errors or time.monotonic() - began > 1.5 * LIMIT)
    assert until(lambda: job.errors or min(job.calls) > calls + 3)
    assert not job.errors
    job.end()
    assert not job.errors


PORTS: dict[str, tuple[Callable[[Lab], None], Callable[[Lab], None]]] = {
    "was taken down": (
        lambda lab: lab.inside(1, "ip link set eth1 down"),
        lambda lab: lab.inside(1, "ip link set eth1 up"),
    ),
    "has no carrier": (lambda lab: lab.unplug(1, 1), lambda lab: lab.plug(1, 1)),
    "has lost its address": (
        lambda lab: lab.inside(1, "ip addr flush dev eth1"),
        lambda lab: lab.inside(1, "ip addr add 10.8.0.2/24 dev eth1"),
    ),
    "was removed": (lambda lab: lab.inside(1, "ip link del eth1"), lambda lab: None),
}
"""What is said of each loss, and how it is made and mended."""


def test_port_lost(lab: Lab) -> None:
    """Said at once, and by the name of the host whose port it is."""
    for text, (lose, mend) in PORTS.items():
        job = Job(lab, 250_000, recovery="off")
        lose(lab)
        check_named(job, 1, "the port of rank 1 " + text, "eth1 10.8.0.2 on ")
        assert {error.rank for error in job.errors.values()} == {1}
        mend(lab)
        assert text == "was removed" or until(lambda: lab.has_carrier(1, 1))


def test_address_of_version_6_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCOMM_SECRET", SECRET)
    with contextlib.closing(Lab()) as lab:
        for host in (1, 2, 3):
            lab.host((0, f"fd07::{host}/64"), (1, f"fd08::{host}/64"))
        job = Job(lab, 8, pause=0.01, master="[fd07::1]", recovery="off")
        lab.inside(1, "ip -6 addr del fd08::2/64 dev eth1")
        check_named(job, 1, "the port of rank 1 has lost its address", "eth1 fd08::2 on ")


# ---- lanes that are made anew ----


def lanes_of(job: Job) -> list[dict[str, Any]]:
    return [lane for comm in job.comms.values() for lane in comm.stats()["lanes"]]


def is_anew(job: Job, before: list[dict[str, Any]]) -> bool:
    """True if all lanes are open, and those of a port of one host were made anew."""
    lanes = lanes_of(job)
    anew = sum(now["made"] > then["made"] for now, then in zip(lanes, before, strict=True))
    return anew >= 2 * (len(job.comms) - 1) and not any(lane["is_lost"] for lane in lanes)


def test_a_port_that_comes_back(lab: Lab) -> None:
    job = Job(lab, 250_000, peer_timeout=PATIENCE)
    for lose, mend in (PORTS["was taken down"], PORTS["has no carrier"]):
        calls, before = min(job.calls), lanes_of(job)
        lose(lab)
        assert until(lambda: any(lane["is_lost"] for lane in lanes_of(job)))
        assert until(lambda calls=calls: min(job.calls) > calls + 3)
        mend(lab)
        assert until(lambda before=before: is_anew(job, before))
    job.end()
    assert not job.errors


@pytest.mark.parametrize("hurt", [0, 1])
def test_the_only_port_comes_back(monkeypatch: pytest.MonkeyPatch, hurt: int) -> None:
    """It was down at one host; the other has heard nothing."""
    monkeypatch.setenv("RINGCOMM_SECRET", SECRET)
    with contextlib.closing(Lab()) as lab:
        for host in (1, 2):
            lab.host((0, f"10.7.0.{host}/24"))
        job = Job(lab, 250_000, interfaces=("eth0",), peer_timeout=PATIENCE)
        before = lanes_of(job)
        lab.inside(hurt, "ip link set eth0 down")
        assert until(lambda: any(lane["is_lost"] for lane in lanes_of(job)))
        lab.inside(hurt, "ip link set eth0 up")
        assert until(lambda: is_anew(job, before))
        job.end()
        assert not job.errors


def move(lab: Lab, job: Job, hosts: Sequence[int], port: int, turn: int = 1) -> None:
    """Hosts' ports lose their addresses, and then get others."""
    before = lanes_of(job)
    for host in hosts:
        lab.inside(host, f"ip addr flush dev eth{port}")
    assert until(lambda: any(lane["is_lost"] for lane in lanes_of(job)))
    time.sleep(0.6)  # in which it is tried from the old one
    for host in hosts:
        lab.inside(host, f"ip addr add 10.{7 + port}.0.{host + 1 + 20 * turn}/24 dev eth{port}")
    assert until(lambda: is_anew(job, before))


@pytest.mark.parametrize("hosts", [(0,), (2,), (0, 1, 2)])
def test_an_address_that_moves(lab: Lab, hosts: tuple[int, ...]) -> None:
    """Ranks hear of it by the other port. It moves again, and home; then the other port moves. All
    lanes have the congestion control that was asked for."""
    job = Job(lab, 250_000, peer_timeout=PATIENCE, congestion=("reno",))
    for port, turn in ((1, 1), (1, 2), (1, 0), (0, 1), (1, 1)):
        move(lab, job, hosts, port, turn)
    calls = min(job.calls)
    assert until(lambda: min(job.calls) > calls + 3)
    for host in lab.hosts:
        listed = ["ip", "netns", "exec", host, "ss", "-tniHO", "state", "established"]
        connections = subprocess.check_output(listed, text=True).splitlines()
        assert connections
        assert all(" reno " in each for each in connections)
    job.end()
    assert not job.errors


@pytest.mark.parametrize("host", [0, 1])
def test_the_only_address_moves(monkeypatch: pytest.MonkeyPatch, host: int) -> None:
    """And then the other host's: each is told of the first move once the lane is back."""
    monkeypatch.setenv("RINGCOMM_SECRET", SECRET)
    with contextlib.closing(Lab()) as lab:
        for number in (1, 2):
            lab.host((0, f"10.7.0.{number}/24"))
        job = Job(lab, 250_000, interfaces=("eth0",), peer_timeout=PATIENCE)
        for mover, turn in ((host, 1), (1 - host, 1), (host, 2), (1 - host, 0), (host, 0)):
            move(lab, job, [mover], 0, turn)
            keeper = job.comms[1 - mover]._keeper
            assert keeper is not None
            targets = keeper._plan.targets
            here = f"10.7.0.{mover + 1 + 20 * turn}"
            assert until(lambda here=here, of=targets: {to.address for to in of.values()} == {here})
        job.end()
        assert not job.errors


def test_what_was_dark_is_used_again(lab: Lab) -> None:
    """Also if there was nothing to send before."""
    job = Job(lab, 2_000_000, pause=1.2, peer_timeout=PATIENCE)
    before = lanes_of(job)
    lab.blackhole(1, 1)
    assert until(lambda: sum(lane["is_lost"] for lane in lanes_of(job)) == 4)
    lab.unblackhole(1, 1)
    assert until(lambda: is_anew(job, before))
    sent = [lane["sent_bytes"] for lane in lanes_of(job)]
    job._pause = 0.0
    assert until(
        lambda: all(
            lane["sent_bytes"] > 3 * bytes_then
            for lane, bytes_then in zip(lanes_of(job), sent, strict=True)
            if bytes_then > 1_000_000  # those round the ring
        )
    )
    job.end()
    assert not job.errors


@pytest.mark.parametrize("rail", [0, 1])
def test_a_port_that_comes_later(lab: Lab, rail: int, caplog: pytest.LogCaptureFixture) -> None:
    """A rail that does not reach host 1 when the job starts."""
    caplog.set_level("INFO", "ringcomm")
    lab.blackhole(1, rail)
    job = Job(lab, 250_000, master=f"10.{8 - rail}.0.1", peer_timeout=PATIENCE)
    before = lanes_of(job)
    assert len(before) == 12
    assert sum(lane["is_lost"] for lane in before) == 4  # to host 1, and from there
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert all("going on without it until it does" in record.getMessage() for record in warned)
    assert len(warned) == 4
    lab.unblackhole(1, rail)
    assert until(lambda: is_anew(job, before))
    job.end()
    assert not job.errors


def test_what_crawls_goes_by_another_lane(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """A cable falls to a thousandth of its rate, with much on its way."""
    caplog.set_level("INFO", "ringcomm")
    job = Job(lab, 2_000_000, peer_timeout=PATIENCE)
    lab.shape(1, 1, "1mbit")
    assert until(lambda: any("is slow: " in record.getMessage() for record in caplog.records))
    calls = min(job.calls)
    assert until(lambda: min(job.calls) > calls + 20)
    job.end()
    assert not job.errors


PROGRAM = f"""
import sys, numpy, ringcomm
config = ringcomm.Config(peer_timeout={SILENCE}, heartbeat={HEARTBEAT}, probe=False)
comm = ringcomm.Communicator.create(
    int(sys.argv[1]), 3, init_method="tcp://10.7.0.1:29500", config=config
)
try:
    for call in range(10**9):
        comm.allreduce(numpy.ones(1000, numpy.float32))
        if call == 3:
            print("works", flush=True)
except ringcomm.PeerLostError as error:
    print("lost", error.rank, flush=True)
"""


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_lost_promptly(lab: Lab, victim: int) -> None:
    """Its host says so: nobody waits whether its lanes come back."""
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, "-c", PROGRAM, str(rank)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate(lab.hosts)
    ]
    try:
        for each in ranks:
            assert each.stdout is not None
            assert each.stdout.readline() == "works\n"
        ranks[victim].kill()
        for rank in {0, 1, 2} - {victim}:
            said, _ = ranks[rank].communicate(timeout=PROMPT)
            assert said == f"lost {victim}\n"
    finally:
        for each in ranks:
            each.kill()
            each.communicate()
