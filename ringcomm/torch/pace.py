"""Which step's mean a backward gets: the base of paces, which is the pace of synchronous training.

    Pace            the mean of this step, waited for      this module
    OneStepStale    the mean of the step before            stale.py
    pace_of         makes the pace of a setting            stale.py

Invariants: a pace gives each bucket to the transport once, in the order of DDP's calls. The
gradients that it returns are the same on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..codecs import Codec
from ..errors import ConfigError, RingcommError
from .buckets import GradientBucket
from .guards import Unsuited
from .transport import GradientFuture, Transport


class Pace:
    """Gives each step its own mean. A subclass may give it another one.

    Attributes:
        under_adam: a rule against optimizers that the pace does not suit; None: it suits all.
    """

    under_adam: Unsuited | None = None

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._in_flight: list[GradientFuture] = []  # for which DDP does not wait, or not yet

    def take_model(self, model: torch.nn.Module) -> None:
        """Takes the model that is trained, in DDP or not; the residuals know its names already."""

    def require(self, codecs: Sequence[Codec]) -> None:
        """Raises ConfigError if one of the codecs cannot work with this pace, or a model is
        missing."""

    def finish_previous_step(self, step: int) -> None:
        """Waits until the works of the step before are over, failed ones included
        (``Transport.error``): before a step's first bucket, a flush, a checkpoint, or a change of
        the loss scale. (In synchronous training DDP has waited, unless backward has raised.)"""
        in_flight, self._in_flight = self._in_flight, []
        if not in_flight:
            return
        with self._transport.account.stall():
            self._transport.finish_step()
            for future in in_flight:
                with contextlib.suppress(RuntimeError, RingcommError):
                    future.wait()

    def launch(self, bucket: GradientBucket, codec: Codec) -> GradientFuture:
        """Sends a bucket, in the thread of backward. Returns a Future of its buffer, which then
        holds the gradients for the optimizer."""
        future = self._transport.launch(bucket, codec)
        self._in_flight.append(future)
        if bucket.last:
            self._in_flight.clear()
        return future

    def flush(self) -> bool:
        """Applies a gradient in flight, as ``HookState.flush`` does. Returns whether there was
        one."""
        return False

    def saved(self, own: bool) -> dict[str, Any]:
        """Returns the state for a checkpoint; empty if there is none. It is the same on all ranks,
        unless ``own`` adds this rank's own part, with which training continues to the bit."""
        return {}

    def require_state(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError for a state that does not fit, or whose gradients in flight this pace
        would lose."""
        if state.get("means"):
            raise ConfigError(
                "the state holds gradients in flight of pace='stale1', and this hook is "
                "synchronous; call state.flush() before saving, or give HookState(..., "
                "pace='stale1')"
            )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what ``saved`` returned, which must fit; an empty state: nothing is in flight."""
