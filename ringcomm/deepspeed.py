"""1-bit all-reduce exactly as DeepSpeed publishes it: ``compression="onebit-deepspeed"``.

For training that must repeat what DeepSpeed's 1-bit optimizers do. "onebit" is the better codec: it
has a scale for every 256 elements, sends them as they are encoded, and keeps exact zeros.

With P the number of elements padded up to a multiple of N lcm(N, 8), N ranks, and chunks of P / N,
all in float32, each operation rounded:

    c = x padded with 0 + worker error          P elements, the errors of the padding too
    s = ||c|| / sqrt(P)                         one scale for the whole tensor
    worker error = c - s sgn(c)                 sgn of both zeros is 1
    rank j gets s and the signs of chunk j      of every rank, its own among them
    m = sum of sgn (s 1/N) + server error       in order of rank; m: of the rank's own chunk
    t = ||m|| / sqrt(P / N)
    server error = m - t sgn(m)
    all ranks get t and the signs               and have t sgn(m) as the chunk's mean

DeepSpeed leaves the order of the sum in ||c|| open, which in float32 shows. Here it is made in
float64, where it hardly ever does: 32 lanes, of which lane i adds the squares of the elements i,
i + 32, ..., are added half to half until one is left. Both roots are rounded before the division.

It is made of an all-to-all and an all-gather, with numpy, which nothing can be submitted between:
so it is always waited for. It is for exactness, and has none of the core's speed.

Invariants: errors change only if the result is finite on every rank: what DeepSpeed would keep from
a NaN would never leave it again. A scale that is not finite makes that of each chunk's mean so, and
all ranks see those. Whether tensors are of one size and dtype, all ranks tell from the same heads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from ._native import ffi
from .buffers import DTYPES, View
from .calls import Feedback
from .errors import MismatchError
from .residuals import Floats, Padding, Residuals

if TYPE_CHECKING:
    from .communicator import Communicator
    from .work import Work

_Array = np.ndarray[Any, Any]
_LEAST_SECONDS = 0.001
_LANES = 32  # as in the core's sums of squares
_PIECE = 2048 * _LANES  # elements that stay in a cache


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Who owns what of a tensor of so many elements.

    Attributes:
        padded: elements with the padding, P above.
        chunk: elements of a chunk.
        start, stop: of the tensor's elements, those in this rank's chunk, if any.
    """

    count: int
    world_size: int
    rank: int

    @property
    def chunk(self) -> int:
        """P / N."""
        step = math.lcm(self.world_size, 8)
        return -(-self.count // (step * self.world_size)) * step

    @property
    def padded(self) -> int:
        """P."""
        return self.chunk * self.world_size

    @property
    def start(self) -> int:
        """Index of this rank's first element."""
        return min(self.rank * self.chunk, self.count)

    @property
    def stop(self) -> int:
        """Index after its last one."""
        return min((self.rank + 1) * self.chunk, self.count)

    @property
    def no_padding_left(self) -> Padding:
        """What is left in the padding before the first call."""
        sizes = self.padded - self.count, self.chunk - (self.stop - self.start)
        zeros = (np.zeros(size, np.float32) for size in sizes)
        return Padding((self.world_size, self.rank), *zeros)


@dataclasses.dataclass
class _Errors:
    worker: Floats  # [P]
    server: Floats  # [P / N]


def allreduce(
    comm: Communicator, name: str, src: View, dst: View, feedback: Feedback, seconds: float
) -> Any:
    """The average of src over all ranks, to dst, which may be src. Waits for it.

    Args:
        name: of the call, for messages.
        src: float32 or, rounded to it first, float64; at least one element.
        feedback: has the errors, and gets the new ones; a checked one, or none.
        seconds: until it fails.

    Returns:
        The tensor that holds the result.

    Raises:
        MismatchError: the ranks' sizes or dtypes differ. If only the padding made up for that, all
            ranks raise it, and the communicator goes on.
        ConfigError: another thread uses the feedback.
        RingcommError: it failed; the class says how.
    """
    chunks = Chunks(src.count, comm.world_size, comm.rank)
    kept = feedback if isinstance(feedback, Residuals) else None
    with kept.taken() if kept is not None else contextlib.nullcontext(), np.errstate(all="ignore"):
        errors = _recall(chunks, kept)
        mean = _exchange(_Call(comm, name, seconds), chunks, src, errors)
        _memory(dst)[:] = np.nan if mean is None else mean[: src.count]
        if kept is not None and mean is not None:
            _keep(chunks, kept, errors)
    if dst.finish is not None:
        dst.finish()
    return dst.owner


# ---- the exchange ----


class _Call:
    """The collectives of one call, by one name and with one deadline."""

    def __init__(self, comm: Communicator, name: str, seconds: float) -> None:
        self.comm, self.name = comm, name
        self._deadline = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(_LEAST_SECONDS, self._deadline - time.monotonic())

    def wait(self, work: Work, rows: _Array) -> _Array:
        """What the work brings, in rows such as those that it sent."""
        work.name = self.name
        got: _Array = work.wait().reshape(-1).view(rows.dtype)
        return got


def _exchange(call: _Call, chunks: Chunks, src: View, errors: _Errors) -> Floats | None:
    """The mean, padding included, or None if it is not finite. Replaces the errors."""
    compensated = errors.worker
    compensated[: chunks.count] += _memory(src).astype(np.float32)
    scale, positive = _scale(compensated), _positive(compensated)
    compensated -= _values(scale, positive)
    server = _sum(_all_to_all(call, chunks, src, scale, positive), chunks)
    server += errors.server
    scale, positive = _scale(server), _positive(server)
    errors.server = server - _values(scale, positive)
    parts = _all_gather(call, chunks, scale, positive)
    if not np.isfinite(parts["scale"]).all():
        return None
    return np.concatenate([_decode(part["scale"], part) for part in parts])


def _all_to_all(
    call: _Call, chunks: Chunks, src: View, scale: np.float32, positive: _Array
) -> _Array:
    """Every rank's scale and signs of this rank's chunk."""
    about = np.uint64(DTYPES[src.dtype] << 56 | chunks.count)
    rows = np.zeros(chunks.world_size, [("scale", "<f4"), ("about", "<u8"), _bits(chunks)])
    rows["scale"], rows["about"] = scale, about
    rows["bits"] = np.packbits(positive).reshape(chunks.world_size, -1)
    every = call.wait(call.comm.alltoall(_bytes(rows), async_op=True, timeout=call.left), rows)
    for rank in np.flatnonzero(every["about"] != about):
        there = int(every["about"][rank])
        dtype = next((name for name, code in DTYPES.items() if code == there >> 56), "?")
        raise MismatchError(
            f"{call.name}: rank {rank} has called allreduce({dtype}[{there & (1 << 56) - 1}])",
            rank=int(rank),
        )
    return every


def _all_gather(call: _Call, chunks: Chunks, scale: np.float32, positive: _Array) -> _Array:
    """Scale and signs of every chunk's mean."""
    row = np.zeros(1, [("scale", "<f4"), _bits(chunks)])
    row["scale"], row["bits"] = scale, np.packbits(positive)
    return call.wait(call.comm.allgather(_bytes(row)[0], async_op=True, timeout=call.left), row)


def _bits(chunks: Chunks) -> tuple[str, str, tuple[int]]:
    return ("bits", "u1", (chunks.chunk // 8,))


def _bytes(rows: _Array) -> _Array:
    return rows.view(np.uint8).reshape(len(rows), -1)


# ---- arithmetic ----


def sum_of_squares(x: Floats) -> float:
    """In float64 and the order that is given above."""
    lanes = np.zeros(_LANES)
    for start in range(0, len(x), _PIECE):
        piece = x[start : start + _PIECE]
        rows = np.zeros((-(-len(piece) // _LANES), _LANES))
        rows.reshape(-1)[: len(piece)] = piece
        rows *= rows
        rows[0] += lanes
        lanes = rows.sum(axis=0)  # one row after the other
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return float(lanes[0])


def _scale(x: Floats) -> np.float32:
    norm = np.float32(math.sqrt(sum_of_squares(x)))
    scale: np.float32 = norm / np.float32(math.sqrt(len(x)))
    return scale


def _positive(x: Floats) -> _Array:
    signs: _Array = ~(x < 0)
    return signs


def _values(scale: np.float32, positive: _Array) -> Floats:
    return np.where(positive, scale, -scale)


def _decode(scale: np.float32, row: Any) -> Floats:
    return _values(scale, np.unpackbits(row["bits"]).view(np.bool_))


def _sum(every: _Array, chunks: Chunks) -> Floats:
    share = np.float32(1 / chunks.world_size)
    total = _decode(every[0]["scale"] * share, every[0])
    for row in every[1:]:
        total += _decode(row["scale"] * share, row)
    return total


def _memory(view: View) -> _Array:
    memory = ffi.buffer(ffi.cast("char *", view.address), view.nbytes)
    return np.frombuffer(memory, np.float64 if view.dtype == "f64" else np.float32)


# ---- errors ----


def _recall(chunks: Chunks, kept: Residuals | None) -> _Errors:
    """The errors to begin with. What is left of the results by another map of parts joins the
    worker's: what a rank would add to the mean it may as well contribute."""
    worker, server = np.zeros(chunks.padded, np.float32), np.zeros(chunks.chunk, np.float32)
    if kept is None:
        return _Errors(worker, server)
    worker[: chunks.count] = kept.worker
    owner, start = kept.owner, kept.owner_start
    if (start, start + len(owner)) == (chunks.start, chunks.stop):
        server[: len(owner)] = owner
    else:
        worker[start : start + len(owner)] += owner * np.float32(chunks.world_size)
    padding = kept.padding
    if padding is not None and padding.place == (chunks.world_size, chunks.rank):
        worker[chunks.count :] = padding.worker
        server[chunks.stop - chunks.start :] = padding.owner
    return _Errors(worker, server)


def _keep(chunks: Chunks, kept: Residuals, errors: _Errors) -> None:
    own = chunks.stop - chunks.start
    padding = Padding(
        (chunks.world_size, chunks.rank), errors.worker[chunks.count :], errors.server[own:]
    )
    kept.load(errors.worker[: chunks.count], errors.server[:own], chunks.start, padding)
