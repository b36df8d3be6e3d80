"""The CUDA kernels, run without a GPU (tests/cuda/emulate.h): their bits are those of the core's
kernel sets, for all formats, classes of values, sizes, places in memory and launches.
"""

from __future__ import annotations

import ctypes
import re
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
    U16,
    U32,
    Array,
    Sides,
    any_number,
    both_sides,
    floats_of_all_classes,
    ordinary,
    placed,
    pointer,
    same,
)

HALVES = {"bf16": 1, "fp16": 2}
BLOCKS = {"int8": 3, "int4": 4, "onebit": 5, "fp8": 6}
LIMITS = {"int8": 127, "int4": 7, "onebit": 1, "fp8": 448}
OPS = {"sum": 0, "avg": 1}
LAUNCHES = [(1, 32), (2, 64), (3, 256)]


@pytest.fixture(scope="module")
def sides() -> Sides:
    return both_sides()


# ---- 16-bit floats ----


@pytest.mark.parametrize("pre", [1.0, 1 / 3, 1e-30, -1e30])
@pytest.mark.parametrize("codec", HALVES)
def test_half_of_every_class_of_float(sides: Sides, codec: str, pre: float) -> None:
    src = floats_of_all_classes()
    got, want = np.zeros(src.size, U16), np.ones(src.size, U16)
    with np.errstate(all="ignore"):
        sides.run(f"pack_{codec}", (16, 256), got, src, pre, src.size)
    sides.core.core_pack_half(
        HALVES[codec], pointer(want), pointer(src), ctypes.c_float(pre), ctypes.c_size_t(src.size)
    )
    same(got, want)


@pytest.mark.parametrize("codec", HALVES)
def test_float_of_every_half(sides: Sides, codec: str) -> None:
    wire = np.arange(1 << 16, dtype=U16)
    got, want = np.zeros(wire.size, F32), np.ones(wire.size, F32)
    sides.run(f"unpack_{codec}", (16, 256), got, wire, wire.size)
    sides.core.core_unpack_half(
        HALVES[codec], pointer(want), pointer(wire), ctypes.c_size_t(wire.size)
    )
    same(got, want)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("codec", HALVES)
def test_halves_at_any_place(sides: Sides, codec: str, launch: tuple[int, int]) -> None:
    random = np.random.default_rng(1)
    for n in [*range(40), 1023, 4097]:
        src = any_number(random, n, 1)
        whole = np.zeros(n, U16)
        sides.core.core_pack_half(
            HALVES[codec], pointer(whole), pointer(src), ctypes.c_float(1 / 3), ctypes.c_size_t(n)
        )
        back = np.zeros(n, F32)
        sides.core.core_unpack_half(
            HALVES[codec], pointer(back), pointer(whole), ctypes.c_size_t(n)
        )
        for f32_at, u16_at in [(0, 0), (4, 0), (0, 2), (None, 0), (0, None), (16, 8), (8, 16)]:
            x = placed(src, f32_at)
            wire = placed(np.full(n + 8, 0xA5A5, U16), u16_at)[8 if u16_at is None else 0 :]
            sides.run(f"pack_{codec}", launch, wire, x, 1 / 3, n)
            same(wire[:n], whole)
            assert (wire[n:] == 0xA5A5).all()
            dst = placed(np.full(n + 4, 7, F32), f32_at)[4 if f32_at is None else 0 :]
            sides.run(f"unpack_{codec}", launch, dst, placed(whole, u16_at), n)
            same(dst[:n], back)
            assert (dst[n:] == 7).all()


# ---- blocks that share a scale ----


@dataclass
class Case:
    """A pack, its operands and where they lie."""

    codec: str
    src: Array
    launch: tuple[int, int] = (2, 64)
    segment: int = 1 << 20
    stride: int = 0
    offset: int | None = 0


def payload_bytes(codec: str, n: int) -> int:
    blocks = -(-n // (64 if codec == "int4" else 256))
    return 2 * blocks + (n if codec in ("int8", "fp8") else 32 * blocks)


def wire_bytes(case: Case) -> int:
    """To the end of the last payload."""
    last = max(case.src.size - 1, 0) // case.segment
    return last * case.stride + payload_bytes(case.codec, case.src.size - last * case.segment)


def segments(case: Case) -> list[tuple[slice, int]]:
    """(elements, where the payload is)"""
    starts = range(0, case.src.size, case.segment)
    return [(slice(at, at + case.segment), i * case.stride) for i, at in enumerate(starts)]


def expected(sides: Sides, case: Case) -> Array:
    """The wire of the core."""
    wire = np.full(wire_bytes(case) + 16, 0xA5, U8)
    for part, at in segments(case):
        sides.core.core_pack(
            BLOCKS[case.codec],
            pointer(wire[at:]),
            pointer(case.src[part]),
            ctypes.c_size_t(case.src[part].size),
        )
    return wire


def check_pack(sides: Sides, case: Case) -> Array:
    """Returns the wire."""
    want = expected(sides, case)
    wire = placed(np.full(want.size, 0xA5, U8), 2 if case.offset is None else 0)
    src = placed(case.src, case.offset)
    sides.run(f"pack_{case.codec}", case.launch, wire, src, src.size, case.segment, case.stride)
    same(src, case.src)
    same(wire, want)
    return want


def check_unpack(sides: Sides, case: Case, wire: Array) -> None:
    n = case.src.size
    want = np.zeros(n, F32)
    for part, at in segments(case):
        sides.core.core_unpack(
            BLOCKS[case.codec],
            pointer(want[part]),
            pointer(wire[at:]),
            ctypes.c_size_t(want[part].size),
        )
    got = placed(np.full(n + 4, 7, F32), case.offset)[4 if case.offset is None else 0 :]
    sides.run(
        f"unpack_{case.codec}",
        case.launch,
        got,
        placed(wire[: wire_bytes(case)], 0),
        n,
        case.segment,
        case.stride,
    )
    same(got[:n], want)
    assert (got[n:] == 7).all()


def one_nan(values: Array) -> Array:
    """With NaNs that two kinds of processor make of infinities alike."""
    return np.where(np.isnan(values), U32(0x7FC00000).view(F32), values)


def check_add(sides: Sides, case: Case, first: Array, second: Array, gap: int = 0) -> None:
    """Of the same elements' wires; the second lies so many bytes behind the first."""
    n, size = case.src.size, wire_bytes(case)
    apart = size + gap + (size + gap) % 2
    both = placed(np.zeros(apart + size, U8), 2 if case.offset is None else 0)
    both[:size], both[apart:] = first[:size], second[:size]
    for op, post in (("sum", 1.0), ("avg", 0.5)):
        want = np.zeros(n, F32)
        for part, at in segments(case):
            sides.core.core_add(
                BLOCKS[case.codec],
                pointer(want[part]),
                pointer(first[at:]),
                pointer(second[at:]),
                OPS[op],
                ctypes.c_size_t(want[part].size),
            )
        got = placed(np.full(n + 4, 7, F32), case.offset)[4 if case.offset is None else 0 :]
        sides.run(
            f"add_{case.codec}", case.launch, got, both, apart, post, n, case.segment, case.stride
        )
        same(got[:n], one_nan(want))
        assert (got[n:] == 7).all()


@pytest.mark.parametrize("values", CLASSES)
@pytest.mark.parametrize("codec", BLOCKS)
def test_sums_of_every_class(
    sides: Sides, codec: str, values: Callable[[np.random.Generator, int, int], Array]
) -> None:
    random = np.random.default_rng(8)
    for n in [0, 1, 33, 64, 65, 255, 257, 1025, 8000]:
        for k, offset in enumerate((0, 4, None)):
            one, two = (
                Case(codec, values(random, n, LIMITS[codec]), launch=LAUNCHES[k], offset=offset)
                for _ in range(2)
            )
            check_add(sides, one, expected(sides, one), expected(sides, two), 14 * k)


@pytest.mark.parametrize("codec", BLOCKS)
def test_sums_of_any_bytes(sides: Sides, codec: str) -> None:
    """Scales that nobody makes too, in the one or the other, and such whose sums are too large."""
    random = np.random.default_rng(9)
    some = np.array(
        [0, 1, 0x7F, 0x80, 0x3F80, 0x7B00, 0x7D80, 0x7E80, 0x7F00, 0x7F7F, 0x7F80, 0x7FC0], U16
    )
    scales = np.concatenate([some, some | U16(0x8000)])
    one, two = (each.reshape(-1) for each in np.meshgrid(scales, scales))
    block = 64 if codec == "int4" else 256
    case = Case(codec, np.zeros(one.size * block, F32), launch=(5, 256), segment=1 << 20)
    codes = wire_bytes(case) - 2 * one.size
    first, second = (
        np.concatenate([each.view(U8), random.integers(0, 256, codes, U8)]) for each in (one, two)
    )
    check_add(sides, case, first, second)
    for i in range(0, one.size, 7):  # each by itself
        for n in (1, block - 1, block):
            few = Case(codec, np.zeros(n, F32), launch=(1, 32))
            codes = payload_bytes(codec, n) - 2
            first, second = (
                np.concatenate([each[i : i + 1].view(U8), random.integers(0, 256, codes, U8)])
                for each in (one, two)
            )
            check_add(sides, few, first, second)


@pytest.mark.parametrize("codec", BLOCKS)
def test_sums_in_segments(sides: Sides, codec: str) -> None:
    random = np.random.default_rng(10)
    for segment, padding, offset in [(256, 0, 0), (768, 2, 4), (1024, 14, None)]:
        stride = payload_bytes(codec, segment) + padding
        for n in (1, segment - 1, segment, segment + 1, 5 * segment + 333):
            one, two = (
                Case(
                    codec,
                    ordinary(random, n, 1),
                    segment=segment,
                    stride=stride,
                    launch=(2, 96),
                    offset=offset,
                )
                for _ in range(2)
            )
            check_add(sides, one, expected(sides, one), expected(sides, two))


@pytest.mark.parametrize("values", CLASSES)
@pytest.mark.parametrize("codec", BLOCKS)
def test_blocks_of_every_class(
    sides: Sides, codec: str, values: Callable[[np.random.Generator, int, int], Array]
) -> None:
    random = np.random.default_rng(2)
    limit = LIMITS[codec]
    for n in [0, 1, 33, 64, 65, 255, 256, 257, 1025, 20000]:
        src = values(random, n, limit)
        wire = check_pack(sides, Case(codec, src))
        check_unpack(sides, Case(codec, src), wire)
        for case in (
            Case(codec, src, (1, 32), offset=None),
            Case(codec, src, (3, 256), offset=4),
            Case(codec, src, (3, 256), offset=8),
        ):
            check_pack(sides, case)


@pytest.mark.parametrize("codec", BLOCKS)
def test_blocks_of_every_length(sides: Sides, codec: str) -> None:
    random = np.random.default_rng(3)
    for n in [*range(330), *range(505, 520), *range(1017, 1026)]:
        case = Case(codec, ordinary(random, n, 1), launch=(1, 64), offset=None if n % 2 else 0)
        check_unpack(sides, case, check_pack(sides, case))


@pytest.mark.parametrize("codec", BLOCKS)
def test_any_bytes_from_the_wire(sides: Sides, codec: str) -> None:
    """Every scale, those too that nobody makes, and every code."""
    block = 64 if codec == "int4" else 256
    scales = np.arange(1 << 16, dtype=U16)
    if codec != "int4":
        keep = [scales[::16], scales[0x7F00:0x8080], scales[0xFF00:], scales[:0x100]]
        scales = np.unique(np.concatenate(keep))
    random = np.random.default_rng(4)
    codes = random.integers(0, 256, scales.size * 32 * (8 if codec in ("int8", "fp8") else 1), U8)
    codes[: 1 << 10] = np.arange(1 << 10).astype(U8)
    case = Case(codec, np.zeros(scales.size * block, F32), launch=(7, 256), segment=1 << 23)
    check_unpack(sides, case, np.concatenate([scales.view(U8), codes]))


@pytest.mark.parametrize("offset", [0, 4, None])
@pytest.mark.parametrize(("segment", "padding"), [(256, 0), (768, 2), (1024, 14), (4096, 0)])
@pytest.mark.parametrize("codec", BLOCKS)
def test_segments_are_payloads(
    sides: Sides, codec: str, segment: int, padding: int, offset: int | None
) -> None:
    """What one launch makes is what works of the core send, and take."""
    random = np.random.default_rng(6)
    stride = payload_bytes(codec, segment) + padding
    for n in (1, segment - 1, segment, segment + 1, 5 * segment, 5 * segment + 333):
        src = ordinary(random, n, 1)
        case = Case(codec, src, (2, 96), segment, stride, offset)
        wire = check_pack(sides, case)
        check_unpack(sides, case, wire)
        number, dst = BLOCKS[codec], np.zeros(segment, F32)
        flag = ctypes.c_int(0)
        for part, at in segments(case):
            count = src[part].size
            payload = np.zeros(payload_bytes(codec, count), U8)
            made = sides.core.core_payload(
                number,
                pointer(payload),
                pointer(src[part]),
                ctypes.c_size_t(count),
                ctypes.byref(flag),
            )
            assert made == payload.size
            same(wire[at : at + made], payload)
            sides.core.core_store(
                number, pointer(dst), pointer(payload), ctypes.c_size_t(count), ctypes.byref(flag)
            )
        assert flag.value == 0


# ---- scaling ----


@pytest.mark.parametrize("factor", [1.0, 1 / 3, 1e30, 1e-30, 0.0])
def test_scale(sides: Sides, factor: float) -> None:
    """But for NaNs that are made of numbers, which no two kinds of processor agree on."""
    src = floats_of_all_classes()
    src = src[np.isfinite(src) | np.isnan(src) | (factor != 0.0)]
    want = np.zeros(src.size, F32)
    sides.core.core_scale(
        pointer(want), pointer(src), ctypes.c_float(factor), ctypes.c_size_t(src.size)
    )
    for offset in (0, 4, None):
        x = placed(src, offset)
        dst = placed(np.zeros(src.size, F32), 0)
        sides.run("scale", (8, 256), dst, x, factor, src.size)
        same(dst, want)
        sides.run("scale", (8, 256), x, x, factor, src.size)
        same(x, want)


def test_scale_of_infinity_by_zero(sides: Sides) -> None:
    x = np.array([np.inf, -np.inf], F32)
    sides.run("scale", (1, 32), x, x, 0.0, 2)
    same(x, np.array([0x7FC00000] * 2, U32).view(F32))


# ---- the emulation ----


def test_it_has_what_a_driver_finds(sides: Sides) -> None:
    ptx = (ROOT / "ringcomm" / "kernels.ptx").read_text(encoding="ascii")
    names = re.findall(r"^\.visible \.entry (\w+)\(", ptx, re.MULTILINE)
    assert "ringcomm_scale" in names
    assert all(sides.gpu.emulated_has(name.encode()) for name in names)
