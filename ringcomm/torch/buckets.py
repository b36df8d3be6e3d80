"""A DDP bucket, and its parts that are reduced one by one.

    bucket   | bias | weight ............ | norm | weight ........ |
    travels  | bf16 | onebit, feedback    | bf16 | onebit, feedback|     three all-reduces

Invariants: a part is a view of the bucket's memory, except the small tensors, which are packed into
one part and copied back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..codecs import CODECS, Codec
from .named_feedback import COMPRESSIBLE, NamedFeedback, is_by_rows
from .sync.bucket import Slice
from .sync.pending import Wire

if TYPE_CHECKING:
    from torch.distributed import GradBucket  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True, eq=False)
class GradientSlice(Slice):
    """Elements of a parameter's gradient in DDP's memory."""

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the gradient's part of a flat tensor, as the parameter lies in memory."""
        return in_shape_of(self.tensor, self.elements(flat))


@dataclasses.dataclass(frozen=True)
class GradientBucket:
    """Gradients of some parameters, which DDP has laid end to end.

    Attributes:
        buffer: the gradients, a tensor of one dimension.
        slices: the place of each parameter's, in order; one without elements has none.
        last: whether it is the last bucket of its step.
    """

    buffer: torch.Tensor
    slices: Sequence[GradientSlice]
    last: bool

    @classmethod
    def from_ddp(cls, bucket: GradBucket) -> GradientBucket:
        """Makes one of DDP's."""
        buffer = bucket.buffer()
        base, item = buffer.data_ptr(), buffer.element_size()
        slices = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if gradient.numel():
                unit = 2 if parameter.dtype.is_complex else 1  # which torch counts as one
                start = unit * (gradient.data_ptr() - base) // item
                end = start + unit * gradient.numel()
                slices.append(GradientSlice(parameter, start, end, end))
        return cls(buffer, sorted(slices, key=lambda one: one.start), bucket.is_last())


def in_shape_of(parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Views the parameter's part of a bucket in the parameter's shape. DDP lays it out as the
    parameter lies in memory, if that has no gaps (channels_last, say), else row by row; a complex
    one as pairs of real numbers."""
    if parameter.is_complex() and not flat.is_complex():
        flat = torch.view_as_complex(flat.view(-1, 2))
    if is_by_rows(parameter):
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())


@dataclasses.dataclass(frozen=True)
class Part:
    """A stretch of a bucket with an all-reduce of its own.

    Attributes:
        wire: how it travels; small tensors take bf16 in place of a quantising codec.
    """

    tensor: torch.Tensor
    wire: Wire


class Parts:
    """Parts of a bucket: all of it, or pieces where residuals are kept or the codec has few bits.

    Attributes:
        travelling: all parts, in the order in which every rank must submit them.
        is_checked: whether results are checked for values that are not finite: those of a codec of
            few bits, whose residuals may have to be restored.
    """

    def __init__(self, bucket: GradientBucket, codec: Codec, residuals: NamedFeedback) -> None:
        self._buffer = bucket.buffer
        self._small: list[torch.Tensor] = []
        self._rest: torch.Tensor | None = None
        known = self._buffer.dtype in COMPRESSIBLE
        self.is_checked = codec.quantises
        if not (codec.quantises or (residuals.keeps and known)):
            self.travelling = [Part(self._buffer, Wire(codec))]
            return
        self.travelling = self._cut(bucket, codec, residuals)

    def _cut(self, bucket: GradientBucket, codec: Codec, residuals: NamedFeedback) -> list[Part]:
        large, end = [], 0
        for one in bucket.slices:
            if residuals.is_large(one.tensor):
                self._add_small(end, one.start)
                wire = Wire(codec, residuals.feedback_of(one.tensor))
                large.append(Part(self._buffer[one.start : one.end], wire))
                end = one.end
        self._add_small(end, self._buffer.numel())
        if not self._small:
            return large
        self._rest = torch.cat(self._small) if len(self._small) > 1 else self._small[0]
        return [*large, Part(self._rest, Wire(CODECS["bf16"] if codec.quantises else codec))]

    def _add_small(self, start: int, stop: int) -> None:
        if start < stop or not self._buffer.numel():  # a bucket without elements travels, too
            self._small.append(self._buffer[start:stop])

    def unpack(self) -> None:
        """Copies the results of small tensors back to their places."""
        if self._rest is None or len(self._small) == 1:
            return
        start = 0
        for part in self._small:
            part.copy_(self._rest[start : start + part.numel()])
            start += part.numel()
        if self._rest.device.type == "cuda":  # allocated on another stream
            self._rest.record_stream(torch.cuda.current_stream(self._rest.device))
