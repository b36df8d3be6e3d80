"""Sends and receives with tags and from any source, and callbacks that are asked for late."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest
from patience import until
from ranks import World

from ringcomm import Communicator, Config, ConfigError, MismatchError, Work

pytestmark = pytest.mark.usefixtures("nothing_left")

SMALL = Config(segment_bytes=4096, timeout=20.0)


@pytest.mark.parametrize("source", [None, 1])
@pytest.mark.parametrize("before", ["a send", "a collective"])
def test_a_receive_finds_a_send_that_is_held_back(source: int | None, before: str) -> None:
    """For want of credit, which what was sent before has taken and is called here only later."""

    def body(comm: Communicator) -> float:
        large, small = np.ones(1 << 16), np.full(4, 7.0)
        if comm.rank == 1:
            first = (
                comm.send(large, 0, tag=1, async_op=True)
                if before == "a send"
                else comm.allreduce(large, async_op=True)
            )
            comm.send(small, 0, tag=2)
            first.wait()
            return 0.0
        got = comm.recv(np.zeros(4), source, tag=2)
        if before == "a send":
            comm.recv(large, 1, tag=1)
        else:
            comm.allreduce(large)
        return float(got[0])

    with World(2, config=SMALL) as world:
        assert world.run(body) == [7.0, 0.0]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lanes", [1, 3])
def test_whatever_the_order_of_the_tags(seed: int, lanes: int) -> None:
    """Every rank sends every other some messages of several tags; each receives them in an order of
    its own, in which only those of one tag and rank keep theirs."""
    n, each = 3, 30

    def body(comm: Communicator) -> None:
        plan = random.Random(seed)  # the same on all ranks
        sizes = {
            (a, b): [
                (plan.choice((0, 1, 7, 2**31 - 1)), plan.choice((0, 5, 1000, 40_000)))
                for _ in range(each)
            ]
            for a in range(n)
            for b in range(n)
            if a != b
        }
        works: list[Work] = []
        order = random.Random(seed * 10 + comm.rank)
        expected: list[tuple[Any, int, int]] = []
        for (a, b), messages in sizes.items():
            for number, (tag, count) in enumerate(messages):
                if a == comm.rank:
                    data = np.full(count, 1000 * a + number, np.int32)
                    works.append(comm.send(data, b, tag=tag, async_op=True))
        queues = [
            [(a, tag, count, at) for at, (tag, count) in enumerate(messages) if tag == which]
            for (a, b), messages in sizes.items()
            if b == comm.rank
            for which in {tag for tag, _ in messages}
        ]
        while queues:
            queue = order.choice(queues)
            a, tag, count, number = queue.pop(0)
            if not queue:
                queues.remove(queue)
            out = np.zeros(count, np.int32)
            works.append(comm.recv(out, a, tag=tag, async_op=True))
            expected.append((out, a, number))
        for work in works:
            work.wait(20)
        for out, a, number in expected:
            assert (out == 1000 * a + number).all()

    with World(n, config=SMALL, lanes=lanes) as ranks:
        ranks.run(body)


def test_any_source_with_named_receives_beside_it() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank:
            for number in range(30):
                comm.send(np.array([comm.rank, number]), 0, tag=3)
            return
        seen: dict[int, list[int]] = {1: [], 2: []}
        for turn in range(20):
            one, other = np.zeros(2, np.int64), np.zeros(2, np.int64)
            any_source = comm.recv(one, None, tag=3, async_op=True)
            named = comm.recv(other, 1 + turn % 2, tag=3, async_op=True)
            any_source.wait()
            named.wait()
            assert any_source.root == one[0]
            assert named.root == other[0] == 1 + turn % 2
            for rank, number in (one, other):
                seen[int(rank)].append(int(number))
        for rank, numbers in seen.items():
            while len(numbers) < 30:
                numbers.append(int(comm.recv(np.zeros(2, np.int64), rank, tag=3)[1]))
            assert numbers == list(range(30))

    with World(3, config=SMALL) as ranks:
        ranks.run(body)


def test_bad_tags_and_sources() -> None:
    def body(comm: Communicator) -> None:
        x = np.zeros(3)
        for tag in (-1, 2**31, "a", 1.5, None):
            with pytest.raises(ConfigError, match="give an integer from 0"):
                comm.send(x, 1 - comm.rank, tag=tag)  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            comm.recv(x, -1)
        with pytest.raises(ConfigError):
            comm.send(x, None)  # type: ignore[arg-type]
        comm.barrier()

    with World(2, config=SMALL) as ranks:
        ranks.run(body)
    with World(1) as alone, pytest.raises(ConfigError):
        alone.comms[0].recv(np.zeros(1), None)


def test_a_mismatch_names_the_tag() -> None:
    def talk(comm: Communicator) -> None:
        for count in (4, 4 + comm.rank):
            if comm.rank:
                comm.recv(np.zeros(count), 0, tag=7)
            else:
                comm.send(np.zeros(count), 1, tag=7)
        comm.barrier()

    def body(comm: Communicator) -> None:
        with pytest.raises(MismatchError, match="send/recv of tag 7 #1"):
            talk(comm)

    with World(2, config=SMALL) as ranks:
        ranks.run(body)


def test_callbacks_are_asked_for_late() -> None:
    """Before the end, after it, and twice."""
    told: list[tuple[int, str]] = []
    lock = threading.Lock()

    def body(comm: Communicator) -> None:
        def tell(what: str) -> Any:
            def over(work: Work) -> None:
                with lock:
                    told.append((comm.rank, what))

            return over

        if comm.rank:
            time.sleep(0.1)
        x = np.ones(10)
        work = comm.allreduce(x, async_op=True)
        work.call_back(tell("first"))
        work.call_back(tell("second"))
        work.wait()
        until(lambda: len([r for r, _ in told if r == comm.rank]) == 2)
        work.call_back(tell("third"))
        assert (x == 2).all()

    with World(2, config=SMALL) as ranks:
        ranks.run(body)
    assert sorted(told) == [(r, what) for r in range(2) for what in ("first", "second", "third")]
