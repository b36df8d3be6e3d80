"""The CUDA kernels of topk, run without a GPU: thresholds, payloads and residuals are those of the
core (codec/topk.c), bit by bit.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "cuda"))

from sides import (  # noqa: E402
    CLASSES,
    F32,
    U8,
    U32,
    Array,
    Sides,
    both_sides,
    broken,
    ordinary,
    placed,
    pointer,
    same,
    sparse,
    ties,
    zeros,
)  # fmt: skip

BYTES, NO_PART = 6, 2**64 - 1


@pytest.fixture(scope="module")
def sides() -> Sides:
    return both_sides()


@dataclass
class Call:
    """A tensor and how it is to be packed."""

    src: Array
    residual: Array | None = None
    density: float = 0.01
    segment: int = 65536
    cap: int = 65536
    turn: int = 5
    exact: int = 0
    exact_count: int = 0
    threshold: tuple[int, int] = (0, 0)
    """(smallest size, whether many have it); a size of 0: to be found"""
    part: int = 0
    """elements of a part; 0: there is one"""
    own: int = NO_PART
    """of which nothing is packed"""

    @property
    def stride(self) -> int:
        return BYTES * min(self.segment, self.cap)

    @property
    def place(self) -> tuple[int, int, int, int, int]:
        """As kernels are told it: elements, those of a part; its segments, their elements, room."""
        part = self.part or self.src.size
        return self.src.size, part, -(-part // self.segment), self.segment, self.stride

    @property
    def segments(self) -> int:
        n, part, each, _, _ = self.place
        return -(-n // part) * each


@dataclass
class Packed:
    threshold: Array
    wire: Array
    kept: Array
    left: Array
    poisoned: int


def empty(call: Call) -> Packed:
    return Packed(
        np.array(call.threshold, U32), np.full(call.segments * call.stride, 0xA5, U8),
        np.zeros(call.segments, U32), np.zeros(call.src.size, F32), 0,
    )  # fmt: skip


def expected(sides: Sides, call: Call) -> Packed:
    p = empty(call)
    p.poisoned = sides.core.core_pack_topk(
        pointer(p.wire), pointer(p.kept), pointer(p.left), pointer(call.src),
        pointer(call.residual), *map(ctypes.c_size_t, (call.src.size, call.segment, call.stride)),
        pointer(p.threshold), ctypes.c_double(call.density),
        *map(ctypes.c_size_t, (call.cap, call.turn, call.exact, call.exact_count)),
    )  # fmt: skip
    return p


def find_threshold(sides: Sides, call: Call) -> Array:
    """As codec/topk.c lays out its sample."""
    n = call.src.size - call.exact_count
    run = min(max(int(256 / call.density / 4096), 8), 256) // 8 * 8
    size = int(min(max(256 / call.density, 4096), 1 << 20))
    size = min(n, size - size % run)
    sample, threshold = placed(np.zeros(size, F32), None), np.full(2, 7, U32)
    sides.run("sample_topk", (3, 64), sample, call.src, call.residual, size, run, call.src.size,
              call.exact, call.exact_count, call.turn)  # fmt: skip
    kept = int(call.density * size + 0.5)
    sides.run("least_topk", (2, 256), threshold, sample, size, kept)
    return threshold


def packed(sides: Sides, call: Call, launch: tuple[int, int], alias: str = "") -> Packed:
    p = empty(call)
    src = placed(call.src, None)
    residual = None if call.residual is None else placed(call.residual, None)
    p.left = {"src": src, "residual": residual}.get(alias, p.left)
    p.threshold = np.array(call.threshold, U32)
    if p.threshold[0] == 0:
        p.threshold = find_threshold(sides, call)
    p.wire = placed(p.wire, 2)
    flag = np.zeros(1, U32)
    sides.run("pack_topk", launch, p.wire, p.kept, p.left, src, residual, call.src.size,
              *call.place[1:], call.own, p.threshold, ctypes.c_double(call.density),
              ctypes.c_uint32(call.cap), call.turn, flag)  # fmt: skip
    p.poisoned = int(flag[0])
    return p


def check(sides: Sides, call: Call, launch: tuple[int, int] = (2, 64), alias: str = "") -> Packed:
    want, got = expected(sides, call), packed(sides, call, launch, alias)
    same(got.threshold, want.threshold)
    same(got.kept, want.kept)
    same(got.wire, want.wire)
    same(got.left, want.left)
    assert got.poisoned == want.poisoned
    check_unpack(sides, call, want, launch)
    return got


def check_unpack(sides: Sides, call: Call, p: Packed, launch: tuple[int, int]) -> None:
    n = call.src.size
    want, got, flag = np.ones(n, F32), placed(np.full(n, 7, F32), None), np.zeros(1, U32)
    poisoned = sides.core.core_unpack_topk(
        pointer(want), pointer(p.wire), pointer(p.kept),
        *map(ctypes.c_size_t, (n, call.segment, call.stride)),
    )  # fmt: skip
    sides.run("unpack_topk", launch, got, placed(p.wire, 2), p.kept, *call.place, flag)
    same(got, want)
    assert flag[0] == poisoned


@pytest.mark.parametrize("values", CLASSES)
def test_every_class(
    sides: Sides, values: Callable[[np.random.Generator, int, int], Array]
) -> None:
    random = np.random.default_rng(1)
    for n in (1, 31, 33, 300, 5000):
        src, residual = values(random, n, 127), ordinary(random, n, 1)
        check(sides, Call(src, segment=1024))
        check(sides, Call(src, residual, 0.1, segment=2048), (1, 256))
        check(sides, Call(src, residual, 0.001, segment=256), (3, 96), "residual")
        check(sides, Call(src, residual, 0.05, segment=512), (3, 32), "src")


@pytest.mark.parametrize("density", [0.1, 0.01, 0.003, 0.0002])
def test_samples_of_long_tensors(sides: Sides, density: float) -> None:
    """Not all of which is drawn."""
    random = np.random.default_rng(2)
    n = 200_003
    src, residual = ordinary(random, n, 1), ordinary(random, n, 1)
    for turn, exact, count in [(0, 0, 0), (9, 70_000, 50_001), (1 << 40, 150_000, 50_003)]:
        call = Call(src, residual, density, turn=turn, exact=exact, exact_count=count)
        got = check(sides, call, (2, 256))
        assert 0.5 * density * n < got.kept.sum() < 2 * density * n


@pytest.mark.parametrize(("n", "world"), [(9000, 3), (4000, 4), (300, 3), (257, 5)])
def test_parts(sides: Sides, n: int, world: int) -> None:
    """Of all but one, in one launch, what each would be by itself; the last ones may be empty."""
    random = np.random.default_rng(8)
    src, residual = ordinary(random, n, 1), ordinary(random, n, 1)
    part = -(-n // world // 256) * 256
    for own in range(-(-n // part)):
        call = Call(src, residual, 0.05, segment=512, part=part, own=own, exact=own * part,
                    exact_count=min(part, n - own * part))  # fmt: skip
        got, each = packed(sides, call, (2, 64)), call.place[2]
        unpacked, flag = placed(np.full(n, 7, F32), None), np.zeros(1, U32)
        sides.run("unpack_topk", (3, 32), unpacked, placed(got.wire, 2), got.kept, *call.place,
                  flag)  # fmt: skip
        for number, start in enumerate(range(0, n, part)):
            within, kept = slice(start, start + part), slice(number * each, (number + 1) * each)
            if number == own:
                assert not got.kept[kept].any()
                assert not got.left[within].any()
                assert not unpacked[within].any()
                continue
            one = Call(src[within], residual[within], 0.05, segment=512,
                       threshold=(int(got.threshold[0]), int(got.threshold[1])))  # fmt: skip
            want = expected(sides, one)
            same(got.kept[kept][: one.segments], want.kept)
            assert not got.kept[kept][one.segments :].any()
            wire = got.wire[kept.start * call.stride :][: want.wire.size]
            same(wire, want.wire)
            same(got.left[within], want.left)
            same(unpacked[within] + got.left[within], src[within] + residual[within])


@pytest.mark.parametrize("exact", [0, 100, 250])
def test_what_stays_is_not_drawn(sides: Sides, exact: int) -> None:
    """Not its first element, not its last one; and what is next to it is."""
    src = ordinary(np.random.default_rng(7), 300, 1)
    src[exact], src[exact + 49] = 8, 9
    without = check(sides, Call(src, exact=exact, exact_count=50)).threshold[0]
    assert without < F32(8).view(U32)
    src[exact - 1], src[(exact + 50) % 300] = 10, 11
    assert check(sides, Call(src, exact=exact, exact_count=50)).threshold[0] > without


@pytest.mark.parametrize("turn", [0, 1, 2, 77])
def test_more_than_the_limit(sides: Sides, turn: int) -> None:
    """The largest go, and of equals other ones in each turn."""
    random = np.random.default_rng(3)
    for n, cap in [(4000, 10), (4000, 700), (100, 1), (65536, 300)]:
        for src in (ordinary(random, n, 1), ties(random, n, 7), np.ones(n, F32)):
            for threshold in [(1, 0), (1, 1), (int(F32(0.5).view(U32)), 0)]:
                got = check(sides, Call(src, density=0.02, cap=cap, turn=turn, threshold=threshold),
                            (1, 256))  # fmt: skip
                assert got.kept[0] <= cap


def test_tied_elements_are_found_out(sides: Sides) -> None:
    random = np.random.default_rng(4)
    equal = np.where(random.random(50_000) < 0.5, F32(1), F32(-1))
    got = check(sides, Call(equal.astype(F32)))
    assert got.threshold[1] == 1
    assert got.kept[0] == 500
    assert check(sides, Call(zeros(random, 5000, 1))).kept[0] == 0
    assert check(sides, Call(sparse(random, 5000, 1), density=0.9)).threshold[0] == 1


def test_density_of_one(sides: Sides) -> None:
    random = np.random.default_rng(5)
    call = Call(ordinary(random, 3000, 1), density=1.0, segment=1024, threshold=(1, 0))
    assert check(sides, call).kept.tolist() == [1024, 1024, 952]


def test_what_is_not_finite_is_sent(sides: Sides) -> None:
    random = np.random.default_rng(6)
    bad = broken(random, 9000, 1)
    got = check(sides, Call(bad, ordinary(random, 9000, 1), segment=4096))
    assert got.poisoned == 1
    assert np.isfinite(got.left).all()
