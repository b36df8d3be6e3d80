"""In which codec the hook sends a step: the seam, and the policy that never changes its mind.

Invariants: a policy's answer for a step is the same on all ranks, so it follows from the number of
the step and from what the ranks have told each other. The hook asks in the thread of backward, and
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
from .account import StepReport
from .auto import Auto
from .buckets import Bucket
from .exchange import CommExchange
from .settings import require_able


class CodecPolicy(Protocol):
    """What decides in which codec the gradients of a step travel.

    It can be pickled, as torch.save of a wrapped model takes the hook's state along; a copy begins
    where the original stood, without connections.
    """

    @property
    def name(self) -> str:
        """What ``HookState.compression`` says."""

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """All that it may choose. Where one of them needs error feedback, residuals are kept; what
        does not go with one of them is refused when the hook's state is made."""

    def codec(self, step: int) -> Codec:
        """What the float32 and float64 gradients of the step of that number, from 0, travel in."""

    def begin(self, step: int, exchange: CommExchange) -> None:
        """A step begins, on all ranks alike: the place to exchange what the ranks must agree on,
        which ought not to be waited for in the same step."""

    def look(self, bucket: Bucket, loss_scale: float) -> None:
        """A bucket with this rank's gradients is about to be sent; it is not to be changed.

        Args:
            loss_scale: the factor that is in the gradients.
        """

    def note(self, report: StepReport, finite: bool) -> None:
        """A step is over.

        Args:
            report: this rank's account of it; other ranks' differ.
            finite: no result was seen that is not finite, on all ranks alike. Results of none,
                bf16 and fp16 without residuals are not looked at.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep of it, the same on all ranks; empty for nothing."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what ``state_dict`` returned. Raises ConfigError for another's state."""


class FixedCodec:
    """One codec for all steps, after a dense start.

    Args:
        warmup_steps: in so many first steps a codec from int8 on waits, and bf16 stands in for it.
    """

    def __init__(self, codec: Codec, warmup_steps: int = 0) -> None:
        self._codec = codec
        self._warmup_steps = warmup_steps

    @property
    def name(self) -> str:
        """The codec's."""
        return self._codec.name

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """That one alone; what stands in for it is gentler."""
        return (self._codec,)

    def codec(self, step: int) -> Codec:
        """See CodecPolicy."""
        waits = self._codec.quantises and step < self._warmup_steps
        return CODECS["bf16"] if waits else self._codec

    def begin(self, step: int, exchange: CommExchange) -> None:
        """Nothing is to be agreed on."""

    def look(self, bucket: Bucket, loss_scale: float) -> None:
        """Nothing depends on it."""

    def note(self, report: StepReport, finite: bool) -> None:
        """Nothing depends on it."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the setting is the caller's."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes no notice: a run may go on with another policy than it began with."""


def policy_of(
    compression: str | CodecPolicy | None, warmup_steps: int, model: torch.nn.Module | None
) -> CodecPolicy:
    """What ``HookState(compression, warmup_steps=..., model=...)`` stands for. Raises ConfigError
    for a codec that the hook does not take, and for what is no policy."""
    if compression == "auto":
        return Auto(model, warmup_steps=warmup_steps)
    if compression is None or isinstance(compression, (str, torch.dtype)):
        return FixedCodec(parse(compression), warmup_steps)
    require_able("compression", compression)
    return compression


def needs_feedback(policy: CodecPolicy) -> bool:
    """Whether a codec that it may choose needs error feedback."""
    return any(codec.needs_feedback for codec in policy.codecs)
