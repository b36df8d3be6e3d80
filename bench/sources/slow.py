"""slow: time to a target loss over a slow link whose rate changes (StellaTrain).

Time to target is a product, whose factors are measured apart:

    steps METHOD    real training of convergence.py's T1, a GPT of 471,936 parameters on 4 ranks, 8
                    seeds that all methods share; its rows are convergence.py's own, and what is
                    missing of them is trained here and kept there. Steps are those after which the
                    loss is TARGET, on a line between evaluations; a run that never is has failed.
    time WAY        a step of a model of 124 M parameters that computes for 0.5 s on each of 4
                    hosts, at a hundredth of its size and a tenth of the rate, so at a tenth of all
                    times; over one whole cycle of the trace or more.

PowerSGD is timed at rank 1, for at a hundredth of the size that is the share of the bytes (0.7 %)
that rank 4 has of matrices of 768 x 3072; it is trained at rank 4. It has one bucket, for its hook
begins a second all-reduce where a bucket's first one ends: with several buckets each rank has an
order of its own, in which gloo hangs and ringcomm raises MismatchError. The hook that stands for
torch's 16 bits is its fp16 hook: DDP refuses the bf16 one without NCCL, and their bytes are the
same.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _site import Site

from . import steps, trace
from .source import Claim, Found, Point

DOCUMENT = (
    "StellaTrain (SIGCOMM 2024): over links of 115 Mbit/s on average whose rate changes, up to 104 "
    "times less time to accuracy than PyTorch DDP, from sparse gradients and a CPU optimizer."
)
REAL = (
    "training to the target with the real codecs; sockets between network namespaces, DDP and its "
    "hooks, and every byte of the timed steps."
)
EMULATED = (
    "the model of the timed steps (124 M parameters at a hundredth, its 0.5 s of compute a tenth, "
    "slept) and the link (115 Mbit/s on average at a tenth, by a trace)."
)
NEEDS_ROOT = True
WITHOUT_ROOT = "bench/convergence.py trains the same methods"
HARNESS = 1

HOSTS, PARAMETERS, LAYERS, COMPUTE_S = 4, 1.24e6, 16, 0.05
RATE, TIME = 0.1, 0.1  # of the trace's
TARGET, EASIER = 1.75, 2.0  # nats; fp32 comes to 1.66 in its 400 steps
OVER_FP32, OVER_16_BITS, AUTO_WITHIN = 20.0, 5.0, 1.05
PAPERS = 104  # times as fast as DDP, at most
ROWS = Path(__file__).resolve().parent.parent / "results" / "convergence.jsonl"

FP32, HALF, POWERSGD = "DDP, gloo fp32", "DDP, gloo, torch's fp16 hook", "DDP, gloo, PowerSGD"
POWERSGD_LONG, OURS = f"{POWERSGD}, long", "DDP, ringcomm, PowerSGD"
AUTO, STELLA = "auto", "StellaTrain's path"
STELLA_LONG = f"{STELLA}, long"
FIXED = ("int8", "int4")

_GLOO = {"kind": "gradients", "over": "gloo", "bucket_mb": 1.0}
_POWERSGD = {**_GLOO, "hook": "powersgd", "rank": 1, "bucket_mb": None}
_OURS = {"kind": "gradients", "bucket_mb": 1.0}
_OUTER = {"kind": "apart", "steps": 1}
WAYS: Mapping[str, tuple[float, steps.Way]] = {  # bytes of a parameter and step, about; the way
    FP32: (6.0, _GLOO),
    HALF: (3.0, {**_GLOO, "hook": "fp16"}),
    POWERSGD: (0.1, _POWERSGD),
    OURS: (0.1, {**_POWERSGD, "over": "ringcomm"}),
    "int8": (1.5, {**_OURS, "codec": "int8"}),
    "int4": (0.8, {**_OURS, "codec": "int4"}),
    AUTO: (0.8, {**_OURS, "codec": "auto", "allow": ["int4"], "settle": 40}),
    "OuterStep int4, H = 10": (0.08, {
        **_OUTER, "per": 10, "settings": {"every": 10, "codec": "int4"}}),
    "OuterStep int4, H = 30": (0.03, {
        **_OUTER, "per": 30, "settings": {"every": 30, "codec": "int4"}}),
    "OuterStep sparse, H = 30": (0.01, {
        **_OUTER, "per": 30, "settings": {"every": 30, "outer": "sparse"}}),
    STELLA: (0.2, {"kind": "sparse", "settings": {"density": 1 / 64}}),
}  # fmt: skip
#: What is compared: how it is trained (convergence.py's name), and how it is timed.
METHODS: Mapping[str, tuple[str, str]] = {
    FP32: ("adamw", FP32),
    HALF: ("torch-fp16", HALF),
    POWERSGD: ("powersgd-4", POWERSGD),
    POWERSGD_LONG: ("powersgd-4-long", POWERSGD),
    f"{OURS}, long": ("powersgd-4-long", OURS),
    "int8": ("int8", "int8"),
    "int4": ("int4", "int4"),
    AUTO: ("", AUTO),
    "OuterStep int4, H = 10": ("outer-int4", "OuterStep int4, H = 10"),
    "OuterStep int4, H = 30, long": ("outer-int4-long", "OuterStep int4, H = 30"),
    "OuterStep sparse, H = 30, long": ("outer-sparse-64-long", "OuterStep sparse, H = 30"),
    STELLA: ("stellatrain", STELLA),
    STELLA_LONG: ("stellatrain-long", STELLA),
    f"{STELLA}, SGD": ("stellatrain-sgd", STELLA),
}
BASELINES = (FP32, HALF, POWERSGD, POWERSGD_LONG)
COLUMNS = (FP32, HALF, POWERSGD_LONG)
_TRAINED_AS = {"none": "adamw", "bf16": "torch-fp16"}  # a codec's losses, by another name


def points(quick: bool) -> list[Point]:
    """Times first, as they need a quiet machine."""
    model = {"hosts": HOSTS, "parameters": 2e4 if quick else PARAMETERS, "layers": LAYERS,
             "compute_s": COMPUTE_S, "rate": 1.0 if quick else RATE, "time": TIME,
             "cycles": 0.0 if quick else 1.0}  # fmt: skip
    timed = [Point(f"time {name}", {**model, "bytes": carried, "way": dict(way)})
             for name, (carried, way) in WAYS.items()]  # fmt: skip
    trained = list(dict.fromkeys(train for train, _ in METHODS.values() if train))
    if quick:
        trained = ["int4", "stellatrain"]
    return timed + [Point(f"steps {name}", {"method": name, "steps": 8 if quick else None})
                    for name in trained]  # fmt: skip


def measure(point: Point) -> Mapping[str, Any]:
    """Either kind of point."""
    if point.name.startswith("steps "):
        return _trained(point.settings)
    return _timed(point.settings)


# ---- a step's time ----


def _timed(asked: Mapping[str, Any]) -> dict[str, Any]:
    link = trace.load().scaled(asked["rate"], asked["time"])
    way = dict(asked["way"])
    layers = steps.square(asked["parameters"], asked["layers"])
    wire_s = asked["bytes"] * asked["parameters"] * 8e-6 / link.mean_mbit
    step_s = way.get("per", 1) * max(asked["compute_s"], wire_s)
    way["steps"] = max(2, math.ceil(asked["cycles"] * link.seconds / step_s))
    if not asked["cycles"]:
        way["settle"] = steps.UNTIMED
    job = steps.Job(layers, asked["compute_s"], {"way": way}, 1, way["steps"])
    with (
        Site(asked["hosts"], asked["hosts"], [link.mean_mbit]) as site,
        trace.played(link, site, asked["hosts"]),
    ):
        runs = steps.run(site, job, 900)["way"]
    told = steps.summary(runs)
    taken = sorted(runs[0]["steps"])
    return {"iteration_s": told["step_s"] / told["per"], **told,
            "slowest_s": taken[-1] / told["per"], "codecs": _counted(runs[0])}  # fmt: skip


def _counted(run: Mapping[str, Any]) -> dict[str, int]:
    """Of a policy: for how many steps each codec was in use."""
    counts: dict[str, int] = {}
    for stretch in run.get("codecs", ()):
        many = stretch["last"] - stretch["first"] + 1
        counts[stretch["codec"]] = counts.get(stretch["codec"], 0) + many
    return counts


# ---- steps to the target ----


def _trained(asked: Mapping[str, Any]) -> dict[str, Any]:
    import convergence
    from _rows import Row, Rows
    from training import pool
    from training.methods import METHODS as TRAINED
    from training.plan import Plan, Run

    method = TRAINED[asked["method"]]
    if method.missing():
        raise RuntimeError(f"{method.missing()} is not there")
    rows = Rows(ROWS)
    plan = Plan(rows, [method])
    progress = convergence.Progress(rows, plan)
    broken: list[str] = []

    def failed(run: Run, why: str) -> None:
        broken.append(f"{run.method} seed {run.seed}: {why}")

    if asked["steps"]:
        run = Run("T1", method.name, method.lrs[len(method.lrs) // 2], 1, "quick", asked["steps"])
        found: dict[int, Row] = {}
        pool.run_all(
            lambda: [] if found or broken else [run],
            lambda one, row: found.update({one.seed: row}), failed, lambda _: Path("none"), jobs=1,
        )  # fmt: skip
    else:

        def due() -> list[Run]:
            names = [TRAINED[method.tuned_as]] if method.tuned_as else []
            runs = [run for one in names for run in plan.runs(one) if run.role == "tune"]
            runs += [run for run in plan.runs(method) if run.role in ("tune", "final")]
            return [run for run in runs if run.setting == "T1" and rows.find(run.key) is None]

        jobs = os.cpu_count() or 1
        pool.run_all(due, progress.done, failed, lambda _: Path("none"), jobs=jobs)
        found = plan.finals("T1", method.name)
    if broken or not found:
        raise RuntimeError("; ".join(broken) or f"{method.name} has no run")
    return {"curves": {str(seed): row["curve"] for seed, row in sorted(found.items())},
            "lr": plan.tuned(method)}  # fmt: skip


def steps_to(curve: Sequence[Sequence[float | None]], target: float) -> float | None:
    """Where a curve first comes to the target, on a line between its points; None: nowhere."""
    before: tuple[float, float] | None = None
    for step, loss in curve:
        if step is None or loss is None:
            return None
        if loss <= target:
            if before is None or before[1] == loss:
                return step
            return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
        before = (step, loss)
    return None


# ---- what the rows say ----


def train_of(found: Found, name: str) -> str:
    """As what a method is trained; of auto, the codec that was in use most."""
    train, way = METHODS[name]
    if train or f"time {way}" not in found:
        return train
    counts = found[f"time {way}"]["codecs"]
    codec = max(counts, key=lambda one: counts[one]) if counts else ""
    return _TRAINED_AS.get(codec, codec)


def times(found: Found, name: str, target: float) -> dict[str, float] | None:
    """Seconds to the target by seed, inf for a run that failed; None: not measured."""
    curves = found.get(f"steps {train_of(found, name)}")
    timed = found.get(f"time {METHODS[name][1]}")
    if curves is None or timed is None:
        return None
    each = float(timed["iteration_s"])
    return {
        seed: math.inf if (many := steps_to(curve, target)) is None else many * each
        for seed, curve in curves["curves"].items()
    }  # fmt: skip


def faster(found: Found, name: str, than: str, target: float) -> float | None:
    """How many times, as the median over the paired seeds; 0 if a run of ``name`` failed, inf if
    all of the other's did; None: not measured."""
    ours, theirs = times(found, name, target), times(found, than, target)
    if ours is None or theirs is None:
        return None
    if math.inf in ours.values():
        return 0.0
    return statistics.median(theirs[seed] / ours[seed] for seed in ours if seed in theirs)


def best(found: Found, than: str, target: float = TARGET) -> tuple[float, str] | None:
    """Of ringcomm's methods, the fastest, and how many times it is faster."""
    ratios = [
        (ratio, -statistics.median(taken.values()), name)
        for name in METHODS
        if name not in BASELINES
        and (ratio := faster(found, name, than, target)) is not None
        and (taken := times(found, name, target)) is not None
    ]
    top = max(ratios, default=None)  # by their own times where the other never gets there
    return None if top is None else (top[0], top[2])


def _times_text(ratio: float) -> str:
    return "it never gets there" if math.isinf(ratio) else f"{ratio:.1f}x"


def claims(found: Found) -> list[Claim]:
    """Beside DDP, its hooks, and StellaTrain's own path."""
    made = []
    for than, document, bound in (
        (FP32, f"up to {PAPERS}x over PyTorch DDP", OVER_FP32),
        (HALF, "-", OVER_16_BITS),
        (POWERSGD_LONG, "-", 1.0),
        (STELLA_LONG, "-", 1.0),
    ):
        top = best(found, than)
        said = "" if top is None else f"{_times_text(top[0])} ({top[1]})"
        ratio = None if top is None or than != FP32 else top[0] / PAPERS
        made.append(Claim(
            f"time to {TARGET} nats, the fastest method beside {than}", document, said,
            f">= {bound:g}x", None if top is None else top[0] >= bound, ratio,
        ))  # fmt: skip
    paths = [(ratio, name) for name in METHODS if name.startswith(STELLA)
             and (ratio := faster(found, name, FP32, TARGET)) is not None]  # fmt: skip
    ratio, path = max(paths, default=(None, ""))
    made.append(Claim(
        f"time to {TARGET} nats, StellaTrain's path beside {FP32}", f"up to {PAPERS}x",
        "" if ratio is None else f"{_times_text(ratio)} ({path})" if ratio
        else "not all runs get there", f">= {OVER_FP32:g}x",
        None if ratio is None else ratio >= OVER_FP32, None if ratio is None else ratio / PAPERS,
    ))  # fmt: skip
    fixed = [ratio for codec in FIXED if (ratio := faster(found, codec, AUTO, TARGET)) is not None]
    made.append(Claim(
        "auto beside the best fixed codec: time", "-", f"{max(fixed):.2f}x" if fixed else "",
        f"<= {AUTO_WITHIN:g}x", max(fixed) <= AUTO_WITHIN if fixed else None,
    ))  # fmt: skip
    return made


def table(found: Found) -> list[Sequence[str]]:
    """A line for each method; seconds are the emulated model's, times over 1 / TIME."""
    lines: list[Sequence[str]] = [
        ("method", "s per step", "MB per step", f"runs that reach {TARGET}", "steps (median)",
         "hours", *(f"over {than}" for than in COLUMNS), f"over fp32, to {EASIER}"),
    ]  # fmt: skip
    for name, (_, way) in METHODS.items():
        timed = found.get(f"time {way}")
        curves = found.get(f"steps {train_of(found, name)}")
        if timed is None and curves is None:
            continue
        said = ["-", "-"] if timed is None else [
            f"{timed['iteration_s'] / TIME:.2f}",
            f"{timed['port_bytes'] / timed['per'] / 1e6 * 100:.1f}",
        ]  # fmt: skip
        runs = [] if curves is None else curves["curves"].values()
        reached = [steps_to(one, TARGET) for one in runs]
        there = sorted(one for one in reached if one is not None)
        said += [f"{len(there)} of {len(reached)}" if reached else "-",
                 f"{statistics.median(there):.0f}" if there else "-"]  # fmt: skip
        to = times(found, name, TARGET)
        middle = statistics.median(to.values()) if to else math.inf
        said.append("-" if math.isinf(middle) else f"{middle / TIME / 3600:.3f}")
        for than, target in (*((than, TARGET) for than in COLUMNS), (FP32, EASIER)):
            ratio = faster(found, name, than, target)
            said.append("-" if not ratio else _times_text(ratio))
        lines.append((name, *said))
    return lines


def draw(found: Found, figure: Any) -> None:
    """Loss over time, a line for each method: the mean over the seeds."""
    axes = figure.subplots()
    for at, (name, (_, way)) in enumerate(METHODS.items()):
        timed, curves = found.get(f"time {way}"), found.get(f"steps {train_of(found, name)}")
        if timed is None or curves is None:
            continue
        runs = [run for run in curves["curves"].values() if None not in dict(run).values()]
        if not runs:
            continue
        hours = [step * timed["iteration_s"] / TIME / 3600 for step, _ in runs[0]]
        losses = [statistics.fmean(loss for _, loss in same) for same in zip(*runs, strict=True)]
        axes.plot(hours, losses, "--" if name in BASELINES else "-", label=name,
                  color=f"C{at % 10}", marker=".x"[at // 10])  # fmt: skip
    axes.axhline(TARGET, color="gray", lw=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("hours, 124 M parameters on 4 hosts, 115 Mbit/s on average")
    axes.set_ylabel("validation loss (nats)")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), handlelength=4)
