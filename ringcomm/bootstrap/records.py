"""Messages between ranks during bring-up: strict JSON in ASCII, bounded, checked by field.

Invariants: nothing received is evaluated, unpickled or used before its type and range were
checked; a blob is at most 64 KiB, but where both its ends take more; whatever a peer sends, the
only error is a BootstrapError that names the rank it came from.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Sequence
from typing import Any, TypeVar

from ..errors import BootstrapError, ConfigError

MAX_BYTES = 64 << 10
LENGTH = struct.Struct("<I")
"""Length before each of several blobs."""
_MAX_TEXT = 2000  # characters of any text field

T = TypeVar("T")


def pack(fields: dict[str, Any], limit: int = MAX_BYTES) -> bytes:
    """Encodes fields as a blob. Raises ConfigError if it would exceed so many bytes."""
    blob = json.dumps(fields, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()
    if len(blob) > limit:
        raise ConfigError(
            f"this rank's part of the bring-up takes {len(blob)} bytes, {limit} are allowed: "
            "use fewer ranks, rails or lanes"
        )
    return blob


def join_blobs(blobs: Sequence[bytes]) -> bytes:
    """Concatenates blobs, each behind its length."""
    return b"".join(LENGTH.pack(len(blob)) + blob for blob in blobs)


def split_blobs(data: bytes, count: int) -> list[bytes] | None:
    """Returns the blobs that join_blobs has concatenated; None if they are malformed, or not
    count."""
    blobs, at = [], 0
    for _ in range(count):
        if len(data) - at < LENGTH.size:
            return None
        (size,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size
        if size > MAX_BYTES or len(data) - at < size:
            return None
        blobs.append(data[at : at + size])
        at += size
    return blobs if at == len(data) else None


@dataclasses.dataclass(frozen=True)
class Record:
    """One JSON object from one rank, read field by field."""

    source: str
    """The rank, for messages: "rank 3"."""
    fields: dict[str, Any]
    """Not checked: only which there are may be read of it."""

    @classmethod
    def unpack(cls, source: str, blob: bytes, limit: int = MAX_BYTES) -> Record:
        """Decodes a blob. Raises BootstrapError."""
        malformed = cls(source, {}).malformed
        if len(blob) > limit:
            raise malformed("is too long")
        try:
            fields = json.loads(
                blob.decode("ascii"), object_pairs_hook=_unique, parse_constant=_no_constant
            )
        except (ValueError, RecursionError):
            raise malformed("is not strict JSON") from None
        if not isinstance(fields, dict):
            raise malformed("is not an object")
        return cls(source, fields)

    def text(self, name: str) -> str:
        """Returns a field that is a printable string."""
        value = self._get(name, str)
        if len(value) > _MAX_TEXT or not value.replace("\n", " ").isprintable():
            raise self.malformed(f"has an unprintable {name!r}")
        return value

    def integer(self, name: str, low: int, high: int) -> int:
        """Returns a field that is a whole number from low to high."""
        value = self._get(name, int)
        if isinstance(value, bool) or not low <= value <= high:
            raise self.malformed(f"has {name!r} out of range")
        return value

    def number(self, name: str, low: float, high: float) -> float:
        """Returns a field that is a number from low to high."""
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.malformed(f"has no number {name!r}")
        if not low <= value <= high:
            raise self.malformed(f"has {name!r} out of range")
        return float(value)

    def records(self, name: str, limit: int) -> list[Record]:
        """Returns a field that is a list of at most limit objects."""
        value = self._get(name, list)
        if len(value) > limit or not all(isinstance(item, dict) for item in value):
            raise self.malformed(f"has a bad list {name!r}")
        return [Record(self.source, item) for item in value]

    def object(self, name: str) -> Record:
        """Returns a field that is itself an object."""
        return Record(self.source, self._get(name, dict))

    def malformed(self, what: str) -> BootstrapError:
        """Returns the error to raise where this cannot be used; what: "has ..."."""
        return BootstrapError(
            f"what {self.source} sent {what}: is it the same version of ringcomm?"
        )

    def _get(self, name: str, kind: type[T]) -> T:
        value = self.fields.get(name)
        if not isinstance(value, kind):
            raise self.malformed(f"has no {name!r}")
        return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name stands twice")
    return fields


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
