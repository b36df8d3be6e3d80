"""The report of an account: figures of steps, and the table of them that people read.

In the table bytes are totals of all steps since the reset, and times are means of the single steps
that are kept.
"""

from __future__ import annotations

import io
import statistics
from typing import Any, Literal, TypedDict

Interval = tuple[float, float]
"""Begin and end, in seconds of one clock."""

_Bytes = Literal["payload_bytes", "wire_bytes", "shared_bytes"]
_TIMES: tuple[tuple[str, Literal["step_s", "compute_s", "exposed_s", "hidden_s"]], ...] = (
    ("step", "step_s"),
    ("  compute", "compute_s"),
    ("  exposed communication", "exposed_s"),
    ("hidden communication", "hidden_s"),
)


class StepReport(TypedDict):
    """Figures of one step; ``HookState.report`` explains them."""

    step_s: float
    compute_s: float
    backward_s: float
    hidden_s: float
    exposed_s: float
    in_flight_s: float
    deferred: bool
    buckets: int
    payload_bytes: int
    wire_bytes: int
    shared_bytes: int


class CodecStretch(TypedDict):
    """A run of steps with one codec: the numbers, from 0 on, of its first and last step."""

    codec: str
    first: int
    last: int


class ExchangeReport(dict[str, Any]):
    """Report of a hook, an optimizer or an OuterStep: a dictionary whose values are attributes,
    too; ``print`` shows it as a table.

    Attributes:
        buckets: buckets reduced.
        payload_bytes: bytes of what was exchanged, before compression.
        wire_bytes: payload that this rank sent over its ports, after compression.
        shared_bytes: bytes that this rank wrote to the memory that ranks of a host share.
        rail_bytes: bytes sent by each port, in rail order, with frame headers.
        comm_s: seconds from submission to completion, summed over buckets.
        works: times of submission and completion of each bucket.
        steps: reports of the finished steps, oldest first.
        codecs: codecs of the whole run, each with its first and last step.
    """

    buckets: int
    payload_bytes: int
    wire_bytes: int
    shared_bytes: int
    rail_bytes: list[int]
    comm_s: float
    works: list[Interval]
    steps: list[StepReport]
    codecs: list[CodecStretch]

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"a {type(self).__name__} has no {name!r}")

    def __str__(self) -> str:
        from rich import box  # which only printing needs
        from rich.console import Console
        from rich.table import Table

        steps = len(self.steps)
        out = Table(
            box=box.SIMPLE,
            title=f"exchanged: {self.buckets:,} buckets, {steps:,} steps",
            title_justify="left",
        )
        out.add_column("")
        out.add_column("all", justify="right")
        out.add_column("a step", justify="right")
        rails = [
            (f"  rail {rail}, headers too", sent, None) for rail, sent in enumerate(self.rail_bytes)
        ]
        rows: list[tuple[str, int, _Bytes | None]] = [
            ("before compression", self.payload_bytes, "payload_bytes"),
            ("sent over ports", self.wire_bytes, "wire_bytes"),
            *(rails if len(rails) > 1 else []),
            ("through shared memory", self.shared_bytes, "shared_bytes"),
        ]
        for name, total, key in rows:
            mean = statistics.fmean(s[key] for s in self.steps) if key and steps else None
            out.add_row(name, bytes_text(total), "" if mean is None else bytes_text(mean))
        for name, part in _TIMES if steps else ():
            out.add_row(name, "", f"{1e3 * statistics.fmean(s[part] for s in self.steps):,.2f} ms")
        text = io.StringIO()
        Console(file=text, width=80, color_system=None).print(out)
        return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())


def bytes_text(count: float) -> str:
    """Writes a number of bytes with its unit, for people."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} bytes"
