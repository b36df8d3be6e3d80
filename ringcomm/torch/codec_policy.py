"""The codec of each step: the interface of codec policies, and the policy with one codec.

Invariants: a policy's answer for a step is the same on all ranks, so it follows from the number of
the step and from data that the ranks have exchanged. The hook calls in the thread of backward, and
in this order, once in a step:

    note(report, finite)    for each step that is over and has not been noted yet, in order
    begin(step, exchange)   before the first bucket of the step
    codec(step)             any number of times; it changes nothing
    look(bucket, scale)     before each bucket is sent, in order
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ..codecs import CODECS, Codec, parse
from .argument_checks import require_able
from .auto import Auto
from .buckets import GradientBucket
from .exchange import CommExchange
from .sync.exchange_report import StepReport


class CodecPolicy(Protocol):
    """Decides in which codec the gradients of a step travel.

    It can be pickled, as torch.save of a wrapped model takes the hook's state along; a copy begins
    with the original's state and without connections.
    """

    @property
    def name(self) -> str:
        """Text of ``HookState.compression``."""

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """All codecs that it may choose. If one of them needs error feedback, residuals are kept;
        settings that one of them cannot work with are refused when the hook's state is made."""

    def codec(self, step: int) -> Codec:
        """Returns the codec of a step's float32 and float64 gradients; steps count from 0."""

    def begin(self, step: int, exchange: CommExchange) -> None:
        """Called when a step begins, on all ranks alike: the place to exchange the measurements of
        the ranks, and to take the results of earlier steps without waiting. A step whose backward
        has raised is begun again."""

    def look(self, bucket: GradientBucket, loss_scale: float) -> None:
        """Called before a bucket with this rank's gradients is sent; it must not change the bucket.

        Args:
            loss_scale: the factor that is in the gradients.
        """

    def note(self, report: StepReport, finite: bool) -> None:
        """Called when a step is over.

        Args:
            report: this rank's figures of the step; other ranks' differ.
            finite: whether no result was found that is not finite, the same on all ranks. Results
                of none, bf16 and fp16 are not checked.
        """

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, the same on all ranks; empty if there is none."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` returned. Raises ConfigError for a state of another
        policy."""


class FixedCodec:
    """One codec for all steps after a warm-up.

    Args:
        warmup_steps: number of first steps in which bf16 replaces int8 and harsher codecs.
    """

    def __init__(self, codec: Codec, warmup_steps: int = 0) -> None:
        self._codec = codec
        self._warmup_steps = warmup_steps

    @property
    def name(self) -> str:
        """Name of the codec."""
        return self._codec.name

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The one codec; its substitute during the warm-up is gentler."""
        return (self._codec,)

    def codec(self, step: int) -> Codec:
        """Returns bf16 during the warm-up of a quantising codec, else the codec."""
        waits = self._codec.quantises and step < self._warmup_steps
        return CODECS["bf16"] if waits else self._codec

    def begin(self, step: int, exchange: CommExchange) -> None:
        """Does nothing: no rank has anything to agree on."""

    def look(self, bucket: GradientBucket, loss_scale: float) -> None:
        """Does nothing: the codec does not depend on gradients."""

    def note(self, report: StepReport, finite: bool) -> None:
        """Does nothing: the codec does not depend on measurements."""

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: the setting is the caller's."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Ignores the state: a run may continue with another policy than it began with."""


def policy_of(
    compression: str | CodecPolicy | None, warmup_steps: int, model: torch.nn.Module | None
) -> CodecPolicy:
    """Returns the policy that ``HookState(compression, warmup_steps=..., model=...)`` names. Raises
    ConfigError for a codec that the hook does not take, and for an object that is no policy."""
    if compression == "auto":
        return Auto(model, warmup_steps=warmup_steps)
    if compression is None or isinstance(compression, (str, torch.dtype)):
        return FixedCodec(parse(compression), warmup_steps)
    require_able("compression", compression)
    return compression


def needs_feedback(policy: CodecPolicy) -> bool:
    """Returns whether a codec that the policy may choose needs error feedback."""
    return any(codec.needs_feedback for codec in policy.codecs)
