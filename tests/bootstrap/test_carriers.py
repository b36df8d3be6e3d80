"""The carriers of the exchange that are not our own: stores, MPI, a parent's gather."""

from __future__ import annotations

import datetime
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from bringup_world import Outcome, run_ranks
from patience import PATIENCE, PROMPT, until
from test_rendezvous import expected, rounds, rows

from ringcomm.bootstrap import rendezvous
from ringcomm.bootstrap.rendezvous import GatherExchange, StoreExchange, mpi_exchange
from ringcomm.errors import BootstrapError

pytestmark = pytest.mark.usefixtures("no_leaked_fds")

# -- stores --


class FakeStore:
    """torch's Store, as far as we use it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.broken = False

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
        if self.broken:
            raise RuntimeError("connection reset")
        give_up = time.monotonic() + timeout.total_seconds()
        while not all(key in self.values for key in keys):
            if time.monotonic() > give_up:
                raise RuntimeError("wait timeout")
            time.sleep(0.001)


def over_store(
    make: Callable[[int], Any], world_size: int, ranks: list[int], patience: float
) -> dict[int, Outcome]:
    def call(rank: int) -> list[bytes]:
        exchange = StoreExchange(make(rank), rank, world_size, prefix="test")
        return rounds(exchange, rank, 3, patience)

    return run_ranks(call, ranks)


def test_store() -> None:
    store = FakeStore()
    outcomes = over_store(lambda _: store, 3, [0, 1, 2], PATIENCE)
    assert all(o.value == expected(3, 3) for o in outcomes.values())
    assert all(key.startswith("test/") for key in store.values)


@pytest.mark.parametrize("before", [[0], [0, 1]], ids=["in vain", "with success"])
def test_a_rank_that_was_there_before_is_met_anew(before: list[int]) -> None:
    """What it left then is not taken, even by a rank that comes before it does."""
    store = FakeStore()
    patience = PATIENCE if len(before) == 2 else 0.01

    def gather(rank: int, blob: bytes, patience: float) -> list[bytes]:
        exchange = StoreExchange(store, rank, 2)
        return exchange.allgather(blob, time.monotonic() + patience)

    run_ranks(lambda rank: gather(rank, b"old", patience), before)

    def again(rank: int) -> list[bytes]:
        if rank == 0:
            until(lambda: b"new" in list(store.values.values()))
        return gather(rank, b"new", PATIENCE)

    outcomes = run_ranks(again, [0, 1])
    assert [outcomes[rank].value for rank in range(2)] == [[b"new"] * 2] * 2


def test_store_with_missing_ranks() -> None:
    store = FakeStore()
    for outcome in over_store(lambda _: store, 4, [0, 2], 0.4).values():
        assert rows(outcome) == [
            (1, "never came to the rendezvous"),
            (3, "never came to the rendezvous"),
        ]
        assert outcome.seconds < 0.4 + PROMPT


def test_broken_store() -> None:
    store = FakeStore()
    store.broken = True
    outcome = over_store(lambda _: store, 2, [0], PATIENCE)[0]
    assert isinstance(outcome.error, BootstrapError)
    assert "connection reset" in str(outcome.error)
    assert outcome.seconds < PROMPT


# -- MPI and parents --


class FakeRequest:
    def __init__(self, barrier: threading.Barrier, finish: Callable[[], None]) -> None:
        self._arrived = threading.Event()
        self._finish = finish
        threading.Thread(target=self._wait, args=(barrier,), daemon=True).start()

    def _wait(self, barrier: threading.Barrier) -> None:
        try:
            barrier.wait(PATIENCE)
        except threading.BrokenBarrierError:
            return
        self._finish()
        self._arrived.set()

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        return self._arrived.is_set()


class FakeMpi:
    """An mpi4py communicator whose ranks are threads."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.lock = threading.Lock()
        self.calls: dict[int, tuple[threading.Barrier, dict[int, Any]]] = {}

    def rank(self, rank: int) -> Any:
        shared, calls = self, 0

        class Comm:
            def Get_size(self) -> int:  # noqa: N802
                return shared.world_size

            def Iallgather(self, mine: bytearray, everyone: bytearray) -> FakeRequest:  # noqa: N802
                nonlocal calls
                calls += 1
                assert isinstance(mine, bytearray)
                assert len(everyone) == len(mine) * shared.world_size
                with shared.lock:
                    barrier, parts = shared.calls.setdefault(
                        calls, (threading.Barrier(shared.world_size), {})
                    )
                    parts[rank] = mine

                def finish() -> None:
                    everyone[:] = b"".join(parts[r] for r in range(shared.world_size))

                return FakeRequest(barrier, finish)

        return Comm()


def test_mpi() -> None:
    mpi, before = FakeMpi(3), set(sys.modules)
    outcomes = run_ranks(lambda r: rounds(mpi_exchange(mpi.rank(r)), r, 3, PATIENCE), range(3))
    assert all(o.value == expected(3, 3) for o in outcomes.values())
    assert "mpi4py" not in set(sys.modules) - before


def test_mpi_with_a_missing_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_abandoned", [])
    mpi = FakeMpi(3)
    outcomes = run_ranks(lambda r: rounds(mpi_exchange(mpi.rank(r)), r, 1, 0.3), [0, 1])
    for outcome in outcomes.values():
        assert isinstance(outcome.error, BootstrapError)
        assert "not all 3 ranks" in str(outcome.error)
        assert outcome.seconds < 0.3 + PROMPT


class Parent:
    """A group of threads that can gather equal-sized parts."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size)
        self._parts: dict[int, bytes] = {}
        self._world = world_size
        self.rounds = 0

    def gather(self, rank: int, part: bytes, seconds: float) -> bytes:
        self._parts[rank] = part
        self._barrier.wait(seconds)
        everything = b"".join(self._parts[r] for r in range(self._world))
        if self._barrier.wait(seconds) == 0:
            self.rounds += 1
        return everything


def test_groups_of_a_parent() -> None:
    """One group ends early, one rank is in none; the third is not held up."""
    parent = Parent(5)
    groups = {0: [3, 0], 3: [3, 0], 1: [1], 2: [2, 4], 4: [2, 4]}

    def call(rank: int) -> list[bytes]:
        exchange = GatherExchange(
            lambda part, seconds: parent.gather(rank, part, seconds), groups[rank], 3, 5.0
        )
        try:
            return rounds(exchange, rank, {1: 1}.get(rank, 3), PATIENCE)
        finally:
            exchange.close()

    outcomes = run_ranks(call, range(5))
    assert all(outcome.error is None for outcome in outcomes.values())
    assert outcomes[0].value == outcomes[3].value
    assert outcomes[0].value[:2] == [b"3.0" * 3001, b"0.0"]
    assert outcomes[4].value[0] == b"2.0" * 2001
    assert parent.rounds == 6  # of each of three rounds, the lengths and the content


def test_impossible_sizes() -> None:
    huge = struct.pack("<QQ", 1, 2**40)
    exchange = GatherExchange(lambda part, seconds: huge, [0, 1])
    with pytest.raises(BootstrapError, match="impossible sizes"):
        exchange.allgather(b"x", time.monotonic() + 1)
