"""Blocks: tensors of a model seen as one flat vector, beside the anchor of that vector.

    block | weight .......... 0 0 | bias .. 0 0 | weight ............ 0 |      align = 256

Invariants: a block's tensors are on one device. The flat dtype is float32, or float64 where one of
the tensors is; integers are int64. Each tensor begins at a multiple of ``align`` elements, so that
none shares a codec's block with another; what lies between is zero and stays it in the anchor. On
the wire a codec that scales a block by its mean finds a tensor's last elements repeated there.
The anchor has full precision where the model has 16 bits: deltas are taken from what the model's
own dtype could hold of it, so that rounding does not count as training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import ConfigError
from ..tensors import all_finite, repeat_last
from ..tiles import tiles

Named = tuple[str, torch.Tensor]


class Block:
    """Some tensors of a model, and their anchor.

    Args:
        tensors: by name, all floating or all integer.
        align: where tensors begin.
        repeats: the codec scales a block by the mean of its elements.

    Attributes:
        tensors: as given.
        anchor: the flat anchor; at first what the tensors hold.
        count: its elements.

    Raises ConfigError for tensors on several devices, or of a kind that cannot be flattened.
    """

    def __init__(self, tensors: Sequence[Named], align: int = 1, repeats: bool = False) -> None:
        self.tensors = list(tensors)
        self._repeats = repeats
        self._starts: list[int] = []
        self.count = 0
        for _, tensor in self.tensors:
            self._starts.append(self.count)
            self.count += -(-tensor.numel() // align) * align
        self.device = _device_of(self.tensors)
        self.dtype = _dtype_of(self.tensors)
        self._is_rounded = any(tensor.dtype != self.dtype for _, tensor in self.tensors)
        self.anchor = self.local()

    def parts(self, flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Views of a flat tensor, as the model's tensors are named and shaped."""
        return [
            (name, flat[start : start + tensor.numel()].view(tensor.shape))
            for (name, tensor), start in zip(self.tensors, self._starts, strict=True)
        ]

    def local(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """What the tensors hold, flat, with zeros between them: a new tensor, or ``out``."""
        flat = torch.empty(self.count, dtype=self.dtype, device=self.device) if out is None else out
        with torch.no_grad():
            self.clear_padding(flat)
            for (_, part), (_, tensor) in zip(self.parts(flat), self.tensors, strict=True):
                part.copy_(tensor)
        return flat

    def clear_padding(self, flat: torch.Tensor) -> None:
        """Makes zero of what lies between the tensors of a flat one."""
        for _, end, stop in self._places():
            if end < stop:
                flat[end:stop] = 0

    def fill_padding(self, flat: torch.Tensor) -> None:
        """Makes a flat tensor ready for the wire, where its codec repeats."""
        if self._repeats:
            for start, end, stop in self._places():
                repeat_last(flat, start, end, stop)

    def _places(self) -> list[tuple[int, int, int]]:
        """Of each tensor, where it begins and ends, and where the next one begins."""
        stops = [*self._starts[1:], self.count]
        return [
            (start, start + tensor.numel(), stop)
            for (_, tensor), start, stop in zip(self.tensors, self._starts, stops, strict=True)
        ]

    @property
    def is_finite(self) -> bool:
        """Whether all values of the tensors are."""
        return all(all_finite(tensor) for _, tensor in self.tensors)

    def carry(self, at_send: torch.Tensor) -> None:
        """Brings the tensors to the anchor, and adds what they have gained since ``at_send``, a
        flat tensor. Where they have gained nothing they are the anchor, to the bit."""
        with torch.no_grad():
            for (_, then), (_, base), (_, tensor) in zip(
                self.parts(at_send), self.parts(self.anchor), self.tensors, strict=True
            ):
                own = tensor if tensor.dtype == self.dtype else tensor.to(self.dtype)
                for gained, before, after in tiles(own, then, base):
                    gained.sub_(before).add_(after)
                tensor.copy_(own)

    def set_local(self, flat: torch.Tensor) -> None:
        """Writes a flat tensor into the model's."""
        with torch.no_grad():
            for (_, part), (_, tensor) in zip(self.parts(flat), self.tensors, strict=True):
                tensor.copy_(part)

    def delta(
        self, local: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, bool]:
        """The anchor less the local weights, in a new tensor or ``out``; and whether all of it is
        finite. Where the two are equal it is zero, also where they are infinite."""
        base = self._held()
        delta = torch.sub(base, local, out=out)
        if all_finite(delta):
            return delta, True
        delta.masked_fill_(base == local, 0)
        return delta, all_finite(delta)

    def _held(self) -> torch.Tensor:
        """The anchor as the model's dtypes hold it."""
        if not self._is_rounded:
            return self.anchor
        held = self.anchor.clone()
        for (_, part), (_, tensor) in zip(self.parts(held), self.tensors, strict=True):
            part.copy_(part.to(tensor.dtype))
        return held


class Scratch:
    """Memory for what lives as long as a flight, which one flight hands on to the next: to fetch
    fresh memory takes longer than what is done in it."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}
        self._spare: dict[tuple[str, torch.dtype, torch.device, int], torch.Tensor] = {}

    def take(self, use: str, block: Block) -> torch.Tensor:
        """As much as the block has; what is in it is void."""
        key = (use, block.dtype, block.device)
        kept = self._kept.get(key)
        if kept is None or len(kept) < block.count:
            kept = torch.empty(block.count, dtype=block.dtype, device=block.device)
            self._kept[key] = kept
        return kept[: block.count]

    def like(self, use: str, tensor: torch.Tensor) -> torch.Tensor:
        """Memory of a tensor's size, which may come into use in its place: ``keep`` it then."""
        key = (use, tensor.dtype, tensor.device, len(tensor))
        if key not in self._spare:
            self._spare[key] = torch.empty_like(tensor)
        return self._spare[key]

    def keep(self, use: str, tensor: torch.Tensor) -> None:
        """A tensor that is in use no more, instead of what ``like`` gave."""
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
