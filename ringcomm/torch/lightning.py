"""The callback of Lightning's Trainer: frameworks.py does its work, Lightning has its base."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .frameworks import LightningCallback

if TYPE_CHECKING:
    from pytorch_lightning.callbacks import Callback
else:
    try:  # one library by two names
        Callback = importlib.import_module("pytorch_lightning.callbacks").Callback
    except ImportError:
        Callback = importlib.import_module("lightning.pytorch.callbacks").Callback


class OuterStepCallback(LightningCallback, Callback):
    __doc__ = LightningCallback.__doc__
