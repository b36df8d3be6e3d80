"""Blocks: tensors of a model seen as one flat vector, beside the anchor of that vector.

    block | weight .......... 0 0 | bias .. 0 0 | weight ............ 0 |      align = 256

Invariants: a block's tensors are on one device. The flat dtype is float32, or float64 if one of
the tensors has it; integers are int64. Each tensor begins at a multiple of ``align`` elements, so
that no two share a codec's block; the padding between them is zero, and remains zero in the anchor.
On the wire the padding repeats a tensor's last elements, for a codec that scales by a mean. The
anchor of a 16-bit model has full precision: deltas are taken from the anchor rounded to the model's
dtype, so that rounding does not count as training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import ConfigError
from ..sync.bucket import Bucket, Slice, laid_out
from ..tensors import all_finite, tiles

Named = tuple[str, torch.Tensor]


class Block(Bucket[Slice]):
    """Some tensors of a model, and their anchor.

    Args:
        tensors: by name, all floating or all integer.
        align: number of elements at a multiple of which each tensor begins.
        repeats: whether the codec scales a block by the mean of its elements.

    Attributes:
        names: names of the tensors.
        anchor: the flat anchor; at first a copy of the tensors.

    Raises ConfigError for tensors on several devices, or of a kind that cannot be flattened.
    """

    def __init__(self, tensors: Sequence[Named], align: int = 1, repeats: bool = False) -> None:
        self.names = [name for name, _ in tensors]
        self._repeats = repeats
        held = [tensor for _, tensor in tensors]
        slices = [Slice(one, *at) for one, at in zip(held, laid_out(held, align), strict=True)]
        super().__init__(slices, _dtype_of(tensors), _device_of(tensors))
        self._is_rounded = any(tensor.dtype != self.dtype for tensor in held)
        self.anchor = self.local()

    def named(self, flat: torch.Tensor) -> list[Named]:
        """Returns views of a flat tensor, with the names and shapes of the model's tensors."""
        return list(zip(self.names, self.parts(flat), strict=True))

    def local(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copies the tensors to a flat one, with zeros between them: a new tensor, or ``out``."""
        flat = self.empty() if out is None else out
        self.gather((one.tensor.detach() for one in self.slices), flat)
        return flat

    def fill_padding(self, flat: torch.Tensor) -> None:
        """Prepares a flat tensor for the wire: repeats values in the padding if the codec needs
        it."""
        if self._repeats:
            super().fill_padding(flat)

    @property
    def is_finite(self) -> bool:
        """Whether all values of the tensors are finite."""
        return all(all_finite(one.tensor) for one in self.slices)

    def rebase(self, at_send: torch.Tensor) -> None:
        """Sets the tensors to the anchor plus their change since ``at_send``, a flat tensor.
        Without a change they become the anchor, to the bit."""
        for one in self.slices:
            tensor = one.tensor.detach()
            own = tensor.to(self.dtype)
            for gained, before, after in tiles(own, one.of(at_send), one.of(self.anchor)):
                gained.sub_(before).add_(after)
            tensor.copy_(own)

    def delta(
        self, local: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, bool]:
        """Returns the anchor less the local weights, in a new tensor or ``out``, and whether all of
        it is finite. Where the two are equal it is zero, even if they are infinite."""
        base = self._rounded_anchor()
        delta = torch.sub(base, local, out=out)
        if all_finite(delta):
            return delta, True
        delta.masked_fill_(base == local, 0)
        return delta, all_finite(delta)

    def _rounded_anchor(self) -> torch.Tensor:
        """Returns the anchor rounded to the model's dtypes."""
        if not self._is_rounded:
            return self.anchor
        held = self.anchor.clone()
        for one in self.slices:
            part = one.of(held)
            part.copy_(part.to(one.tensor.dtype))
        return held


class Scratch:
    """Memory that each round passes on to the next one: allocating it anew takes longer than the
    work done in it."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}
        self._spare: dict[tuple[str, torch.dtype, torch.device, int], torch.Tensor] = {}

    def take(self, use: str, block: Block) -> torch.Tensor:
        """Returns memory of the block's size; its contents are undefined."""
        key = (use, block.dtype, block.device)
        kept = self._kept.get(key)
        if kept is None or len(kept) < block.count:
            kept = torch.empty(block.count, dtype=block.dtype, device=block.device)
            self._kept[key] = kept
        return kept[: block.count]

    def like(self, use: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns memory of a tensor's size, which may replace that tensor: then give the tensor to
        ``keep``."""
        key = (use, tensor.dtype, tensor.device, len(tensor))
        if key not in self._spare:
            self._spare[key] = torch.empty_like(tensor)
        return self._spare[key]

    def keep(self, use: str, tensor: torch.Tensor) -> None:
        """Takes a tensor that is no longer in use, in place of the memory that ``like``
        returned."""
        self._spare[use, tensor.dtype, tensor.device, len(tensor)] = tensor


def _device_of(tensors: Sequence[Named]) -> torch.device:
    devices = {tensor.device for _, tensor in tensors}
    if len(devices) > 1:
        raise ConfigError(
            f"OuterStep: the model's tensors are on {', '.join(sorted(map(str, devices)))}; they "
            "must be on one device"
        )
    return devices.pop() if devices else torch.device("cpu")


def _dtype_of(tensors: Sequence[Named]) -> torch.dtype:
    for name, tensor in tensors:
        if tensor.is_complex() or tensor.layout != torch.strided or hasattr(tensor, "device_mesh"):
            kind = "a DTensor" if hasattr(tensor, "device_mesh") else str(tensor.dtype)
            raise ConfigError(
                f"OuterStep: {name!r} is {kind}, {tensor.layout}: it takes dense, "
                "real tensors that each rank has whole"
            )
    dtypes = {tensor.dtype for _, tensor in tensors}
    if dtypes and not any(dtype.is_floating_point for dtype in dtypes):
        return torch.int64
    return torch.float64 if torch.float64 in dtypes else torch.float32
