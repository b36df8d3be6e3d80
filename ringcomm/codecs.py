"""The wire formats by name: what ``compression=`` may be, read in one place.

Invariants: a name means the same everywhere, in calls, hooks and command lines; what this module
has parsed needs no further check, save that of the tensor's dtype and of the op.
"""

from __future__ import annotations

import dataclasses

from .errors import ConfigError


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
        raise ConfigError(f"{what}{compression!r} is unknown; give one of {', '.join(CODECS)}")
    return found
