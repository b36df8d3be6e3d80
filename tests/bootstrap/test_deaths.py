"""A rank that leaves while lanes are made, where nothing but the lanes shows it: the others are
told long before the time of the bring-up is over.

Ranks are threads; one that leaves raises, which closes all that it has, as its death would.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import Any

import pytest
from bringup_world import Outcome, identity, join_world, meshes, run_ranks
from patience import PROMPT
from test_carriers import FakeMpi, FakeStore

from ringcomm.bootstrap import bringup, lanes, mesh, rendezvous
from ringcomm.bootstrap.join_failure import LEFT, Row
from ringcomm.bootstrap.loop import Loop
from ringcomm.bootstrap.rendezvous import (
    Exchange,
    ExitWatch,
    GatherExchange,
    StoreExchange,
    mpi_exchange,
)
from ringcomm.config import Config
from ringcomm.errors import BootstrapError

pytestmark = pytest.mark.usefixtures("no_leaked_fds")

WORLD = 3
TIME = 60.0  # of the bring-up


class LeftError(Exception):
    """Of the rank that leaves."""


class CheckedStore(FakeStore):
    """One that can be asked without waiting, as torch's own."""

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def carriers(name: str) -> Callable[[int], Exchange]:
    """Of each rank of one world."""
    if name == "mpi":
        mpi = FakeMpi(WORLD)
        return lambda rank: mpi_exchange(mpi.rank(rank))
    store = CheckedStore() if name == "store" else FakeStore()
    return lambda rank: StoreExchange(store, rank, WORLD)


def join(name: str, port: int) -> dict[int, Outcome]:
    """Joins the world over this carrier."""
    if name == "tcp":
        return join_world(WORLD, port, connect_timeout=TIME)
    carrier = carriers(name)
    config = Config(connect_timeout=TIME)
    return run_ranks(
        lambda rank: mesh.join(identity(rank, WORLD, port), config, None, carrier(rank)),
        range(WORLD),
    )


def leave(monkeypatch: pytest.MonkeyPatch, who: int, when: str) -> None:
    """Rank who leaves before it makes its lanes, or as soon as it has made them."""
    run = lanes.LaneMaker.run

    def leaving(self: lanes.LaneMaker, *arguments: Any) -> None:
        if self.plan.rank == who and when == "before":
            raise LeftError
        run(self, *arguments)
        if self.plan.rank == who:
            raise LeftError

    monkeypatch.setattr(lanes.LaneMaker, "run", leaving)


@pytest.fixture(autouse=True)
def nothing_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_abandoned", [])


CASES = [
    *[("tcp", when, who) for when in ("before", "after") for who in range(WORLD)],
    *[("store", "after", 1), ("waiting store", "after", 2), ("mpi", "after", 0)],
    # Who is dialled is missed at its listener; nobody dials the highest rank.
    *[("store", "before", 1), ("waiting store", "before", 0), ("mpi", "before", 0)],
]


@pytest.mark.parametrize(("carrier", "when", "who"), CASES)
def test_a_rank_that_leaves(
    carrier: str, when: str, who: int, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(monkeypatch, who, when)
    outcomes = join(carrier, port)
    assert isinstance(outcomes.pop(who).error, LeftError)
    for outcome in outcomes.values():
        assert isinstance(outcome.error, BootstrapError)
        assert f"rank {who}" in str(outcome.error)
        # Its connections are reset where it had not read all that came.
        assert LEFT in str(outcome.error) or "was lost during the bring-up" in str(outcome.error)
        assert outcome.seconds < PROMPT


@pytest.mark.parametrize("carrier", ["store", "waiting store", "mpi"])
def test_who_is_done_early_has_not_left(
    carrier: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may be joined, and close everything, while others still wait for the last answer."""
    monkeypatch.setattr(rendezvous, "EXIT_GRACE", 0.1)
    slow = bringup.Bringup._mesh

    def late(self: bringup.Bringup, *arguments: Any) -> mesh.Mesh:
        if self._rank == 2:
            time.sleep(0.3)
        return slow(self, *arguments)

    monkeypatch.setattr(bringup.Bringup, "_mesh", late)
    carrier_of = carriers(carrier)

    def call(rank: int) -> int:
        me, config = identity(rank, WORLD, port), Config(connect_timeout=TIME)
        made = mesh.join(me, config, None, carrier_of(rank))
        made.close()
        return len(made.hosts)

    assert meshes(run_ranks(call, range(WORLD))) == [WORLD] * WORLD


def test_a_lane_that_ends_while_lanes_are_handed_over(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another lane was looked at before: the fixture finds what stays open."""
    describe, looks = bringup.Bringup._describe_end, list[int]()

    def end(self: bringup.Bringup, *arguments: Any) -> str:
        looks.append(self._rank)
        if self._rank == 1 and looks.count(1) > 3:  # a lane's two ends, and one of the next
            raise OSError(errno.ENOTCONN, "not connected")
        return describe(self, *arguments)

    monkeypatch.setattr(bringup.Bringup, "_describe_end", end)
    outcomes = join_world(WORLD, port)
    assert isinstance(outcomes.pop(1).error, OSError)
    for made in meshes(outcomes):
        assert made.in_memory
        made.close()


def test_a_parent_that_fails() -> None:
    exchange = GatherExchange(lambda part, seconds: part, [0], failed=lambda: True)
    loop, rung = Loop(), []
    exchange.alarm(loop, lambda: rung.append(True), list)
    assert loop.run(lambda: bool(rung), time.monotonic() + PROMPT)
    loop.close()


def test_an_exit_counts_once_it_has_lasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "EXIT_GRACE", 0.1)
    lost = [Row(1, 0, "", LEFT)]
    exits = ExitWatch(lambda: lost)
    assert exits.rows() == []
    lost.clear()
    time.sleep(0.15)
    assert exits.rows() == []
    lost.append(Row(1, 0, "", LEFT))
    assert exits.rows() == []
    time.sleep(0.15)
    assert exits.rows() == lost
