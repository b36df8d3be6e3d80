"""When the mean of a gradient is handed out: the seam, and the pace of synchronous training.

    EveryStep       the mean of this step, as soon as it is there          this module
    OneStepStale    the mean of the step before                            stale.py

Invariants: a pace takes each bucket to the transport once, in the order in which it comes. What it
hands out is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ..codecs import Codec
from ..errors import ConfigError, did_you_mean
from .account import Account
from .buckets import Bucket
from .guards import Unsuited
from .named_feedback import NamedFeedback
from .stale import OneStepStale, Stale1
from .transport import GradientFuture, Transport


class Pace(Protocol):
    """What decides which mean a backward gets.

    Attributes:
        under_adam: which optimizers it does not suit, and what to say then; None for nothing.
    """

    under_adam: Unsuited | None

    def take_model(self, model: torch.nn.Module) -> None:
        """The model that is trained, in DDP or not; the residuals know its names already."""

    def require(self, codecs: Sequence[Codec]) -> None:
        """Raises ConfigError if one of these does not go with this pace, or a model is missing."""

    def settle(self, step: int) -> None:
        """Before the first bucket of a step: waits until the works of the step before are over,
        well or not (``Transport.error``)."""

    def launch(self, bucket: Bucket, codec: Codec) -> GradientFuture:
        """Sends a bucket, in the thread of backward; a Future of its buffer, which then holds what
        the optimizer is to have."""

    def flush(self) -> bool:
        """See ``HookState.flush``."""

    def state_dict(self, own: bool) -> dict[str, Any]:
        """What a checkpoint must keep of it, the same on all ranks; empty for nothing. ``own``:
        with what is this rank's own, so that training goes on to the bit."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what ``state_dict`` returned."""


class EveryStep:
    """Each step has its own mean, and waits for it."""

    under_adam: Unsuited | None = None

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def take_model(self, model: torch.nn.Module) -> None:
        """It needs none."""

    def require(self, codecs: Sequence[Codec]) -> None:
        """Goes with all."""

    def settle(self, step: int) -> None:
        """DDP has waited at the end of backward."""

    def launch(self, bucket: Bucket, codec: Codec) -> GradientFuture:
        """See Pace."""
        return self._transport.launch(bucket, codec)

    def flush(self) -> bool:
        """Nothing is in flight between two steps."""
        return False

    def state_dict(self, own: bool) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError: a gradient that is in the state would be lost."""
        raise ConfigError(
            "the state holds gradients in flight of pace='stale1', and this hook is "
            "synchronous; call state.flush() before saving, or give HookState(..., "
            "pace='stale1')"
        )


def pace_of(
    setting: object, transport: Transport, account: Account, residuals: NamedFeedback
) -> Pace:
    """What ``HookState(pace=...)`` stands for. Raises ConfigError for anything else."""
    if setting == "every":
        return EveryStep(transport)
    if setting == "stale1":
        setting = Stale1()
    if isinstance(setting, Stale1):
        return OneStepStale(setting, transport, account, residuals)
    near = did_you_mean(str(setting), ["every", "stale1"])
    raise ConfigError(f"pace={setting!r}: give 'every', 'stale1' or ringcomm.torch.Stale1(){near}")
