"""Fragments: the parameters cut by layers, and the buffers.

A layer is a numbered part of the model ("blocks.3."), or, outside of those, all parameters with the
same first name ("embedding."). Layer i belongs to fragment i mod P, so that each fragment has parts
of all depths:

    layers      embedding  blocks.0  blocks.1  blocks.2  blocks.3  head
    fragment        0         1         0         1         0       1         P = 2

Invariants: every trained parameter is in exactly one fragment; frozen ones are in none. The cut
follows from names and their order alone, so it is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ...errors import ConfigError
from ..wrapped import plain_name
from .blocks import Named


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
    whole = [(name, one) for name, one in named if _is_integer(one)]
    return floating, whole


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


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
