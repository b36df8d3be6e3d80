"""The plan, for any collective, world, count and segment size: what must hold whatever the numbers.

csrc/plan touches no OS, so it is compiled here by itself and called through its own header.
The main property is shown by running plans: every rank's frames are delivered in an order that
hypothesis picks, each element being the tuple of what was added up to it, so that a wrong order of
a sum, a lost segment and one that lands in the wrong place all show.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import reference
from compiled import declared, library
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ALIGN = 256
COLLECTIVES = (
    "ALLREDUCE",
    "REDUCE_SCATTER",
    "ALLGATHER",
    "BROADCAST",
    "REDUCE",
    "GATHER",
    "SCATTER",
    "ALLTOALL",
    "BARRIER",
    "SEND",
    "RECV",
)
POINT_TO_POINT = ("SEND", "RECV")
REDUCING = ("ALLREDUCE", "REDUCE_SCATTER", "REDUCE")
MOST_COUNT = 2**36 - 1
JOIN, MERGE = 2, 3  # PLAN_JOIN, PLAN_MERGE
NO_CHUNK = 2**32 - 1

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
thorough = settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))


ffi = declared("include/ringcomm.h", "plan/plan.h")


@pytest.fixture(scope="session")
def lib(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The plan as a library of its own."""
    sources = ["plan/plan.c", "plan/merges.c", "plan/rounds.c"]
    return library(ffi, sources, tmp_path_factory.mktemp("plan"))


class Plan:
    """One rank's plan, with the functions of plan.h as methods."""

    def __init__(
        self,
        lib: Any,
        collective: str,
        rank: int,
        n: int,
        root: int,
        count: int,
        segment: int,
        algorithm: str = "RING",
    ) -> None:
        call = ffi.new("rc_call *")
        call.collective = getattr(lib, "RC_" + collective)
        call.root = root
        call.count = count
        self.collective, self.rank, self.n, self.root = collective, rank, n, root
        self._lib, self._plan = lib, ffi.new("plan *")
        self.algorithm = algorithm
        lib.plan_init(self._plan, call, getattr(lib, "RC_" + algorithm), rank, n, segment)
        self.chunks = int(self._plan.chunks)
        self.segment_elems = int(self._plan.segment_elems)

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = getattr(self._lib, "plan_" + name)
        return lambda *arguments: int(function(self._plan, *arguments))

    def segment_elems_of(self, chunk: int, segment: int) -> int:
        return int(self._lib.plan_segment_elems(self._plan, chunk, segment))

    def path(self, chunk: int) -> list[int]:
        return [self.rank_at(chunk, position) for position in range(self.hops(chunk) + 1)]


counts = st.one_of(
    st.integers(0, 20),
    st.integers(0, 12).flatmap(lambda k: st.integers(max(0, ALIGN * k - 2), ALIGN * k + 2)),
    st.integers(0, 200_000),
)
segments = st.integers(1, 2048).map(lambda blocks: blocks * ALIGN)


@st.composite
def calls(draw: st.DrawFn, most_world: int = 9) -> tuple[str, int, int, int, int]:
    """collective, world size, root, count, segment bound. A message goes from rank 0 to root."""
    collective = draw(st.sampled_from(COLLECTIVES))
    point_to_point = collective in POINT_TO_POINT
    n = draw(st.integers(2 if point_to_point else 1, most_world))
    root = draw(st.integers(1 if point_to_point else 0, n - 1))
    count = 0 if collective == "BARRIER" else draw(counts)
    return collective, n, root, count, draw(segments)


def plans_of(lib: Any, call: tuple[str, int, int, int, int]) -> dict[int, Plan]:
    """The plans of the ranks that take part. Of a message, both ends'."""
    collective, n, root, count, segment = call
    if collective in POINT_TO_POINT:
        return {
            0: Plan(lib, "SEND", 0, n, root, count, segment),
            root: Plan(lib, "RECV", root, n, 0, count, segment),
        }
    return {rank: Plan(lib, collective, rank, n, root, count, segment) for rank in range(n)}


# ---- geometry ----


@quick
@given(call=calls())
def test_segments_tile_their_chunk(lib: Any, call: tuple[str, int, int, int, int]) -> None:
    for plan in plans_of(lib, call).values():
        assert plan.segment_elems <= call[4]
        assert plan.segment_elems % ALIGN == 0
        for chunk in range(min(plan.chunks, 12)):
            elems = plan.chunk_elems(chunk)
            number = plan.segments(chunk)
            sizes = [plan.segment_elems_of(chunk, s) for s in range(number)]
            starts = [plan.segment_offset(s) for s in range(number)]
            assert sum(sizes) == elems
            assert starts == [sum(sizes[:s]) for s in range(number)]
            assert all(size == plan.segment_elems for size in sizes[:-1])
            says_something = call[0] in ("BARRIER", *POINT_TO_POINT) and call[3] == 0
            assert number == 1 if says_something else (number == 0) == (elems == 0)


@quick
@given(n=st.integers(1, 40), count=st.one_of(counts, st.integers(0, MOST_COUNT)), segment=segments)
def test_chunks_of_an_allreduce_are_the_references(
    lib: Any, n: int, count: int, segment: int
) -> None:
    plan = Plan(lib, "ALLREDUCE", 0, n, 0, count, segment)
    ours = []
    for chunk in range(n):
        start = min(plan.src_offset(chunk), count)
        assert plan.src_offset(chunk) == plan.dst_offset(chunk)
        assert plan.src_offset(chunk) % ALIGN == 0
        ours.append((start, start + plan.chunk_elems(chunk)))
    assert ours == reference.chunk_bounds(count, n)
    assert ours[0][0] == 0
    assert ours[-1][1] == count


@quick
@given(n=st.integers(1, 16), count=st.integers(0, MOST_COUNT), call=calls())
def test_no_count_is_too_large(
    lib: Any, n: int, count: int, call: tuple[str, int, int, int, int]
) -> None:
    """All offsets stay within the buffers that ringcomm.h describes, for any count it allows."""
    collective = call[0]
    count = 0 if collective == "BARRIER" else count
    plan = Plan(lib, collective, 0, n, n - 1, count, call[4])
    src, dst = buffer_sizes(collective, n, count)
    for chunk in range(plan.chunks):
        elems = plan.chunk_elems(chunk)
        assert plan.src_offset(chunk) + elems <= src or elems == 0 or src == 0
        assert plan.dst_offset(chunk) + elems <= dst or elems == 0 or dst == 0
        assert elems == count or collective == "ALLREDUCE"


def buffer_sizes(collective: str, n: int, count: int) -> tuple[int, int]:
    """Elements of src and dst, as the comment above rc_call says."""
    src = count * n if collective in ("REDUCE_SCATTER", "SCATTER", "ALLTOALL") else count
    dst = count * n if collective in ("ALLGATHER", "GATHER", "ALLTOALL") else count
    return src, dst


# ---- paths ----


@quick
@given(call=calls(16))
def test_paths(lib: Any, call: tuple[str, int, int, int, int]) -> None:
    collective, n, root = call[:3]
    by_rank = plans_of(lib, call)
    plan = by_rank[0]
    for chunk in range(plan.chunks):
        path = plan.path(chunk)
        assert all(path == other.path(chunk) for other in by_rank.values())
        assert all(0 <= rank < n for rank in path)
        assert all(a != b for a, b in itertools.pairwise(path))
        if collective in ("ALLREDUCE", "REDUCE_SCATTER", "ALLGATHER", "BROADCAST", "REDUCE"):
            assert all(b == (a + 1) % n for a, b in itertools.pairwise(path))
            assert sorted(path[:n]) == list(range(n))
        if collective == "BROADCAST":
            assert path[0] == root
        if collective == "REDUCE":
            assert path[-1] == root
        if collective == "REDUCE_SCATTER":
            assert path[-1] == chunk
    assert plan.reduce_hops() == (n - 1 if collective in REDUCING else 0)


@quick
@given(call=calls())
def test_what_one_rank_sends_another_receives(
    lib: Any, call: tuple[str, int, int, int, int]
) -> None:
    by_rank = plans_of(lib, call)
    for rank, plan in by_rank.items():
        assert plan.sends(-1) == sum(plan.sends(peer) for peer in range(plan.n))
        assert plan.receives(-1) == sum(plan.receives(peer) for peer in range(plan.n))
        assert plan.sends(rank) == plan.receives(rank) == 0
        for peer, other in by_rank.items():
            assert plan.sends(peer) == other.receives(rank)
            starts = any(
                plan.hops(chunk) > 0
                and plan.segments(chunk) > 0
                and plan.path(chunk)[:2] == [rank, peer]
                for chunk in range(plan.chunks)
            )
            assert bool(plan.starts_towards(peer)) == starts


# ---- running it ----


class Rank:
    """One rank running its plan on tuples."""

    def __init__(self, plan: Plan, count: int) -> None:
        src, dst = buffer_sizes(plan.collective, plan.n, count)
        self.plan = plan
        self.src = np.empty(src, object)
        self.src[:] = [((plan.rank, i),) for i in range(src)]
        self.dst = np.full(dst, None, object)
        self.received = 0
        self.contributions: dict[int, dict[int, Any]] = {}

    def _span(self, offset: int, chunk: int, segment: int) -> slice:
        start = offset + self.plan.segment_offset(segment)
        return slice(start, start + self.plan.segment_elems_of(chunk, segment))

    def own(self, chunk: int, segment: int) -> Any:
        return self.src[self._span(self.plan.src_offset(chunk), chunk, segment)]

    def store(self, chunk: int, segment: int, values: Any) -> None:
        span = self._span(self.plan.dst_offset(chunk), chunk, segment)
        assert all(old is None for old in self.dst[span]), "written twice"
        self.dst[span] = values

    def start(self) -> list[tuple[int, int, int, Any]]:
        """Keeps what stays here; returns the frames (chunk, segment, step, values) that leave."""
        frames = []
        joins = self.plan.algorithm != "RING"
        for chunk in range(self.plan.chunks):
            if self.plan.rank_at(chunk, 0) != self.plan.rank or not self.plan.is_given(chunk):
                continue
            hops = self.plan.hops(chunk)
            for segment in range(self.plan.segments(chunk)):
                if joins and hops == 0:
                    frames += self.join(chunk, segment, self.plan.rank, self.own(chunk, segment))
                elif hops == 0 or self.plan.collective in ("ALLGATHER", "BROADCAST"):
                    self.store(chunk, segment, self.own(chunk, segment))
                if hops > 0:
                    frames.append((chunk, segment, 0, self.own(chunk, segment)))
        return frames

    def join(self, chunk: int, segment: int, rank: int, values: Any) -> list[Any]:
        """A contribution is there; with the last one the sum, and the frames that carry it."""
        of_all = self.contributions.setdefault(segment, {})
        assert rank not in of_all
        of_all[rank] = values
        if len(of_all) < self.plan.n:
            return []
        total = of_all[0]
        for other in range(1, self.plan.n):
            total = total + of_all[other]
        self.store(chunk, segment, total)
        if self.plan.algorithm == "ONE_SHOT" or self.plan.collective == "REDUCE_SCATTER":
            return []
        others = [rank for rank in range(self.plan.n) if rank != self.plan.rank]
        return [(self.plan.result_chunk(to), segment, 0, total) for to in others]

    def take(self, chunk: int, segment: int, step: int, values: Any) -> list[Any]:
        """A frame arrives: reduces or stores it, and returns what goes on."""
        self.received += 1
        if self.plan.action_at(chunk, step) == JOIN:
            return self.join(chunk, segment, self.plan.rank_at(chunk, 0), values)
        reduce_hops = self.plan.reduce_hops()
        if step < reduce_hops:
            values = values + self.own(chunk, segment)
        if step + 1 >= reduce_hops:
            self.store(chunk, segment, values)
        return [(chunk, segment, step + 1, values)] if step + 1 < self.plan.hops(chunk) else []


def expected(collective: str, rank: int, n: int, root: int, count: int) -> list[Any]:
    """dst of a rank, element by element: who added what, in which order."""

    def added(first: int, i: int) -> Any:
        return tuple((r, i) for r in reference.ring(first, n))

    here = rank == root
    if collective == "ALLREDUCE":
        bounds = reference.chunk_bounds(count, n)
        return [added(c, i) for c, (start, stop) in enumerate(bounds) for i in range(start, stop)]
    if collective == "REDUCE_SCATTER":
        return [added(rank + 1, rank * count + i) for i in range(count)]
    if collective == "REDUCE":
        return [added(root + 1, i) for i in range(count)] if here else [None] * count
    if collective == "BROADCAST":
        return [((root, i),) for i in range(count)]
    if collective == "ALLGATHER" or (collective == "GATHER" and here):
        return [((r, i),) for r in range(n) for i in range(count)]
    if collective == "SCATTER":
        return [((root, rank * count + i),) for i in range(count)]
    if collective == "ALLTOALL":
        return [((r, rank * count + i),) for r in range(n) for i in range(count)]
    if collective == "RECV":
        return [((0, i),) for i in range(count)]
    return [None] * (n * count if collective == "GATHER" else count)


def deliver_all(ranks: Mapping[int, Rank], data: st.DataObject) -> int:
    """Delivers all frames in a drawn order, those that answer them too. Returns how many."""
    pick = data.draw(st.randoms(use_true_random=False))
    in_flight = [frame for rank in ranks.values() for frame in rank.start()]
    path = next(iter(ranks.values())).plan
    sent = len(in_flight)
    while in_flight:
        chunk, segment, step, values = in_flight.pop(pick.randrange(len(in_flight)))
        more = ranks[path.rank_at(chunk, step + 1)].take(chunk, segment, step, values)
        in_flight += more
        sent += len(more)
    return sent


@thorough
@given(call=calls(6), count=st.one_of(st.integers(0, 12), st.integers(0, 1600)), data=st.data())
def test_any_order_of_arrival_gives_the_stated_result(
    lib: Any, call: tuple[str, int, int, int, int], count: int, data: st.DataObject
) -> None:
    collective, n, root, _, _ = call
    count = 0 if collective == "BARRIER" else count
    by_rank = plans_of(lib, (collective, n, root, count, ALIGN))
    ranks = {rank: Rank(plan, count) for rank, plan in by_rank.items()}
    deliver_all(ranks, data)
    for number, rank in ranks.items():
        assert rank.received == rank.plan.receives(-1)
        wanted = expected(rank.plan.collective, number, n, root, count)
        assert rank.dst.tolist() == wanted


@thorough
@given(
    kind=st.sampled_from(
        [
            ("ALLREDUCE", "DIRECT"),
            ("ALLREDUCE", "ONE_SHOT"),
            ("REDUCE_SCATTER", "DIRECT"),
        ]
    ),
    n=st.integers(2, 6),
    count=st.one_of(st.integers(0, 12), st.integers(0, 1600)),
    data=st.data(),
)
def test_joins_add_in_order_of_rank(
    lib: Any, kind: tuple[str, str], n: int, count: int, data: st.DataObject
) -> None:
    collective, algorithm = kind
    plans = [Plan(lib, collective, rank, n, 0, count, ALIGN, algorithm) for rank in range(n)]
    ranks = [Rank(plan, count) for plan in plans]
    sent = deliver_all(dict(enumerate(ranks)), data)
    for rank in ranks:
        assert rank.received == rank.plan.receives(-1)
        first = rank.plan.rank * count if collective == "REDUCE_SCATTER" else 0
        assert rank.dst.tolist() == [tuple((r, first + i) for r in range(n)) for i in range(count)]
    assert sent == sum(plan.sends(-1) for plan in plans)


class Merging(Rank):
    """One rank of a plan that merges, running it on tuples."""

    def __init__(self, plan: Plan, count: int) -> None:
        super().__init__(plan, count)
        self.turns: dict[tuple[int, int], dict[int, tuple[int, Any]]] = {}
        self.over: dict[tuple[int, int], int] = {}
        self.values: dict[tuple[int, int], Any] = {}

    def start(self) -> list[tuple[int, int, int, Any]]:
        """The frames of those parts for which this rank waits for nothing."""
        frames = []
        for part in range(self.plan.parts()):
            chunk = self.plan.send_after_turns(part, 0)
            for segment in range(self.plan.segments(chunk) if chunk != NO_CHUNK else 0):
                self.values[part, segment] = self.own(chunk, segment)
                frames.append((chunk, segment, 0, self.values[part, segment]))
        return frames

    def results(self, chunk: int, segment: int, values: Any) -> list[Any]:
        """Stores a result and passes it on."""
        part = self.plan.part(chunk)
        self.store(chunk, segment, values)
        chunks = [self.plan.result(part, i) for i in range(self.plan.results(part))]
        return [(to, segment, 0, values) for to in chunks]

    def take(self, chunk: int, segment: int, step: int, values: Any) -> list[Any]:
        """A frame arrives: merges all whose turn has come."""
        self.received += 1
        if self.plan.action_at(chunk, step) != MERGE:
            return self.results(chunk, segment, values)
        part = self.plan.part(chunk)
        unit, frames = (part, segment), []
        waiting = self.turns.setdefault(unit, {})
        assert self.plan.turn(chunk) not in waiting
        waiting[self.plan.turn(chunk)] = (chunk, values)
        while (over := self.over.get(unit, 0)) in waiting:
            chunk, came = waiting[over]
            had = self.values.get(unit)
            if had is None:
                had = came + self.own(chunk, segment)
            else:
                had = came + had if self.plan.comes_first(over) else had + came
            self.values[unit], self.over[unit] = had, over + 1
            if over + 1 == self.plan.turns(part) and self.plan.is_owner(part):
                frames += self.results(chunk, segment, had)
            elif (to := self.plan.send_after_turns(part, over + 1)) != NO_CHUNK:
                frames.append((to, segment, 0, had))
        return frames


class Symbols:
    """reference.Wire for tuples of what was added, in which nothing is rounded."""

    def pack(self, x: Any) -> Any:
        return x

    def unpack(self, x: Any) -> Any:
        return x

    def reduce(self, wire: Any, x: Any, last: bool) -> Any:
        return wire + x

    def merge(self, first: Any, second: Any, last: bool) -> Any:
        return first + second


@thorough
@given(
    algorithm=st.sampled_from(["DOUBLING", "HALVING"]),
    n=st.integers(2, 16),
    count=st.one_of(st.integers(0, 12), st.integers(0, 1600)),
    data=st.data(),
)
def test_merges_add_in_the_references_order(
    lib: Any, algorithm: str, n: int, count: int, data: st.DataObject
) -> None:
    plans = [Plan(lib, "ALLREDUCE", rank, n, 0, count, ALIGN, algorithm) for rank in range(n)]
    ranks = [Merging(plan, count) for plan in plans]
    sent = deliver_all(dict(enumerate(ranks)), data)
    symbols: Any = Symbols()
    bounds = [(0, count)] if algorithm == "DOUBLING" else reference.chunk_bounds(count, n)
    wanted: list[Any] = []
    for owner, (start, stop) in enumerate(bounds):
        part = [rank.src[start:stop] for rank in ranks]
        wanted += (
            reference.doubling(part, symbols)
            if algorithm == "DOUBLING"
            else reference.halving(owner, part, symbols)
        ).tolist()
    for rank in ranks:
        assert rank.received == rank.plan.receives(-1)
        assert rank.dst.tolist() == wanted
    assert sent == sum(plan.sends(-1) for plan in plans)
