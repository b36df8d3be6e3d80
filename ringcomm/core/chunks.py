"""Sparse payloads of arrays: the largest elements of each chunk as bytes, sums of such bytes
(Entries), and optimizer steps of the elements that a sum has.

Calls csrc/sparse with checked arguments and with memory that is allocated here. Nothing in
this module communicates or keeps state between calls.

Invariants: arrays are float32, contiguous and of one dimension, which the caller ensures (as_view);
``put`` also writes to bfloat16.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError, ProtocolError, TensorError
from .faces import host_view
from .native import check, ffi, lib
from .views import View

Floats = np.ndarray[Any, np.dtype[np.float32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

VALUES = ("fp32", "bf16")
BLOCKS = (1, 16)
_MOST_CHUNK = 65536


@dataclasses.dataclass(frozen=True)
class Format:
    """Division of a tensor into chunks and blocks, and the part of each chunk that is sent.

    Attributes:
        chunk: elements of a chunk.
        block: elements that are chosen and sent together.
        kept: blocks of a chunk that are sent; of a short last chunk its share, rounded up.
        values: a name of VALUES.
    """

    chunk: int
    block: int
    kept: int
    values: str

    def __post_init__(self) -> None:
        if self.block not in BLOCKS:
            raise ConfigError(f"Invalid block: {self.block!r}: give 1 or 16 elements")
        if not _is_whole(self.chunk, 16, _MOST_CHUNK) or self.chunk % self.block:
            raise ConfigError(
                f"Invalid chunk: {self.chunk!r}: give 16 to {_MOST_CHUNK} elements, a multiple of "
                "the block"
            )
        if not _is_whole(self.kept, 1, self.chunk // self.block):
            raise ConfigError(
                f"Invalid k: of {self.kept!r} blocks of {self.block} elements; a chunk of "
                f"{self.chunk} has {self.chunk // self.block}"
            )
        if self.values not in VALUES:
            raise ConfigError(f"Invalid values: {self.values!r}: give {' or '.join(VALUES)}")

    def native(self) -> Any:
        """Makes the core's rc_sparse_format."""
        values = lib.RC_BF16 if self.values == "bf16" else lib.RC_F32
        return ffi.new("rc_sparse_format *", (self.chunk, self.block, self.kept, values))

    def record_bytes(self) -> int:
        """Returns the bytes of a whole chunk's record."""
        return int(lib.rc_sparse_record_bytes(self.native()))

    def payload_bytes(self, count: int) -> int:
        """Returns the payload bytes of a tensor of count elements."""
        return int(lib.rc_sparse_bytes(self.native(), count))

    def chunks(self, count: int) -> int:
        """Returns the number of chunks of a tensor of count elements."""
        return -(-count // self.chunk)


class Entries:
    """Sum of the blocks that all ranks sent of a tensor, in ascending order; the rest is zero.

    Attributes:
        format: chunk and block; its kept does not limit the number of blocks.
        count: elements of the tensor.
        counts: number of blocks of each chunk, uint32.
        index: number of each block in its chunk, uint16.
        values: elements of the blocks, float32[blocks, block]; the last block of the tensor may go
            past its end, with zeros there.
        poisoned: True if a value or a sum was not finite: all of the tensor is NaN on every rank.
    """

    def __init__(self, format: Format, count: int, most: int) -> None:
        self.format = format
        self.count = count
        self.counts = np.zeros(format.chunks(count), np.uint32)
        self.index = np.empty(most, np.uint16)
        self.values = np.empty((most, format.block), np.float32)
        self.poisoned = False

    def native(self) -> Any:
        """Makes the core's rc_sparse_entries, valid as long as this object's arrays."""
        return ffi.new(
            "rc_sparse_entries *",
            (
                _pointer(self.counts, "uint32_t *"),
                _pointer(self.index, "uint16_t *"),
                _pointer(self.values, "float *"),
            ),
        )

    def elements(self) -> int:
        """Returns the number of elements in the blocks."""
        return len(self.index) * self.format.block

    def scatter(self, out: Any = None) -> Any:
        """Writes the whole tensor, with zeros outside the blocks, to a new float32 array or to
        ``out``, and returns it. NaN everywhere if it is poisoned."""
        dense = np.empty(self.count, np.float32) if out is None else out
        return self._into(dense, lib.rc_sparse_scatter, ffi.NULL, self.native())

    def add_to(self, dense: Any, factor: float = 1.0) -> Any:
        """Adds factor times this to dense; NaN everywhere if it is poisoned."""
        return self._into(dense, lib.rc_sparse_add, self.native(), factor)

    def _into(self, dense: Any, function: Any, *arguments: Any) -> Any:
        """Has a function of the core write to a whole tensor; if this is poisoned, writes NaN."""
        seen = as_view(dense, self.count, writable=True)
        if self.poisoned:
            memory = ffi.buffer(_address(seen), seen.nbytes) if seen.count else b""
            np.frombuffer(memory, np.float32)[:] = np.nan
        else:
            _check(function(self.format.native(), *arguments, _address(seen), self.count))
        return _finished(seen)


def select(
    format: Format,
    kernel_set: str,
    wire: Bytes,
    left: Floats,
    residual: Floats,
    delta: View,
    decay: float,
) -> None:
    """Computes c = residual * decay + delta; writes its largest blocks to wire, the rest to left,
    which is invalid if a value that is sent is not finite."""
    _check(
        lib.rc_sparse_select(
            format.native(),
            kernel_set.encode(),
            _pointer(wire, "uint8_t *"),
            _pointer(left, "float *"),
            _pointer(residual, "float *"),
            _address(delta),
            decay,
            delta.count,
            ffi.new("int *"),  # join tells the same of all ranks' payloads
        )
    )


def join(
    format: Format,
    kernel_set: str,
    payloads: Sequence[Bytes] | Bytes,
    factor: float,
    count: int,
    first: int,
) -> Entries:
    """Sums payloads in their order, times factor; factor 0: divides each block by its senders.
    They are of successive ranks, from ``first`` on.

    Raises ProtocolError, with its rank, for a malformed payload.
    """
    native = format.native()
    out = Entries(format, count, int(lib.rc_sparse_most(native, count, len(payloads))))
    wires = ffi.new("uint8_t *[]", [_pointer(one, "uint8_t *") for one in payloads])
    total, flags = ffi.new("uint64_t *"), ffi.new("int[2]")
    result = lib.rc_sparse_join(
        native,
        kernel_set.encode(),
        wires,
        len(payloads),
        factor,
        count,
        out.native(),
        total,
        flags,
        flags + 1,
    )
    if result == lib.RC_PROTOCOL:
        rank = first + int(flags[1])
        raise ProtocolError(
            f"rank {rank} sent no sparse payload of this format: have all ranks the same k, chunk, "
            "block and values?",
            rank=rank,
        )
    _check(result)
    out.poisoned = bool(flags[0])
    if out.poisoned:
        out.counts[:] = 0
        total[0] = 0
    # Copies, which free the memory beyond the blocks that there are.
    out.index, out.values = out.index[: total[0]].copy(), out.values[: total[0]].copy()
    return out


# ---- optimizer steps of the received blocks only ----


@dataclasses.dataclass(frozen=True)
class SgdStep:
    """Parameters of one SGD step; see rc_sparse_sgd. number: of the step, from 1."""

    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool
    number: int


@dataclasses.dataclass(frozen=True)
class AdamStep:
    """Parameters of one Adam step; see rc_sparse_adam. decoupled: weight decay as in AdamW."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    number: int


def sgd(
    entries: Entries,
    kernel_set: str,
    step: SgdStep,
    weights: Floats,
    buffer: Floats | None,
    last: np.ndarray[Any, np.dtype[np.uint32]] | None,
) -> None:
    """Applies an SGD step to the weights of these blocks; buffer and last are None without
    momentum."""
    _check(
        lib.rc_sparse_sgd(
            entries.format.native(),
            kernel_set.encode(),
            entries.native(),
            ffi.new("rc_sparse_sgd_step *", dataclasses.astuple(step)),
            _pointer(weights, "float *"),
            entries.count,
            ffi.NULL if buffer is None else _pointer(buffer, "float *"),
            ffi.NULL if last is None else _pointer(last, "uint32_t *"),
        )
    )


def adam(
    entries: Entries,
    kernel_set: str,
    step: AdamStep,
    weights: Floats,
    first: Floats,
    second: Floats,
) -> None:
    """Applies an Adam step to the weights and moments of these blocks only."""
    _check(
        lib.rc_sparse_adam(
            entries.format.native(),
            kernel_set.encode(),
            entries.native(),
            ffi.new("rc_sparse_adam_step *", dataclasses.astuple(step)),
            _pointer(weights, "float *"),
            entries.count,
            _pointer(first, "float *"),
            _pointer(second, "float *"),
        )
    )


# ---- values of the blocks ----


def take(entries: Entries, dense: Floats) -> None:
    """Copies the blocks' values from dense."""
    _check(
        lib.rc_sparse_take(
            entries.format.native(), entries.native(), _pointer(dense, "float *"), entries.count
        )
    )


def put(entries: Entries, kernel_set: str, dense: Any) -> None:
    """Writes the blocks' values into a float32 or bfloat16 tensor in host memory."""
    seen = host_view(dense, writable=True)
    dtype = {"f32": lib.RC_F32, "bf16": lib.RC_BF16}[seen.dtype]
    _check(
        lib.rc_sparse_put(
            entries.format.native(),
            kernel_set.encode(),
            entries.native(),
            ffi.cast("void *", seen.address),
            dtype,
            entries.count,
        )
    )
    _finished(seen)


# ---- memory of arguments ----


def as_view(tensor: Any, count: int, *, writable: bool) -> View:
    """Makes a View of a float32 tensor in host memory with count elements. Raises TensorError."""
    seen = host_view(tensor, writable=writable)
    if seen.dtype != "f32" or seen.count != count:
        raise TensorError(
            f"it is {seen.dtype}[{seen.count}]; a sparse exchange of {count} elements takes "
            f"f32[{count}]"
        )
    return seen


def _finished(seen: View) -> Any:
    if seen.finish is not None:
        seen.finish()
    return seen.owner


def _is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _pointer(array: np.ndarray[Any, Any], kind: str) -> Any:
    return ffi.cast(kind, array.ctypes.data)


def _address(seen: View) -> Any:
    return ffi.cast("float *", seen.address)


_check = functools.partial(check, about="the sparse kernels: ")
