"""OuterStep as a callback of the Trainer of Hugging Face's transformers.

    torch.distributed.init_process_group("ringcomm")
    trainer = Trainer(..., callbacks=[ringcomm.torch.transformers.OuterStepCallback(every=30)])

The Trainer's DDP exchanges no gradients then. Before each evaluation and each checkpoint all ranks
come to the same weights, by a round.
"""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from .outer import OuterStep
from .wrapped import stop_exchange, wrappers_of

_FILE = "outer_step.pt"


class OuterStepCallback(TrainerCallback):
    """Exchanges weights every so many steps, and no gradients.

    Args:
        settings: those of OuterStep, but for model and optimizer.

    Attributes:
        outer: the OuterStep, while training.
    """

    def __init__(self, **settings: Any) -> None:
        self.outer: OuterStep | None = None
        self._settings = settings

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Begins; from a checkpoint where the Trainer does, with a warning if that has no state of
        OuterStep's. A collective."""
        model = known["model"]
        stop_exchange(wrappers_of({id(p) for p in model.parameters()}))
        self.outer = OuterStep(model, known["optimizer"], **self._settings)
        if state.global_step:
            self._resume(_resumed(args, state) / _FILE, self.outer)
        self.outer.attach()

    def _resume(self, kept: Path, outer: OuterStep) -> None:
        if kept.exists():
            outer.load_state_dict(torch.load(kept, weights_only=True))
        else:
            warnings.warn(
                f"training resumes, and there is no {kept}: OuterStep begins anew, without its "
                "momentum and what codecs had left; resume from a folder that was saved with "
                "OuterStepCallback, whole, on every host", stacklevel=2,
            )  # fmt: skip

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """A round where an evaluation or a checkpoint follows. A collective then."""
        if self.outer is not None and (control.should_evaluate or control.should_save):
            self.outer.flush()

    on_epoch_end = on_step_end

    def on_save(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Beside the Trainer's own files. A collective."""
        if self.outer is None:
            return
        kept = self.outer.state_dict()
        folder = _folder(args, state)
        if state.is_world_process_zero and folder.is_dir():
            torch.save(kept, folder / _FILE)

    def on_train_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """A last round, so that all ranks end with the same weights. A collective."""
        if self.outer is not None:
            self.outer.flush()
            self.outer.detach()
            self.outer = None


def _resumed(args: Any, state: Any) -> Path:
    """The folder that training resumes from. The Trainer tells it to no callback, so it is read
    where its ``train`` has it: what lies in output_dir may be of another run."""
    frame = inspect.currentframe()
    while frame is not None:
        known = frame.f_locals
        if isinstance(known.get("self"), Trainer) and known.get("resume_from_checkpoint"):
            return Path(known["resume_from_checkpoint"])
        frame = frame.f_back
    return _folder(args, state)


def _folder(args: Any, state: Any) -> Path:
    """Of the Trainer's checkpoint at this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
