"""When the mean of a gradient is handed out: the seam, and the pace of synchronous training.

    EveryStep    the mean of this step, as soon as it is there             this module

Invariants: a pace takes each bucket to the transport once, in the order in which it comes.
"""

from __future__ import annotations

from typing import Protocol

from ..codecs import Codec
from .buckets import Bucket
from .transport import GradientFuture, Transport


class Pace(Protocol):
    """What decides which mean a backward gets."""

    def begin(self, step: int) -> None:
        """Before the first bucket of a step; what is known of the step before is then complete."""

    def launch(self, bucket: Bucket, codec: Codec) -> GradientFuture:
        """Sends a bucket, in the thread of backward; a Future of its buffer, which then holds what
        the optimizer is to have."""


class EveryStep:
    """Each step has its own mean, and waits for it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def begin(self, step: int) -> None:
        """See Pace."""
        self._transport.begin()

    def launch(self, bucket: Bucket, codec: Codec) -> GradientFuture:
        """See Pace."""
        return self._transport.launch(bucket, codec)
