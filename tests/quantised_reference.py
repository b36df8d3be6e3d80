"""The quantising codecs and the collectives that use them, in numpy.

Written from the contract alone (docs/COMPRESSION.md, "How it works"), so that it and the
core can only agree by both being right. All arithmetic is float32, one rounding for each operation.

    codec    block  scale s, a bfloat16                           code of c             D
    int8     256    max|c|/127 rounded up                         rint(c/s)             code s
    int4     64     max|c|/7 rounded up                           rint(c/s)             code s
    fp8      256    max|c|/448 rounded up                         e4m3(c/s)             code s
    onebit   256    min(RMS, 1.75 mean|c|) to nearest even        c >= 0                +s or -s
    int2     64     <r,q>/<q,q> to nearest even                   q: 3 or 10, signed    rotated back

r is the block of int2, rotated: times signs/8, then the Walsh-Hadamard transform; |q| is 10 where
|r| is 1.23 of its mean or more.

c is the value and the residual that was left of its predecessors; c - D is left of it. c/s is c
times the rounded 1/s. A scale below 2**-126 makes a block of zeros; a value that is not finite, or
too large to be encoded, makes a block of NaN. Blocks start with each chunk, so the last one of a
chunk may be short.

    direct (3 ranks and more)  each rank encodes the parts of the others and keeps its own as it is;
                               a part's owner adds all in order of rank, multiplies (avg), adds
                               what it has left of before, encodes; all decode that
    one-shot (2 ranks)         each encodes everything; both add both in order of rank

Arrays are flat. Nothing here is fast, and nothing needs to be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from reference import Array, bf16_bits, bf16_value, chunk_bounds

BLOCK = {"int8": 256, "int4": 64, "onebit": 256, "fp8": 256, "int2": 64}
CODECS = tuple(BLOCK)
LEVELS = {"int8": 127, "int4": 7, "fp8": 448}
_SMALLEST = np.float32(2.0**-126)
_NAN = np.float32("nan")
F0, F1 = np.float32(0), np.float32(1)


# ---- scales and codes ----


def bf16_up(x: Array) -> Array:
    """Positive float32 rounded up to a bfloat16, as float32."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return (((bits + 0xFFFF) >> 16) << 16).astype(np.uint32).view(np.float32)


def e4m3_values() -> Array:
    """The magnitudes of float8 e4m3 by code, as float64; 480 for 0x7f, which no encoder uses."""
    codes = np.arange(0x80)
    exponent, mantissa = codes >> 3, codes & 7
    subnormal = mantissa / 8 * 2.0**-6
    return np.where(exponent == 0, subnormal, (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def e4m3_nearest(x: Array) -> Array:
    """The e4m3 code nearest to a float32, the even one of two; beyond 448 that of 448."""
    values = e4m3_values()
    middles = (values[1:] + values[:-1]) / 2
    magnitude = np.abs(x.astype(np.float64))
    low = np.searchsorted(middles, magnitude, side="left")  # of two as near, the lower
    high = np.searchsorted(middles, magnitude, side="right")
    code = np.minimum(np.where(low % 2 == 0, low, high), 0x7E)
    return (code + 0x80 * np.signbit(x)).astype(np.uint8)


def e4m3_value(codes: Array) -> Array:
    """e4m3 codes as float32."""
    magnitude = e4m3_values()[codes & 0x7F]
    return np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)


def lane_sums(rows: Array) -> Array:
    """Sums of rows: 32 lanes with a step of 32 elements, then halves onto one another."""
    lanes = np.zeros((len(rows), 32), np.float32)
    for start in range(0, rows.shape[1], 32):
        lanes = lanes + rows[:, start : start + 32]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def int2_signs() -> Array:
    """The signs of a block's 64 elements, over 8: minus where x0 x1 + x2 x3 + x4 x5 of the index's
    bits is odd."""
    bits = np.arange(64)[:, None] >> np.arange(6) & 1
    odd = (bits[:, 0] & bits[:, 1]) ^ (bits[:, 2] & bits[:, 3]) ^ (bits[:, 4] & bits[:, 5])
    return np.where(odd, np.float32(-0.125), np.float32(0.125))


def hadamard(rows: Array) -> Array:
    """The Walsh-Hadamard transform of rows of 64, in the order of sums that fixes the bits."""
    for _ in range(6):
        first, second = rows[:, 0::2], rows[:, 1::2]
        rows = np.concatenate([first + second, first - second], axis=1)
    return rows


def int2_numbers(rotated: Array) -> Array:
    """q of rotated rows: 3 or 10 with their signs."""
    least = lane_sums(np.abs(rotated)) * np.float32(np.float32(1.23) / np.float32(64))
    large = (np.abs(rotated) >= least[:, None]) & (rotated != 0)
    return np.where(rotated >= 0, F1, -F1) * np.where(large, np.float32(10), np.float32(3))


def scales_of(codec: str, rows: Array, sizes: Array) -> tuple[Array, Array]:
    """(scales as float32, 0 for a block of zeros; whether a block is poisoned)."""
    with np.errstate(all="ignore"):
        if codec == "onebit":
            n = sizes.astype(np.float32)
            squares, magnitudes = lane_sums(rows * rows), lane_sums(np.abs(rows))
            rms = np.sqrt(squares / n)
            scale = np.minimum(rms, np.float32(1.75) * (magnitudes / n))
            poisoned = ~(np.isfinite(squares) & np.isfinite(magnitudes))
            scale = bf16_value(bf16_bits(np.where(poisoned, F1, scale)))
        elif codec == "int2":
            rotated = hadamard(rows * int2_signs())
            poisoned = ~np.isfinite(lane_sums(np.abs(rotated)))
            number = np.abs(int2_numbers(rotated))
            squares = (number * number).sum(axis=1)
            scale = lane_sums(np.abs(rotated) * number) / squares
            scale = bf16_value(bf16_bits(np.where(poisoned, F1, scale)))
            poisoned |= ~np.isfinite(scale * np.float32(80))
        else:
            largest = np.max(np.abs(rows), axis=1, initial=0)
            poisoned = ~np.isfinite(rows).all(axis=1)
            scale = bf16_up(np.where(poisoned, F1, largest) / np.float32(LEVELS[codec]))
            poisoned |= ~np.isfinite(scale * np.float32(LEVELS[codec]))
    return np.where(scale < _SMALLEST, F0, scale), poisoned


@dataclasses.dataclass
class Encoded:
    """A chunk as it travels: bfloat16 bits of the scales, and a code for each element (of int2 for
    all of a block, even if fewer are sent: a rotation has spread them)."""

    codec: str
    scales: Array
    codes: Array
    count: int

    @classmethod
    def of(cls, codec: str, payload: Array, n: int) -> Encoded:
        """n elements of a segment's payload, given as bytes."""
        blocks = -(-n // BLOCK[codec])
        scales, codes = payload[: 2 * blocks].view("<u2"), payload[2 * blocks :]
        if codec == "int4":
            rows = codes.reshape(blocks, 32)
            codes = np.concatenate([rows << 4, rows], axis=1).view(np.int8) >> 4
        elif codec == "onebit":
            codes = np.unpackbits(codes, bitorder="little")
        elif codec == "int2":
            bits = np.unpackbits(codes, bitorder="little").reshape(blocks, 2, 64)
            return cls(codec, scales, (bits[:, 0] | bits[:, 1] << 1).reshape(-1), n)
        elif codec == "int8":
            codes = codes.view(np.int8)
        return cls(codec, scales, codes.reshape(-1)[:n], n)

    @property
    def poisoned(self) -> bool:
        """Whether a scale is not finite, as where a value was not."""
        return bool((self.scales & 0x7F80 == 0x7F80).any())

    def decode(self) -> Array:
        """D, float32 for each element."""
        scale = np.repeat(bf16_value(self.scales), BLOCK[self.codec])[: len(self.codes)]
        if self.codec == "onebit":
            value = np.where(self.codes != 0, scale, np.where(scale == 0, F0, -scale))
        elif self.codec == "fp8":
            value = e4m3_value(self.codes) * scale
        elif self.codec == "int2":
            number = np.where(self.codes & 2, 10, 3) * np.where(self.codes & 1, 1, -1)
            rows = hadamard(number.astype(np.float32).reshape(-1, 64))
            value = (rows * (int2_signs() * scale.reshape(-1, 64))).reshape(-1) + F0  # no -0
        else:
            value = self.codes.astype(np.float32) * scale
        return np.where(np.isfinite(scale), value, _NAN)[: self.count]

    def payload(self) -> bytes:
        """The bytes on the wire of a segment."""
        scales = self.scales.astype("<u2").tobytes()
        if self.codec in ("int8", "fp8"):
            return scales + self.codes.astype(np.uint8).tobytes()
        size = BLOCK[self.codec]
        rows = np.zeros((len(self.scales), size), np.uint8)
        rows.reshape(-1)[: len(self.codes)] = self.codes.astype(np.uint8)
        if self.codec == "int4":
            return scales + ((rows[:, :32] & 15) | (rows[:, 32:] & 15) << 4).tobytes()
        if self.codec == "int2":
            rows = np.stack([rows & 1, rows >> 1], axis=1)
        return scales + np.packbits(rows, bitorder="little").tobytes()


def encode(codec: str, c: Array) -> Encoded:
    """c, float32, encoded in blocks from its start."""
    size = BLOCK[codec]
    blocks = -(-len(c) // size)
    rows = np.zeros((blocks, size), np.float32)
    rows.reshape(-1)[: len(c)] = c
    sizes = np.minimum(size, len(c) - size * np.arange(blocks))
    scale, poisoned = scales_of(codec, rows, sizes)
    with np.errstate(all="ignore"):
        scaled = rows * np.where(scale == 0, F0, F1 / scale)[:, None]
        scaled[poisoned | (scale == 0)] = 0
        if codec == "onebit":
            codes = np.where(poisoned[:, None], 0, rows >= 0).astype(np.int16)
        elif codec == "int2":
            number = int2_numbers(hadamard(rows * int2_signs()))
            codes = ((number > 0) + 2 * (np.abs(number) == 10)).astype(np.int16)
            codes[poisoned | (scale == 0)] = 0
        elif codec == "fp8":
            codes = e4m3_nearest(scaled).astype(np.int16)
        else:
            codes = np.rint(scaled).astype(np.int16)
    bits = np.where(poisoned, 0x7FC0, bf16_bits(scale)).astype(np.uint16)
    sent = codes.reshape(-1) if codec == "int2" else codes.reshape(-1)[: len(c)]
    return Encoded(codec, bits, sent, len(c))


def payload_bytes(codec: str, n: int) -> int:
    """Bytes on the wire of n elements that start with a block."""
    blocks = -(-n // BLOCK[codec])
    per_block = {"int4": 32, "onebit": 32, "int2": 16}.get(codec)
    return 2 * blocks + (n if per_block is None else per_block * blocks)


# ---- residuals ----


@dataclasses.dataclass
class Residuals:
    """What a rank has left: of what it contributed, and of the part of the result that it owns."""

    worker: Array
    owner: Array
    start: int = 0

    @classmethod
    def zero(cls, n: int) -> Residuals:
        return cls(np.zeros(n, np.float32), np.zeros(0, np.float32))

    def copy(self) -> Residuals:
        return Residuals(self.worker.copy(), self.owner.copy(), self.start)

    def fold(self, own: tuple[int, int], op: str, n: int) -> Residuals:
        """The same error where this rank owns the elements from own[0] to own[1]."""
        start, stop = own
        kept = Residuals(self.worker.copy(), np.zeros(stop - start, np.float32), start)
        if len(self.owner) == stop - start and (self.start == start or start == stop):
            kept.owner[:] = self.owner
        elif len(self.owner):
            factor = np.float32(n) if op == "avg" else F1
            where = slice(self.start, self.start + len(self.owner))
            kept.worker[where] = kept.worker[where] + self.owner * factor
        return kept


# ---- collectives: the inputs of all ranks in, what every rank gets out ----


def _scale(op: str, n: int) -> np.float32:
    return np.float32(1.0 / n) if op == "avg" else F1


def left_of(c: Array, sent: Encoded) -> Array:
    """What is left of c, NaN where a block is poisoned."""
    decoded = sent.decode()
    with np.errstate(all="ignore"):
        return np.where(np.isnan(decoded), _NAN, c - decoded)


def allreduce(
    inputs: Sequence[Array], op: str, codec: str, before: Sequence[Residuals] | None = None
) -> tuple[Array, list[Residuals]]:
    """(result, what is left on each rank); without residuals nothing is carried over."""
    n, count = len(inputs), len(inputs[0])
    values = [x.astype(np.float32) for x in inputs]
    given = [Residuals.zero(count)] * n if before is None else list(before)
    if n == 1:
        return _flushed(values, op, given)
    result, left = _exchanged(values, op, codec, given, n)
    if np.isnan(result).any():
        return np.full(count, _NAN), [one.copy() for one in given]
    return result, left


def _flushed(
    values: Sequence[Array], op: str, given: Sequence[Residuals]
) -> tuple[Array, list[Residuals]]:
    """One rank: nothing is encoded."""
    folded = given[0].fold((0, 0), op, 1)
    with np.errstate(all="ignore"):
        result = values[0] + folded.worker
    kept = np.isfinite(result).all()
    return result, [Residuals.zero(len(result)) if kept else given[0].copy()]


def _exchanged(
    values: Sequence[Array], op: str, codec: str, given: Sequence[Residuals], ranks: int
) -> tuple[Array, list[Residuals]]:
    """By the codec's plan; ranks: whose values are in these."""
    return (_one_shot if len(values) == 2 else _direct)(values, op, codec, given, ranks)


def _one_shot(
    values: Sequence[Array], op: str, codec: str, given: Sequence[Residuals], ranks: int
) -> tuple[Array, list[Residuals]]:
    left, total = [], None
    for x, before in zip(values, given, strict=True):
        folded = before.fold((0, 0), op, ranks)
        with np.errstate(all="ignore"):
            c = x + folded.worker
        sent = encode(codec, c)
        left.append(Residuals(left_of(c, sent), folded.owner))
        total = sent.decode() if total is None else total + sent.decode()
    assert total is not None
    return total * _scale(op, ranks), left


def _contributions(
    values: Sequence[Array], codec: str, left: Sequence[Residuals], owner: int, part: slice
) -> Array:
    """A part's sum at its owner; updates what is left at the workers."""
    total = None
    for rank, x in enumerate(values):
        with np.errstate(all="ignore"):
            c = x[part] + left[rank].worker[part]
            if rank == owner:
                decoded, rest = c, np.zeros_like(c)
            else:
                sent = encode(codec, c)
                decoded, rest = sent.decode(), left_of(c, sent)
            total = decoded if total is None else total + decoded
        left[rank].worker[part] = rest
    assert total is not None
    return total


def _direct(
    values: Sequence[Array], op: str, codec: str, given: Sequence[Residuals], ranks: int
) -> tuple[Array, list[Residuals]]:
    bounds = chunk_bounds(len(values[0]), len(values))
    left = [one.fold(own, op, ranks) for one, own in zip(given, bounds, strict=True)]
    parts = []
    for owner, (start, stop) in enumerate(bounds):
        total = _contributions(values, codec, left, owner, slice(start, stop))
        with np.errstate(all="ignore"):
            t = total * _scale(op, ranks) + left[owner].owner
        sent = encode(codec, t)
        left[owner].owner = left_of(t, sent)
        parts.append(sent.decode())
    return np.concatenate(parts), left


def among_hosts(
    inputs: Sequence[Array],
    op: str,
    codec: str,
    local: int,
    before: Sequence[Residuals] | None = None,
) -> tuple[Array, list[Residuals]]:
    """allreduce where so many ranks in succession are a host: summed there as they are; then the
    ranks with the same place exchange its chunk among hosts."""
    n, count = len(inputs), len(inputs[0])
    left = [Residuals.zero(count) for _ in inputs] if before is None else [r.copy() for r in before]
    parts = []
    for place, (start, stop) in enumerate(chunk_bounds(count, local)):
        values, ranks = [], range(place, n, local)
        for first in range(0, n, local):
            total = inputs[first][start:stop]
            for x in inputs[first + 1 : first + local]:
                total = total + x[start:stop]
            values.append(total.astype(np.float32))
        given = [
            Residuals(left[r].worker[start:stop], left[r].owner, left[r].start - start)
            for r in ranks
        ]
        result, after = _exchanged(values, op, codec, given, n)
        parts.append(result)
        for r, one in zip(ranks, after, strict=True):
            left[r].worker[start:stop] = one.worker
            left[r].owner, left[r].start = one.owner, one.start + start
    return np.concatenate(parts), left


def reduce_scatter(
    inputs: Sequence[Array], op: str, codec: str, before: Sequence[Residuals] | None = None
) -> tuple[list[Array], list[Residuals]]:
    """(result of each rank, what is left on each rank). The result is not encoded again."""
    n, count = len(inputs), len(inputs[0]) // len(inputs)
    values = [x.astype(np.float32) for x in inputs]
    given = [Residuals.zero(len(inputs[0]))] * n if before is None else before
    left = [one.copy() for one in given]
    results = []
    for owner in range(n):
        part = slice(owner * count, (owner + 1) * count)
        total = _contributions(values, codec, left, owner, part)
        results.append(total * _scale(op, n))
    return results, left


def allgather(
    inputs: Sequence[Array], codec: str, before: Sequence[Residuals] | None = None
) -> tuple[Array, list[Residuals]]:
    """(all ranks' tensors as everyone decodes them, what is left on each rank)."""
    given = [Residuals.zero(len(inputs[0]))] * len(inputs) if before is None else before
    if len(inputs) == 1:
        return _flushed([inputs[0].astype(np.float32)], "sum", given)
    parts, left = [], []
    for x, one in zip(inputs, given, strict=True):
        with np.errstate(all="ignore"):
            c = x.astype(np.float32) + one.worker
        sent = encode(codec, c)
        parts.append(sent.decode())
        left.append(Residuals(left_of(c, sent), one.owner))
    return np.concatenate(parts), left


# ---- bytes ----


def allreduce_payload(codec: str, count: int, n: int, rank: int) -> int:
    """Bytes of payload that a rank sends in an all-reduce, without the frames' headers."""
    if n == 1:
        return 0
    if n == 2:
        return payload_bytes(codec, count)
    sizes = [payload_bytes(codec, stop - start) for start, stop in chunk_bounds(count, n)]
    return sum(sizes) - sizes[rank] + (n - 1) * sizes[rank]
