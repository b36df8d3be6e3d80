"""Every collective in numpy, in the order and with the rounding that the project promises.

Written from the contracts alone (plan.h for who adds when, codec.h for what is rounded when,
kernels.h for the elementwise rules), so that it and the core can only agree by both being right.

    chunk c of an all-reduce lies at [c * size, (c + 1) * size), size = count/N rounded up to 256
    its sum starts at rank c and goes round the ring: ((x_c + x_c+1) + x_c+2) + ... + x_c-1
    16-bit wires: a contribution is what its rank would send; each hop widens to f32, adds, and
    rounds once to nearest even
    direct and one-shot add in order of rank, and round each contribution once
    doubling adds neighbours, then neighbouring pairs, ...: (x_0 + x_1) + (x_2 + x_3); where N is no
    power of two, first pairs from the front until one is left
    halving adds part c at rank c, from afar: what lies s or more ranks before it goes s ahead, for
    s = N halved and rounded up, again and again

Arrays are flat. bfloat16 is np.uint16 holding the bits; the dtype travels beside the array as one
of the names in NUMPY. Nothing here is fast, and nothing needs to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

NUMPY: dict[str, Any] = {
    "f16": np.float16,
    "bf16": np.uint16,
    "f32": np.float32,
    "f64": np.float64,
    "i8": np.int8,
    "u8": np.uint8,
    "i32": np.int32,
    "i64": np.int64,
}
OPS = ("sum", "avg", "min", "max", "prod")
ALIGN = 256


# ---- 16-bit floats ----


def bf16_bits(x: Array) -> Array:
    """float32 to bfloat16 bits, to nearest even; every NaN becomes 0x7fc0."""
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16  # only those of a NaN could run over
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


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
    quotient = x // np.int64(n)
    return (quotient + ((x % np.int64(n) != 0) & (x < 0))).astype(x.dtype)


class Wire:
    """How elements of one dtype travel under one op and codec in a world of n.

    finishes: an average ends here; else its values go on to another Wire.
    """

    def __init__(self, dtype: str, op: str, codec: str, n: int, finishes: bool = True) -> None:
        self.dtype, self.op, self.n = dtype, op, n
        own = {"f16": "fp16", "bf16": "bf16"}.get(dtype)
        self.half = own if codec == "none" else codec
        share = np.float32(1.0 / n) if op == "avg" else np.float32(1.0)
        self.before = share if self.half == "fp16" else np.float32(1.0)
        self.after = share if self.half == "bf16" and finishes else np.float32(1.0)
        self.finishes = finishes

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
            total = combine(self.op, self._decode(wire), self._decode(self.pack(x)))
            return self._encode(total * self.after if last else total)
        total = combine(self.op, wire, x)
        if not last or self.op != "avg" or not self.finishes:
            return total
        if self.dtype in ("f32", "f64"):
            return total * NUMPY[self.dtype](1.0 / self.n)
        return divided(total, self.n)

    def merge(self, first: Array, second: Array, last: bool) -> Array:
        """Two sums that both travelled."""
        if self.half is not None:
            total = combine(self.op, self._decode(first), self._decode(second))
            return self._encode(total * self.after if last else total)
        total = combine(self.op, first, second)
        if not last:
            return total
        if self.dtype in ("f32", "f64"):
            total = total * NUMPY[self.dtype](1.0 / self.n) if self.op == "avg" else total
            return np.where(np.isnan(total), NUMPY[self.dtype]("nan"), total)
        return divided(total, self.n) if self.op == "avg" else total

    def join(self, inputs: Sequence[Array]) -> Array:
        """All ranks' inputs in order of rank."""
        if self.half is None:
            total = inputs[0]
            for position, x in enumerate(inputs[1:], start=2):
                total = self.reduce(total, x, last=position == len(inputs))
            if self.dtype in ("f32", "f64"):
                total = np.where(np.isnan(total), NUMPY[self.dtype]("nan"), total)
            return total
        with np.errstate(all="ignore"):
            values = [self._decode(self.pack(x)) for x in inputs]
            total = values[0]
            for value in values[1:]:
                total = combine(self.op, total, value)
            return self.unpack(self._encode(total * self.after))

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


def doubling(inputs: Sequence[Array], wire: Wire) -> Array:
    """What every rank decodes: sums of neighbours, pairwise."""
    n = len(inputs)
    surplus = n - (1 << (n.bit_length() - 1))
    with np.errstate(all="ignore"):
        sums = [
            wire.reduce(wire.pack(inputs[2 * i]), inputs[2 * i + 1], last=False)
            for i in range(surplus)
        ] + [wire.pack(x) for x in inputs[2 * surplus :]]
        while len(sums) > 1:
            pairs = zip(sums[::2], sums[1::2], strict=True)
            sums = [wire.merge(a, b, last=len(sums) == 2) for a, b in pairs]
        return wire.unpack(sums[0])


def halving(owner: int, inputs: Sequence[Array], wire: Wire) -> Array:
    """A part as every rank decodes it: in each round the farther half before the owner sends."""
    n = len(inputs)
    own = [inputs[(owner - distance) % n] for distance in range(n)]
    sums: list[Array | None] = [None] * n
    left = n
    with np.errstate(all="ignore"):
        while left > 1:
            half = (left + 1) // 2
            for distance in range(half, left):
                taken, to = sums[distance], distance - half
                sent = wire.pack(own[distance]) if taken is None else taken
                had, last = sums[to], half == 1
                sums[to] = (
                    wire.reduce(sent, own[to], last) if had is None else wire.merge(sent, had, last)
                )
            left = half
        total = sums[0]
        assert total is not None
        return wire.unpack(total)


def choose(payload: int, n: int) -> str:
    """The algorithm for an all-reduce of that many bytes as they travel over links of unknown
    speed: times in ns of a hop (50 us), of a further message in it (25 us), and of a byte at 1
    Gbit/s."""
    if n == 1:
        return "ring"
    hop, exchange, bytes_ = 50e3, 50e3 + (n - 2) * 25e3, payload / 0.117
    shared, down, up = 2 * (n - 1) / n * bytes_, n.bit_length() - 1, (n - 1).bit_length()
    ring = 2 * (n - 1) * hop + shared
    times = {
        "one_shot": exchange + (n - 1) * bytes_,
        "doubling": (down + 2 * (up - down)) * (hop + bytes_),
        "direct": 2 * exchange + shared,
        "halving": 2 * up * hop + shared,
    }
    best = min(times, key=lambda name: times[name])
    return "ring" if ring - times[best] < 0.05 * ring else best


def choose_shared(payload: int, n: int) -> str:
    """The algorithm through shared memory: times in ns of a hop (1 us) and of a byte at 8 GB/s."""
    if n == 1:
        return "ring"
    one_shot = 1e3 + n * payload / 8
    direct = 2e3 + (3 * (n - 1) + 1) / n * payload / 8
    return "one_shot" if one_shot <= direct else "direct"


def reduced(inputs: Sequence[Array], wire: Wire, algorithm: str) -> Array:
    """What every rank gets by one algorithm."""
    n = len(inputs)
    if algorithm == "doubling" and n > 1:
        return doubling(inputs, wire)
    if algorithm in ("direct", "one_shot") and n > 1:
        with np.errstate(all="ignore"):
            return wire.join(inputs)
    parts = []
    for c, (start, stop) in enumerate(chunk_bounds(len(inputs[0]), n)):
        part = [x[start:stop] for x in inputs]
        halves = algorithm == "halving" and n > 1
        parts.append(halving(c, part, wire) if halves else along(ring(c, n), part, wire))
    return np.concatenate(parts)


def among_hosts(inputs: Sequence[Array], dtype: str, op: str, codec: str, local: int) -> Array:
    """Joined on each host, uncompressed; then each of its ranks' chunks reduced among hosts."""
    n = len(inputs)
    within = Wire(dtype, op, "none", n, finishes=False)
    across = Wire(dtype, op, codec, n)
    if within.before != 1.0:
        across.before = np.float32(1.0)  # it is in the values by now
    with np.errstate(all="ignore"):
        hosts = [within.join(inputs[h : h + local]) for h in range(0, n, local)]
    parts = []
    for start, stop in chunk_bounds(len(inputs[0]), local):
        algorithm = choose((stop - start) * wire_bytes(dtype, codec), len(hosts))
        parts.append(reduced([host[start:stop] for host in hosts], across, algorithm))
    return np.concatenate(parts)


def chosen(payload: int, n: int, algorithm: str, memory: int = 0) -> str:
    """What "auto" stands for in an all-reduce of that many bytes as they travel."""
    if algorithm == "auto" and memory > 1 and payload:
        return "among hosts" if memory < n else choose_shared(payload, n)
    return choose(payload, n) if algorithm == "auto" else algorithm


def allreduce(
    inputs: Sequence[Array],
    dtype: str,
    op: str,
    codec: str = "none",
    algorithm: str = "auto",
    memory: int = 0,
) -> Array:
    """What every rank gets; memory: so many ranks in succession share that of their host."""
    n, payload = len(inputs), len(inputs[0]) * wire_bytes(dtype, codec)
    algorithm = chosen(payload, n, algorithm, memory)
    if algorithm == "among hosts":
        return among_hosts(inputs, dtype, op, codec, memory)
    return reduced(inputs, Wire(dtype, op, codec, n), algorithm)


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


def allreduce_payload(count: int, n: int, rank: int, item: int) -> int:
    """Bytes of payload that a rank sends: every chunk on each hop that starts at it; where it is
    not a ring, everything to everyone, to each its part and to all its own part's result,
    everything once in each round, or each part up and down its tree."""
    bounds = chunk_bounds(count, n)
    algorithm = choose(count * item, n)
    if algorithm == "one_shot":
        return (n - 1) * count * item
    if algorithm == "direct":
        own = bounds[rank][1] - bounds[rank][0]
        return (count - own + (n - 1) * own) * item
    if algorithm == "doubling":
        surplus = n - (1 << (n.bit_length() - 1))
        sits_out, stands_in = (rank < 2 * surplus and rank % 2 == odd for odd in (0, 1))
        return (1 if sits_out else n.bit_length() - 1 + stands_in) * count * item
    if algorithm == "halving":
        sent, left = 0, n
        while left > 1:
            half = (left + 1) // 2
            for c, (start, stop) in enumerate(bounds):
                distance = (c - rank) % n
                up, down = half <= distance < left, distance + half < left
                sent += (up + down) * (stop - start) * item
            left = half
        return sent
    hops = 2 * (n - 1)
    chunks = [c for c in range(n) for position in range(hops) if (c + position) % n == rank]
    return sum(bounds[c][1] - bounds[c][0] for c in chunks) * item
