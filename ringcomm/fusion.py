"""Fusion of many tensors into few all-reduces, for allreduce_many.

A small tensor costs its hops, hardly its bytes; hundreds of them, one after the other, cost
hundreds of times as much. So the small ones of a dtype are copied into one buffer, reduced there,
and copied back. Large ones are reduced alone, in place: a copy would cost more than it saves.

Invariants: the grouping depends on the order, dtypes and sizes of the tensors alone, which are
the same on all ranks. Everything is checked before anything is sent.
"""

from __future__ import annotations

import array
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from .codecs import BLOCK, Codec, parse
from .core.calls import Feedback, naming, require_compressible, require_feedback
from .core.dispatch import Dispatcher
from .core.faces import view
from .core.native import ffi, lib
from .core.residuals import Residuals
from .core.views import ITEM_BYTES, DeviceView, PackedView, View, common_device, laid_out
from .core.work import Work
from .errors import CommTimeoutError, ConfigError, RingcommError, TensorError

SMALL_BYTES = 256 << 10  # tensors below this share a buffer
MOST_BYTES = 16 << 20  # most bytes of one buffer


class Works:
    """Several works in flight as one, as returned by ``allreduce_many`` with ``async_op=True``.

    Attributes:
        works, result: as given.
    """

    def __init__(self, works: Sequence[Work], result: list[Any]) -> None:
        self.works = works
        self.result = result

    @naming("allreduce_many()")
    def wait(self, timeout: float | None = None) -> list[Any]:
        """Waits for all of them and returns the tensors; otherwise as ``Work.wait``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for work in self.works:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                work.wait(left)
            except CommTimeoutError as error:
                if work.done() or timeout is None:
                    raise
                raise CommTimeoutError(
                    f"{work.name} #{work.seq}, one of {len(self.works)}, is still in flight after "
                    f"{timeout:g} s; it goes on",
                    seq=work.seq,
                    elapsed=timeout,
                ) from error
        return self.result

    def done(self) -> bool:
        """True once all are over, well or not. Never waits."""
        return all(work.done() for work in self.works)

    def exception(self) -> RingcommError | None:
        """Returns the first failure, or None if there is none (yet). Never waits."""
        return next((error for work in self.works if (error := work.exception())), None)


@naming("allreduce_many()")
def allreduce_many(
    comm: Dispatcher,
    tensors: list[Any],
    op: str,
    compression: str | None,
    feedback: Sequence[Residuals] | Literal[False] | None,
    async_op: bool,
    timeout: float | None,
    out: list[Any] | None = None,
) -> Any:
    """Implements Communicator.allreduce_many. ``out``: tensors in host memory, one like each of
    ``tensors``, that are given the results and returned; ``tensors`` are only read then."""
    results = tensors if out is None else out
    views = [view(tensor, writable=out is None) for tensor in tensors]
    written = views if out is None else [view(tensor, writable=True) for tensor in results]
    common_device([*views, *written])
    _require_distinct(written)
    codec = parse(compression)
    for one in views:
        require_compressible(compression, one.dtype)
    pairs = list(zip(views, written, strict=True))
    if feedback is None or feedback is False:
        require_feedback(codec, feedback)
        align = BLOCK if codec.quantises else 1
        pairs = [_pack(batch, align) for batch in _batches(pairs)]
        each: Sequence[Feedback] = [feedback] * len(pairs)
    else:
        each = _require_one_each(codec, op, feedback, views)
    works = [
        comm.run_collective(
            lib.RC_ALLREDUCE,
            src,
            dst,
            src.count,
            op=op,
            compression=compression,
            feedback=its,
            async_op=True,
            timeout=timeout,
        )
        for (src, dst), its in zip(pairs, each, strict=True)
    ]
    together = Works(works, results)
    return together if async_op else together.wait()


def as_list(tensors: Any) -> list[Any]:
    """Returns the tensors as a list. Raises TensorError for a single tensor, a mapping, and
    objects that are no list of tensors."""
    single = isinstance(tensors, np.generic) or any(
        hasattr(tensors, name)
        for name in ("__array_interface__", "__cuda_array_interface__", "__dlpack__")
    )
    if single or isinstance(tensors, (bytes, bytearray, memoryview, array.array)):
        raise TensorError(
            "allreduce_many takes a list of tensors, and this is one; for one there is allreduce"
        )
    if isinstance(tensors, Mapping):
        raise TensorError(
            "allreduce_many takes a list of tensors; give those of this mapping in an order that "
            "is the same on all ranks, as by [d[name] for name in sorted(d)]"
        )
    if isinstance(tensors, str) or not isinstance(tensors, Iterable):
        raise TensorError(f"allreduce_many takes a list of tensors, not {tensors!r}")
    return list(tensors)


def _require_one_each(
    codec: Codec, op: str, feedback: Sequence[Residuals], views: Sequence[View]
) -> Sequence[Residuals]:
    """Returns feedback if it has one ErrorFeedback for each tensor, which can use it; else raises
    ConfigError, or TensorError, before anything was sent."""
    if not isinstance(feedback, Sequence) or len(feedback) != len(views):
        hint = ""
        if type(feedback).__name__ == "FeedbackStore":
            hint = ": of a FeedbackStore [store[name] for name in names]"
        raise ConfigError(
            f"feedback={feedback!r}: give a list of as many ErrorFeedbacks as there "
            f"are tensors, {len(views)}, or False{hint}"
        )
    for one in feedback:
        require_feedback(codec, one)
    if len({id(one) for one in feedback}) < len(views):
        raise ConfigError("two of the tensors have the same feedback; give each its own")
    for number, (one, tensor) in enumerate(zip(feedback, views, strict=True)):
        if one.count not in (None, tensor.count):
            raise ConfigError(
                f"feedback[{number}] is of {one.count} elements, and its tensor has {tensor.count}"
            )
        one.check_fit("allreduce_many()", tensor.dtype, tensor.count, op)
    return feedback


def _require_distinct(views: Sequence[View]) -> None:
    end = 0
    for one in sorted((v for v in views if v.count), key=lambda v: v.address):
        if one.address < end:
            raise TensorError("two of the tensors share memory; pass each of them once")
        end = one.address + one.nbytes


Pair = tuple[View, View]
"""Tensor that is read, and the one that is given the result: the same in place."""


def _batches(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Divides pairs into batches to be reduced together, in order of each batch's first tensor."""
    batches: list[list[Pair]] = []
    filling: dict[str, tuple[list[Pair], int]] = {}
    for pair in pairs:
        one = pair[0]
        if one.nbytes >= SMALL_BYTES:
            batches.append([pair])
            continue
        batch, nbytes = filling.get(one.dtype, ([], MOST_BYTES))
        if nbytes + one.nbytes > MOST_BYTES:
            batch, nbytes = [], 0
            batches.append(batch)
        batch.append(pair)
        filling[one.dtype] = batch, nbytes + one.nbytes
    return batches


def _pack(batch: list[Pair], align: int) -> Pair:
    """Packs a batch into one tensor, whose ``finish`` copies the results back. Each part begins at
    a multiple of ``align`` elements, with zeros before it, so that no two share a codec's block."""
    if len(batch) == 1:
        return batch[0]
    sources, targets = zip(*batch, strict=True)
    if isinstance(sources[0], DeviceView):
        whole = PackedView([one for one in targets if isinstance(one, DeviceView)], align)
        return whole, whole
    dtype = sources[0].dtype
    offsets, count = laid_out(sources, align)
    buffer = np.zeros(count * ITEM_BYTES[dtype], np.uint8)
    base = ffi.cast("char *", buffer.__array_interface__["data"][0])
    for one, offset in zip(sources, offsets, strict=True):
        ffi.memmove(base + offset, ffi.cast("char *", one.address), one.nbytes)

    def unpack() -> None:
        for one, offset in zip(targets, offsets, strict=True):
            ffi.memmove(ffi.cast("char *", one.address), base + offset, one.nbytes)
            if one.finish is not None:
                one.finish()

    packed = View(
        targets,
        (buffer, targets),
        buffer.__array_interface__["data"][0],
        dtype,
        (count,),
        count,
        targets[0].new,
        unpack,
    )
    return packed, packed
