"""All-reduce against the numpy reference, bit for bit and equal on all ranks.

A road is an algorithm in a world: over links, through the memory of one host, or summed on each of
several hosts first. Each runs, in one world and without a barrier:

    each of the 60 combinations of dtype (8), op (5) and compression (none; bf16 and fp16 for f32
    and f64) once, at one of the counts 0, 1, N-1, N, N+1, 255, 256, 257 and 5003
    every twelfth combination at 100003, and through memory at 400009 also

Which combination gets which count, and with how many lanes and rails, of which segments, on engines
shared or one for each rank, goes on from road to road, so that any two of these meet. A million
elements and a second thread, which takes works of over 1 MiB, have tests of their own.

Cases run in windows of 16: by turns one after the other in place, all in flight at once in place,
and all in flight with out=. bfloat16 needs a library that has it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import reference
from patience import until
from ranks import World
from reference import NUMPY, OPS, Array
from tensors import (
    bits,
    elements,
    hash_of,
    same_but_for_nans,
    special,
    subnormals_are_zeros,
    tensor,
)

from ringcomm import Communicator, Config, MismatchError
from ringcomm.bootstrap import bringup

pytestmark = pytest.mark.usefixtures("nothing_left")

HAS_TORCH = importlib.util.find_spec("torch") is not None
ALGORITHMS = ("ring", "direct", "one_shot", "doubling", "halving")
WORLDS = (1, 2, 3, 4, 5, 7, 8, 16)
COMBINATIONS = [
    (dtype, op, codec)
    for dtype, op in itertools.product(NUMPY, OPS)
    if dtype != "bf16" or HAS_TORCH
    for codec in ("none", "bf16", "fp16")
    if codec == "none" or dtype in ("f32", "f64")
]
LARGE = 100_003
WINDOW = 16


@dataclasses.dataclass(frozen=True)
class Road:
    """memory: so many ranks in succession share that of their host."""

    world: int
    algorithm: str
    memory: int = 0


OVER_LINKS = [
    Road(world, algorithm)
    for algorithm in (*ALGORITHMS, "auto")
    # whose trees and pairs differ from world to world
    for world in (*WORLDS, *((6, 11) if algorithm in ("doubling", "halving") else ()))
]
IN_MEMORY = [
    Road(world, algorithm, memory=world)
    for algorithm in ("direct", "one_shot", "auto")
    for world in WORLDS[1:]
]
AMONG_HOSTS = [
    Road(hosts * local, "auto", memory=local)
    for hosts, local in ((2, 2), (3, 2), (2, 3), (4, 2), (2, 4))
]
ROADS = [*OVER_LINKS, *IN_MEMORY, *AMONG_HOSTS]


@dataclasses.dataclass(frozen=True)
class Case:
    """One all-reduce, and what every rank must have afterwards."""

    road: Road
    count: int
    dtype: str
    op: str
    codec: str

    def input(self, rank: int) -> Array:
        return elements(self.dtype, self.count, rank, salt=hash_of(self.op + self.codec) % 97)

    @functools.cached_property
    def expected(self) -> Array:
        return reference.allreduce(
            [self.input(rank) for rank in range(self.road.world)],
            self.dtype,
            self.op,
            self.codec,
            self.road.algorithm,
            self.road.memory,
        )

    @property
    def compression(self) -> str | None:
        return None if self.codec == "none" else self.codec


def cases(road: Road, turn: int) -> list[Case]:
    """Every combination at the count whose turn it is, in an order that mixes dtypes and sizes."""
    n = road.world
    small = sorted({0, 1, n - 1, n, n + 1, 255, 256, 257, 5003})
    made = []
    for k, rest in enumerate(COMBINATIONS, start=turn):
        made.append(Case(road, small[k % len(small)], *rest))
        if n < 16 and k % 12 == 0:
            made.append(Case(road, LARGE, *rest))
        if n < 16 and k % 12 == 6 and road.memory:
            made.append(Case(road, 4 * LARGE - 3, *rest))
    np.random.default_rng(turn).shuffle(made)  # type: ignore[arg-type]
    return made


def windows(todo: Sequence[Case]) -> Iterator[tuple[int, Sequence[Case]]]:
    for start in range(0, len(todo), WINDOW):
        yield start // WINDOW, todo[start : start + WINDOW]


def run_window(comm: Communicator, number: int, window: Sequence[Case]) -> list[Array]:
    """The window's all-reduces on one rank, in the manner that its number says."""
    arrays = [case.input(comm.rank) for case in window]
    if number % 3 == 0:
        for case, array in zip(window, arrays, strict=True):
            comm.allreduce(tensor(array, case.dtype), case.op, compression=case.compression)
        return arrays
    outs = arrays if number % 3 == 1 else [np.empty_like(array) for array in arrays]
    works = [
        comm.allreduce(
            tensor(array, case.dtype),
            case.op,
            compression=case.compression,
            async_op=True,
            out=None if out is array else tensor(out, case.dtype),
        )
        for case, array, out in zip(window, arrays, outs, strict=True)
    ]
    for work in reversed(works):
        work.wait()
    return outs


def wrong(case: Case, result: Array) -> str:
    """What is wrong with the result; empty if nothing is."""
    integers = f"u{result.dtype.itemsize}"
    equal = result.view(integers) == case.expected.view(integers)
    if equal.all():
        return ""
    differs = np.flatnonzero(~equal)
    first = differs[0]
    return (
        f"{case}: {len(differs)} of {case.count} differ, first [{first}] {result[first]} "
        f"instead of {case.expected[first]}"
    )


def check(comm: Communicator, todo: Sequence[Case]) -> list[str]:
    """Runs the cases on one rank and says what is wrong. Every rank compares with the same
    expected bits, so this is also what makes the ranks equal."""
    found = []
    for number, window in windows(todo):
        for case, result in zip(window, run_window(comm, number, window), strict=True):
            found.append(wrong(case, result))
    return [text for text in found if text]


def assert_right(world: World, todo: Sequence[Case]) -> None:
    for case in todo:
        _ = case.expected  # once, before the ranks compete for it
    found = world.run(lambda comm: check(comm, todo))
    assert not any(found), "\n".join(f"rank {r}: {t}" for r, ts in enumerate(found) for t in ts[:5])


@pytest.mark.parametrize(
    ("turn", "road"),
    [*enumerate(ROADS)],
    ids=[f"{r.algorithm}-{r.world}-{r.memory}" for r in ROADS],
)
def test_bit_for_bit(turn: int, road: Road) -> None:
    config = Config(
        segment_bytes=(4 << 10, 64 << 10, 256 << 10)[turn % 3],
        timeout=30.0,
        algorithm=road.algorithm,
    )
    with World(
        road.world,
        lanes=(1, 2, 3)[turn // 2 % 3],
        rails=(1, 2)[turn % 2],
        config=config,
        engines=("shared", "own")[turn // 6 % 2],
        memory=road.memory,
    ) as ranks:
        assert_right(ranks, cases(road, turn))


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("world", [2, 5, 8])
def test_a_million(world: int, lanes: int) -> None:
    codec = ("none", "bf16", "fp16")[lanes - 1]
    config = Config(segment_bytes=(4 << 10) << 3 * (lanes - 1), timeout=30.0, algorithm="ring")
    with World(world, lanes=lanes, rails=2, config=config) as ranks:
        assert_right(ranks, [Case(Road(world, "ring"), 1 << 20, "f32", "avg", codec)])


@pytest.mark.parametrize("algorithm", ["ring", "direct", "halving"])
@pytest.mark.parametrize("world", [2, 3])
def test_by_two_threads(world: int, algorithm: str) -> None:
    """Small works by the driver and large ones with the sender, mixed, give the same bits."""
    config = Config(timeout=30.0, algorithm=algorithm, threads=2)
    todo = [
        Case(Road(world, algorithm), count, dtype, op, "none")
        for dtype, op in (("f32", "sum"), ("f16", "avg"), ("f32", "avg"), ("f16", "sum"))
        for count in (100, 530_003)
    ]
    with World(world, lanes=world - 1, config=config, engines="own") as ranks:
        assert {comm.stats()["threads"] for comm in ranks.comms} == {2}
        assert_right(ranks, todo)


def test_slower_links_have_another_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the bits show."""
    inputs = [elements("f32", 1000, rank) for rank in range(4)]
    expected = {
        name: bits(reference.allreduce(inputs, "f32", "sum", algorithm=name))
        for name in ("direct", "doubling")
    }
    assert expected["direct"] != expected["doubling"]
    config = Config(timeout=30.0, shared_memory=False)
    for mbit, name in ((0, "doubling"), (100, "direct")):
        monkeypatch.setattr(bringup, "slowest", lambda *_, mbit=mbit: mbit)
        with World(4, bring_up="tcp", config=config) as world:
            told = f"model of {mbit} Mbit/s links" if mbit else "model"
            assert [comm.algorithms for comm in world.comms] == [told] * 4
            for sums in world.run(lambda comm: comm.allreduce(inputs[comm.rank].copy())):
                assert bits(sums) == expected[name]


@pytest.mark.parametrize(
    "road",
    [
        *(Road(world, algorithm) for world in (3, 4) for algorithm in ALGORITHMS),
        *(Road(3, algorithm, memory=3) for algorithm in ("direct", "one_shot")),
    ],
)
@pytest.mark.parametrize("mode", [contextlib.nullcontext, subnormals_are_zeros])
def test_special_values(road: Road, mode: Callable[[], Any]) -> None:
    """Infinities, NaN, subnormals, signed zeros, integer extremes, whatever mode the threads are
    in. Of two NaN in a plain f32 or f64 sum or product either may win, but the same on all ranks.
    """
    count = 1031

    def body(comm: Communicator) -> list[Array]:
        results = [special(dtype, count, comm.rank) for dtype, _, _ in COMBINATIONS]
        with mode():
            for (dtype, op, codec), array in zip(COMBINATIONS, results, strict=True):
                compression = None if codec == "none" else codec
                comm.allreduce(tensor(array, dtype), op, compression=compression)
        return results

    config = Config(segment_bytes=4096, timeout=30.0, algorithm=road.algorithm)
    with World(road.world, config=config, memory=road.memory) as ranks:
        results = ranks.run(body)
    for (dtype, op, codec), *ours in zip(COMBINATIONS, *results, strict=True):
        inputs = [special(dtype, count, rank) for rank in range(road.world)]
        expected = reference.allreduce(inputs, dtype, op, codec, road.algorithm)
        assert len({bits(one) for one in ours}) == 1, (dtype, op, codec)
        adds = op in ("sum", "avg", "prod")
        plain = dtype in ("f32", "f64") and codec == "none"
        free = road.algorithm in ("ring", "halving") and plain and adds
        same = same_but_for_nans(ours[0], expected) if free else bits(ours[0]) == bits(expected)
        assert same, (dtype, op, codec)


def test_ranks_of_one_host_cut_coarsely() -> None:
    """1 MiB is a frame for each of the two chunks and hops there, 8 among hosts; a limit counts."""

    def frames(ranks: World) -> int:
        before = [comm.stats()["lanes"][0]["sent_frames"] for comm in ranks.comms]
        ranks.run(lambda c: c.allreduce(elements("f32", 1 << 18, c.rank)))
        after = [comm.stats()["lanes"][0]["sent_frames"] for comm in ranks.comms]
        return max(b - a for a, b in zip(before, after, strict=True))

    quiet = Config(timeout=60.0, heartbeat=20.0, peer_timeout=60.0)
    with World(2, config=quiet) as ranks:
        assert frames(ranks) == 2
    with World(2, config=dataclasses.replace(quiet, segment_bytes=128 << 10)) as ranks:
        assert 8 <= frames(ranks) < 16  # with what is said of credit


def test_every_lane_and_rail_carries_a_share() -> None:
    """Striping is real: no lane of a large transfer is left idle."""
    with World(2, lanes=2, rails=2, config=Config(segment_bytes=65536, timeout=30.0)) as ranks:

        def have_all_sent() -> bool:
            ranks.run(lambda c: [c.allreduce(elements("f32", 1 << 20, c.rank)) for _ in range(8)])
            lanes = [lane for comm in ranks.comms for lane in comm.stats()["lanes"]]
            return all(one["sent_bytes"] > 65536 for one in lanes)

        # a lane whose thread had to wait for a core is held to be slow for a while
        assert until(have_all_sent), [comm.stats()["lanes"] for comm in ranks.comms]
        for comm in ranks.comms:
            lanes = comm.stats()["lanes"]
            assert [(one["rail"], one["lane"]) for one in lanes] == [(0, 0), (0, 1), (1, 2), (1, 3)]
            assert sum(one["share"] for one in lanes) == pytest.approx(1.0)


@pytest.mark.parametrize("algorithm", ["doubling", "halving"])
@pytest.mark.parametrize("world", [3, 8])
def test_ranks_that_differ_are_told_by_the_data(world: int, algorithm: str) -> None:
    """No calls are announced here, so whoever differs must meet another in a frame."""
    differently = [
        lambda comm: comm.barrier(),
        lambda comm: comm.allreduce(np.ones(70_000, np.float32), "max"),
        lambda comm: comm.allreduce(np.ones(0, np.float32)),
        lambda comm: comm.broadcast(np.ones(10, np.float32), root=world - 1),
    ]
    config = Config(timeout=30.0, algorithm=algorithm)
    groups = [*[{rank} for rank in range(world)], set(range(0, world, 2)), set(range(world // 2))]
    for number, group in enumerate(groups):

        def calls(comm: Communicator, group: set[int] = group, number: int = number) -> None:
            if comm.rank in group:
                differently[number % len(differently)](comm)
            else:
                comm.allreduce(np.ones(5, np.float32))
            comm.barrier()  # a broadcast's root may be done before it hears of it

        def body(comm: Communicator, calls: Callable[[Communicator], None] = calls) -> None:
            with pytest.raises(MismatchError):
                calls(comm)

        with World(world, config=config) as ranks:
            ranks.run(body)


def test_a_host_waits_for_its_own_frames_to_leave() -> None:
    """Rank 0's part waits behind other traffic, when its peer's is there already: what it hands to
    its host's ranks must be the sum over hosts all the same."""

    def body(comm: Communicator) -> int:
        wrong = 0
        for _ in range(5):
            big, works = np.zeros(1 << 20), []
            if comm.rank == 0:
                works = [comm.send(big, 2, tag=tag, async_op=True) for tag in range(4)]
            if comm.rank == 2:
                works = [comm.recv(big.copy(), 0, tag=tag, async_op=True) for tag in range(4)]
            for _ in range(10):
                small = np.full(5, comm.rank + 1, np.int64)
                comm.allreduce(small)
                wrong += not (small == 10).all()
            for work in works:
                work.wait()
        return wrong

    with World(4, config=Config(timeout=30.0), memory=2) as ranks:
        assert ranks.run(body) == [0, 0, 0, 0]
