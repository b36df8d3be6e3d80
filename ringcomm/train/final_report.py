"""The final report: one dictionary for the log, one table for people.

Invariants: every figure in it was measured or counted in this run, as its row of the table tells.
Figures are means over the same steps, the measured ones, and over the ranks, so the parts of a step
add up. Figures that nobody counts are left out: for DDP's own exchange, and in a world of one, the
report has only the step and its input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

_BY = {
    "momentum": "ringcomm.torch.optim",
    "outer": "OuterStep",
    "sparse": "ringcomm.torch.sparse",
}


def build(
    run: Mapping[str, Any], held_out: Mapping[str, float], measured: Mapping[str, float]
) -> dict[str, Any]:
    """Build the report for the log.

    Args:
        run: description of the run; needs "batch", the rest is passed on.
        held_out: loss, with accuracy (images) or perplexity (text).
        measured: "step_s", "input_s" and the figures of ``Method.account``; empty without steps.
    """
    report = {**run, "held_out": dict(held_out), **measured}
    if measured:
        report["samples_per_s"] = run["batch"] / measured["step_s"]
    if "exposed_s" in measured:
        busy = measured["step_s"] - measured["input_s"]
        report["compute_s"] = busy - measured["exposed_s"]
        report["scaling_efficiency"] = report["compute_s"] / busy
    return report


def table(report: Mapping[str, Any]) -> Table:
    """Make the report for people, each figure with how it was measured."""
    title = (
        f"{report['model']} on {report['data']}: {report['steps']} steps, "
        f"{report['world_size']} rank{'s' if report['world_size'] > 1 else ''}"
    )
    if report["world_size"] > 1:
        by = _BY.get(report["method"], "ringcomm's hook" if report["hook"] else "")
        way = f"{by} over " if by else ""
        title += f"\n{way}{report['backend']}, {report['compression']} between ranks"
    out = Table(box=box.SIMPLE, title=title, title_justify="left", title_style="bold")
    out.add_column("")
    out.add_column("figure", justify="right", no_wrap=True)
    out.add_column("how it was measured", style="dim")
    for name, value in report["held_out"].items():
        shown = f"{100 * value:.2f} %" if name == "accuracy" else f"{value:.4f}"
        out.add_row(f"held-out {name}", shown, "after the last step")
    for label, name, form, how in _ROWS:
        if name in report:
            out.add_row(label, form(report[name]), how)
    return out


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _codec(codecs: Sequence[Mapping[str, Any]]) -> str:
    return f"{codecs[-1]['codec']} from {codecs[-1]['first'] + 1} on" if codecs else "none"


def _bytes(count: float) -> str:
    for unit, size in (("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} bytes"


#: Label, name in the report, format, and how it was measured, short enough for 80 columns.
_ROWS: Sequence[tuple[str, str, Callable[[Any], str], str]] = (
    ("throughput", "samples_per_s", "{:,.0f} samples/s".format, "global batch / step"),
    ("step", "step_s", _milliseconds, "mean over steps and ranks"),
    ("  input", "input_s", _milliseconds, "fetching the batch"),
    ("  compute", "compute_s", _milliseconds, "step - input - exposed"),
    ("  exposed communication", "exposed_s", _milliseconds, "waiting for others"),
    ("hidden communication", "hidden_s", _milliseconds, "in flight during compute"),
    ("gradients per step", "gradient_bytes_per_step", _bytes, "before compression"),
    ("codec", "codecs", _codec, "the last one chosen"),
    ("sent per step and rank", "sent_bytes_per_step", _bytes, "ports and shared memory"),
    ("  over ports", "wire_bytes_per_step", _bytes, "by TCP"),
    ("  through shared memory", "shared_bytes_per_step", _bytes, "between ranks of a host"),
    ("efficiency", "scaling_efficiency", "{:.1%}".format, "compute / (compute + exposed)"),
)
