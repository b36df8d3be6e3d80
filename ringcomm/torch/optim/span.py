"""Spans: parameters of one group laid end to end, so that they travel by one exchange.

    large   | weight ............|pad| weight ......|pad| weight ...........|
            each begins at a block of the codec; the padding of its last block repeats its end
    small   | bias | norm | bias |

A parameter is large if it has more than one dimension and ``threshold`` bytes. Large ones are
joined until a span has ``span_bytes``; the small ones of a group are one span. All ranks lay out
alike, which follows from the parameters' shapes and order.

Invariants: a span's flat tensors have one dtype: float64 for float64 parameters, else float32. The
padding of an outgoing tensor repeats values of the block's own parameter, so a block's scale is
that of its values. Padding in flat states has no meaning, and is in no checkpoint: to count or sum
elements read them by ``views``, never whole, or call ``fill_padding`` first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ...codecs import BLOCK
from ...errors import ConfigError
from ..tensors import repeat_last, tile_elements
from .checks import require_dense

Mark = tuple[object, ...]
SPAN_BYTES = 25 << 20  # size of a bucket of DDP


@dataclasses.dataclass(frozen=True)
class IndexedParameter:
    """A parameter, its number in the optimizer, and the number of its group."""

    index: int
    group: int
    parameter: torch.nn.Parameter


@dataclasses.dataclass(frozen=True)
class Place:
    """Place of a parameter in a flat tensor: elements start to end, and padding to stop."""

    index: int
    parameter: torch.nn.Parameter
    start: int
    end: int
    stop: int
    dtype: torch.dtype
    device: torch.device

    def mark(self) -> Mark:
        """Returns a fingerprint of the parameter's storage, which changes when an operation writes
        to it or its ``.data`` is assigned. A write into ``.data`` cannot be detected.

        Raises ConfigError if the parameter has another size, dtype or device than when it was laid
        out.
        """
        parameter = self.parameter
        here = (parameter.dtype, parameter.device, parameter.numel())
        there = (self.dtype, self.device, self.end - self.start)
        if here != there:
            raise ConfigError(
                f"parameter {self.index} was {_text(*there)} when the optimizer began to use it, "
                f"and is {_text(*here)} now: make the optimizer after model.to(), model.bfloat16() "
                "and the like"
            )
        return parameter._version, parameter.data_ptr(), parameter.shape, parameter.stride()

    def gradient(self) -> torch.Tensor | None:
        """Returns the parameter's gradient, if it has one. Raises TensorError unless it is
        dense."""
        found = self.parameter.grad
        if found is not None:
            require_dense(found, "a gradient")
            found = found.detach()
        return found

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the parameter's part of a flat tensor, in its shape."""
        return flat[self.start : self.end].view(self.parameter.shape)


def _text(dtype: torch.dtype, device: torch.device, count: int) -> str:
    return f"{count} elements of {dtype} on {device}"


def places_of(held: Sequence[IndexedParameter], block: int) -> tuple[Place, ...]:
    """Lays parameters end to end; each begins at a multiple of ``block`` elements."""
    places, at = [], 0
    for one in held:
        p = one.parameter
        end = at + p.numel()
        stop = end + -end % block
        places.append(Place(one.index, p, at, end, stop, p.dtype, p.device))
        at = stop
    return tuple(places)


class Span:
    """Some parameters of a group, with their flat gradient and states.

    Attributes:
        name: equal on all ranks, and in checkpoints.
        group: the parameter group: its hyperparameters.
        step: the number of the step in progress, from 1.
        rank, world_size: the communicator's.
        is_small: whether it holds the small parameters.
        state: the rule's flat tensors by name.
        gradient: this rank's gradient, flat, in ``outgoing`` and ``update``. Zero for a parameter
            without one.
        present: for each parameter, whether any rank has a gradient of it in this step.
    """

    def __init__(
        self, held: Sequence[IndexedParameter], is_small: bool, states: Iterable[str]
    ) -> None:
        self.name = f"{'small' if is_small else 'large'}.{held[0].index}"
        self.group_index = held[0].group
        self.places = places_of(held, 1 if is_small else BLOCK)
        self.is_small = is_small
        self.count = self.places[-1].stop
        first = self.places[0].parameter
        self.dtype = master_dtype(first.dtype)
        self.device = first.device
        self.group: dict[str, Any] = {}
        self.step = 0
        self.rank, self.world_size = 0, 1
        self.present = [True] * len(self.places)
        self.state = {name: self.zeros() for name in states}
        self.master: torch.Tensor | None = None
        if first.dtype != self.dtype:
            self.master = self.zeros()
        self._marks: list[Mark] = [()] * len(self.places)  # as ``follow`` last saw them
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
            return self.view(self.master, place)
        return place.parameter.detach()

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns the part of each of ``parameters`` in a flat tensor, in its shape."""
        return [self.view(flat, place) for place in self.present_places()]

    def view(self, flat: torch.Tensor, place: Place) -> torch.Tensor:
        """Returns the part of one parameter, in its shape."""
        return place.view(flat)

    def tiles(self) -> Iterator[Tile]:
        """Yields all elements, in order. A GPU, whose memory is fast, gets them in one tile."""
        size = tile_elements() if self.device.type == "cpu" else self.count
        for start in range(0, self.count, size):
            yield Tile(self, start, min(start + size, self.count))

    def zeros(self) -> torch.Tensor:
        """Makes a flat tensor of the span's size."""
        return torch.zeros(self.count, dtype=self.dtype, device=self.device)

    def kept(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the flat tensors for a checkpoint, by name."""
        yield from self.state.items()
        if self.master is not None:
            yield "master", self.master

    def present_places(self) -> list[Place]:
        """Returns the places of ``parameters``."""
        return [place for place, here in zip(self.places, self.present, strict=True) if here]

    # ---- for the mechanism ----

    def gather(self, factor: float) -> None:
        """Copies the parameters' gradients, times a factor, to the flat gradient."""
        flat = torch.empty(self.count, dtype=self.dtype, device=self.device)
        for place in self.places:
            gradient = place.gradient()
            part = self.view(flat, place)
            if gradient is None:
                part.zero_()
            else:
                part.copy_(gradient)
            flat[place.end : place.stop].zero_()
        self._gradient = flat if factor == 1.0 else flat.mul_(factor)

    def release_gradient(self) -> None:
        """Drops the flat gradient."""
        self._gradient = None

    def fill_padding(self, flat: torch.Tensor) -> None:
        """Repeats each parameter's last elements in the padding after it."""
        for place in self.places:
            repeat_last(flat, place.start, place.end, place.stop)

    def write_parameters(self) -> None:
        """Rounds the master copy to the parameters, after an update."""
        if self.master is not None:
            for place in self.places:
                place.parameter.detach().copy_(self.view(self.master, place))
        self._marks = [place.mark() for place in self.places]
        self._has_stepped = True

    def follow(self) -> list[Place]:
        """Copies to the master copy what other code has written to the parameters, for example
        loaded weights. Returns the places written to since an update."""
        before, self._marks = self._marks, [place.mark() for place in self.places]
        written = [
            place
            for place, old, new in zip(self.places, before, self._marks, strict=True)
            if old != new
        ]
        if self.master is not None:
            for place in written:
                self.view(self.master, place).copy_(place.parameter.detach())
        return written if self._has_stepped else []

    def load(self, name: str, index: int, value: torch.Tensor) -> None:
        """Copies one parameter's value to its part of the tensor that ``kept`` yields by that
        name."""
        flat = dict(self.kept())[name]
        number = [place.index for place in self.places].index(index)
        self.view(flat, self.places[number]).copy_(value)
        if flat is self.master:
            self._marks[number] = self.places[number].mark()


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


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the state of a parameter of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def lay_out(
    parameters: Sequence[IndexedParameter],
    threshold: int,
    states: Sequence[str],
    span_bytes: int = SPAN_BYTES,
) -> list[Span]:
    """Returns spans of parameters, in the order in which they travel: large ones first, the last
    parameters before the others, as backward computes their gradients first; then small ones.

    Args:
        span_bytes: size at which a span of large parameters is full.
    """
    filling: dict[tuple[Any, ...], list[IndexedParameter]] = {}
    full: list[tuple[bool, list[IndexedParameter]]] = []
    for one in reversed(parameters):
        parameter = one.parameter
        size = parameter.numel() * parameter.element_size()
        small = not (parameter.dim() > 1 and size >= threshold)
        key = (small, one.group, parameter.dtype, parameter.device)
        held = filling.setdefault(key, [])
        held.append(one)
        nbytes = (
            sum(each.parameter.numel() for each in held) * master_dtype(parameter.dtype).itemsize
        )
        if nbytes >= span_bytes and not small:
            full.append((small, filling.pop(key)))
    full += [(key[0], held) for key, held in filling.items()]
    full.sort(key=lambda one: (one[0], -one[1][0].index))
    return [Span(held, small, states) for small, held in full]
