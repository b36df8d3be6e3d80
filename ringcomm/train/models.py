"""The models by name, each fitted to the data at hand.

Invariants: no model has buffers or statistics over the batch, so a step on N ranks equals a step
of one process with the same global batch; weights depend on the seed alone.
"""

from __future__ import annotations

import re
from typing import Literal

import torch
from torch import nn

from ..errors import ConfigError
from .data import Data
from .resnet import ResNet
from .transformer import GPT, ViT

_RESNET_WIDTH = 16  # channels of the first stage
_SIZES = {
    "mini": {"width": 128, "layers": 4, "heads": 4},
    "s": {"width": 384, "layers": 12, "heads": 6},
    "m": {"width": 512, "layers": 8, "heads": 8},
}


def family(name: str) -> Literal["resnet", "vit", "gpt"]:
    """Return the kind of model that a name stands for. ConfigError if it is unknown."""
    if re.fullmatch(r"resnet\d{1,4}", name):
        depth = int(name.removeprefix("resnet"))
        if depth < 8 or (depth - 2) % 6:
            raise ConfigError(
                f"--model {name} has no whole blocks; give a depth of 6n+2, as resnet8 or resnet20"
            )
        return "resnet"
    kind, _, size = name.partition("-")
    if size in _SIZES and kind == "vit":
        return "vit"
    if size in _SIZES and kind == "gpt":
        return "gpt"
    raise ConfigError(
        f"--model {name} is unknown; give resnet8, resnet20, resnet56, vit-mini, vit-s, vit-m, "
        "gpt-mini, gpt-s or gpt-m"
    )


def build(name: str, data: Data, *, seed: int) -> nn.Module:
    """Build the model ``name`` for the shape and classes of ``data``, its weights from ``seed``.

    Raises ConfigError if there is no such model, or it does not take this kind of data.
    """
    kind, size = family(name), _SIZES.get(name.partition("-")[2], {})
    if (kind == "gpt") != (data.kind == "text"):
        fix = "stdlib-text" if kind == "gpt" else "digits, a folder or synthetic images"
        raise ConfigError(f"--model {name} does not take {data.kind} data; give --data {fix}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "gpt":
            return GPT(data.shape[0], data.classes, **size)
        channels, height, breadth = data.shape
        if kind == "vit":
            return ViT((channels, height, breadth), data.classes, **size)
        return ResNet(int(name.removeprefix("resnet")), _RESNET_WIDTH, channels, data.classes)


def parameter_count(model: nn.Module) -> int:
    """Return the number of trained values."""
    return sum(parameter.numel() for parameter in model.parameters())
