"""The arithmetic of csrc/kernels and csrc/codec against numpy, bit for bit: the portable kernel
set, and each other one that this CPU has.

Both folders touch no OS, so they are compiled here by themselves and called through their headers.
The C tests hold the sets to the portable one alone, over more lengths, offsets and aliases.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensors
from compiled import declared, library
from quantised_reference import (
    BLOCK,
    CODECS,
    LEVELS,
    Encoded,
    encode,
    hadamard,
    int2_signs,
    left_of,
    payload_bytes,
)
from reference import NUMPY, OPS, Array, Wire

ffi = declared("include/ringcomm.h", "kernels/kernels.h", "codec/codec.h")
KINDS = (
    "ordinary",
    "sparse",
    "zeros",  # of both signs
    "tiny",  # subnormal, or with a scale that is or nearly is
    "small",  # with squares that are subnormal
    "large",  # up to the largest float, with sums of squares that overflow
    "heavy",  # whose sums are infinite
    "any",  # of all exponents
    "ties",  # halves of the steps of a scale of 1
    "edges",  # the largest next to where the scale changes
    "halfway",  # of one size, between two of bfloat16
    "lanes",  # small ones that a sum loses unless it has lanes, with a mean next to halfway
    "broken",  # a few infinities and NaNs
)
LENGTHS = (0, 1, 31, 64, 65, 255, 256, 257, 868, 1025)
NAN = np.float32("nan")


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Both folders as a library of their own."""
    kernels = [f"kernels/{name}.c" for name in ("kernels", "scalar", "avx2", "avx512", "neon")]
    sources = [*kernels, "codec/codec.c", "codec/quant.c", "base/copy.c"]
    return library(ffi, sources, tmp_path_factory.mktemp("kernels"))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def sets_of(lib: Any) -> list[Any]:
    """The portable set, and those that this CPU has."""
    every = itertools.takewhile(bool, map(lib.kernels_at, itertools.count()))
    return [one for one in every if one.supported()]


def block_of(lib: Any, kernels: Any, codec: str) -> Any:
    """The functions of a set for a codec."""
    return kernels.block[getattr(lib, "RC_CODEC_" + codec.upper())]


def memory(array: Array | None, kind: str = "char") -> Any:
    """An array's elements for C, which keep the array as long as they live."""
    return ffi.NULL if array is None else ffi.from_buffer(kind + "[]", array)


def flag() -> Any:
    """An int of C, 0."""
    return ffi.new("int *")


def call_of(lib: Any, dtype: str, op: str, codec: str, count: int) -> Any:
    call = ffi.new("rc_call *")
    call.dtype = getattr(lib, "RC_" + dtype.upper())
    call.op = getattr(lib, "RC_" + op.upper())
    call.codec = getattr(lib, "RC_CODEC_" + codec.upper())
    call.count = count
    return call


def same(ours: Array, expected: Array, nan_is_nan: bool = False) -> bool:
    """Equal bits. nan_is_nan: whatever the payloads of NaNs are."""
    if not nan_is_nan:
        return ours.tobytes() == expected.tobytes()
    number = ~np.isnan(expected)
    return bool(np.isnan(ours[~number]).all()) and same(ours[number], expected[number])


# ---- values ----


def of_exponents(rng: np.random.Generator, n: int, low: int, high: int) -> Array:
    """Floats of both signs whose exponent field is from low to high."""
    rest = rng.integers(0, 2**32, n, np.uint32) & np.uint32(0x807FFFFF)
    return (rest | rng.integers(low, high + 1, n, np.uint32) << np.uint32(23)).view(np.float32)


def edges(rng: np.random.Generator, codec: str, n: int) -> Array:
    """First of each block what is up to two units beside the limit times a bfloat16."""
    scales = of_exponents(rng, n, 60, 190).view(np.uint32) & np.uint32(0x7FFF0000)
    tops = np.float32(LEVELS.get(codec, 1)) * scales.view(np.float32)
    tops = (tops.view(np.int32) + rng.integers(-2, 3, n, np.int32)).view(np.float32)
    return np.where(np.arange(n) % BLOCK[codec], np.float32(0), tops)


def values(kind: str, codec: str, n: int, salt: int = 0) -> Array:
    """n float32 of a kind."""
    rng = np.random.default_rng((KINDS.index(kind), CODECS.index(codec), n, salt))
    pick, limit = rng.random(n), LEVELS.get(codec, 1)
    if kind == "sparse":
        x = np.where(pick < 0.9, 0, of_exponents(rng, n, 120, 130))
    elif kind == "zeros":
        x = np.where(pick < 0.5, 0.0, -0.0)
    elif kind == "tiny":
        x = np.where(pick < 0.9, of_exponents(rng, n, 0, 6), of_exponents(rng, n, 6, 12))
    elif kind == "small":
        x = of_exponents(rng, n, 50, 70)
    elif kind == "large":
        x = np.where(pick < 0.95, of_exponents(rng, n, 180, 190), of_exponents(rng, n, 250, 254))
        x[pick > 0.998] = np.finfo(np.float32).max  # its scale is a bit too large for it
    elif kind == "heavy":
        x = np.where(pick < 0.5, 0, 1.3e38)
    elif kind == "any":
        x = of_exponents(rng, n, 0, 254)
    elif kind == "ties":
        x = np.where(pick < 0.02, limit, rng.integers(-2 * limit, 2 * limit + 1, n) / 2)
    elif kind == "edges":
        x = edges(rng, codec, n)
    elif kind == "halfway":
        x = np.where(pick < 0.5, 1, -1) * (257 + 2 * ((np.arange(n) // 256 + n) % 128)) / 256
    elif kind == "lanes":
        at = np.arange(n) % 256
        x = np.select([at == 0, at < 32], [39.0, 0.75 * 2.0**-19])
    elif kind == "broken":
        bad = rng.choice([np.inf, -np.inf, np.nan], n)
        x = np.where(pick < 0.995, of_exponents(rng, n, 100, 130), bad)
    else:
        x = rng.standard_normal(n)
    return x.astype(np.float32)


# ---- formats whose elements share a scale ----


@pytest.mark.parametrize("codec", CODECS)
def test_blocks_are_encoded(lib: Any, codec: str) -> None:
    """Of all kinds, each with a residual and without, multiplied by one thing or another."""
    factors = itertools.cycle([1.0, 0.25, 1 / 3, -1.5, 1e30, 1e-30])
    for kind, n, carries in itertools.product(KINDS, LENGTHS, (False, True)):
        x = values(kind, codec, n)
        residual = values(kind, codec, n, 1) if carries else None
        factor = np.float32(1.0 if n < 256 else next(factors))
        c = x * factor if residual is None else x * factor + residual
        expected = encode(codec, c)
        for kernels in sets_of(lib):
            scales = np.empty(len(expected.scales), np.uint16)
            codes = np.empty(payload_bytes(codec, n) - 2 * len(scales), np.uint8)
            left = np.empty(n, np.float32)
            poisoned = block_of(lib, kernels, codec).encode(
                memory(scales, "uint16_t"),
                memory(codes, "uint8_t"),
                memory(left, "float"),
                memory(x, "float"),
                factor,
                memory(residual, "float"),
                n,
                n % 2,
            )
            what = (ffi.string(kernels.name), kind, n, carries, factor)
            assert poisoned == expected.poisoned, what
            assert scales.tobytes() + codes.tobytes() == expected.payload(), what
            assert same(left, left_of(c, expected)), what


def test_a_level_begins_at_its_threshold(lib: Any) -> None:
    """int2: a rotated element of exactly 1.23 times the mean is a large one."""
    sums = np.arange(1, 1 << 20)
    least = sums.astype(np.float32) * np.float32(np.float32(1.23) / np.float32(64))
    at = int(np.flatnonzero(least == np.rint(least))[0])  # the first that is a whole number
    rotated = np.full((1, 64), (sums[at] - least[at]) // 63, np.float32)
    rotated[0, 5] = least[at]
    rotated[0, 37] += sums[at] - rotated.sum()
    c = (hadamard(rotated) * int2_signs())[0]
    assert (hadamard((c * int2_signs())[None]) == rotated).all()
    expected = encode("int2", c)
    assert (expected.codes[[5, 6]] & 2).tolist() == [2, 0]
    for kernels in sets_of(lib):
        scales, codes = np.empty(1, np.uint16), np.empty(16, np.uint8)
        of_wire = memory(scales, "uint16_t"), memory(codes, "uint8_t")
        block_of(lib, kernels, "int2").encode(
            *of_wire, ffi.NULL, memory(c, "float"), 1.0, ffi.NULL, len(c), 0
        )
        assert scales.tobytes() + codes.tobytes() == expected.payload()


def test_what_int2_leaves_is_less_than_what_it_was_given() -> None:
    """Of each block, whatever it holds: one of the claims in kernels/int2.h. (A scale that is next
    to the least normal float has fewer digits.)"""
    for kind in ("ordinary", "sparse", "small", "any"):
        c = values(kind, "int2", 64 * 500)
        c = np.where(np.abs(c) < 1e30, c, 0).astype(np.float32)
        left = left_of(c, encode("int2", c)).astype(np.float64).reshape(-1, 64)
        given = (c.astype(np.float64).reshape(-1, 64) ** 2).sum(axis=1)
        assert ((left**2).sum(axis=1) <= given * (1 - (given > 1e-60) / 64)).all(), kind


def payloads(codec: str) -> Iterator[tuple[int, Array]]:
    """Of any bytes: tensors of many lengths, and every code with every exponent of a scale."""
    rng = np.random.default_rng(CODECS.index(codec))
    special = [0, 0x8000, 1, 0x80, 0x7F80, 0xFF80, 0x7FC0, 0xFF81]
    for n in (*LENGTHS, *range(2, 600, 7)):
        blocks = -(-n // BLOCK[codec])
        any_bits, ordinary = rng.integers(0, 2**16, blocks), rng.integers(0, 0x4000, blocks)
        kinds = np.stack([rng.choice(special, blocks), any_bits, ordinary])
        scales = kinds[rng.integers(0, 3, blocks), np.arange(blocks)].astype("<u2")
        codes = rng.integers(0, 256, payload_bytes(codec, n) - 2 * blocks, np.uint8)
        yield n, np.concatenate([scales.view(np.uint8), codes])
    per_exponent = 256 // (payload_bytes(codec, BLOCK[codec]) - 2)
    scales = np.repeat(np.arange(256) << 8, per_exponent)
    scales = (scales | rng.integers(0, 256, len(scales))).astype("<u2")
    codes = np.tile(np.arange(256, dtype=np.uint8), 256)
    yield len(scales) * BLOCK[codec], np.concatenate([scales.view(np.uint8), codes])


@pytest.mark.parametrize("codec", CODECS)
def test_any_bytes_are_decoded_and_added(lib: Any, codec: str) -> None:
    for n, payload in payloads(codec):
        expected = Encoded.of(codec, payload, n)
        decoded, before = expected.decode(), values("any", codec, n)
        total = np.where(np.isnan(decoded), NAN, before + decoded)
        scales, codes = payload[: 2 * len(expected.scales)], payload[2 * len(expected.scales) :]
        of_wire = memory(scales.copy(), "uint16_t"), memory(codes.copy(), "uint8_t")
        for kernels in sets_of(lib):
            out, added = np.empty(n, np.float32), before.copy()
            block = block_of(lib, kernels, codec)
            told = (
                block.decode(memory(out, "float"), *of_wire, n, n % 2),
                block.add(memory(added, "float"), *of_wire, n),
            )
            what = (ffi.string(kernels.name), n)
            assert told == (expected.poisoned, expected.poisoned), what
            assert same(out, decoded), what
            assert same(added, total, nan_is_nan=True), what
            assert (added.view(np.uint32)[np.isnan(decoded)] == 0x7FC00000).all(), what


# ---- segments of them ----


def quant_of(lib: Any, kernels: Any, codec: str, dtype: str, op: str, n: int) -> Any:
    """For three ranks."""
    q = ffi.new("quant *")
    lib.quant_init(q, kernels, call_of(lib, dtype, op, codec, n), 3)
    assert lib.quant_bytes(q, n) == payload_bytes(codec, n)
    return q


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_segments(lib: Any, dtype: str, codec: str) -> None:
    """What travels, by docs/WIRE.md, what is left, and what it means to who gets it."""
    for kind, n in itertools.product(KINDS, LENGTHS):
        x = values(kind, codec, n).astype(NUMPY[dtype]) * NUMPY[dtype](1 / 3)
        residual = values("ordinary", codec, n, 1)
        c = x.astype(np.float32) + residual
        expected = encode(codec, c)
        decoded = expected.decode()
        for kernels in sets_of(lib):
            q = quant_of(lib, kernels, codec, dtype, "sum", n)
            wire, left = np.empty(payload_bytes(codec, n), np.uint8), np.empty(n, np.float32)
            out, sent, stored = np.empty(n, x.dtype), flag(), flag()
            of_wire = memory(wire, "uint8_t")
            of_residual = memory(residual, "float")
            lib.quant_encode(q, of_wire, memory(x), of_residual, memory(left, "float"), n, sent)
            lib.quant_store(q, memory(out), of_wire, n, stored)
            what = (ffi.string(kernels.name), kind, n)
            assert wire.tobytes() == expected.payload(), what
            assert same(left, left_of(c, expected)), what
            assert same(out, decoded.astype(x.dtype)), what
            poisoned = (sent[0], stored[0], lib.quant_is_poisoned(q, of_wire, n))
            assert poisoned == (expected.poisoned,) * 3, what


class Sum:
    """Three ranks' contributions. own: the second one's is its own, as it is."""

    def __init__(self, kind: str, codec: str, n: int, own: bool) -> None:
        self.x, self.residual = values(kind, codec, n, 1), values("ordinary", codec, n, 3)
        sent = [encode(codec, values(kind, codec, n, salt)) for salt in range(3)]
        middle = self.x + self.residual if own else sent[1].decode()
        self.total = sent[0].decode() + middle + sent[2].decode()
        self._wires = [np.frombuffer(one.payload(), np.uint8) for one in sent]
        pointers = [memory(wire) for wire in self._wires]
        self._pointers = ffi.new(
            "void *[]", [ffi.NULL if own and i == 1 else p for i, p in enumerate(pointers)]
        )
        self.terms = ffi.new("quant_terms *")
        self.terms.wires, self.terms.count = self._pointers, 3
        self.terms.src, self.terms.residual = memory(self.x), memory(self.residual, "float")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("own", [True, False])
def test_sums_are_in_order_of_rank(lib: Any, own: bool, codec: str) -> None:
    """An average, as it is and encoded, and whether it is told that one is not finite."""
    for kind, n in itertools.product(KINDS, LENGTHS):
        one, residual = Sum(kind, codec, n, own), values("ordinary", codec, n, 4)
        mean = one.total * np.float32(1 / 3)
        expected = encode(codec, mean + residual)
        for kernels in sets_of(lib):
            q = quant_of(lib, kernels, codec, "f32", "avg", n)
            plain, out, left = (np.empty(n, np.float32) for _ in range(3))
            wire, added, sent = np.empty(payload_bytes(codec, n), np.uint8), flag(), flag()
            lib.quant_join(q, memory(plain), one.terms, n, added)
            lib.quant_join_encoded(
                q,
                memory(out),
                memory(wire, "uint8_t"),
                one.terms,
                memory(residual, "float"),
                memory(left, "float"),
                n,
                sent,
            )
            what = (ffi.string(kernels.name), kind, n)
            assert same(plain, mean, nan_is_nan=True), what
            assert added[0] == (not np.isfinite(one.total).all()), what
            assert own or lib.quant_sum_is_poisoned(q, one.terms, n) == added[0], what
            assert wire.tobytes() == expected.payload(), what
            assert same(left, left_of(mean + residual, expected)), what
            assert same(out, expected.decode()), what
            assert sent[0] == expected.poisoned, what


# ---- whole elements and 16-bit floats ----


def operands(dtype: str, n: int) -> list[Array]:
    """Of three ranks, a third of them infinities, NaN and such."""
    every = [tensors.elements(dtype, n, rank) for rank in range(3)]
    for rank, x in enumerate(every):
        x[: n // 3] = tensors.special(dtype, n // 3, rank)
    return every


def codec_cases() -> list[tuple[str, str]]:
    wide = [(codec, dtype) for codec in ("bf16", "fp16") for dtype in ("f32", "f64")]
    return [*(("none", dtype) for dtype in NUMPY), *wide]


class Codec:
    """codec.h, for one kernel set, with arrays in and out."""

    def __init__(self, lib: Any, kernels: Any, wire: Wire, codec: str) -> None:
        self._lib, self._codec = lib, ffi.new("codec *")
        self._dtype = NUMPY[wire.dtype]
        self._moving = self._dtype if wire.half is None else np.dtype(np.uint16)
        call = call_of(lib, wire.dtype, wire.op, codec, 0)
        lib.codec_init(self._codec, kernels, call, wire.n)

    def pack(self, x: Array) -> Array:
        out = np.empty(len(x), self._moving)
        self._lib.codec_encode(self._codec, memory(out), memory(x), len(x))
        return out

    def reduce(self, wire: Array, x: Array, last: bool) -> Array:
        out = np.empty(len(x), self._moving)
        self._lib.codec_reduce(self._codec, memory(out), memory(wire), memory(x), len(x), last)
        return out

    def merge(self, first: Array, second: Array, last: bool) -> Array:
        out, n = np.empty(len(first), self._moving), len(first)
        self._lib.codec_combine(self._codec, memory(out), memory(first), memory(second), n, last)
        return out

    def unpack(self, wire: Array) -> Array:
        out = np.empty(len(wire), self._dtype)
        self._lib.codec_store(self._codec, memory(out), memory(wire), len(wire))
        return out

    def join(self, inputs: Sequence[Array], encoded: bool) -> Array:
        """The second one's own is made from its tensor."""
        n, packed = len(inputs[0]), [self.pack(x) for x in inputs]
        wires = ffi.new("void *[]", [memory(one) for one in packed])
        wires[1] = ffi.NULL
        out = np.empty(n, self._moving if encoded else self._dtype)
        self._lib.codec_join(
            self._codec, memory(out), encoded, wires, len(inputs), memory(inputs[1]), n
        )
        return self.unpack(out) if encoded else out


@pytest.mark.parametrize(("codec", "dtype"), codec_cases())
def test_elements_on_their_way(lib: Any, codec: str, dtype: str) -> None:
    """Each hop, by each operation, in worlds of several sizes. Of two NaNs of float32 or float64
    either may stay, but for the last sum."""
    plain = codec == "none" and dtype in ("f32", "f64")
    for op, world, n in itertools.product(OPS, (1, 2, 3, 8, 4096), (0, 1, 7, 255, 1025, 3000)):
        x, y, _ = every = operands(dtype, n)
        wire = Wire(dtype, op, codec, world)
        joined = Wire(dtype, op, codec, 3).join(every)
        for kernels in sets_of(lib):
            ours = Codec(lib, kernels, wire, codec)
            what = (ffi.string(kernels.name), op, world, n)
            first, second = wire.pack(x), wire.pack(y)
            assert same(ours.unpack(first), wire.unpack(first)), what
            encoded = ours.unpack(ours.pack(x))  # of float16 the bits go as they are, if alone
            assert same(encoded, wire.unpack(first), nan_is_nan=dtype == "f16"), what
            for last in (False, True):
                reduced, merged = (wire.reduce(first, y, last), wire.merge(first, second, last))
                assert same(ours.reduce(first, y, last), reduced, nan_is_nan=plain), (what, last)
                free = plain and not last
                assert same(ours.merge(first, second, last), merged, nan_is_nan=free), (what, last)
            if world == 3:
                assert same(ours.join(every, encoded=False), joined), what
                assert same(ours.join(every, encoded=True), joined), what
