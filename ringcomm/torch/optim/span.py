"""Spans: parameters of one group laid end to end, so that they travel by one exchange.

    large   | weight ............|pad| weight ......|pad| weight ...........|
            each begins at a block of the codec; what fills its last block repeats its last elements
    small   | bias | norm | bias |

A parameter is large if it has more than one dimension and ``threshold`` bytes. Large ones are
joined until a span has SPAN_BYTES; the small ones of a group are one span. All ranks lay out alike,
as that follows from the parameters' shapes and order.

Invariants: a span's flat tensors have one dtype: float64 for float64 parameters, else float32. The
padding repeats values of the block's own parameter, so a block's scale is that of its values; what
arrives there is read by nobody.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch

Layout = Literal["blocks", "apart", "joined"]
BLOCK = 256  # elements; a multiple of every codec's block
SPAN_BYTES = 25 << 20


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a parameter lies in its span: elements start to end, and padding to stop."""

    index: int
    parameter: torch.nn.Parameter
    start: int
    end: int
    stop: int


class Span:
    """Some parameters of a group, and what belongs to them, flat.

    Attributes:
        name: equal on all ranks, and in checkpoints.
        group: the parameter group: its hyperparameters.
        step: the number of the step in progress, from 1.
        rank, world_size: of the communicator.
        is_small: whether it holds the small parameters.
        state: the rule's flat tensors by name.
        gradient: this rank's gradient, flat, in ``outgoing`` and ``update``. Zero where a parameter
            has none.
        used: for each parameter, whether any rank has ever had a gradient of it.
    """

    def __init__(
        self, name: str, group_index: int, places: Sequence[Place], is_small: bool,
        states: Iterable[str],
    ) -> None:  # fmt: skip
        self.name = name
        self.group_index = group_index
        self.places = tuple(places)
        self.is_small = is_small
        self.count = self.places[-1].stop
        first = self.places[0].parameter
        self.dtype = wide(first.dtype)
        self.device = first.device
        self.group: dict[str, Any] = {}
        self.step = 0
        self.rank, self.world_size = 0, 1
        self.used = [False] * len(self.places)
        self.state = {name: self.zeros() for name in states}
        self.master: torch.Tensor | None = None
        if first.dtype != self.dtype:
            self.master = self.zeros()
            for place in self.places:
                self.view(self.master, place).copy_(place.parameter.detach())
        self._gradient: torch.Tensor | None = None

    @property
    def gradient(self) -> torch.Tensor:
        """See above."""
        assert self._gradient is not None, "a span has its gradient in outgoing and update only"
        return self._gradient

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters that have been used, each in its shape; of a 16-bit one its float32
        master copy, which the parameter follows."""
        if self.master is not None:
            return self.views(self.master)
        return [place.parameter.detach() for place in self._used_places()]

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Of a flat tensor, the part of each of ``parameters``, in its shape."""
        return [self.view(flat, place) for place in self._used_places()]

    def view(self, flat: torch.Tensor, place: Place) -> torch.Tensor:
        """The part of one parameter, in its shape."""
        return flat[place.start : place.end].view(place.parameter.shape)

    def zeros(self) -> torch.Tensor:
        """A flat tensor of the span's size."""
        return torch.zeros(self.count, dtype=self.dtype, device=self.device)

    def _used_places(self) -> list[Place]:
        return [place for place, used in zip(self.places, self.used, strict=True) if used]

    # ---- for the mechanism ----

    def gather(self, factor: float) -> None:
        """Takes the parameters' gradients times a factor."""
        flat = torch.empty(self.count, dtype=self.dtype, device=self.device)
        for place in self.places:
            gradient = place.parameter.grad
            part = self.view(flat, place)
            if gradient is None:
                part.zero_()
            else:
                part.copy_(gradient.detach())
            flat[place.end : place.stop].zero_()
        self._gradient = flat if factor == 1.0 else flat.mul_(factor)

    def let_go(self) -> None:
        """Of the gradient."""
        self._gradient = None

    def fill_padding(self, flat: torch.Tensor) -> None:
        """Repeats each parameter's last elements behind it."""
        for place in self.places:
            lacking = place.stop - place.end
            if lacking:
                own = flat[max(place.start, place.end - lacking) : place.end]
                flat[place.end : place.stop] = own.repeat(-(-lacking // len(own)))[:lacking]

    def show_master(self) -> None:
        """Rounds the master copy to the parameters."""
        if self.master is not None:
            for place in self._used_places():
                place.parameter.detach().copy_(self.view(self.master, place))


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which dtype a parameter's state is kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def lay_out(
    parameters: Sequence[tuple[int, int, torch.nn.Parameter]], threshold: int,
    states: Iterable[str], taken: Iterable[str], layout: Layout = "blocks",
) -> list[Span]:  # fmt: skip
    """Spans of (index of the parameter, index of its group, parameter), in the order in which they
    travel: large ones first, those of the last parameters before the others, as backward has
    these first; then small ones.

    Args:
        taken: names of spans that there are already.
        layout: "blocks" as above; for rules that must repeat what others exchange "apart", each
            parameter a span, or "joined", all of a group a span: none small, and without padding.
    """
    names, kinds = set(taken), list(states)
    open_spans: dict[tuple[Any, ...], list[tuple[int, int, torch.nn.Parameter]]] = {}
    closed: list[tuple[bool, int, list[tuple[int, int, torch.nn.Parameter]]]] = []
    for one in reversed(parameters):
        _, group, parameter = one
        size = parameter.numel() * parameter.element_size()
        small = layout == "blocks" and not (parameter.dim() > 1 and size >= threshold)
        key = (small, group, parameter.dtype, parameter.device)
        held = open_spans.setdefault(key, [])
        held.append(one)
        joined = sum(p.numel() for _, _, p in held) * wide(parameter.dtype).itemsize
        full = not small and layout == "blocks" and joined >= SPAN_BYTES
        if full or layout == "apart":
            closed.append((small, group, open_spans.pop(key)))
    closed += [(key[0], key[1], held) for key, held in open_spans.items()]
    spans, block = [], BLOCK if layout == "blocks" else 1
    for small, group, held in sorted(closed, key=lambda one: (one[0], -one[2][0][0])):
        name = f"{'small' if small else 'large'}.{held[0][0]}"
        assert name not in names
        spans.append(Span(name, group, _places(held, 1 if small else block), small, kinds))
    return spans


def _places(held: Sequence[tuple[int, int, torch.nn.Parameter]], block: int) -> list[Place]:
    places, at = [], 0
    for index, _, parameter in held:
        end = at + parameter.numel()
        stop = end + -end % block
        places.append(Place(index, parameter, at, end, stop))
        at = stop
    return places
