"""Blocks: tensors of a model that travel together, as one flat vector beside that vector's anchor.

    block | weight .......... 0 0 | bias .. 0 0 | weight ............ 0 |      align = 256

A fragment is the blocks with a common round: one of parameters, and with the last fragment those of
the buffers. Parameters are cut by layers. A layer is a numbered part of the model ("blocks.3."),
or, outside of those, all parameters with the same first name ("embedding."). Layer i belongs to
fragment i mod P, so that each fragment has parts of all depths:

    layers      embedding  blocks.0  blocks.1  blocks.2  blocks.3  head
    fragment        0         1         0         1         0       1         P = 2

Invariants: every trained parameter is in exactly one fragment; frozen ones are in none. The cut
follows from names and their order alone, so it is the same on all ranks. A block's tensors are on
one device. The flat dtype is float32, or float64 if one of the tensors has it; integers are int64.
Each tensor begins at a multiple of ``align`` elements, so that no two share a codec's block; the
padding between them is zero, and remains zero in the anchor. On the wire the padding repeats a
tensor's last elements, for a codec that scales by a mean. The anchor of a 16-bit model has full
precision: deltas are taken from the anchor rounded to the model's dtype, so that rounding does not
count as training.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from ...errors import ConfigError
from ..sync.bucket import Bucket, Slice, all_finite, laid_out, tiles
from ..wrapped import plain_name
from .rules import MEAN, Memory, Rule
from .wires import DenseWires, Wires

Named = tuple[str, torch.Tensor]


class Block(Bucket[Slice]):
    """Some tensors of a model, their anchor, and the rule and wire by which it moves.

    Args:
        name: of the block in its model.
        tensors: by name, all floating or all integer.
        rule: moves the anchor.
        wires: make the block's wire, and say how tensors lie in it.
        present: returns the tensors as they are now, where the model may assign them anew.

    Attributes:
        names: names of the tensors.
        fills_padding: as of its wires.
        anchor: the flat anchor; at first a copy of the tensors.
        memory: the rule's memory.

    Raises ConfigError for tensors on several devices, or of a kind that cannot be flattened.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[Named],
        rule: Rule,
        wires: Wires,
        present: Callable[[], Iterable[Named]] = tuple,
    ) -> None:
        self._present = present
        self.name, self.rule, self.fills_padding = name, rule, wires.fills_padding
        self.names = [own for own, _ in tensors]
        held = [tensor for _, tensor in tensors]
        slices = [
            Slice(one, *at) for one, at in zip(held, laid_out(held, wires.align), strict=True)
        ]
        super().__init__(slices, _dtype_of(tensors), _device_of(tensors))
        self.wire = wires.wire(name, self.count)
        self.anchor = self.local()
        self.memory = rule.memory(self.anchor)

    @property
    def state(self) -> Memory:
        """Anchor, by the name "", and the rule's memory: all that a round moves."""
        return {"": self.anchor, **self.memory}

    def named(self, flat: torch.Tensor) -> list[Named]:
        """Returns views of a flat tensor, with the names and shapes of the model's tensors."""
        return list(zip(self.names, self.parts(flat), strict=True))

    def local(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copies the tensors to a flat one, with zeros between them: a new tensor, or ``out``."""
        flat = self.empty() if out is None else out
        self._follow()
        self.gather((one.tensor.detach() for one in self.slices), flat)
        return flat

    def scatter(self, flat: torch.Tensor) -> None:
        self._follow()
        super().scatter(flat)

    def _follow(self) -> None:
        """Takes tensors that the model has assigned anew, if they are of the same kind."""
        kind, now = operator.attrgetter("shape", "dtype", "device"), dict(self._present())
        self.slices = tuple(
            dataclasses.replace(one, tensor=now[name])
            if name in now and kind(now[name]) == kind(one.tensor)
            else one
            for name, one in zip(self.names, self.slices, strict=True)
        )

    @property
    def is_finite(self) -> bool:
        """Whether the tensors' change since the anchor is finite."""
        return self.delta(self.local(), self.empty())[1]

    def rebase(self, at_send: torch.Tensor) -> None:
        """Sets the tensors to the anchor plus their change since ``at_send``, a flat tensor.
        Without a change they become the anchor, to the bit but for the sign of a zero; also where
        values are infinite."""
        self._follow()
        for one in self.slices:
            tensor = one.tensor.detach()
            own = tensor.to(self.dtype)
            for gained, before, after in tiles(own, one.of(at_send), one.of(self.anchor)):
                if all_finite(gained):
                    gained.sub_(before).add_(after)
                else:
                    gained.copy_(torch.where(gained == before, after, gained - before + after))
            tensor.copy_(own)

    def delta(self, local: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Returns the anchor less the local weights, in ``out``, and whether all of it is finite.
        Where the two are equal it is zero, even if they are infinite."""
        base = self.anchor
        if any(one.tensor.dtype != self.dtype for one in self.slices):
            base = base.clone()
            for one in self.slices:
                one.of(base).copy_(one.of(base).to(one.tensor.dtype))
        delta = torch.sub(base, local, out=out)
        if all_finite(delta):
            return delta, True
        delta.masked_fill_(base == local, 0)
        return delta, all_finite(delta)

    def next_state(self, mean: torch.Tensor, scratch: Scratch, at: int) -> Memory:
        """Computes the state after a round with this mean delta, in other tensors than those in
        use."""
        own = self.state
        after = {slot: scratch.like(f"{slot} {at}", tensor) for slot, tensor in own.items()}
        for *pieces, moves in tiles(*own.values(), *after.values(), mean):
            new = pieces[len(own) :]
            torch._foreach_copy_(new, pieces[: len(own)])
            memory = dict(zip(own, new, strict=True))
            self.rule.step(memory.pop(""), moves.clone(), memory)
        return after

    def adopt(self, state: Memory, scratch: Scratch, at: int) -> None:
        """Makes a computed state the present one."""
        for slot, tensor in self.state.items():
            scratch.keep(f"{slot} {at}", tensor)
        self.anchor, self.memory = state.pop(""), state


@dataclasses.dataclass
class Fragment:
    """Blocks with a common round.

    Attributes:
        iterations: number of this rank's iterations since their last round.
    """

    blocks: list[Block]
    iterations: int = 0

    def give_up(self) -> None:
        """Sets the weights to the anchor, and drops the training since the last round."""
        self.iterations = 0
        for block in self.blocks:
            block.scatter(block.anchor)


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


# ---- the cut ----


def trained_of(model: nn.Module) -> list[Named]:
    """Returns the parameters that are trained, by name. Raises ConfigError if there are none."""
    found: list[Named] = [
        (plain_name(name), p) for name, p in model.named_parameters() if p.requires_grad
    ]
    if not found:
        raise ConfigError("OuterStep: the model has no parameter that is trained")
    return found


def buffers_of(model: nn.Module) -> tuple[list[Named], list[Named]]:
    """Returns the buffers, by name: the floating ones, and the integers. bool buffers are left out:
    they are masks, not results of training."""
    named = [(plain_name(name), buffer) for name, buffer in model.named_buffers()]
    floating = [(name, one) for name, one in named if one.is_floating_point()]
    whole = [
        (name, one)
        for name, one in named
        if not (one.is_floating_point() or one.is_complex() or one.dtype == torch.bool)
    ]
    return floating, whole


def cut(parameters: Iterable[Named], count: int) -> list[list[Named]]:
    """Cuts the parameters into ``count`` fragments. If there are fewer layers than that, each
    parameter counts as a layer.

    Raises ConfigError if there are fewer parameters than fragments.
    """
    named = list(parameters)
    layers: dict[str, list[Named]] = {}
    for name, parameter in named:
        layers.setdefault(_layer_of(name), []).append((name, parameter))
    units = list(layers.values())
    if len(units) < count:
        units = [[one] for one in named]
    if len(units) < count:
        raise ConfigError(f"Invalid fragments: {count}; the model has {len(units)} parameters")
    return [[one for unit in units[first::count] for one in unit] for first in range(count)]


def _layer_of(name: str) -> str:
    words = name.split(".")
    for number, word in enumerate(words):
        if word.isdigit():
            return ".".join(words[: number + 1])
    return words[0]


def fragments_of(model: nn.Module, count: int, rule: Rule, wires: Wires) -> list[Fragment]:
    """Returns the model's fragments. The last one has the buffers, too, which become their exact
    mean; integer buffers become the largest of any rank."""
    parts = enumerate(cut(trained_of(model), count))
    fragments = [Fragment([Block(f"fragment {at}", named, rule, wires)]) for at, named in parts]
    for at, name, op in ((0, "buffers", "avg"), (1, "counters", "min")):

        def present(at: int = at) -> list[Named]:
            return buffers_of(model)[at]

        if named := present():
            wires = DenseWires(None, None, op)
            fragments[-1].blocks.append(Block(name, named, MEAN(), wires, present))
    return fragments
