"""Table of a failed bring-up: where each rank was tried, and with what outcome.

Invariants: every row names a rank and says one thing about it; rows travel between ranks as
records, so that all of them show the same table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import AuthenticationError, BootstrapError
from .handshake_params import Outcome
from .records import Record

MAX_ROWS = 100
MAX_RAIL = 1 << 16

CONNECTED = "connected"
REFUSED = "refused"
NO_ANSWER = "no answer"
MUTE = "connected, but no answer to the handshake"
NEVER_CAME = "never came to the rendezvous"
NOT_SEEN = "did not connect"
LEFT = "left during the bring-up"
FAILED_HEADLINE = "the bring-up failed"
_DENIED = (
    Outcome.AUTHENTICATION_FAILED.text,
    Outcome.OTHER_JOB.text,
    Outcome.OTHER_USER.text,
)


@dataclasses.dataclass(frozen=True, order=True)
class Row:
    """State of one rank, as seen from another or from the rendezvous."""

    rank: int
    """The rank that could not be reached."""
    seen_from: int
    """The rank that tried; -1: the rendezvous."""
    address: str
    """Address that was tried; empty if none."""
    state: str
    """State of the rank: CONNECTED, REFUSED, ... or an Outcome's text."""
    detail: str = ""
    rail: int = -1
    """Rail that was tried; -1: not about one rail."""

    def to_fields(self) -> dict[str, Any]:
        """Returns the fields for a blob."""
        return {**dataclasses.asdict(self), "detail": self.detail[:200]}

    @classmethod
    def from_record(cls, record: Record, world_size: int) -> Row:
        """Reads the fields of a blob. Raises BootstrapError."""
        return cls(
            rank=record.integer("rank", 0, world_size - 1),
            seen_from=record.integer("seen_from", -1, world_size - 1),
            address=record.text("address"),
            state=record.text("state"),
            detail=record.text("detail"),
            rail=record.integer("rail", -1, MAX_RAIL),
        )


Lost = Callable[[], list[Row]]
"""Returns a row for each rank that seems to have left."""


class JoinError(BootstrapError):
    """Not all ranks could be joined.

    Attributes:
        rows: one for each rank and address that was tried.
    """

    def __init__(self, message: str, *, rows: Sequence[Row] = (), **fields: Any) -> None:
        super().__init__(message, **fields)
        self.rows = tuple(rows)


class JoinDeniedError(JoinError, AuthenticationError):
    """Not all ranks could be joined, and the only reason is that they hold different secrets."""


def join_error(headline: str, rows: Iterable[Row], hosts: Sequence[str] = ()) -> JoinError:
    """Makes the error with its table. hosts, where known, are the host names by rank."""
    rows = sorted(rows)
    lines = [_line(row, hosts) for row in rows]
    failed = [row for row in rows if row.state != CONNECTED]
    culprits = {row.rank for row in failed}
    culprit = next(iter(culprits)) if len(culprits) == 1 else None
    return (JoinDeniedError if _all_denied(failed) else JoinError)(
        "\n".join([f"{headline}:", *_align(lines)]),
        rows=rows,
        rank=culprit,
        host=hosts[culprit] if hosts and culprit is not None else None,
    )


def _all_denied(failed: Sequence[Row]) -> bool:
    """True if every rank that could not be reached denied the connection; refused connections at
    other ports of such a rank do not count."""
    denied = {row.rank for row in failed if row.state in _DENIED}
    return bool(failed) and all(
        row.rank in denied and row.state in (*_DENIED, REFUSED) for row in failed
    )


def _line(row: Row, hosts: Sequence[str]) -> tuple[str, str, str, str]:
    who = f"rank {row.rank}" + (f" ({hosts[row.rank]})" if hosts else "")
    seen = f"from rank {row.seen_from}" if row.seen_from >= 0 else ""
    if row.rail >= 0:
        seen += f" on rail {row.rail}"
    return who, row.address, seen, row.state + (f": {row.detail}" if row.detail else "")


def _align(lines: Sequence[tuple[str, str, str, str]]) -> list[str]:
    widths = [max(len(line[i]) for line in lines) if lines else 0 for i in range(3)]
    return [
        "  " + "  ".join([line[i].ljust(widths[i]) for i in range(3) if widths[i]] + [line[3]])
        for line in lines
    ]
