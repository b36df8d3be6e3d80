"""Which step's mean a backward gets: the interface, and the pace of synchronous training.

    EveryStep       the mean of this step, waited for                      this module
    OneStepStale    the mean of the step before                            stale.py

Invariants: a pace gives each bucket to the transport once, in the order of DDP's calls. The
gradients that it returns are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ..codecs import Codec
from ..errors import ConfigError, did_you_mean
from .account import Account
from .buckets import GradientBucket
from .guards import Unsuited
from .named_feedback import NamedFeedback
from .stale import OneStepStale, Stale1
from .transport import GradientFuture, Transport


class Pace(Protocol):
    """Decides which step's mean a backward gets.

    Attributes:
        under_adam: a rule against optimizers that the pace does not suit; None: it suits all.
    """

    under_adam: Unsuited | None

    def take_model(self, model: torch.nn.Module) -> None:
        """Takes the model that is trained, in DDP or not; the residuals know its names already."""

    def require(self, codecs: Sequence[Codec]) -> None:
        """Raises ConfigError if one of the codecs cannot work with this pace, or a model is
        missing."""

    def finish_previous_step(self, step: int) -> None:
        """Waits, before the first bucket of a step, until the works of the step before are over,
        failed ones included (``Transport.error``)."""

    def launch(self, bucket: GradientBucket, codec: Codec) -> GradientFuture:
        """Sends a bucket, in the thread of backward. Returns a Future of its buffer, which then
        holds the gradients for the optimizer."""

    def flush(self) -> bool:
        """Applies a gradient in flight, as ``HookState.flush`` does."""

    def saved(self, own: bool) -> dict[str, Any]:
        """Returns the state for a checkpoint; empty if there is none. It is the same on all ranks,
        unless ``own`` adds this rank's own part, with which training continues to the bit."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what ``saved`` returned; an empty state: nothing is in flight."""


class EveryStep:
    """Gives each step its own mean."""

    under_adam: Unsuited | None = None

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def take_model(self, model: torch.nn.Module) -> None:
        """Does nothing: this pace needs no model."""

    def require(self, codecs: Sequence[Codec]) -> None:
        """Does nothing: this pace works with all codecs."""

    def finish_previous_step(self, step: int) -> None:
        """Does nothing: DDP has waited at the end of backward."""

    def launch(self, bucket: GradientBucket, codec: Codec) -> GradientFuture:
        return self._transport.launch(bucket, codec)

    def flush(self) -> bool:
        """Returns False: nothing is in flight between two steps."""
        return False

    def saved(self, own: bool) -> dict[str, Any]:
        """Returns nothing: no gradient is in flight."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError for a gradient in flight, which would be lost."""
        if state.get("means"):
            raise ConfigError(
                "the state holds gradients in flight of pace='stale1', and this hook is "
                "synchronous; call state.flush() before saving, or give HookState(..., "
                "pace='stale1')"
            )


def pace_of(
    setting: object, transport: Transport, account: Account, residuals: NamedFeedback
) -> Pace:
    """Returns the pace that ``HookState(pace=...)`` names. Raises ConfigError for anything else."""
    if setting == "every":
        return EveryStep(transport)
    if setting == "stale1":
        setting = Stale1()
    if isinstance(setting, Stale1):
        return OneStepStale(setting, transport, account, residuals)
    near = did_you_mean(str(setting), ["every", "stale1"])
    raise ConfigError(f"pace={setting!r}: give 'every', 'stale1' or ringcomm.torch.Stale1(){near}")
