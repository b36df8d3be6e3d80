"""All-reduce against the numpy reference, bit for bit and equal on all ranks.

What is covered, with S = 21 shapes of a world: 1, 2, 3, 4, 5, 7 or 8 ranks, each with 1, 2 and 3
lanes, on 1 rail or 2, so that any two of the three meet, and K = the 60 combinations of dtype (8),
op (5) and compression (none; bf16 and fp16 for f32 and f64):

    counts 0, 1, N-1, N, N+1, 255, 256, 257, 100003    S x K: all of them
    count 1 << 20 of f32                               a third of its 15 for each of S
    count 1 << 20 of other dtypes                      each combination under one of S

The thirds rotate: f32's combination k is tried in each world under one lane count. Segments are 4,
64 or 256 KiB by the lane count, engines shared or one per rank by world and lanes. Small cases run
in windows of 16: by turns one after the other in place, all in flight at once in place, and all in
flight with out=.

All this is the ring. The other algorithms, and the choice between them, get the counts below 1 <<
20 in every world, with the lanes and rails in turns, and again through shared memory; from 100003
on a third of K each, with every op and every codec, which another world continues. In a world of 16
each gets a third of K, through shared memory the next one. Doubling and halving also get some in
all worlds up to 16.

With a second thread, which takes works of over 1 MiB, a few of 530,003 elements beside small ones.

The cases of one (world, lanes, rails) share their communicators, so hundreds of collectives follow
each other without a barrier. bfloat16 needs a library that has it and stands apart.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import reference
from patience import until
from ranks import World
from reference import NUMPY, OPS, Array
from tensors import bits, elements, hash_of, same_but_for_nans, special, tensor

from ringcomm import Communicator, Config, MismatchError, _native

pytestmark = pytest.mark.usefixtures("nothing_left")

WORLDS = (1, 2, 3, 4, 5, 7, 8)
LANES = (1, 2, 3)
RAILS = (1, 2)
SHAPES = [
    (world, lanes, RAILS[(w + turn) % len(RAILS)])
    for (w, world), (turn, lanes) in itertools.product(enumerate(WORLDS), enumerate(LANES))
]
OTHERS = ("direct", "one_shot", "doubling", "halving")
SEGMENTS = (4 << 10, 64 << 10, 256 << 10)
WINDOW = 16
LARGE = 100_003

FAMILIES = [
    pytest.param(tuple(name for name in NUMPY if name != "bf16"), id="native"),
    pytest.param(("bf16",), id="bf16", marks=pytest.mark.torch),
]


@dataclasses.dataclass(frozen=True)
class Case:
    """One all-reduce, and what every rank must have afterwards."""

    world: int
    count: int
    dtype: str
    op: str
    codec: str
    algorithm: str = "ring"
    memory: int = 0

    def input(self, rank: int) -> Array:
        return elements(self.dtype, self.count, rank, salt=hash_of(self.op + self.codec) % 97)

    @functools.cached_property
    def expected(self) -> Array:
        payload = self.count * reference.wire_bytes(self.dtype, self.codec)
        order = reference.chosen(payload, self.world, self.algorithm, self.memory)
        if order in ("direct", "one_shot"):
            return in_order_of_rank(dataclasses.replace(self, algorithm="direct", memory=0))
        return self.computed()

    def computed(self) -> Array:
        inputs = [self.input(rank) for rank in range(self.world)]
        return reference.allreduce(
            inputs, self.dtype, self.op, self.codec, self.algorithm, self.memory
        )

    @property
    def compression(self) -> str | None:
        return None if self.codec == "none" else self.codec


@functools.lru_cache(maxsize=700)  # a world's, which several algorithms share
def in_order_of_rank(case: Case) -> Array:
    return case.computed()


def small_counts(n: int) -> list[int]:
    return sorted({0, 1, n - 1, n, n + 1, 255, 256, 257})


def combinations(dtypes: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    for dtype, op in itertools.product(dtypes, OPS):
        for codec in ("none", "bf16", "fp16") if dtype in ("f32", "f64") else ("none",):
            yield dtype, op, codec


_INDEX = {rest: k for k, rest in enumerate(combinations(tuple(NUMPY)))}


def by_turns(todo: Sequence[Case], turn: int, large: int = LARGE) -> list[Case]:
    """Of large counts a third of the combinations; three turns in succession have them all."""

    def is_due(case: Case) -> bool:
        k = _INDEX[case.dtype, case.op, case.codec]
        return (k + k // 3 + turn) % 3 == 0  # of the three codecs of an op, one

    return [case for case in todo if case.count < large or is_due(case)]


@functools.lru_cache(maxsize=2)  # of the world at hand: its three lane counts follow
def cases(
    world: int,
    counts: tuple[int, ...],
    dtypes: tuple[str, ...],
    algorithm: str = "ring",
    memory: int = 0,
) -> list[Case]:
    """Every combination at every count, in an order that mixes dtypes and sizes."""
    made = [
        Case(world, n, *rest, algorithm=algorithm, memory=memory)
        for rest in combinations(dtypes)
        for n in counts
    ]
    np.random.default_rng(world).shuffle(made)  # type: ignore[arg-type]
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


def millions(world: int, lanes: int, dtypes: Sequence[str]) -> list[Case]:
    """The cases of 1 << 20 elements for this shape, as the module's text says."""
    w, turn = WORLDS.index(world), LANES.index(lanes)
    often = [rest for rest in combinations(dtypes) if rest[0] == "f32"]
    once = [rest for rest in combinations(dtypes) if rest[0] != "f32"]
    chosen = [rest for k, rest in enumerate(often) if (k + w + turn) % len(LANES) == 0]
    number = w * len(LANES) + turn
    chosen += [rest for k, rest in enumerate(once) if (11 * k + 7) % len(SHAPES) == number]
    return [Case(world, 1 << 20, *rest) for rest in chosen]


def open_world(
    world: int, lanes: int, rails: int, algorithm: str = "ring", memory: int = 0
) -> World:
    turn = LANES.index(lanes)
    config = Config(segment_bytes=SEGMENTS[turn], timeout=30.0, algorithm=algorithm)
    engines = ("shared", "own")[(WORLDS.index(world) + turn) // 2 % 2]
    return World(world, lanes=lanes, rails=rails, config=config, engines=engines, memory=memory)


def need(dtypes: Sequence[str]) -> None:
    if "bf16" in dtypes:
        pytest.importorskip("torch", reason="bfloat16 arrays need PyTorch")


def assert_right(world: World, todo: Sequence[Case]) -> None:
    for case in todo:
        _ = case.expected  # once, before the ranks compete for it
    found = world.run(lambda comm: check(comm, todo))
    assert not any(found), "\n".join(f"rank {r}: {t}" for r, ts in enumerate(found) for t in ts[:5])


@pytest.mark.parametrize("dtypes", FAMILIES)
@pytest.mark.parametrize(("world", "lanes", "rails"), SHAPES)
def test_small(world: int, lanes: int, rails: int, dtypes: tuple[str, ...]) -> None:
    need(dtypes)
    with open_world(world, lanes, rails) as ranks:
        assert_right(ranks, cases(world, tuple(small_counts(world)), dtypes))


@pytest.mark.parametrize("dtypes", FAMILIES)
@pytest.mark.parametrize(("world", "lanes", "rails"), SHAPES)
def test_100003(world: int, lanes: int, rails: int, dtypes: tuple[str, ...]) -> None:
    need(dtypes)
    with open_world(world, lanes, rails) as ranks:
        assert_right(ranks, cases(world, (LARGE,), dtypes))


@pytest.mark.parametrize("dtypes", FAMILIES)
@pytest.mark.parametrize(("world", "lanes", "rails"), SHAPES)
def test_a_million(world: int, lanes: int, rails: int, dtypes: tuple[str, ...]) -> None:
    need(dtypes)
    todo = millions(world, lanes, dtypes)
    with open_world(world, lanes, rails) as ranks:
        for case in todo:  # one at a time: eight ranks' windows of 16 would fill the memory
            assert_right(ranks, [case])


@pytest.mark.parametrize("algorithm", ["ring", "direct", "halving"])
@pytest.mark.parametrize("world", [2, 3])
def test_by_two_threads(world: int, algorithm: str) -> None:
    """Small works by the driver and large ones with the sender, mixed, give the same bits."""
    config = Config(timeout=30.0, algorithm=algorithm, threads=2)
    todo = cases(world, (100, 530_003), ("f32", "f16"), algorithm)
    with World(world, lanes=world - 1, config=config, engines="own") as ranks:
        assert {comm.stats()["threads"] for comm in ranks.comms} == {2}
        assert_right(ranks, [case for case in todo if case.op in ("sum", "avg")])


@pytest.mark.parametrize("dtypes", FAMILIES)
@pytest.mark.parametrize("algorithm", [*OTHERS, "auto"])
@pytest.mark.parametrize("world", WORLDS)
def test_algorithms(world: int, algorithm: str, dtypes: tuple[str, ...]) -> None:
    need(dtypes)
    number = [*OTHERS, "auto"].index(algorithm)
    lanes, rails = list(itertools.product(LANES, RAILS))[(number + world) % 6]
    counts = (*small_counts(world), 5003, LARGE)
    todo = by_turns(cases(world, counts, dtypes, algorithm), WORLDS.index(world) + number)
    with open_world(world, lanes, rails, algorithm) as ranks:
        assert_right(ranks, todo)


@pytest.mark.parametrize("dtypes", FAMILIES)
@pytest.mark.parametrize("algorithm", ["ring", "direct", "one_shot", "auto"])
@pytest.mark.parametrize("world", WORLDS)
def test_shared_memory(world: int, algorithm: str, dtypes: tuple[str, ...]) -> None:
    """The same bits as over links by the same algorithm."""
    need(dtypes)
    counts = (*small_counts(world), 5003, LARGE, 400_009)
    todo = by_turns(cases(world, counts, dtypes, algorithm, world), WORLDS.index(world))
    with open_world(world, 1, 1 + world % 2, algorithm, memory=world) as ranks:
        assert_right(ranks, todo)


@pytest.mark.parametrize("dtypes", FAMILIES)
@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (3, 2), (2, 3), (4, 2), (2, 4)])
def test_shared_memory_among_hosts(hosts: int, local: int, dtypes: tuple[str, ...]) -> None:
    """Summed on each host first."""
    need(dtypes)
    world = hosts * local
    counts = (*small_counts(world), 5003, LARGE, 400_009)
    todo = by_turns(cases(world, counts, dtypes, "auto", local), hosts)
    config = Config(segment_bytes=65536, timeout=30.0)
    engines = ("shared", "own")[hosts % 2]
    with World(world, rails=2, config=config, engines=engines, memory=local) as ranks:
        assert_right(ranks, todo)


@pytest.mark.parametrize("dtypes", FAMILIES)
@pytest.mark.parametrize("memory", [0, 16], ids=["links", "memory"])
@pytest.mark.parametrize("algorithm", ["ring", *OTHERS])
def test_world_of_sixteen(algorithm: str, memory: int, dtypes: tuple[str, ...]) -> None:
    need(dtypes)
    counts = (0, 1, 15, 16, 17, 4099)
    todo = cases(16, counts, dtypes, algorithm)
    turn = ["ring", *OTHERS].index(algorithm) + (memory > 0)
    config = Config(segment_bytes=4096, timeout=30.0, algorithm=algorithm)
    with World(16, lanes=2, rails=2, config=config, memory=memory) as ranks:
        assert_right(ranks, by_turns(todo, turn, large=0))


@pytest.mark.parametrize("algorithm", ["doubling", "halving"])
@pytest.mark.parametrize("world", [6, 9, 10, 11, 12, 13, 14, 15])
def test_other_worlds(world: int, algorithm: str) -> None:
    """Those for which the trees and the pairs differ from any that is tried above."""
    dtypes = (("f32", "f16", "i8"), ("f64", "u8"), ("f32", "i64"))[world % 3]
    config = Config(segment_bytes=4096, timeout=30.0, algorithm=algorithm)
    with World(world, config=config) as ranks:
        assert_right(ranks, cases(world, (1, 300, 256 * world + 3, 9001), dtypes, algorithm))


@pytest.mark.parametrize("dtypes", FAMILIES)
@pytest.mark.parametrize("memory", [False, True], ids=["links", "memory"])
@pytest.mark.parametrize("algorithm", ["ring", *OTHERS])
@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_special_values(world: int, algorithm: str, memory: bool, dtypes: tuple[str, ...]) -> None:
    """Infinities, NaN, subnormals, signed zeros, integer extremes. Of two NaN in a plain f32 or f64
    sum or product either may win, but the same on all ranks."""
    need(dtypes)
    count = 1031

    def body(comm: Communicator) -> list[Array]:
        results = []
        for dtype, op, codec in combinations(dtypes):
            array = special(dtype, count, comm.rank)
            results.append(array)
            comm.allreduce(tensor(array, dtype), op, compression=None if codec == "none" else codec)
        return results

    config = Config(segment_bytes=4096, timeout=30.0, algorithm=algorithm)
    with World(world, config=config, memory=world * memory) as ranks:
        results = ranks.run(body)
    for index, (dtype, op, codec) in enumerate(combinations(dtypes)):
        ours = [one[index] for one in results]
        expected = reference.allreduce(
            [special(dtype, count, rank) for rank in range(world)], dtype, op, codec, algorithm
        )
        assert len({bits(one) for one in ours}) == 1, (dtype, op, codec)
        adds = op in ("sum", "avg", "prod")
        plain = dtype in ("f32", "f64") and codec == "none"
        free = algorithm in ("ring", "halving") and plain and adds
        same = same_but_for_nans(ours[0], expected) if free else bits(ours[0]) == bits(expected)
        assert same, (dtype, op, codec)


@pytest.mark.parametrize("dtypes", FAMILIES)
def test_kernel_sets_agree(dtypes: tuple[str, ...]) -> None:
    """Every kernel set that this CPU has gives the reference's bits, also when ranks differ."""
    need(dtypes)
    names = [name for name, supported in _native.kernel_sets() if supported]
    assert names[0] == "scalar"
    for algorithm, name in itertools.product(("ring", *OTHERS), names):
        config = Config(kernel_set=name, timeout=30.0, algorithm=algorithm)
        with World(3, config=config) as ranks:
            assert {comm.kernel_set for comm in ranks.comms} == {name}
            assert_right(ranks, cases(3, (257, 5003), dtypes, algorithm))


@pytest.mark.torch
@pytest.mark.parametrize("world", [2, 3, 4])
def test_travelling_by_16_bits_is_being_a_tensor_of_16_bits(world: int) -> None:
    """Whatever the algorithm: what encodes a tensor may be anything that rounds alike."""
    torch = pytest.importorskip("torch")
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}

    def body(comm: Communicator) -> None:
        x = torch.from_numpy(elements("f32", 20_011, comm.rank))
        for (codec, dtype), op in itertools.product(dtypes.items(), OPS):
            travelled = comm.allreduce(x.clone(), op, compression=codec)
            before = 1.0 / comm.world_size if (op, codec) == ("avg", "fp16") else 1.0
            small = (x * before).to(dtype)
            comm.allreduce(small, "sum" if before != 1.0 else op)
            assert bits(travelled.numpy()) == bits(small.float().numpy()), (codec, op)

    for algorithm, memory in itertools.product(("ring", *OTHERS), (0, world)):
        with World(world, config=Config(timeout=30.0, algorithm=algorithm), memory=memory) as ranks:
            ranks.run(body)


def test_segments_and_lanes_do_not_change_a_sum() -> None:
    """The order of a sum depends on the element's index and the world size alone."""
    results = set()
    for segment_bytes, lanes, rails in ((4096, 1, 1), (4096, 3, 2), (1 << 20, 2, 1), (65536, 1, 2)):
        config = Config(segment_bytes=segment_bytes, timeout=30.0)
        with World(5, lanes=lanes, rails=rails, config=config) as ranks:
            results |= set(
                ranks.run(lambda c: bits(c.allreduce(elements("f32", 300_007, c.rank), "avg")))
            )
    assert len(results) == 1


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
@pytest.mark.parametrize("world", [3, 5, 8])
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
