"""Support for frameworks that wrap the model and step the optimizer out of the caller's sight.

    attach                  the hook, or an optimizer of ours, for a model that is in DDP already
    LightningCallback       OuterStep for Lightning's Trainer       lightning.OuterStepCallback
    TransformersCallback    OuterStep for transformers' Trainer     transformers.OuterStepCallback

A callback needs the framework's own class as a base, which has its other methods. The callbacks
here lack that base; lightning.py and transformers.py add it. Only a process that has the framework
imports those two modules.

Invariants: nothing of a framework is imported here. A DDP whose model OuterStep or an optimizer of
ours exchanges sends no gradients any more.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Unpack

from ..codecs import Compression
from ..errors import ConfigError
from .argument_checks import require_able, takes
from .codec_policy import CodecPolicy
from .hooks import REMOVED, HookSettings, HookState, allreduce_hook
from .optim.exchanging import ExchangingOptimizer
from .outer import OuterStep
from .outer.settings import OuterSettings, takes_settings
from .outer.step import require_settings
from .wrapped import bare_optimizer, stop_exchange, wrappers_of

_FILE = "outer_step.pt"


def _wrappers(model: torch.nn.Module) -> list[DistributedDataParallel]:
    return wrappers_of({id(parameter) for parameter in model.parameters()})


@takes(HookSettings, removed=REMOVED)
def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    compression: Compression | Literal["auto"] | CodecPolicy | None = None,
    **settings: Unpack[HookSettings],
) -> HookState | ExchangingOptimizer[Any, Any]:
    """Makes ringcomm carry the gradients of a model. Call it on all ranks after the framework has
    wrapped the model and before the first step.

    Args:
        model: the model or its DDP, which is found by the model's parameters.
        optimizer: one of ringcomm.torch.optim or ringcomm.torch.sparse, or a framework's wrapper
            of it: DDP's own exchange is stopped for good, as the optimizer has its own. Any other
            optimizer, or None: DDP gets ringcomm's hook.
        compression, settings: arguments of HookState.

    Returns:
        The state of the hook; or ringcomm's optimizer, if ``optimizer`` is or wraps one.

    Raises ConfigError if ``model`` is no module; where no DDP has the model, or its DDP has a hook
    already; for a setting that HookState does not have; and for any setting beside an optimizer of
    ringcomm's, which has its own.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model={model!r}: give the torch.nn.Module that is trained")
    wrappers, bare = _wrappers(model), bare_optimizer(optimizer)
    if isinstance(bare, ExchangingOptimizer):
        if compression is not None or settings:
            raise ConfigError(
                f"{type(bare).__name__} sends by settings of its own; give them "
                "where it is made, not to attach()"
            )
        stop_exchange(wrappers)
        return bare
    if not wrappers:
        raise ConfigError(
            "no DistributedDataParallel has this model, so there is nothing to attach to. Call "
            "attach() once the framework has wrapped it: after Accelerator.prepare, in Lightning's "
            "on_fit_start, in on_train_begin of a TrainerCallback; and start several ranks. On "
            "hosts without GPUs Accelerate wraps with Accelerator(cpu=True) only"
        )
    state = HookState(compression, model=model, **settings)
    for wrapper in wrappers:
        try:
            wrapper.register_comm_hook(state, allreduce_hook)
        except RuntimeError as error:
            raise ConfigError(
                f"the model's DDP has a hook already, and takes one only ({error})"
            ) from None
    return state


class _Callback:
    """Base of the callbacks: holds an OuterStep from the start of training to its end."""

    def __init__(self, settings: OuterSettings) -> None:
        require_settings(**settings)
        self.outer: OuterStep | None = None
        self._settings = settings

    def _make(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scaler: Any,
    ) -> OuterStep:
        """Makes the OuterStep of a model, not attached, and stops the exchange of the model's DDP.
        Leaves the former one, if its training has raised."""
        self._leave()
        stop_exchange(_wrappers(model))
        self.outer = OuterStep(model, optimizer, scaler=scaler, **self._settings)
        return self.outer

    def _leave(self) -> None:
        """Leaves the OuterStep, if there is one, as after an exception: without a round."""
        outer, self.outer = self.outer, None
        if outer is not None:
            outer.__exit__(BaseException, None, None)


class LightningCallback(_Callback):
    """Exchanges weights every so many steps, and no gradients.

        trainer = Trainer(strategy=DDPStrategy(process_group_backend="ringcomm"),
                          callbacks=[ringcomm.torch.lightning.OuterStepCallback(every=30)])

    The strategy starts the ranks and shares out the data; its DDP exchanges no gradients.
    Validation uses the anchor's weights, and checkpoints, with weights only or more, keep them.

    Args:
        settings: arguments of OuterStep other than model, optimizer and scaler.

    Attributes:
        outer: the OuterStep, while training.

    Raises ConfigError for a setting that cannot work.
    """

    @takes_settings
    def __init__(self, **settings: Unpack[OuterSettings]) -> None:
        super().__init__(settings)
        self._loaded: dict[str, Any] = {}  # by the checkpoint of this run
        self._saved: dict[str, Any] = {}  # returned while there is no OuterStep
        self._anchor: contextlib.ExitStack | None = None
        self._hook = contextlib.ExitStack()  # gives the module its own one back

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Makes and attaches the OuterStep. A collective."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        outer = self._make(pl_module, list(trainer.optimizers), scaler)
        if self._loaded:
            outer.load_state_dict(self._loaded)
        outer.attach()
        # Where weights only are saved, Lightning calls the module's hook, but no callback's.
        own_hook = pl_module.on_save_checkpoint
        pl_module.on_save_checkpoint = functools.partial(self._on_save_weights, pl_module, own_hook)
        self._hook.callback(setattr, pl_module, "on_save_checkpoint", own_hook)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Puts the anchor's weights into the model."""
        if self.outer is not None:
            self._anchor = contextlib.ExitStack()
            self._anchor.enter_context(self.outer.anchor())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Puts this rank's own weights back."""
        if self._anchor is not None:
            self._anchor.close()
            self._anchor = None

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Saves the anchor's weights."""
        if self.outer is not None and self._anchor is None:
            with self.outer.anchor():
                weights = trainer.strategy.lightning_module_state_dict()
                checkpoint["state_dict"] = {name: one.clone() for name, one in weights.items()}

    def _on_save_weights(self, pl_module: Any, own_hook: Any, checkpoint: dict[str, Any]) -> None:
        """Replaces the module's own hook, and calls it."""
        if "callbacks" not in checkpoint and self in pl_module.trainer.callbacks:
            self.on_save_checkpoint(pl_module.trainer, pl_module, checkpoint)
        own_hook(checkpoint)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Runs a last round, so that all ranks end with the same weights. A collective."""
        if self.outer is not None:
            self.outer.flush()
            self._saved = self.outer.gather_state_dict()
            self._leave()

    def state_dict(self) -> dict[str, Any]:
        """Returns OuterStep's state. A collective, as Lightning's checkpoints are."""
        return self._saved if self.outer is None else self.outer.gather_state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the state for the start of training in this run, which restores it."""
        self._loaded = self._saved = dict(state_dict)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Drops the state that was loaded for this run, so that a later one begins anew."""
        self._loaded = {}

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Ends the exchange, and drops the state that was loaded for this run. The OuterStep is
        kept for checkpoints until training starts again."""
        self._loaded = {}
        self.on_validation_end(trainer, pl_module)
        if self.outer is not None:
            self.outer.__exit__(type(exception), exception, exception.__traceback__)

    def _leave(self) -> None:
        """Leaves the OuterStep, and gives the module its weights and its hook back."""
        self.on_validation_end(None, None)
        self._hook.close()
        super()._leave()


class TransformersCallback(_Callback):
    """Exchanges weights every so many steps, and no gradients.

        torch.distributed.init_process_group("ringcomm")
        trainer = Trainer(..., callbacks=[ringcomm.torch.transformers.OuterStepCallback(every=30)])

    The Trainer's DDP exchanges no gradients then. Before each evaluation and each checkpoint a
    round brings all ranks to the same weights; give a callback that asks for them before this one.

    Args:
        resume_from: the folder that ``Trainer.train(resume_from_checkpoint=...)`` resumes from,
            which it tells no callback; None: the folder of that step in ``output_dir``.
        scaler: the torch.amp.GradScaler, if there is one.
        settings: other arguments of OuterStep, but for model and optimizer.

    Attributes:
        outer: the OuterStep, while training.

    Raises ConfigError for a setting that cannot work.
    """

    @takes_settings
    def __init__(
        self,
        *,
        resume_from: str | Path | None = None,
        scaler: Any = None,
        **settings: Unpack[OuterSettings],
    ) -> None:
        super().__init__(settings)
        require_able("scaler", scaler)
        self._resume_from = None if resume_from is None else Path(resume_from)
        self._scaler = scaler

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Makes and attaches the OuterStep. If the Trainer resumes from a checkpoint, restores its
        state from there, or warns if the checkpoint has none. A collective."""
        outer = self._make(known["model"], known["optimizer"], self._scaler)
        if state.global_step:
            self._resume((self._resume_from or _folder(args, state)) / _FILE, outer)
        outer.attach()

    def _resume(self, kept: Path, outer: OuterStep) -> None:
        if kept.exists():
            outer.load_state_dict(torch.load(kept, map_location="cpu", weights_only=True))
        else:
            warnings.warn(
                f"training resumes, and there is no {kept}: OuterStep begins anew, without its "
                "momentum and what codecs had left. Where the Trainer resumes from another folder, "
                "give OuterStepCallback(resume_from=FOLDER), with the folder on every host",
                stacklevel=2,
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Runs a round if an evaluation, a checkpoint or the end follows. A collective then. After
        the end a round would change the best model, which the Trainer may have loaded by then."""
        if self.outer is not None and (
            control.should_evaluate or control.should_save or control.should_training_stop
        ):
            self.outer.flush()

    on_epoch_end = on_step_end

    def on_save(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Saves OuterStep's state beside the Trainer's files. Warns if their folder is none that a
        callback can know, as in a search of hyperparameters. A collective."""
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
        """Runs a last round, so that all ranks end with the same weights. A collective."""
        if self.outer is not None:
            self.outer.flush()
            self._leave()


def _folder(args: Any, state: Any) -> Path:
    """Returns the folder of the Trainer's checkpoint at this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
