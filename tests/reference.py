"""Every collective in numpy, in the order and with the rounding that the project promises.

Written from the contracts alone (plan.h for who adds when, codec.h for what is rounded when,
kernels.h for the elementwise rules), so that it and the core can only agree by both being right.

    chunk c of an all-reduce lies at [c * size, (c + 1) * size), size = count/N rounded up to 256
    its sum starts at rank c and goes round the ring: ((x_c + x_c+1) + x_c+2) + ... + x_c-1
    16-bit wires: each hop widens to f32, adds, and rounds once to nearest even
    direct and one-shot add in order of rank, and round each contribution once

Arrays are flat. bfloat16 is np.uint16 holding the bits; the dtype travels beside the array as one
of the names in NUMPY. Nothing here is fast, and nothing needs to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

NUMPY: dict[str, Any] = {
    "f16": np.float16, "bf16": np.uint16, "f32": np.float32, "f64": np.float64,
    "i8": np.int8, "u8": np.uint8, "i32": np.int32, "i64": np.int64,
}  # fmt: skip
OPS = ("sum", "avg", "min", "max", "prod")
ALIGN = 256


# ---- 16-bit floats ----


def bf16_bits(x: Array) -> Array:
    """float32 to bfloat16 bits, to nearest even; every NaN becomes 0x7fc0."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    kept, dropped = bits >> 16, bits & 0xFFFF
    up = (dropped > 0x8000) | ((dropped == 0x8000) & (kept & 1 == 1))
    return np.where(np.isnan(x), 0x7FC0, kept + up).astype(np.uint16)


def bf16_value(bits: Array) -> Array:
    """bfloat16 bits to float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fp16_bits(x: Array) -> Array:
    """float32 to float16 bits, to nearest even, overflow to infinity; NaN becomes 0x7e00."""
    return np.where(np.isnan(x), 0x7E00, x.astype(np.float16).view(np.uint16)).astype(np.uint16)


def fp16_value(bits: Array) -> Array:
    """float16 bits to float32, exactly."""
    return bits.view(np.float16).astype(np.float32)


def as_f32(x: Array, dtype: str) -> Array:
    """Elements of a tensor of dtype as float32; float64 is rounded to nearest even."""
    return bf16_value(x) if dtype == "bf16" else x.astype(np.float32)


# ---- one hop ----


def combine(op: str, a: Array, b: Array) -> Array:
    """a op b in their own dtype. Integers wrap; min and max give NaN if either operand is."""
    if op in ("sum", "avg"):
        return a + b
    if op == "prod":
        return a * b
    chosen = (a < b) if op == "min" else (a > b)
    return np.where(chosen | (a != a), a, b)


def divided(x: Array, n: int) -> Array:
    """Integers divided by n, truncated towards zero."""
    quotient = x // n
    return (quotient + ((x % n != 0) & (x < 0))).astype(x.dtype)


class Wire:
    """How elements of one dtype travel under one op and codec in a world of n."""

    def __init__(self, dtype: str, op: str, codec: str, n: int) -> None:
        self.dtype, self.op, self.n = dtype, op, n
        own = {"f16": "fp16", "bf16": "bf16"}.get(dtype)
        self.half = own if codec == "none" else codec
        share = np.float32(1.0 / n) if op == "avg" else np.float32(1.0)
        self.before = share if self.half == "fp16" else np.float32(1.0)
        self.after = share if self.half == "bf16" else np.float32(1.0)

    def _encode(self, x: Array) -> Array:
        return bf16_bits(x) if self.half == "bf16" else fp16_bits(x)

    def _decode(self, wire: Array) -> Array:
        return bf16_value(wire) if self.half == "bf16" else fp16_value(wire)

    @property
    def _bits_stay(self) -> bool:
        """The wire holds the tensor's own bits."""
        return self.half is None or self.dtype in ("f16", "bf16")

    def pack(self, x: Array) -> Array:
        """What the first rank of a path sends."""
        if self._bits_stay and self.before == 1.0:
            return x if self.half is None else x.view(np.uint16)
        return self._encode(as_f32(x, self.dtype) * self.before)

    def reduce(self, wire: Array, x: Array, last: bool) -> Array:
        """What the next rank makes of it with its own x."""
        if self.half is not None:
            mine = as_f32(x, self.dtype) * self.before
            total = combine(self.op, self._decode(wire), mine)
            return self._encode(total * self.after if last else total)
        total = combine(self.op, wire, x)
        if not last or self.op != "avg":
            return total
        if self.dtype in ("f32", "f64"):
            return total * NUMPY[self.dtype](1.0 / self.n)
        return divided(total, self.n)

    def join(self, inputs: Sequence[Array], travels: bool) -> Array:
        """All ranks' inputs in order of rank; travels: the result is sent on by one rank."""
        if self.half is None:
            total = inputs[0]
            for position, x in enumerate(inputs[1:], start=2):
                total = self.reduce(total, x, last=position == self.n)
            if self.dtype in ("f32", "f64"):
                total = np.where(np.isnan(total), NUMPY[self.dtype]("nan"), total)
            return total
        with np.errstate(all="ignore"):
            values = [self._decode(self.pack(x)) for x in inputs]
            total = values[0]
            for value in values[1:]:
                total = combine(self.op, total, value)
            total = total * self.after
            if travels or self._bits_stay:
                return self.unpack(self._encode(total))
            total = total.astype(NUMPY[self.dtype])
            return np.where(np.isnan(total), NUMPY[self.dtype]("nan"), total)

    def unpack(self, wire: Array) -> Array:
        """What every rank stores of the result."""
        if self._bits_stay:
            return wire.view(NUMPY[self.dtype])
        return self._decode(wire).astype(NUMPY[self.dtype])

    def kept(self, x: Array) -> Array:
        """What is left of x when it travels without being reduced."""
        return x if self.n == 1 else self.unpack(self.pack(x))


# ---- collectives: the inputs of all ranks in, the output of a rank out ----


def chunk_bounds(count: int, n: int) -> list[tuple[int, int]]:
    """Where the chunks of an all-reduce start and stop."""
    share = (count + n - 1) // n
    size = (share + ALIGN - 1) // ALIGN * ALIGN
    return [(min(c * size, count), min((c + 1) * size, count)) for c in range(n)]


def along(path: Sequence[int], inputs: Sequence[Array], wire: Wire) -> Array:
    """The inputs reduced in the order of the path, as every rank decodes the result."""
    if len(path) == 1:
        return inputs[path[0]]
    with np.errstate(all="ignore"):
        moving = wire.pack(inputs[path[0]])
        for position, rank in enumerate(path[1:], start=2):
            moving = wire.reduce(moving, inputs[rank], last=position == len(path))
        return wire.unpack(moving)


def ring(first: int, n: int) -> list[int]:
    """All ranks in ring order from first."""
    return [(first + i) % n for i in range(n)]


Table = Sequence[tuple[int, str]]


def choose(payload: int, n: int, table: Table = ()) -> str:
    """The algorithm for an all-reduce of that many bytes as they travel: what the first row of the
    table says that reaches so far, or else times in ns of a hop (50 us), of a further message in it
    (10 us), and of a byte at 1 Gbit/s."""
    tuned = next((name for up_to, name in table if payload <= up_to), "auto")
    if tuned != "auto":
        return "ring" if n == 1 else tuned
    hops, bytes_ = 50e3 + (n - 2) * 10e3, payload / 0.117
    ring = 2 * (n - 1) * 50e3 + 2 * (n - 1) / n * bytes_
    direct = 2 * hops + 2 * (n - 1) / n * bytes_
    saved = 2 * (n - 1) * 50e3 - (hops if n == 2 else 2 * hops)
    if n == 1 or saved < 0.05 * ring:
        return "ring"
    return "one_shot" if hops + (n - 1) * bytes_ <= direct else "direct"


def allreduce(
    inputs: Sequence[Array], dtype: str, op: str, codec: str = "none", algorithm: str = "auto",
    table: Table = (),
) -> Array:
    """What every rank gets."""
    n = len(inputs)
    wire = Wire(dtype, op, codec, n)
    if algorithm == "auto":
        algorithm = choose(len(inputs[0]) * wire_bytes(dtype, codec), n, table)
    if algorithm != "ring" and n > 1:
        with np.errstate(all="ignore"):
            return wire.join(inputs, travels=algorithm == "direct")
    parts = [
        along(ring(c, n), [x[start:stop] for x in inputs], wire)
        for c, (start, stop) in enumerate(chunk_bounds(len(inputs[0]), n))
    ]
    return np.concatenate(parts)


def reduce(inputs: Sequence[Array], dtype: str, op: str, root: int, codec: str = "none") -> Array:
    """What root gets."""
    n = len(inputs)
    return along(ring(root + 1, n), inputs, Wire(dtype, op, codec, n))


def reduce_scatter(
    inputs: Sequence[Array], dtype: str, op: str, codec: str = "none"
) -> list[Array]:
    """What each rank gets of the n equal parts."""
    n = len(inputs)
    wire, size = Wire(dtype, op, codec, n), len(inputs[0]) // n
    return [
        along(ring(r + 1, n), [x[r * size : (r + 1) * size] for x in inputs], wire)
        for r in range(n)
    ]


def allgather(inputs: Sequence[Array], dtype: str, codec: str = "none") -> Array:
    """What every rank gets (with gather: what root gets), in order of rank."""
    wire = Wire(dtype, "sum", codec, len(inputs))
    return np.concatenate([wire.kept(x) for x in inputs])


def alltoall(inputs: Sequence[Array], dtype: str, codec: str = "none") -> list[Array]:
    """What each rank gets."""
    n = len(inputs)
    wire, size = Wire(dtype, "sum", codec, n), len(inputs[0]) // n
    return [
        np.concatenate([wire.kept(x[r * size : (r + 1) * size]) for x in inputs]) for r in range(n)
    ]


# ---- bytes ----


def wire_bytes(dtype: str, codec: str) -> int:
    """Bytes of one element on the wire."""
    return 2 if codec != "none" else np.dtype(NUMPY[dtype]).itemsize


def allreduce_payload(count: int, n: int, rank: int, item: int, table: Table = ()) -> int:
    """Bytes of payload that a rank sends: every chunk on each hop that starts at it; where it is
    not a ring, everything to everyone, or to each its part and to all its own part's result."""
    bounds = chunk_bounds(count, n)
    algorithm = choose(count * item, n, table)
    if algorithm == "one_shot":
        return (n - 1) * count * item
    if algorithm == "direct":
        own = bounds[rank][1] - bounds[rank][0]
        return (count - own + (n - 1) * own) * item
    hops = 2 * (n - 1)
    chunks = [c for c in range(n) for position in range(hops) if (c + position) % n == rank]
    return sum(bounds[c][1] - bounds[c][0] for c in chunks) * item
