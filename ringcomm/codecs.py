"""The wire formats by name: parses the values of ``compression=``.

Invariants: a name means the same everywhere, in calls, hooks and command lines; a parsed codec
needs no further check, except of the tensor's dtype and of the op.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from .errors import ConfigError, did_you_mean

BLOCK = 256  # elements; the largest block of any codec, as the core's PLAN_ALIGN

Compression = Literal["none", "bf16", "fp16", "int8", "fp8", "int4", "int2", "onebit"]
"""Values of ``compression=``, for type checkers."""


@dataclasses.dataclass(frozen=True)
class Codec:
    """Name and properties of a wire format.

    Attributes:
        name: as in ``compression=``; "none" for None.
        number: in the C header (rc_codec).
        bits: bits of an element on the wire, scales included.
        quantises: True if elements share a scale, which permits sums and averages only.
        needs_feedback: True if it loses too much to be useful without error feedback.
    """

    name: str
    number: int
    bits: float
    quantises: bool = False
    needs_feedback: bool = False


#: Codecs by name, gentlest first among those of a kind.
CODECS = {
    codec.name: codec
    for codec in (
        Codec("none", 0, 32),
        Codec("bf16", 1, 16),
        Codec("fp16", 2, 16),
        Codec("int8", 3, 8.0625, quantises=True),
        Codec("fp8", 6, 8.0625, quantises=True),
        Codec("int4", 4, 4.25, quantises=True, needs_feedback=True),
        Codec("int2", 7, 2.25, quantises=True, needs_feedback=True),
        Codec("onebit", 5, 1.0625, quantises=True, needs_feedback=True),
    )
}


#: Removed names, without a colon and what follows it, each with the end of its error message.
_REMOVED = {
    "onebit-deepspeed": "has been removed; use 'onebit', which has a scale for each block",
    "topk": "has been removed: under AdamW it ended far behind; ringcomm.torch.sparse and "
    "OuterStep(outer='sparse') send the largest elements and make up for the rest",
}


def parse(compression: object, what: str = "compression=") -> Codec:
    """Returns the codec that ``compression`` names; None is "none".

    Args:
        what: name of the argument in an error message.

    Raises ConfigError for anything else.
    """
    if compression is None:
        return CODECS["none"]
    if isinstance(compression, str):
        if compression in CODECS:
            return CODECS[compression]
        if why := _REMOVED.get(compression.partition(":")[0]):
            raise ConfigError(f"{what}{compression!r} {why}")
    raise ConfigError(
        f"{what}{compression!r} is unknown; give one of {names()}{_meant(compression)}"
    )


def of_group(compression: object) -> Codec:
    """Parses the codec of a torch process group's all-reduces. Raises ConfigError, too, for one
    that needs error feedback."""
    codec = parse(compression)
    if codec.needs_feedback:
        raise ConfigError(
            f"compression={codec.name!r} needs error feedback, which a process group has not: "
            "leave it out, and give it to HookState with ringcomm.torch.allreduce_hook"
        )
    return codec


def names(among: Callable[[Codec], bool] = lambda codec: True) -> str:
    """Lists the names of the codecs, or of some, for messages and help texts."""
    return ", ".join(codec.name for codec in CODECS.values() if among(codec))


def _meant(compression: object) -> str:
    """Suggests a codec for a wrong name, also for a dtype such as torch.bfloat16."""
    name = getattr(compression, "__name__", None) or str(compression)
    word = name.rpartition(".")[2].lower()
    word = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}.get(word, word)
    return did_you_mean(word, CODECS)
