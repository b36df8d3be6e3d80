"""What a step would take by each codec, forecast from what the link was measured to do.

Backward makes one bucket after the other ready, and the link carries them in that order:

    backward   |bucket 0 ready |bucket 1 ready |bucket 2 ready: backward is over
    link       |[0 .........]  |[1 .........]  |[2 .........]|
               |<--------- it can hide ------->|<- exposed ->|

A bucket takes as long as the slower of the link and the codec. A step takes what was computed and
what is exposed.

Invariants: nothing here has a state. Times are in seconds, rates in bytes per second of encoded
gradients, so that a rate has in it how often the algorithm sends each byte.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ..codecs import CODECS, Codec
from ..errors import ConfigError

#: What encoding, decoding and adding takes a processor beside the network, seconds an element:
#: of use until a codec has been measured.
CODEC_S = {"int8": 1.0e-9, "fp8": 1.2e-9, "int4": 1.5e-9, "onebit": 1.6e-9}
_LEAST_H, _MOST_H = 1, 1000


@dataclasses.dataclass(frozen=True)
class Freight:
    """What travels together.

    Attributes:
        large: elements that travel by the codec.
        small: elements that travel at bf16 where the codec quantises.
        plain: bytes that travel as they are, whatever the codec.
        width: bytes of an element without a codec.
    """

    large: int
    small: int = 0
    plain: int = 0
    width: int = 4

    def bytes_in(self, codec: Codec) -> float:
        """Bytes of the bucket in this codec."""
        bits = 8 * self.width if codec.name == "none" else codec.bits
        rest = CODECS["bf16"].bits if codec.quantises else bits
        return (self.large * bits + self.small * rest) / 8 + self.plain


Load = Sequence[Freight]
"""A step's buckets, in the order in which they become ready."""


@dataclasses.dataclass(frozen=True)
class Link:
    """What the network and the codecs do.

    Attributes:
        rate: encoded bytes per second, while there are any to carry.
        latency_s: of a bucket, beside its bytes.
        codec_s: seconds an element, by codec's name; one that is not there takes none.
    """

    rate: float
    latency_s: float = 0.0
    codec_s: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def slower(self, factor: float) -> Link:
        """The same with its rate divided by a factor."""
        return dataclasses.replace(self, rate=self.rate / factor)

    def seconds(self, bucket: Freight, codec: Codec) -> float:
        """What a bucket keeps the link busy for."""
        encoding = bucket.large * self.codec_s.get(codec.name, 0.0)
        return max(bucket.bytes_in(codec) / self.rate, encoding)


def encoded_bytes(load: Load, codec: Codec) -> float:
    """Encoded bytes of one step's buckets."""
    return sum(bucket.bytes_in(codec) for bucket in load)


def transfer_s(load: Load, codec: Codec, link: Link) -> float:
    """What the buckets of a step take one after the other, were all ready at once."""
    return sum(link.seconds(bucket, codec) for bucket in load) + link.latency_s


def exposed_s(load: Load, codec: Codec, link: Link, ready_s: Sequence[float]) -> float:
    """How long the link goes on after the last bucket was ready.

    Args:
        ready_s: when each bucket is ready.
    """
    free = 0.0
    for bucket, at in zip(load, ready_s, strict=True):
        free = max(free, at) + link.seconds(bucket, codec)
    return max(0.0, free + link.latency_s - ready_s[-1])


def inner_steps(
    step_s: float, nbytes: float, goodput: float, *, latency_s: float = 0.0, overlap: float = 0.0,
    share: float = 0.03, least: int = _LEAST_H, most: int = _MOST_H,
) -> int:  # fmt: skip
    """The fewest inner steps between two exchanges that cost at most a share of their time.

    Args:
        step_s: seconds of an inner step.
        nbytes: that a rank sends for an exchange, encoded.
        goodput: bytes per second that it sends.
        latency_s: of an exchange, beside its bytes.
        overlap: inner steps behind which the exchange hides; 0: they wait for it.
        share: of the inner steps' time, that an exchange may cost.
        least, most: bounds of the answer.

    Raises ConfigError for a time or rate that is not positive, or a share that is none.
    """
    for name, value in (("step_s", step_s), ("goodput", goodput), ("share", share)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{name}={value!r}: give a number above 0")
    if not 1 <= least <= most:
        raise ConfigError(f"least={least}, most={most}: give 1 or more, and no more than most")
    transfer = nbytes / goodput + latency_s
    exposed = max(0.0, transfer - overlap * step_s)
    # An exchange that is still under way when the next one starts costs more than it shows.
    fewest = max(exposed / (share * step_s), min(transfer / step_s, overlap))
    return min(most, max(least, math.ceil(fewest - 1e-9)))
