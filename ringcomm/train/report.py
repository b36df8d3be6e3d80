"""The final report: one dictionary for the log, one table for people.

Invariants: every figure in it was measured or counted in this run; ``measured`` says how. Times
are means over the measured steps and over the ranks, so the parts add up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from .timing import StepTimes, efficiency

_HOW = {  # each fits the table's 80 columns beside the longest label and figure
    "codecs": "the last one chosen",
    "held_out": "after the last step",
    "samples_per_s": "global batch / step",
    "step_s": "mean over steps and ranks",
    "input_s": "fetching the batch",
    "compute_s": "step - input - exposed",
    "exposed_s": "last bucket to backward's end",
    "hidden_s": "in flight during compute",
    "trial_sync_s": "after the run: median",
    "trial_no_sync_s": "median under no_sync",
    "gradient_bytes_per_step": "counted by the hook",
    "sent_bytes_per_step": "compressed gradients",
    "wire_bytes_per_step": "by TCP",
    "shared_bytes_per_step": "between ranks of a host",
    "scaling_efficiency": "compute / (compute + exposed)",
    "trial_efficiency": "trial: without / with",
}
_BY = {
    "momentum": "ringcomm.torch.optim", "outer": "OuterStep", "sparse": "ringcomm.torch.sparse",
}  # fmt: skip
_HOW_BY = {  # of methods that have no DDP, which know neither works nor who shares memory
    "exposed_s": "waiting for the others",
    "gradient_bytes_per_step": "before compression",
    "sent_bytes_per_step": "ports and shared memory",
}
_UNKNOWN_BY = ("hidden_s", "wire_bytes_per_step", "shared_bytes_per_step")
_HOW_GLOO_WIRE = "2(N-1)/N of the gradients"


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a run measured, each mean over ranks. Times in seconds, of one step."""

    steps: int
    times: StepTimes
    trial: tuple[float, float] | None  # seconds of a step with and without communication
    gradient_bytes: float
    wire_bytes: float
    shared_bytes: float
    buckets: float


def build(
    run: Mapping[str, Any], held_out: Mapping[str, float], measured: Measured | None
) -> dict[str, Any]:
    """The report as it is logged.

    Args:
        run: what was run; needs "batch", "backend", "hook" and "method", the rest is passed on.
        held_out: loss, with accuracy (images) or perplexity (text).
        measured: None if no step was left to run.
    """
    how = dict(_HOW)
    if run["backend"] == "gloo" and not run["hook"]:
        how["sent_bytes_per_step"] = _HOW_GLOO_WIRE
    if run["method"] in _BY:
        how |= _HOW_BY
        for name in _UNKNOWN_BY:
            del how[name]
    report: dict[str, Any] = {**run, "held_out": dict(held_out)}
    if measured is not None:
        times = measured.times
        report |= {f"{name}_s": value for name, value in dataclasses.asdict(times).items()}
        report |= {
            "measured_steps": measured.steps,
            "samples_per_s": run["batch"] / times.step,
            "gradient_bytes_per_step": round(measured.gradient_bytes),
            "sent_bytes_per_step": round(measured.wire_bytes + measured.shared_bytes),
            "wire_bytes_per_step": round(measured.wire_bytes),
            "shared_bytes_per_step": round(measured.shared_bytes),
            "buckets_per_step": measured.buckets,
            "scaling_efficiency": efficiency(times.compute, times.exposed),
        }
        if measured.trial is not None:
            sync, no_sync = measured.trial
            report["trial_sync_s"] = sync
            report["trial_no_sync_s"] = no_sync
            report["trial_efficiency"] = no_sync / sync
    report["measured"] = {name: text for name, text in how.items() if name in report}
    return report


def table(report: Mapping[str, Any]) -> Table:
    """The report for people, each figure with how it was measured. Of the two efficiencies it shows
    the trial's, where there was one: only that sees what hidden communication costs."""
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
        out.add_row(f"held-out {name}", shown, _HOW["held_out"])
    left_out = {"scaling_efficiency"} if "trial_efficiency" in report else set()
    if report["world_size"] == 1:
        left_out = {name for _, name, _ in _ROWS if name not in _ALONE}
    for label, name, form in _ROWS:
        if name in report["measured"] and name not in left_out:
            out.add_row(label, form(report[name]), report["measured"][name])
    return out


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _codec(codecs: Sequence[Mapping[str, Any]]) -> str:
    return f"{codecs[-1]['codec']} from {codecs[-1]['first'] + 1} on" if codecs else "none"


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _bytes(count: float) -> str:
    for unit, size in (("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} bytes"


_ALONE = {"samples_per_s", "step_s", "input_s", "compute_s"}
_ROWS: Sequence[tuple[str, str, Callable[[Any], str]]] = (
    ("throughput", "samples_per_s", lambda value: f"{value:,.0f} samples/s"),
    ("step", "step_s", _milliseconds),
    ("  input", "input_s", _milliseconds),
    ("  compute", "compute_s", _milliseconds),
    ("  exposed communication", "exposed_s", _milliseconds),
    ("hidden communication", "hidden_s", _milliseconds),
    ("gradients per step", "gradient_bytes_per_step", _bytes),
    ("codec", "codecs", _codec),
    ("sent per step and rank", "sent_bytes_per_step", _bytes),
    ("  over ports", "wire_bytes_per_step", _bytes),
    ("  through shared memory", "shared_bytes_per_step", _bytes),
    ("trial: with communication", "trial_sync_s", _milliseconds),
    ("trial: without", "trial_no_sync_s", _milliseconds),
    ("efficiency", "trial_efficiency", _percent),
    ("efficiency", "scaling_efficiency", _percent),
)
