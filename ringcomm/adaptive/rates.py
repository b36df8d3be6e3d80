"""What the link and the codecs do, learned from windows of steps.

A window tells how long the link was busy, and that may have been the wire or the processor that
encodes. The processor time of the engine tells them apart: where it is a large part of that time,
the codec is what was waited for, and nothing is seen of the wire. Its rate is then taken to be a
little higher with every window, until the next gentler codec is tried, whose window tells the
truth. Where many ranks share a processor, its time says less; but a codec that has just been
changed to, and takes clearly longer than the wire did a moment before, takes that time itself.

Invariants: codecs that do not quantise cost no time of their own: what they take is the wire's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..codecs import Codec
from .forecast import CODEC_S, Link, Load, encoded_bytes

_BOUND = 0.35  # of the busy time: the processor is what is waited for
_SUSPECT = 0.15  # it may be, where ranks share it
_CLEARLY = 1.25
_PROBE = 1.05
_REACH = 2.2  # times what is seen: the next gentler codec would do as well, and no other


class Rates:
    """The estimate.

    Attributes:
        link: by the latest window; None: there was none.
    """

    def __init__(self) -> None:
        self.link: Link | None = None
        self._codec_s = dict(CODEC_S)

    def learn(
        self, codec: Codec, load: Load, busy_s: float, cpu_s: float, latency_s: float,
        is_first: bool,
    ) -> Link:  # fmt: skip
        """A window of that codec, ``is_first`` since it changed; what the link does by now.

        Args:
            busy_s, cpu_s: of a step: in which a bucket was in flight; of the engine.
            latency_s: of a step, and in busy_s.
        """
        busy = max(busy_s - latency_s, busy_s / 10, 1e-9)
        rate, elements = encoded_bytes(load, codec) / busy, sum(bucket.large for bucket in load)
        if codec.quantises and elements:
            name, own, before = codec.name, busy / elements, self.link.rate if self.link else rate
            took_over = is_first and cpu_s >= _SUSPECT * busy and rate * _CLEARLY < before
            if took_over or cpu_s >= _BOUND * busy:
                self._codec_s[name] = own
                reach = max(before, rate * (_REACH if codec.bits > 4 else 2 * _REACH))
                rate = max(rate, before if is_first else min(before * _PROBE, reach))
            else:
                self._codec_s[name] = min(self._codec_s[name], own)
        self.link = Link(rate, min(latency_s, busy_s), dict(self._codec_s))
        return self.link

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        rate = None if self.link is None else self.link.rate
        return {"rate": rate, "codec_s": dict(self._codec_s)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from it."""
        self._codec_s = {**CODEC_S, **state["codec_s"]}
        rate = state["rate"]
        self.link = None if rate is None else Link(rate, 0.0, dict(self._codec_s))
