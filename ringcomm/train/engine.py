"""Training step and evaluation of one model on one rank.

A step is: fetch the micro-batches of this rank; forward and backward on each, the last one with
the gradient exchange; one update. The loss is the mean over the global batch: each micro-batch
counts 1/accumulate, and the hook averages over ranks.

Invariants: a step draws no random numbers, so that a resumed run continues as if never stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from . import methods, optim
from .command_line import Options
from .data import Data
from .distributed import World
from .sampling import MicroBatches


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """Record of a step on this rank: mean loss over its share, learning rate, seconds of the step
    and of its input."""

    loss: float
    lr: float
    step_s: float
    input_s: float


class Engine:
    """Model and method of one rank, with their training step.

    Attributes:
        model: the bare model, whose weights are evaluated and saved.
        method: the exchange between ranks; it has the optimizer.
    """

    def __init__(self, model: nn.Module, options: Options, world: World) -> None:
        self.model = model
        self.method = methods.method_of(model, options, world)
        self._options = options
        self._world = world
        self._peak_rate = optim.choices(options)[1]

    def train_step(self, step: int, steps: int, source: Iterator[MicroBatches]) -> StepRecord:
        """Train step number ``step`` of ``steps`` on the next item of ``source``. Collective."""
        rate = optim.rate_at(step, steps, self._peak_rate)
        optim.set_rate(self.method.optimizer, rate)
        begin = time.perf_counter()
        micro_batches = next(source)
        input_done = time.perf_counter()
        loss = self._backward(micro_batches)
        self.method.optimizer.step()
        self.method.optimizer.zero_grad()
        return StepRecord(loss, rate, time.perf_counter() - begin, input_done - begin)

    def evaluate(self, data: Data) -> dict[str, float]:
        """Compute loss, and accuracy or perplexity, on the held-out set. Collective: ranks share
        the set."""
        options, world = self._options, self._world
        numbers = torch.arange(world.rank, data.sizes["held_out"], world.size)
        batch = options.batch // (world.size * options.accumulate)
        loss = correct = count = 0.0
        self.model.eval()
        with torch.no_grad(), self.method.evaluated():
            for first in range(0, len(numbers), batch):
                inputs, targets = data.batch("held_out", numbers[first : first + batch])
                logits = self.model(inputs).flatten(0, -2)
                targets = targets.flatten()
                loss += float(functional.cross_entropy(logits, targets, reduction="sum"))
                correct += float((logits.argmax(-1) == targets).sum())
                count += len(targets)
        self.model.train()
        loss, correct, count = world.sum([loss, correct, count])
        if data.kind == "text":
            perplexity = float(torch.tensor(loss / count, dtype=torch.float64).exp())  # may be inf
            return {"loss": loss / count, "perplexity": perplexity}
        return {"loss": loss / count, "accuracy": correct / count}

    def _backward(self, micro_batches: MicroBatches) -> float:
        """Compute gradients of the mean loss over all micro-batches; return this rank's loss."""
        total = 0.0
        for number, (inputs, targets) in enumerate(micro_batches, 1):
            is_last = number == len(micro_batches)
            with contextlib.nullcontext() if is_last else self.method.no_exchange():
                logits = self.method.model(inputs).flatten(0, -2)
                loss = functional.cross_entropy(logits, targets.flatten()) / len(micro_batches)
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total
