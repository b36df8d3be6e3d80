"""The CUDA kernels, run without a GPU (tests/cuda/emulate.h): their bits are those of the core's
kernel sets, for all formats, classes of values, sizes, places in memory and launches.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE / "cuda"))

import emulation  # noqa: E402

HALVES = {"bf16": 1, "fp16": 2}
BLOCKS = {"int8": 3, "int4": 4, "onebit": 5, "fp8": 6}
LIMITS = {"int8": 127, "int4": 7, "onebit": 1, "fp8": 448}
LAUNCHES = [(1, 32), (2, 64), (3, 256)]
F32, U16, U8, U32 = np.float32, np.uint16, np.uint8, np.uint32
Array = np.ndarray[Any, Any]


# ---- both sides ----


@dataclass
class Sides:
    """The emulated kernels and the core's own."""

    gpu: ctypes.CDLL
    core: ctypes.CDLL

    def launch(self, name: str, launch: tuple[int, int], *arguments: Any) -> int:
        """Arrays and None are pointers, floats are f32, integers are u64."""
        kept: list[Any] = [as_argument(one) for one in arguments]
        places = (ctypes.c_void_p * len(kept))(*map(ctypes.addressof, kept))
        return int(self.gpu.emulated_launch(name.encode(), *launch, places))

    def run(self, name: str, launch: tuple[int, int], *arguments: Any) -> None:
        assert self.launch("ringcomm_" + name, launch, *arguments) == 0


def as_argument(one: Any) -> Any:
    if one is None:
        return ctypes.c_void_p(None)
    if isinstance(one, np.ndarray):
        return ctypes.c_void_p(one.ctypes.data)
    return ctypes.c_float(one) if isinstance(one, float) else ctypes.c_uint64(one)


def pointer(array: Array | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    folder = tmp_path_factory.mktemp("emulated")
    csrc = ROOT / "csrc"
    core = [csrc / "kernels" / "scalar.c", *(csrc / "codec").glob("*.c"), csrc / "base" / "copy.c",
            HERE / "cuda" / "core.c"]  # fmt: skip
    try:
        gpu = ctypes.CDLL(str(emulation.build(folder / "emulated.so")))
        host = ctypes.CDLL(str(emulation.compiled(folder / "core.so", core)))
    except OSError as error:
        pytest.skip(f"no C compiler: {error}")
    host.core_payload.restype = ctypes.c_size_t
    return Sides(gpu, host)


# ---- memory ----

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None)


def placed(array: Array, offset: int | None) -> Array:
    """A copy that lies so many bytes behind a multiple of 64; None: as far back as it can before
    memory that must not be touched."""
    space = (array.nbytes + 127) // PAGE * PAGE + 2 * PAGE
    room = mmap.mmap(-1, space)
    start = np.frombuffer(room, U8).ctypes.data
    assert LIBC.mprotect(ctypes.c_void_p(start + space - PAGE), PAGE, 0) == 0
    at = space - PAGE - array.nbytes
    if offset is not None:
        at = at // 64 * 64 - 64 + offset
    copy = np.frombuffer(room, array.dtype, array.size, at)
    copy[:] = array.reshape(-1)
    return copy


def same(got: Array, want: Array) -> None:
    """Bit for bit."""
    a, b = (x.view({2: U16, 4: U32, 1: U8}[x.itemsize]) for x in (got, want))
    if not np.array_equal(a, b):
        differ = np.flatnonzero(a != b)
        at = differ[0]
        pytest.fail(f"{differ.size} of {a.size} differ, first {at}: {a[at]:#x} for {b[at]:#x}")


# ---- values ----


def floats_of_all_classes() -> Array:
    """Every sign and exponent, NaNs and subnormals too, with mantissas in which every bit that
    rounding looks at is 0 and 1, and next to that."""
    low = {0, 1, 2, 0xFFFF, 0x5555, 0xAAAA, 0xE000, 0xEFFF, 0xF000}
    for bit in (0x8000, 0x2000, 0x1000, 0x800):  # of halves and last places of bf16 and fp16
        low |= {middle + by & 0xFFFF for middle in (bit, 3 * bit) for by in (-1, 0, 1)}
    high = np.arange(1 << 16, dtype=U32) << np.uint32(16)
    return (high[:, None] | np.array(sorted(low), U32)[None, :]).reshape(-1).view(F32)


def exponents(random: np.random.Generator, n: int, low: int, high: int) -> Array:
    bits = random.integers(0, 1 << 32, n, np.uint64).astype(U32) & np.uint32(0x807FFFFF)
    return (bits | random.integers(low, high + 1, n).astype(U32) << np.uint32(23)).view(F32)


def ordinary(random: np.random.Generator, n: int, limit: int) -> Array:
    return random.standard_normal(n).astype(F32)


def sparse(random: np.random.Generator, n: int, limit: int) -> Array:
    return np.where(random.random(n) < 0.9, F32(0), exponents(random, n, 120, 130)).astype(F32)


def zeros(random: np.random.Generator, n: int, limit: int) -> Array:
    return np.where(random.random(n) < 0.5, F32(-0.0), F32(0.0))


def tiny(random: np.random.Generator, n: int, limit: int) -> Array:
    return exponents(random, n, 0, int(random.integers(0, 13)))


def small(random: np.random.Generator, n: int, limit: int) -> Array:
    return exponents(random, n, 50, 70)


def large(random: np.random.Generator, n: int, limit: int) -> Array:
    return exponents(random, n, 180, int(random.integers(185, 255)))


def any_number(random: np.random.Generator, n: int, limit: int) -> Array:
    return exponents(random, n, 0, 254)


def ties(random: np.random.Generator, n: int, limit: int) -> Array:
    halves = random.integers(-2 * limit, 2 * limit + 1, n).astype(F32) / F32(2)
    halves[::64] = limit
    return halves


def edges(random: np.random.Generator, n: int, limit: int) -> Array:
    """The largest next to the limit times a bfloat16."""
    scale = (exponents(random, n, 60, 190).view(U32) & np.uint32(0x7FFF0000)).view(F32)
    near = (F32(limit) * scale).view(U32) + random.integers(-2, 3, n).astype(U32)
    return np.where(np.arange(n) % 64 == 0, near.astype(U32).view(F32), F32(0)).astype(F32)


def broken(random: np.random.Generator, n: int, limit: int) -> Array:
    x = exponents(random, n, 100, 130)
    bad = np.array([np.inf, -np.inf, np.nan, -np.nan], F32)
    return np.where(random.random(n) < 0.004, bad[random.integers(0, 4, n)], x).astype(F32)


CLASSES: list[Callable[[np.random.Generator, int, int], Array]] = [
    ordinary, sparse, zeros, tiny, small, large, any_number, ties, edges, broken,
]  # fmt: skip


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
    residual: Array | None = None
    pre: float = 1.0
    left: str = "own"  # none, residual, src
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


def expected(sides: Sides, case: Case) -> tuple[Array, Array, int]:
    """(wire, left, poisoned) of the core."""
    wire = np.full(wire_bytes(case) + 16, 0xA5, U8)
    left = np.zeros(case.src.size, F32)
    poisoned = 0
    for part, at in segments(case):
        residual = None if case.residual is None else case.residual[part]
        poisoned |= sides.core.core_pack(
            BLOCKS[case.codec], pointer(wire[at:]), pointer(left[part]),
            pointer(case.src[part]), ctypes.c_float(case.pre), pointer(residual),
            ctypes.c_size_t(case.src[part].size),
        )  # fmt: skip
    return wire, left, poisoned


def packed(sides: Sides, case: Case) -> tuple[Array, Array | None, int]:
    """(wire, left, poisoned) of the GPU."""
    n = case.src.size
    wire = placed(np.full(wire_bytes(case) + 16, 0xA5, U8), 2 if case.offset is None else 0)
    src = placed(case.src, case.offset)
    residual = None if case.residual is None else placed(case.residual, case.offset)
    left = {"own": placed(np.zeros(n, F32), case.offset), "none": None, "residual": residual,
            "src": src}[case.left]  # fmt: skip
    poisoned = np.full(1, 0, U32)
    sides.run(f"pack_{case.codec}", case.launch, wire, left, src, case.pre, residual, n,
              case.segment, case.stride, poisoned)  # fmt: skip
    if case.left != "src":
        same(src, case.src)
    return wire, left, int(poisoned[0])


def check_pack(sides: Sides, case: Case) -> Array:
    """Returns the wire."""
    wire, left, poisoned = expected(sides, case)
    got, got_left, got_poisoned = packed(sides, case)
    same(got, wire)
    if got_left is not None:
        same(got_left, left)
    assert got_poisoned == poisoned
    return wire


def check_unpack(sides: Sides, case: Case, wire: Array) -> None:
    n = case.src.size
    want = np.zeros(n, F32)
    poisoned = 0
    for part, at in segments(case):
        poisoned |= sides.core.core_unpack(
            BLOCKS[case.codec], pointer(want[part]), pointer(wire[at:]),
            ctypes.c_size_t(want[part].size),
        )  # fmt: skip
    got = placed(np.full(n + 4, 7, F32), case.offset)[4 if case.offset is None else 0 :]
    flag = np.full(1, 0, U32)
    sides.run(f"unpack_{case.codec}", case.launch, got, placed(wire[: wire_bytes(case)], 0), n,
              case.segment, case.stride, flag)  # fmt: skip
    same(got[:n], want)
    assert (got[n:] == 7).all()
    assert flag[0] == poisoned


@pytest.mark.parametrize("values", CLASSES)
@pytest.mark.parametrize("codec", BLOCKS)
def test_blocks_of_every_class(
    sides: Sides, codec: str, values: Callable[[np.random.Generator, int, int], Array]
) -> None:
    random = np.random.default_rng(2)
    limit = LIMITS[codec]
    for n in [0, 1, 33, 64, 65, 255, 256, 257, 1025, 20000]:
        src, residual = values(random, n, limit), values(random, n, limit)
        pre = [1.0, 0.25, 1 / 3, -1.5, 1e-30, 1e30][n % 6]
        wire = check_pack(sides, Case(codec, src))
        check_unpack(sides, Case(codec, src), wire)
        for case in (
            Case(codec, src, residual, pre),
            Case(codec, src, residual, pre, "residual", (1, 32), offset=None),
            Case(codec, src, None, pre, "src", (3, 256), offset=4),
            Case(codec, src, residual, 1.0, "src", offset=None),
            Case(codec, src, residual, 1.0, "none", (3, 256), offset=8),
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


@pytest.mark.parametrize("poison", [0x7FC0, 0x7F80, 0xFF80, 0x7F81, 0xFFFF])
@pytest.mark.parametrize("codec", BLOCKS)
def test_a_scale_that_is_not_finite(sides: Sides, codec: str, poison: int) -> None:
    case = Case(codec, ordinary(np.random.default_rng(5), 1500, 1))
    wire = expected(sides, case)[0]
    wire[4:6] = np.array([poison], U16).view(U8)
    check_unpack(sides, case, wire)


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
        src, residual = ordinary(random, n, 1), ordinary(random, n, 1)
        case = Case(codec, src, residual, segment=segment, stride=stride, launch=(2, 96),
                    offset=offset)  # fmt: skip
        wire = check_pack(sides, case)
        check_unpack(sides, case, wire)
        number, left, dst = BLOCKS[codec], np.zeros(segment, F32), np.zeros(segment, F32)
        flag = ctypes.c_int(0)
        for part, at in segments(case):
            count = src[part].size
            payload = np.zeros(payload_bytes(codec, count), U8)
            made = sides.core.core_payload(
                number, pointer(payload), pointer(left), pointer(src[part]),
                pointer(residual[part]), ctypes.c_size_t(count), ctypes.byref(flag),
            )  # fmt: skip
            assert made == payload.size
            same(wire[at : at + made], payload)
            sides.core.core_store(
                number, pointer(dst), pointer(payload), ctypes.c_size_t(count), ctypes.byref(flag)
            )
        assert flag.value == 0


@pytest.mark.parametrize("codec", BLOCKS)
def test_residuals_over_many_steps(sides: Sides, codec: str) -> None:
    """In place and from one buffer to another, as works do it."""
    random = np.random.default_rng(7)
    n = 5003
    ours, theirs = placed(np.zeros(n, F32), 0), np.zeros(n, F32)
    flag = np.zeros(1, U32)
    for step in range(6):
        src = ordinary(random, n, 1) * F32(10.0 ** (step - 3))
        want = expected(sides, Case(codec, src, theirs, 0.5))
        wire = np.full(want[0].size, 0xA5, U8)
        left = ours if step % 2 else placed(np.zeros(n, F32), 4)
        sides.run(f"pack_{codec}", (3, 64), wire, left, src, 0.5, ours, n, 1 << 20, 0, flag)
        same(wire, want[0])
        same(left, want[1])
        ours, theirs = left, want[1]
    assert flag[0] == 0
    assert np.abs(theirs).max() > 0


@pytest.mark.parametrize("codec", BLOCKS)
def test_a_flag_is_never_taken_back(sides: Sides, codec: str) -> None:
    src, wire, flag = np.ones(300, F32), np.zeros(700, U8), np.full(1, 9, U32)
    sides.run(f"pack_{codec}", (1, 32), wire, None, src, 1.0, None, 300, 512, 0, flag)
    sides.run(f"unpack_{codec}", (1, 32), src, wire, 300, 512, 0, flag)
    assert flag[0] == 9


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


def test_bad_launches(sides: Sides) -> None:
    x = np.zeros(4, F32)
    for launch in [(0, 32), (1, 0), (1, 33), (1, 512)]:
        assert sides.launch("ringcomm_scale", launch, x, x, 1.0, 4) == 1
    assert sides.launch("ringcomm_nothing", (1, 32)) == 500
    assert sides.gpu.emulated_has(b"ringcomm_scale") == 1
    assert sides.gpu.emulated_has(b"scale") == 0


def test_it_has_what_a_driver_finds(sides: Sides) -> None:
    ptx = (ROOT / "ringcomm" / "kernels.ptx").read_text(encoding="ascii")
    names = re.findall(r"^\.visible \.entry (\w+)\(", ptx, re.MULTILINE)
    assert "ringcomm_scale" in names
    assert all(sides.gpu.emulated_has(name.encode()) for name in names)


def test_addresses_of_a_device(sides: Sides) -> None:
    """They may be others than the host's."""
    x, moved = np.ones(8, F32), 1 << 20
    to_host = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda device: device - moved)
    arguments = [ctypes.c_void_p(x.ctypes.data + moved), ctypes.c_void_p(x.ctypes.data + moved),
                 ctypes.c_float(3), ctypes.c_uint64(8)]  # fmt: skip
    places = (ctypes.c_void_p * 4)(*map(ctypes.addressof, arguments))
    sides.gpu.emulated_map(to_host)
    try:
        assert sides.gpu.emulated_launch(b"ringcomm_scale", 1, 32, places) == 0
    finally:
        sides.gpu.emulated_map(None)
    assert (x == 3).all()
