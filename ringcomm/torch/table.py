"""The hook's report as a table for people.

Bytes are totals of all steps since the reset, times are means of the single steps that are kept.
"""

from __future__ import annotations

import io
import statistics
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table

from .account import HookReport, bytes_text

_Bytes = Literal["payload_bytes", "wire_bytes", "shared_bytes"]
_TIMES: tuple[tuple[str, Literal["step_s", "compute_s", "exposed_s", "hidden_s"]], ...] = (
    ("step", "step_s"),
    ("  compute", "compute_s"),
    ("  exposed communication", "exposed_s"),
    ("hidden communication", "hidden_s"),
)


def table_of(report: HookReport) -> str:
    """Writes the report as a table of a few lines, without an end of line."""
    steps = len(report.steps)
    out = Table(
        box=box.SIMPLE,
        title=f"gradients exchanged: {report.buckets:,} buckets, {steps:,} steps",
        title_justify="left",
    )
    out.add_column("")
    out.add_column("all", justify="right")
    out.add_column("a step", justify="right")
    for name, total, key in _bytes_of(report):
        mean = statistics.fmean(s[key] for s in report.steps) if key and steps else None
        out.add_row(name, bytes_text(total), "" if mean is None else bytes_text(mean))
    for name, part in _TIMES if steps else ():
        out.add_row(name, "", f"{1e3 * statistics.fmean(s[part] for s in report.steps):,.2f} ms")
    text = io.StringIO()
    Console(file=text, width=80, color_system=None).print(out)
    return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())


def _bytes_of(report: HookReport) -> list[tuple[str, int, _Bytes | None]]:
    """Returns (row's name, total bytes, key of the bytes in a step's report) for each row."""
    rails = [
        (f"  rail {rail}, headers too", sent, None) for rail, sent in enumerate(report.rail_bytes)
    ]
    return [
        ("gradients", report.payload_bytes, "payload_bytes"),
        ("sent over ports", report.wire_bytes, "wire_bytes"),
        *(rails if len(rails) > 1 else []),
        ("through shared memory", report.shared_bytes, "shared_bytes"),
    ]
