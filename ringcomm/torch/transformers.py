"""The callback of transformers' Trainer: frameworks.py does its work, transformers has its base."""

from __future__ import annotations

from transformers.trainer_callback import TrainerCallback

from .frameworks import TransformersCallback


class OuterStepCallback(TransformersCallback, TrainerCallback):
    __doc__ = TransformersCallback.__doc__
