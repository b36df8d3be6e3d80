"""OuterStep as a callback of the Trainer of Hugging Face's transformers.

    torch.distributed.init_process_group("ringcomm")
    trainer = Trainer(..., callbacks=[ringcomm.torch.transformers.OuterStepCallback(every=30)])

The Trainer's DDP exchanges no gradients then. Before each evaluation and each checkpoint all ranks
come to the same weights, by a round.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from typing_extensions import Unpack

from .outer import OuterStep
from .outer.settings import OuterSettings
from .outer.step import require_settings
from .settings import require_able, takes
from .wrapped import stop_exchange, wrappers_of

_FILE = "outer_step.pt"


class OuterStepCallback(TrainerCallback):
    """Exchanges weights every so many steps, and no gradients.

    Args:
        resume_from: the folder that ``Trainer.train(resume_from_checkpoint=...)`` resumes from, of
            which no callback is told; None: ``output_dir``'s of the step that it resumes at.
        scaler: the torch.amp.GradScaler, if there is one.
        settings: the others of OuterStep, but for model and optimizer.

    Attributes:
        outer: the OuterStep, while training.

    Raises ConfigError for a setting that cannot work.
    """

    @takes(OuterSettings, {"codec": "compression"})
    def __init__(
        self, *, resume_from: str | Path | None = None, scaler: Any = None,
        **settings: Unpack[OuterSettings],
    ) -> None:  # fmt: skip
        require_settings(**settings)
        require_able("scaler", scaler)
        self.outer: OuterStep | None = None
        self._resume_from = None if resume_from is None else Path(resume_from)
        self._settings, self._scaler = settings, scaler

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Begins; from a checkpoint where the Trainer does, with a warning if that has no state of
        OuterStep's. A collective."""
        model = known["model"]
        stop_exchange(wrappers_of({id(p) for p in model.parameters()}))
        self.outer = OuterStep(
            model, known["optimizer"], scaler=self._scaler, **self._settings
        )
        if state.global_step:
            self._resume((self._resume_from or _folder(args, state)) / _FILE, self.outer)
        self.outer.attach()

    def _resume(self, kept: Path, outer: OuterStep) -> None:
        if kept.exists():
            outer.load_state_dict(torch.load(kept, weights_only=True))
        else:
            warnings.warn(
                f"training resumes, and there is no {kept}: OuterStep begins anew, without its "
                "momentum and what codecs had left. Where the Trainer resumes from another folder, "
                "give OuterStepCallback(resume_from=FOLDER), with the folder on every host",
                stacklevel=2,
            )  # fmt: skip

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """A round where an evaluation or a checkpoint follows. A collective then."""
        if self.outer is not None and (control.should_evaluate or control.should_save):
            self.outer.flush()

    on_epoch_end = on_step_end

    def on_save(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Beside the Trainer's own files, with a warning where these are in a folder that no
        callback is told of, as in a search of hyperparameters. A collective."""
        if self.outer is None:
            return
        kept = self.outer.gather_state_dict()
        folder = _folder(args, state)
        if not state.is_world_process_zero:
            return
        if folder.is_dir():
            torch.save(kept, folder / _FILE)
        else:
            warnings.warn(
                f"there is no {folder}: OuterStep's state is not in this checkpoint, and training "
                "that resumes from it begins OuterStep anew",
                stacklevel=2,
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """A last round, so that all ranks end with the same weights. A collective."""
        if self.outer is not None:
            self.outer.flush()
            self.outer.detach()
            self.outer = None


def _folder(args: Any, state: Any) -> Path:
    """Of the Trainer's checkpoint at this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
