"""The probe of the rails: who streams to whom, and what it says of streams of known rate."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from patience import PROMPT

from ringcomm.bootstrap import probe


@pytest.mark.parametrize(
    ("hosts", "targets"),
    [
        ([0, 1], [1, 0]),
        ([0, 1, 2], [1, 2, 0]),
        ([0, 0, 1, 1], [2, 2, 0, 0]),
        ([0, 1, 0, 1], [1, 2, 3, 0]),
        ([0, 0], [None, None]),
    ],
)
def test_next_rank_on_another_host(hosts: list[int], targets: list[int | None]) -> None:
    assert [probe.target(rank, hosts) for rank in range(len(hosts))] == targets


def test_both_ends_agree_on_the_connections() -> None:
    hosts = [0, 0, 1, 1, 2]
    needs = [probe.peers(rank, hosts, {r: 2 for r in range(5) if r != rank}) for rank in range(5)]
    assert needs == [{2, 4}, {2}, {0, 1, 4}, {4}, {0, 2, 3}]
    assert all(rank in needs[peer] for rank in range(5) for peer in needs[rank])


def test_one_rail_needs_no_probe() -> None:
    assert probe.peers(0, [0, 1], {1: 1}) == set()


@pytest.fixture
def pairs() -> Iterator[Callable[[], tuple[socket.socket, socket.socket]]]:
    """Makes pairs of connected, non-blocking TCP sockets."""
    made: list[socket.socket] = []

    def make() -> tuple[socket.socket, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs = listener.accept()[0]
        made.extend((ours, theirs))
        ours.setblocking(False)
        theirs.setblocking(False)
        return ours, theirs

    yield make
    for sock in made:
        sock.close()


def both(*ends: dict[str, tuple[socket.socket, bool]]) -> list[dict[str, float]]:
    """What each end measures, each in a thread of its own."""
    found: list[dict[str, float]] = [{} for _ in ends]

    def run(index: int) -> None:
        found[index] = probe.measure(ends[index])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(ends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_each_end_learns_how_fast_it_sends(pairs: Callable[..., tuple]) -> None:
    a, b = pairs(), pairs()
    found = both({"a": (a[0], True), "b": (b[0], True)}, {"a": (a[1], True), "b": (b[1], True)})
    for rates in found:
        assert set(rates) == {"a", "b"}
        assert all(rate > 1e6 for rate in rates.values())


def test_a_listener_learns_nothing_and_tells(pairs: Callable[..., tuple]) -> None:
    a = pairs()
    sender, listener = both({"a": (a[0], True)}, {"a": (a[1], False)})
    assert sender["a"] > 1e6
    assert listener == {}


def test_a_rail_that_stalls_is_slow(pairs: Callable[..., tuple]) -> None:
    """Nobody is at the far end of b: the probe is over in time, and says so."""
    a, b = pairs(), pairs()
    began = time.monotonic()
    sender, _ = both({"a": (a[0], True), "b": (b[0], True)}, {"a": (a[1], True)})
    assert time.monotonic() - began < probe.LIMIT_S + PROMPT
    assert sender["b"] < sender["a"] / 10


def test_a_broken_connection_is_no_failure(pairs: Callable[..., tuple]) -> None:
    a, b = pairs(), pairs()
    b[1].close()
    sender, _ = both({"a": (a[0], True), "b": (b[0], True)}, {"a": (a[1], True)})
    assert sender["b"] < sender["a"] / 10


def test_nothing_at_all_says_nothing(pairs: Callable[..., tuple]) -> None:
    a = pairs()
    assert both({"a": (a[0], True)}) == [{}]


def test_judged_by_the_later_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shaper that lets 128 KiB through at once, and then 1 MB a second."""
    stream = probe._Stream(socket.socket(), fills=False)
    with stream.sock:
        stream._arrivals = [(0.0, 128 << 10)]
        stream._arrivals += [(i / 1000, (128 << 10) + i * 1000) for i in range(1, 101)]
        assert stream.measured_rate() == pytest.approx(1e6)
