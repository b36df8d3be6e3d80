"""A run from set-up to report: steps, and the evaluations, logs and checkpoints between them.

Invariants: a ConfigError of set-up is raised on all ranks alike; after ``--resume`` the run
continues as if never stopped, since its step number decides everything else.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..torch.sync.account import KEPT
from . import checkpoint, launcher, models, optim, sampling
from .command_line import AUTO, DDP_METHODS, Options
from .data import Data, load
from .distributed import World
from .engine import Engine, StepRecord
from .final_report import build, table
from .launcher import SharedError
from .progress import Log, Progress

_REPORT_EVERY = 10  # steps between two lines of progress
_UNSETTLED = 5  # first steps, not measured: DDP rebuilds its buckets and allocators grow


def train(options: Options, world: World) -> dict[str, Any]:
    """Run as ``options`` say and return the report (``report.build``). Collective.

    Raises ConfigError if the options do not fit the data or the world, and ringcomm's errors if a
    peer is lost.
    """
    torch.set_num_threads(launcher.default_threads())
    run = Run(options, world)
    try:
        with Progress(run.steps, run.step, quiet=world.rank > 0) as progress:
            run.train(progress)
            report = run.finish()
        progress.console.print(table(report))
        return report
    except RuntimeError as error:
        raise run.engine.method.error or error from None
    finally:
        run.log.close()


class Run:
    """Run on one rank.

    Attributes:
        step: steps done; the next step has this number.
        steps: steps of the whole run.
    """

    def __init__(self, options: Options, world: World) -> None:
        """Set everything up. Collective; raises ConfigError on every rank alike."""
        self.options = options
        self.world = world
        self.step = 0
        self.data, self.sampler, model, self.log = world.agree(self._open)
        world.require_same(
            "the content of --data", self.data.fingerprint, "give every host the same files"
        )
        self.steps = options.steps or self.data.epochs * self.sampler.steps_per_epoch
        self.engine = Engine(model, dataclasses.replace(options, steps=self.steps), world)
        state = self._restore()
        self.engine.method.connect()
        if state and self.step < self.steps:
            world.agree(lambda: self.engine.method.load_state_dict(state))
        self._records: list[StepRecord] = []
        self._reported = self.step
        left = self.steps - self.step
        # The hook remembers single steps of the latest KEPT: all figures are of the same steps.
        self._unsettled = max(min(_UNSETTLED, left // 2), left - KEPT)

    def train(self, progress: Progress) -> None:
        """Train the remaining steps, with evaluations, logs and checkpoints as due, except those
        of the end. Collective."""
        options, per_epoch = self.options, self.sampler.steps_per_epoch
        progress.say(self._headline())
        self.log.write("config", **self._description(), settings=self._settings())
        source = sampling.batches(self.data, self.sampler, self.step, self.steps)
        while self.step < self.steps:
            if len(self._records) == self._unsettled:
                self.engine.method.start_account()
            self._records.append(self.engine.train_step(self.step, self.steps, source))
            self.step += 1
            last = self.step == self.steps
            evaluates = not last and self._due(per_epoch)
            saves = not last and options.checkpoint and self._due(options.checkpoint_every)
            if last or evaluates or saves or self._due(_REPORT_EVERY):
                self._report(progress)
            if evaluates:
                self._report_held_out(progress)
            if saves:
                self._save()

    def finish(self) -> dict[str, Any]:
        """Write the last checkpoint, evaluate, and build and log the report. Collective; ends all
        training."""
        measured = self._measured()
        self.engine.method.finish()
        if self.options.checkpoint and self._records:
            self._save()
        held_out = self.engine.evaluate(self.data)
        about = self._description()
        if about["compression"] == AUTO:
            about["codecs"] = self.engine.method.codecs()
        report = build(about, held_out, measured)
        self.log.write("report", **report)
        return report

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    # ---- progress and log ----

    def _report(self, progress: Progress) -> None:
        """Show and log the steps since the last time, their losses averaged over ranks.

        Raises SharedError if a loss is not finite, before it can reach a checkpoint.
        """
        first, self._reported = self._reported, self.step
        records = self._records[first - self.step :]
        losses = self.world.sum([record.loss for record in records])
        for step, (record, loss) in enumerate(zip(records, losses, strict=True), first):
            if not math.isfinite(loss):
                raise SharedError(f"the loss is {loss} in step {step + 1}; lower --lr")
            self.log.write(
                "step",
                step=step + 1,
                epoch=step // self.sampler.steps_per_epoch,
                loss=loss / self.world.size,
                lr=record.lr,
                step_s=record.step_s,
                input_s=record.input_s,
            )
        rate = self.options.batch / statistics.fmean(record.step_s for record in records)
        progress.show(self.step, losses[-1] / self.world.size, records[-1].lr, rate)

    def _report_held_out(self, progress: Progress) -> None:
        epoch = self.step // self.sampler.steps_per_epoch
        figures = self.engine.evaluate(self.data)
        self.log.write("held_out", step=self.step, epoch=epoch, **figures)
        text = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
        progress.say(f"epoch {epoch}: held-out {text}")

    def _headline(self) -> str:
        about, sizes = self._description(), self.data.sizes
        start = f" from step {self.step} on" if self.step else ""
        return (
            f"{about['model']} with {about['parameters']:,} parameters on {about['data']}, "
            f"{sizes['train']} samples and {sizes['held_out']} held out: {self.steps} steps of "
            f"{about['batch']}{start}, {about['world_size']} x {about['threads']} threads"
        )

    def _measured(self) -> dict[str, float]:
        """Return means over this run's measured steps and over ranks; empty without steps.
        Collective."""
        kept = self._records[self._unsettled :]
        if not kept:
            return {}
        own = {
            "step_s": statistics.fmean(record.step_s for record in kept),
            "input_s": statistics.fmean(record.input_s for record in kept),
            **self.engine.method.account(len(kept)),
        }
        sums = self.world.sum(list(own.values()))
        means = {name: total / self.world.size for name, total in zip(own, sums, strict=True)}
        return {"measured_steps": len(kept), **means}

    def _description(self) -> dict[str, Any]:
        options, alone = self.options, self.world.size == 1
        return {
            "model": options.model,
            "parameters": models.parameter_count(self.engine.model),
            "data": options.data,
            "world_size": self.world.size,
            "backend": "none" if alone else options.backend,
            "hook": options.hook and not alone and options.method in DDP_METHODS,
            "method": "alone" if alone else options.method,
            "compression": "none" if alone else options.sent,
            "batch": options.batch,
            "accumulate": options.accumulate,
            "threads": torch.get_num_threads(),
            "steps": self.steps,
        }

    # ---- set-up and checkpoints ----

    def _open(self) -> tuple[Data, sampling.Sampler, nn.Module, Log]:
        options, world = self.options, self.world
        models.family(options.model)
        optim.require_suitable(options)
        data = load(options)
        sampler = sampling.Sampler(
            data.sizes["train"],
            options.batch,
            rank=world.rank,
            world_size=world.size,
            accumulate=options.accumulate,
            seed=options.seed,
        )
        model = models.build(options.model, data, seed=options.seed)
        return data, sampler, model, Log(options.log_file if world.rank == 0 else None)

    def _settings(self) -> dict[str, Any]:
        """Return the settings that shape the loss curve, which a resuming run must share."""
        options = self.options
        optimizer, rate, _ = optim.choices(options)
        return {
            **{f"--{name}": getattr(options, name) for name in ("model", "batch", "seed")},
            "--method": options.method,
            "--optimizer": optimizer,
            "--lr": rate,
            "--image-size": options.image_size,
            "--every": options.every,
            "number of steps": self.steps,
            "crc of --data": self.data.fingerprint,
        }

    def _restore(self) -> dict[str, Any]:
        """Load the checkpoint to resume; return the method's part of it. Collective."""
        if self.options.checkpoint is None:
            return {}
        folder, resume = Path(self.options.checkpoint), self.options.resume
        content = self.world.from_root(lambda: checkpoint.open_folder(folder, resume))
        if not content:
            return {}
        state = self.world.agree(lambda: checkpoint.read(content, self._settings()))
        self.engine.model.load_state_dict(state["model"])
        self.engine.method.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        return state["method"]

    def _save(self) -> None:
        """Write a checkpoint; no rank continues before it is on disk. Collective."""
        epoch, position = divmod(self.step, self.sampler.steps_per_epoch)
        method = self.engine.method
        kept = method.gather_state_dict()
        with method.evaluated():
            state = checkpoint.State(
                format=checkpoint.FORMAT,
                settings=self._settings(),
                step=self.step,
                epoch=epoch,
                position=position,
                model=self.engine.model.state_dict(),
                optimizer=method.optimizer_state(),
                method=kept,
            )
            folder = Path(self.options.checkpoint or ".")
            self.world.from_root(lambda: checkpoint.save(folder, state))
