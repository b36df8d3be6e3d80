"""What is learned in a setting of convergence.py: model, batches, loss, and the figure judged by.

    task_of(setting)    Characters (T1, T4) or Images (T5)

Invariants: a task follows from its setting alone, so one object serves all runs and ranks of a
process. The judged figure is smaller where a model is better.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.model import CharGPT, loss_of, validate
from training.text import Batches, text

if TYPE_CHECKING:
    from training.plan import Setting

SAMPLE = 64  # windows of an evaluation that is not the last


class Stream(Protocol):
    """The batches of one rank."""

    def next(self) -> tuple[Tensor, Tensor]: ...


class Task(Protocol):
    """What a training loop needs to know.

    Attributes:
        unit: of the judged figure.
        evaluations: over a run.
        digest: of the data, which is part of every row.
    """

    unit: str
    evaluations: int
    digest: str

    def model(self, seed: int) -> nn.Module: ...
    def batches(self, seed: int, rank: int, ranks: int) -> Stream: ...
    def loss_of(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor: ...
    def judge(self, model: nn.Module, ranks: int, whole: bool) -> float: ...


class Characters:
    """The next character of a text; judged by mean nats."""

    unit = "nats"
    evaluations = 8
    loss_of = staticmethod(loss_of)

    def __init__(self, setting: Setting) -> None:
        self._setting, self._text = setting, text(setting.text)
        self.digest = self._text.digest

    def model(self, seed: int) -> nn.Module:
        """A GPT whose weights are drawn from the seed."""
        return CharGPT(self._text.symbols, self._setting.context, seed)

    def batches(self, seed: int, rank: int, ranks: int) -> Batches:
        """Of that rank's shard."""
        shard = self._text.training(ranks)[rank]
        return Batches(shard, self._setting.batch, self._setting.context, seed, rank)

    def judge(self, model: nn.Module, ranks: int, whole: bool) -> float:
        """Mean nats over all windows that are held back, or over a sample of them."""
        windows = self._text.validation(ranks, self._setting.context)
        return validate(model, windows if whole else windows[:: len(windows) // SAMPLE])


class Images:
    """The class of an image; judged by the share of views that a model has wrong."""

    unit = "wrong"
    evaluations = 16
    depth, width = 8, 16

    def __init__(self, setting: Setting) -> None:
        from training.images import ImageBatches, digits

        self._setting, self._stream, self._digits = setting, ImageBatches, digits()
        self._held_out = self._digits.validation()
        self.digest = self._digits.digest

    def model(self, seed: int) -> nn.Module:
        """A ResNet of the trainer, of 77,562 parameters, drawn from the seed."""
        from ringcomm.train.resnet import ResNet

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return ResNet(self.depth, self.width, 1, 10)

    def batches(self, seed: int, rank: int, ranks: int) -> Stream:
        """Of that rank's images."""
        return self._stream(self._setting.batch, seed, rank, ranks)

    def loss_of(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy."""
        return functional.cross_entropy(model(inputs), targets)

    @torch.no_grad()
    def judge(self, model: nn.Module, ranks: int, whole: bool) -> float:
        """The share of all held-out views that are classed wrongly; nan where logits are."""
        views, labels = self._held_out
        logits = model(views)
        if not bool(logits.isfinite().all()):
            return float("nan")
        return float((logits.argmax(1) != labels).float().mean())


@functools.cache
def task_of(setting: Setting) -> Task:
    """The task of a setting; its data are made on first use."""
    return Images(setting) if setting.text == "digits" else Characters(setting)


@functools.cache
def parameters_of(setting: Setting) -> int:
    """How many its model has."""
    return sum(parameter.numel() for parameter in task_of(setting).model(0).parameters())
