"""One rank of a run of convergence.py: the training loop that every method shares.

    batch -> loss, backward -> hook, where there is one -> clip -> optimizers -> ...

The same function is a rank's thread and a rank's process. In a thread the gradients are brought to
the hook by a stand-in for DistributedDataParallel, for DDP wants a process group; in a process by
DDP itself. Threads compute by turns: where four threads computed at once they would mostly wait for
Python's lock. Invariants: the result follows from the run alone, not from what is faster; nothing
is measured of the library's own speed here.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ringcomm import Communicator
from training.methods import METHODS, Place, Recipe
from training.model import digest_of
from training.plan import RANKS, SETTINGS, Run
from training.tasks import task_of
from training.watch import Watch

Result = dict[str, Any]


class Gradients:
    """Brings a model's gradients to a hook as DDP does: in one bucket, in DDP's order.

    It is a torch.distributed.GradBucket to the hook, by its methods.
    """

    def __init__(self, model: nn.Module, hook: tuple[Any, Any]) -> None:
        self._state, self._hook = hook
        self._ready: list[nn.Parameter] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._ready.append)
        self._lay_out(list(model.parameters()))
        self._rebuilt = False

    def _lay_out(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._buffer = torch.zeros(sum(parameter.numel() for parameter in parameters))
        self._views, start = [], 0
        for parameter in parameters:
            view = self._buffer[start : start + parameter.numel()].view_as(parameter)
            if parameter.grad is not None:
                view.copy_(parameter.grad)
            parameter.grad = view
            self._views.append(view)
            start += parameter.numel()

    def clear(self) -> None:
        """Before the first backward of a step."""
        self._buffer.zero_()
        self._ready.clear()

    def exchange(self) -> None:
        """After the last: the gradients are the means then."""
        ready = list(dict.fromkeys(self._ready))
        self._hook(self._state, self).wait()
        if not self._rebuilt:  # DDP lays its buckets out anew in the order of the first backward
            self._rebuilt = True
            self._lay_out(ready)

    def index(self) -> int:
        """Of the bucket."""
        return 0

    def is_last(self) -> bool:
        """Whether it is the step's last."""
        return True

    def buffer(self) -> torch.Tensor:
        """All gradients, one after the other."""
        return self._buffer

    def parameters(self) -> list[nn.Parameter]:
        """In the buffer's order."""
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        """Views of the buffer."""
        return self._views


class _Rank:
    """What the loop holds of one rank."""

    def __init__(
        self,
        comm: Communicator,
        run: Run,
        turn: contextlib.AbstractContextManager[Any],
        checkpoint: Path,
        watch: Watch | None,
    ) -> None:
        self.comm, self.run, self.turn, self.watch = comm, run, turn, watch
        self.setting, self.method = SETTINGS[run.setting], METHODS[run.method]
        with turn:  # torch's random numbers are the process's
            self.task = task_of(self.setting)
            self.model = self.task.model(run.seed)
        if self.setting.starts_at:
            self.model.load_state_dict(torch.load(checkpoint, weights_only=True))
        self.steps = run.steps // self.method.accumulate
        dealt = (comm.rank + self.method.deal) % RANKS
        self.batches = self.task.batches(run.seed, dealt, RANKS)
        place = Place(comm, self.model, run.lr, self.steps, self.setting.clip)
        self.recipe: Recipe = self.method.build(place, **self.method.options)
        self.rates = [
            [group["lr"] for group in optimizer.param_groups]
            for optimizer in self.recipe.optimizers
        ]
        self.called: nn.Module = self.model
        self.gradients: Gradients | None = None
        self.no_sync: Any = contextlib.nullcontext
        self.losses: list[float] = []
        self.curve: list[tuple[int, float | None]] = []

    def connect(self, distributed: bool) -> None:
        """Puts the hook to work, if there is one."""
        if self.recipe.hook is None:
            return
        if not distributed:
            self.gradients = Gradients(self.model, self.recipe.hook)
            return
        ddp = nn.parallel.DistributedDataParallel(
            self.model, bucket_cap_mb=100, gradient_as_bucket_view=True
        )
        ddp.register_comm_hook(*self.recipe.hook)
        self.called, self.no_sync = ddp, ddp.no_sync

    def step(self, number: int) -> None:
        """One optimizer step."""
        factor = self.setting.factor(number, self.steps)
        for optimizer, rates in zip(self.recipe.optimizers, self.rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
        with self.turn:
            self._clear()
            self.losses.append(self._backward())
        if self.gradients is not None:
            self.gradients.exchange()
        self._update()

    def _update(self) -> None:
        if not self.recipe.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.setting.clip)
        for optimizer in self.recipe.optimizers:
            optimizer.step()

    def _clear(self) -> None:
        if self.gradients is not None:
            self.gradients.clear()
            return
        for optimizer in self.recipe.optimizers:
            optimizer.zero_grad()

    def _backward(self) -> float:
        total, count = 0.0, self.method.accumulate
        for left in range(count - 1, -1, -1):
            with self.no_sync() if left else contextlib.nullcontext():
                loss = self.task.loss_of(self.called, *self.batches.next()) / count
                loss.backward()
            total += float(loss.detach())
        return total

    def evaluate(self, number: int) -> None:
        """Behind a step: what the task judges by, of rank 0's weights."""
        watch = self.watch
        every = watch.every if watch else max(1, self.steps // self.task.evaluations)
        last = number == self.steps - 1
        if not last and (number + 1) % every:
            return
        if last and self.recipe.flush():
            self._update()
        with watch.stopped() if watch else contextlib.nullcontext():
            if self.comm.rank > 0 and self.recipe.together:
                with self.recipe.evaluated():
                    pass
            if self.comm.rank == 0:
                with self.turn, self.recipe.evaluated():
                    self.model.eval()
                    figure = _finite(self.task.judge(self.model, RANKS, last or watch is not None))
                    self.model.train()
                self.curve.append((number + 1, figure))
                if watch:
                    watch.note(number + 1, figure)


def train(
    comm: Communicator,
    run: Run,
    *,
    turn: Any = None,
    distributed: bool = False,
    checkpoint: Path = Path(),
    save: Path | None = None,
    watch: Watch | None = None,
) -> Result:
    """Trains on this rank; all ranks of ``comm`` call it.

    Args:
        turn: the lock of threads that compute by turns.
        distributed: there is a process group, so the hook runs under DDP.
        checkpoint: the weights of a setting that starts from some.
        save: where to put the weights at the end.
        watch: the clock of a run whose time counts, which may end it early.

    Returns:
        This rank's part of the row.
    """
    torch.set_num_threads(1)
    rank = _Rank(comm, run, turn or contextlib.nullcontext(), checkpoint, watch)
    rank.connect(distributed)
    before = comm.stats()
    began = time.perf_counter()
    with rank.recipe.around:
        if watch:
            watch.start()
        for number in range(rank.steps):
            rank.step(number)
            if number == rank.steps - 1:
                break
            rank.evaluate(number)
            if watch and watch.is_over:
                break
        sent = _sent(before, comm.stats())
        if number == rank.steps - 1:
            rank.evaluate(number)
        with rank.recipe.evaluated():
            weights = digest_of(rank.model)
            if save is not None and comm.rank == 0:
                torch.save(rank.model.state_dict(), save)
    return {
        "loss": rank.curve[-1][1] if rank.curve else None,
        "curve": rank.curve,
        "train": [_finite(loss) for loss in rank.losses[:: max(1, rank.steps // 40)]],
        "weights": weights,
        "sent": sent,
        "seconds": time.perf_counter() - began,
    }


def _sent(before: Any, after: Any) -> int:
    """Payload bytes that this rank has sent in between, over links or memory."""
    return int(after["payload_bytes"] - before["payload_bytes"])


def _finite(loss: float) -> float | None:
    return round(loss, 6) if loss == loss and abs(loss) != float("inf") else None
