"""ResNet in the form made for small images (He et al. 2015, section 4.2), with GroupNorm.

    image -> 3x3 convolution -> stage 1 -> stage 2 (half) -> stage 3 (quarter) -> mean -> linear

Each stage is (depth - 2) / 6 blocks of two convolutions and a shortcut; channels double with each
halving.

GroupNorm is used since BatchNorm's statistics run over the samples of one rank, so N ranks with a
share of the batch each would compute another function than one process with the whole batch.
GroupNorm looks at one sample at a time: gradients then differ only in their order of summation.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional

_GROUPS = 8
_GROUP_CHANNELS = 4  # normalising a single channel removes its mean, which pooling then needs


class ResNet(nn.Module):
    """ResNet from images float [n, channels, H, W] to logits [n, classes]; depth = 6m + 2."""

    def __init__(self, depth: int, width: int, channels: int, classes: int) -> None:
        super().__init__()
        blocks = (depth - 2) // 6
        self.stem = _convolution(channels, width)
        self.norm = _norm(width)
        self.stages = nn.Sequential(
            _stage(width, width, blocks, stride=1),
            _stage(width, 2 * width, blocks, stride=2),
            _stage(2 * width, 4 * width, blocks, stride=2),
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.stem(images)))
        x = self.stages(x).mean(dim=(2, 3))
        logits: Tensor = self.head(x)
        return logits


class Block(nn.Module):
    """Residual block x + f(x), f being two 3x3 convolutions; a changed shape projects the
    shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs, stride)
        self.first_norm = _norm(outputs)
        self.second = _convolution(outputs, outputs)
        self.second_norm = _norm(outputs)
        # A block starts as the identity: a deep stack then trains from the first step.
        nn.init.zeros_(self.second_norm.weight)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        return functional.relu(y + self.shortcut(x))


def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
    first = Block(inputs, outputs, stride)
    return nn.Sequential(first, *(Block(outputs, outputs, 1) for _ in range(blocks - 1)))


def _convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def _norm(channels: int) -> nn.GroupNorm:
    most = min(_GROUPS, max(1, channels // _GROUP_CHANNELS))
    return nn.GroupNorm(math.gcd(channels, most), channels)
