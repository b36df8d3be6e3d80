"""OuterStep as a callback of Lightning's Trainer.

    trainer = Trainer(strategy=DDPStrategy(process_group_backend="ringcomm"),
                      callbacks=[ringcomm.torch.lightning.OuterStepCallback(every=30)])

The strategy starts the ranks and shares out the data; its DDP exchanges no gradients. Validation,
and the weights of checkpoints, those of weights only included, are the anchor's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

from .outer import OuterStep
from .outer.settings import OuterSettings
from .outer.step import require_settings
from .settings import takes
from .wrapped import stop_exchange, wrappers_of

if TYPE_CHECKING:
    from pytorch_lightning.callbacks import Callback
else:
    try:  # one library by two names
        Callback = importlib.import_module("pytorch_lightning.callbacks").Callback
    except ImportError:
        Callback = importlib.import_module("lightning.pytorch.callbacks").Callback


class OuterStepCallback(Callback):
    """Exchanges weights every so many steps, and no gradients.

    Args:
        settings: those of OuterStep, but for model, optimizer and scaler.

    Attributes:
        outer: the OuterStep, while training.

    Raises ConfigError for a setting that cannot work.
    """

    @takes(OuterSettings, {"codec": "compression"})
    def __init__(self, **settings: Unpack[OuterSettings]) -> None:
        require_settings(**settings)
        self.outer: OuterStep | None = None
        self._settings = settings
        self._saved: dict[str, Any] = {}
        self._anchor: contextlib.ExitStack | None = None
        self._own_hook: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins. A collective."""
        stop_exchange(wrappers_of({id(p) for p in pl_module.parameters()}))
        optimizers = list(trainer.optimizers)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.outer = OuterStep(pl_module, optimizers, scaler=scaler, **self._settings)
        if self._saved:
            self.outer.load_state_dict(self._saved)
        self.outer.attach()
        # Where weights only are saved, Lightning calls the module's hook, but no callback's.
        self._own_hook = pl_module.on_save_checkpoint
        pl_module.on_save_checkpoint = functools.partial(
            self._on_save_weights, trainer, pl_module, self._own_hook
        )

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """On the anchor."""
        if self.outer is not None:
            self._anchor = contextlib.ExitStack()
            self._anchor.enter_context(self.outer.anchor())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Back on this rank's own weights."""
        if self._anchor is not None:
            self._anchor.close()
            self._anchor = None

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """The anchor's weights are what is kept."""
        if self.outer is not None and self._anchor is None:
            with self.outer.anchor():
                weights = trainer.strategy.lightning_module_state_dict()
                checkpoint["state_dict"] = {name: one.clone() for name, one in weights.items()}

    def _on_save_weights(
        self, trainer: Any, pl_module: Any, own_hook: Any, checkpoint: dict[str, Any]
    ) -> None:
        """In place of the module's own hook, which it calls."""
        if "callbacks" not in checkpoint:
            self.on_save_checkpoint(trainer, pl_module, checkpoint)
        own_hook(checkpoint)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """A last round, so that all ranks end with the same weights. A collective."""
        if self.outer is not None:
            self._saved = self.outer.gather_state_dict()
            self.outer.flush()
            self.outer.detach()
            self.outer = None
            pl_module.on_save_checkpoint = self._own_hook

    def state_dict(self) -> dict[str, Any]:
        """OuterStep's. A collective, as Lightning's checkpoints are."""
        return self._saved if self.outer is None else self.outer.gather_state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from there when training starts."""
        self._saved = dict(state_dict)
