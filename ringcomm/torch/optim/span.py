"""Spans: parameters of one group laid end to end, so that they travel by one exchange.

    large   | weight ............|pad| weight ......|pad| weight ...........|
            each begins at a block of the codec; the padding of its last block repeats its end
    small   | bias | norm | bias |

A parameter is large if it has more than one dimension and ``threshold`` bytes. Large ones are
joined until a span has ``span_bytes``; the small ones of a group are one span. All ranks lay out
alike, which follows from the parameters' shapes and order.

ParameterBucket is the base of Span, of Muon's Owned and of HostBucket (torch/sparse).

Invariants: a span's flat tensors have one dtype: float64 for float64 parameters, else float32. The
padding of an outgoing tensor repeats values of the block's own parameter, so a block's scale is
that of its values. Padding in flat states has no meaning, and is in no checkpoint: to count or sum
elements, read all parameters by ``parts`` or those of this step by ``views``, never the whole
tensor, or call ``fill_padding`` first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ...codecs import BLOCK
from ...errors import ConfigError, TensorError
from ..sync.bucket import Bucket, Slice, laid_out, master_dtype, tile_elements

Mark = tuple[object, ...]
SPAN_BYTES = 25 << 20  # size of a bucket of DDP


@dataclasses.dataclass(frozen=True)
class IndexedParameter:
    """A parameter, its number in the optimizer, and the number of its group."""

    index: int
    group: int
    parameter: torch.nn.Parameter


@dataclasses.dataclass(frozen=True, eq=False)
class Place(Slice):
    """Place of a parameter in a flat tensor; its number, and its dtype and device when it was laid
    out."""

    index: int
    dtype: torch.dtype
    device: torch.device

    def moved(self, by: int) -> Place:
        """Returns the place by so many elements further on."""
        start, end, stop = (at + by for at in (self.start, self.end, self.stop))
        return dataclasses.replace(self, start=start, end=end, stop=stop)

    def mark(self) -> Mark:
        """Returns a fingerprint of the parameter's storage, which changes when an operation writes
        to it or its ``.data`` is assigned. A write into ``.data`` cannot be detected.

        Raises ConfigError if the parameter has another size, dtype or device than when it was laid
        out.
        """
        parameter = self.tensor
        here = (parameter.dtype, parameter.device, parameter.numel())
        there = (self.dtype, self.device, self.end - self.start)
        if here != there:
            raise ConfigError(
                f"parameter {self.index} was {_text(*there)} when the optimizer began to use it, "
                f"and is {_text(*here)} now: make the optimizer after model.to(), model.bfloat16() "
                "and the like"
            )
        return parameter._version, parameter.data_ptr(), parameter.shape, parameter.stride()

    def follow(self, flat: torch.Tensor) -> None:
        """Copies the parameter to its part of a flat master copy. Elements whose rounding is the
        parameter's value stay: they have more digits."""
        master, value = self.of(flat), self.tensor.detach().to(flat.device)
        master.copy_(torch.where(master.to(value.dtype) == value, master, value.to(master.dtype)))

    def gradient(self) -> torch.Tensor | None:
        """Returns the parameter's gradient, if it has one. Raises TensorError unless it is
        dense."""
        found = self.tensor.grad
        if found is not None:
            require_dense(found, "a gradient")
            found = found.detach()
        return found


def _text(dtype: torch.dtype, device: torch.device, count: int) -> str:
    return f"{count} elements of {dtype} on {device}"


def require_dense(tensor: torch.Tensor, what: str) -> None:
    """Raises TensorError for a tensor that is sparse, sharded, or not of real numbers."""
    if tensor.layout != torch.strided:
        raise TensorError(
            f"{what} is {tensor.layout}, and must be dense: make the layer with sparse=False"
        )
    if hasattr(tensor, "device_mesh"):
        raise TensorError(
            f"{what} is a {type(tensor).__name__}, of which each rank has a part, as FSDP makes "
            "them; this optimizer takes whole models that all ranks have"
        )
    if not tensor.is_floating_point():
        raise TensorError(f"{what} has dtype {tensor.dtype}, and must have real numbers")


def places_of(held: Sequence[IndexedParameter], block: int) -> list[Place]:
    """Lays parameters end to end; each begins at a multiple of ``block`` elements."""
    parameters = [one.parameter for one in held]
    return [
        Place(p, *at, one.index, p.dtype, p.device)
        for one, p, at in zip(held, parameters, laid_out(parameters, block), strict=True)
    ]


class ParameterBucket(Bucket[Place]):
    """Parameters of one group, dtype and device, laid end to end.

    Args:
        held: the parameters.
        slices: their places.
        dtype, device: as in Bucket.

    Attributes:
        group_index: the number of the parameter group.
        indices: numbers of the parameters, as given.
    """

    def __init__(
        self,
        held: Sequence[IndexedParameter],
        slices: Sequence[Place],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(slices, dtype, device)
        self.group_index, self.indices = held[0].group, [one.index for one in held]
        self._marks: list[Mark] = [()] * len(self.slices)

    def gather_gradients(self, flat: torch.Tensor) -> bool:
        """Copies the parameters' gradients to a flat tensor, zeros where there is none. Returns
        whether there are any. Raises TensorError unless they are dense."""
        gradients = [place.gradient() for place in self.slices]
        self.gather(gradients, flat)
        return any(one is not None for one in gradients)

    def note(self) -> None:
        """Notes the parameters' present values as known. Raises ConfigError as ``Place.mark``."""
        self._marks = [place.mark() for place in self.slices]

    def written(self) -> list[Place]:
        """Returns the places of parameters that were written to since this or ``note`` was last
        called; at first all. Raises ConfigError as ``Place.mark``."""
        before = self._marks
        self.note()
        every = zip(self.slices, before, self._marks, strict=True)
        return [place for place, old, new in every if old != new]


class Span(ParameterBucket):
    """Some parameters of a group, with their flat gradient and states.

    Attributes:
        name: equal on all ranks, and in checkpoints.
        group: the parameter group: its hyperparameters.
        step: the number of the step in progress, from 1.
        world_size: the communicator's.
        is_small: whether it holds the small parameters.
        state: the rule's flat tensors by name.
        master: the float32 copy of 16-bit parameters, flat; None for others.
        gradient: this rank's gradient, flat, in ``outgoing`` and ``update``. Zero for a parameter
            without one.
        present: for each parameter, whether any rank has a gradient of it in this step.
    """

    def __init__(
        self, held: Sequence[IndexedParameter], is_small: bool, states: Iterable[str]
    ) -> None:
        self.name = f"{'small' if is_small else 'large'}.{held[0].index}"
        self.is_small = is_small
        first = held[0].parameter
        super().__init__(
            held, places_of(held, 1 if is_small else BLOCK), master_dtype(first.dtype), first.device
        )
        self.group: dict[str, Any] = {}
        self.step = 0
        self.world_size = 1
        self.present = [True] * len(self.slices)
        self.state = {name: self.zeros() for name in states}
        self.master = self.zeros() if first.dtype != self.dtype else None
        self._has_stepped = False
        self._gradient: torch.Tensor | None = None

    @property
    def gradient(self) -> torch.Tensor:
        """Flat gradient of this rank, in ``outgoing`` and ``update`` only."""
        assert self._gradient is not None, "a span has its gradient in outgoing and update only"
        return self._gradient

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Tensors to update: the parameters that any rank has a gradient of in this step, each in
        its shape; for a 16-bit one its float32 master copy."""
        return [self.stepped(place) for place in self.present_places()]

    def stepped(self, place: Place) -> torch.Tensor:
        """Returns the tensor that an update changes: the parameter itself, or its master copy."""
        if self.master is not None:
            return place.of(self.master)
        return place.tensor.detach()

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns the part of each of ``parameters`` in a flat tensor, in its shape."""
        return [place.of(flat) for place in self.present_places()]

    def tiles(self) -> Iterator[Tile]:
        """Yields all elements, in order. A GPU, whose memory is fast, gets them in one tile."""
        size = tile_elements() if self.device.type == "cpu" else self.count
        for start in range(0, self.count, size):
            yield Tile(self, start, min(start + size, self.count))

    def kept(self) -> dict[str, torch.Tensor]:
        """Returns the flat tensors for a checkpoint, by name."""
        return self.state if self.master is None else {**self.state, "master": self.master}

    def present_places(self) -> list[Place]:
        """Returns the places of ``parameters``."""
        return [place for place, here in zip(self.slices, self.present, strict=True) if here]

    # ---- for the mechanism ----

    def take_gradient(self, factor: float) -> None:
        """Copies the parameters' gradients, times a factor, to the flat gradient."""
        flat = self.empty()
        self.gather_gradients(flat)
        self._gradient = flat if factor == 1.0 else flat.mul_(factor)

    def release_gradient(self) -> None:
        """Drops the flat gradient."""
        self._gradient = None

    def write_parameters(self) -> None:
        """Rounds the master copy to the parameters, after an update."""
        if self.master is not None:
            self.scatter(self.master)
        self.note()
        self._has_stepped = True

    def follow(self) -> list[Place]:
        """Copies to the master copy what other code has written to the parameters, for example
        loaded weights. Returns the places written to since an update."""
        written = self.written()
        if self.master is not None:
            for place in written:
                place.follow(self.master)
        return written if self._has_stepped else []


class Tile:
    """Elements start to stop of a span, for element-wise arithmetic.

    Attributes:
        group: the span's.
        state, gradient: these elements of the span's.
    """

    def __init__(self, span: Span, start: int, stop: int) -> None:
        self.span, self.start, self.stop = span, start, stop
        self.group = span.group
        self.state = {name: self.of(flat) for name, flat in span.state.items()}

    @property
    def gradient(self) -> torch.Tensor:
        """Elements of the span's gradient."""
        return self.of(self.span.gradient)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns these elements of another flat tensor of the span."""
        return flat[self.start : self.stop]


def lay_out(
    parameters: Sequence[IndexedParameter],
    threshold: int,
    states: Sequence[str],
    span_bytes: int = SPAN_BYTES,
) -> list[Span]:
    """Returns spans of parameters, in the order in which they travel: large ones first.

    Args:
        span_bytes: size at which a span of large parameters is full.
    """

    def is_small(parameter: torch.Tensor) -> bool:
        return parameter.dim() <= 1 or parameter.numel() * parameter.element_size() < threshold

    small = [one for one in parameters if is_small(one.parameter)]
    large = [one for one in parameters if not is_small(one.parameter)]
    return [
        *(Span(held, False, states) for held in filled(large, span_bytes)),
        *(Span(held, True, states) for held in filled(small, math.inf)),
    ]


def filled(
    parameters: Sequence[IndexedParameter], most: float, itemsize: int | None = None
) -> list[list[IndexedParameter]]:
    """Returns lists of parameters of one group, dtype and device that travel together: the last
    parameters first, as backward computes their gradients first.

    Args:
        most: bytes at which a list is full.
        itemsize: bytes of an element on its way; None: of one in its state.
    """
    filling: dict[tuple[Any, ...], list[IndexedParameter]] = {}
    full: list[list[IndexedParameter]] = []
    for one in reversed(parameters):
        dtype = one.parameter.dtype
        key = (one.group, dtype, one.parameter.device)
        held = filling.setdefault(key, [])
        held.append(one)
        count = sum(each.parameter.numel() for each in held)
        if count * (itemsize or master_dtype(dtype).itemsize) >= most:
            full.append(filling.pop(key))
    full += filling.values()
    return sorted(full, key=lambda held: -held[0].index)
