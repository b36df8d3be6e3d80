"""The wire formats by name: what ``compression=`` may be, read in one place.

Invariants: a name means the same everywhere, in calls, hooks and command lines; what this module
has parsed needs no further check, save that of the tensor's dtype and of the op.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from .errors import ConfigError, did_you_mean

BLOCK = 256  # elements; the largest block of any codec, as the core's PLAN_ALIGN

Compression = Literal["none", "bf16", "fp16", "int8", "fp8", "int4", "onebit"]
"""What ``compression=`` takes, for who checks types."""


@dataclasses.dataclass(frozen=True)
class Codec:
    """One wire format.

    Attributes:
        name: as in ``compression=``; "none" for None.
        number: in the C header (rc_codec).
        bits: on the wire for an element, scales included.
        quantises: elements share a scale: sums and averages only.
        needs_feedback: without error feedback it loses too much to be useful.
    """

    name: str
    number: int
    bits: float
    quantises: bool = False
    needs_feedback: bool = False


#: By name, gentlest first among those of a kind.
CODECS = {
    codec.name: codec
    for codec in (
        Codec("none", 0, 32),
        Codec("bf16", 1, 16),
        Codec("fp16", 2, 16),
        Codec("int8", 3, 8.0625, quantises=True),
        Codec("fp8", 6, 8.0625, quantises=True),
        Codec("int4", 4, 4.25, quantises=True, needs_feedback=True),
        Codec("onebit", 5, 1.0625, quantises=True, needs_feedback=True),
    )
}


#: Names that used to be codecs, without what follows a colon, and what an error says of them.
_REMOVED = {
    "onebit-deepspeed": "has been removed; use 'onebit', which has a scale for each block",
    "topk": "has been removed: under AdamW it ended far behind; ringcomm.torch.sparse and "
    "OuterStep(outer='sparse') send the largest elements and make up for the rest",
}


def parse(compression: object, what: str = "compression=") -> Codec:
    """The codec that ``compression`` names; None is "none".

    Args:
        what: what the message of an error calls it.

    Raises ConfigError for anything else.
    """
    if compression is None:
        return CODECS["none"]
    found = CODECS.get(compression) if isinstance(compression, str) else None
    if found is None:
        why = isinstance(compression, str) and _REMOVED.get(compression.partition(":")[0])
        if why:
            raise ConfigError(f"{what}{compression!r} {why}")
        raise ConfigError(
            f"{what}{compression!r} is unknown; give one of {names()}{_meant(compression)}"
        )
    return found


def names(among: Callable[[Codec], bool] = lambda codec: True) -> str:
    """The codecs, or some of them, as messages and help texts list them."""
    return ", ".join(codec.name for codec in CODECS.values() if among(codec))


def _meant(compression: object) -> str:
    """Of a dtype, too, as torch.bfloat16 and numpy.float16, it says which codec is meant."""
    name = getattr(compression, "__name__", None) or str(compression)
    word = name.rpartition(".")[2].lower()
    word = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}.get(word, word)
    return did_you_mean(word, CODECS)
