"""The models that hybrid.py cuts into stages: a GPT and a deep ResNet, as sequences of pieces.

    pieces(kind, ...)    the real thing, small enough for two cores; weights follow from the seed
    shapes(kind)         what an emulated one is made of: parameters and cost of each piece, and the
                         bytes that pass a cut, of a model of 30 M parameters at a tenth of its size
    cut(shapes, ...)     where to cut it, by a formula of a step

A GPT's output layer is its own here, not tied to the embedding, as the two are on other ranks.
ResNet-1001 is Keras's version 2, whose 30 M parameters the document names: three stages of 111
bottlenecks, 16 to 64, 64 to 128 and 128 to 256 channels, on images of 32 x 32, 16 x 16 and 8 x 8.
The last stage holds four fifths of the parameters and computes three sevenths of the time.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ringcomm.train import resnet
from ringcomm.train.transformer import Block, init_weights

Kind = Literal["gpt", "resnet"]
SCALE = 10  # of rate and size
CLASSES, VOCABULARY, CONTEXT = 10, 64, 16
CHANNELS, SIDE = 3, 8

# ---- real ----


class Embedding(nn.Module):
    """Bytes int64 [n, T] to tokens of the width, with their places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(CONTEXT, width)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        return x


class Logits(nn.Sequential):
    """The norm and the output layer of a GPT."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))


class Stem(nn.Module):
    """The first convolution of a ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.whole = nn.Sequential(
            nn.Conv2d(CHANNELS, width, 3, padding=1, bias=False),
            nn.GroupNorm(1, width),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.whole(x)
        return y


class Head(nn.Module):
    """The mean over the places, and the classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.classes = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.classes(x.mean(dim=(2, 3)))
        return y


def pieces(kind: Kind, depth: int, width: int, seed: int) -> list[nn.Module]:
    """All layers in order. ``depth``: blocks of a GPT; layers of a ResNet, 6 m + 2."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "gpt":
            blocks = [Block(width, 2, causal=True) for _ in range(depth)]
            made = nn.Sequential(Embedding(width), *blocks, Logits(width))
            init_weights(made, depth)
            return list(made)
        whole = resnet.ResNet(depth, width, CHANNELS, CLASSES)
        stages = [block for stage in whole.stages for block in stage]  # type: ignore[union-attr, attr-defined]
        return [Stem(width), *stages, Head(4 * width)]


def batch(kind: Kind, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Samples and what is to be learnt of them; they follow from the seed."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "gpt":
        text = torch.randint(VOCABULARY, (samples, CONTEXT + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()
    images = torch.randn(samples, CHANNELS, SIDE, SIDE, generator=generator)
    return images, torch.randint(CLASSES, (samples,), generator=generator)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """The cross entropy, a mean over samples and places."""
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten())


# ---- emulated ----


@dataclasses.dataclass(frozen=True)
class Shape:
    """A piece of an emulated model.

    Attributes:
        parameters: float32 each.
        cost: its part of a step's compute, in any unit.
        bytes_behind: of a sample's activations behind it.
    """

    parameters: int
    cost: float
    bytes_behind: int


def shapes(kind: Kind) -> list[Shape]:
    """A model of about 30 M parameters, a tenth of it."""
    if kind == "gpt":
        width, layers, vocabulary, context = 448, 8, 12_000, 256
        passed = 4 * width * context // SCALE
        ends = vocabulary * width // SCALE
        block = Shape(12 * width * width // SCALE, 12 * width * width, passed)
        return [
            Shape(ends, 0.01 * ends, passed),
            *([block] * layers),
            Shape(ends, SCALE * ends, 4),
        ]
    found = []
    for inner, outer, side in ((16, 64, 32), (64, 128, 16), (128, 256, 8)):
        weights = 2 * inner * outer + 9 * inner * inner
        passed = 4 * outer * side * side // SCALE
        found += [Shape(3 * weights // SCALE, weights * side * side, passed)] * 37  # 3 in each
    return found


def cut(made: list[Shape], samples: int, micro: int, compute_s: float, mbit: float) -> int:
    """How many pieces the first of two stages has: the cut with the shortest step by a formula.

    A stage computes micro + 1 slots (one is the bubble) and waits for one micro-batch's activations
    and their gradient, as all others travel while it computes. It exchanges its gradients among two
    replicas behind its last backward, which the second stage ends one earlier than the first.

    Args:
        samples: of a replica's step.
        compute_s: of a replica's step on one device.
    """
    total = sum(piece.cost for piece in made)

    wire = 8e-6 / mbit

    def step_s(at: int) -> float:
        slots = [
            sum(piece.cost for piece in part) / total * compute_s / micro
            for part in (made[:at], made[at:])
        ]
        wires = [
            4 * wire * sum(piece.parameters for piece in part) for part in (made[:at], made[at:])
        ]
        between = made[at - 1].bytes_behind * samples / micro * wire
        behind = max(wires[0], wires[1] - slots[0] * 2 / 3 - between)
        return (micro + 1) * max(slots) + 2 * between + behind

    return min(range(1, len(made)), key=step_s)


class Emulated(nn.Module):
    """Computes nothing, hands on activations of its size, and has a gradient.

    Args:
        shape: the gradient lies in DDP's buckets already, as a device's memory traffic is no load.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.zeros(shape.parameters))
        generator = torch.Generator().manual_seed(seed)
        self.weight.grad = torch.randn(shape.parameters, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Pass.apply(x, self.weight, self.shape.bytes_behind // 4)
        return out


class _Pass(torch.autograd.Function):
    """Zeros [n, behind] of any [n, before]; backward leaves the weight's gradient as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, behind: int) -> Tensor:  # type: ignore[override]
        ctx.before = x.shape
        return torch.zeros(x.shape[0], behind)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return torch.zeros(ctx.before), None, None
