"""slow: time to a target loss over a slow link whose rate changes (StellaTrain).

Time to target is a product, whose factors are measured apart:

    steps METHOD    real training of convergence.py's T1, a GPT of 471,936 parameters on 4 ranks, 8
                    seeds that all methods share; its rows are convergence.py's own, and what is
                    missing of them is trained here and kept there. Steps are those after which the
                    loss is TARGET, on a line between evaluations; a run that never is has failed.
    time WAY        a step of a model of 124 M parameters that computes for 0.5 s on each of 4
                    hosts, at a hundredth of its size and a tenth of the rate, so at a tenth of all
                    times; over one whole cycle of the trace or more.

Every step on the way to the target is paid for: the ten that PowerSGD's hook exchanges dense before
it begins, and those that auto spends on wider codecs while it measures (first_steps()).

PowerSGD is timed at rank 1, for at a hundredth of the size that is the share of the bytes (0.7 %)
that rank 4 has of matrices of 768 x 3072; it is trained at rank 4. It has one bucket, for its hook
begins a second all-reduce where a bucket's first one ends: with several buckets each rank has an
order of its own, in which gloo hangs and ringcomm raises MismatchError. The hook that stands for
torch's 16 bits is its fp16 hook: DDP refuses the bf16 one without NCCL, and their bytes are the
same.

StellaTrain's own case, image classes under SGD with momentum, is convergence.py's T5: a ResNet of
77,562 parameters over digits, 3 seeds; its target is the share WRONG of held-out views.

Methods with Muon are timed as those with AdamW are, for what an optimizer computes is in no step's
time, and are compared among each other alone.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.site import Site

from . import steps, trace
from .source import Claim, Found, Point

TARGET, EASIER = 1.75, 2.0  # nats; fp32 comes to 1.66 in its 400 steps
DOCUMENT = (
    "StellaTrain (SIGCOMM 2024): less time to accuracy than PyTorch DDP, by sparse gradients and a "
    "CPU optimizer, over links whose rate changes, 115 Mbit/s on average. Ours is the fastest "
    f"method with the same optimizer, to {TARGET} nats."
)
REAL = (
    "the loss (a GPT of 0.47 M parameters trained with the real codecs), every byte of the timed "
    "steps, DDP and its hooks."
)
EMULATED = (
    "the timed steps (a stand-in for 124 M parameters at a hundredth; compute of 0.5 s is slept at "
    "a tenth) and the link (a trace at a tenth, without delay). Time is the one's steps by the "
    "other's seconds."
)
WITHOUT_ROOT = "bench/convergence.py trains the same methods"
HARNESS = 1

HOSTS, PARAMETERS, LAYERS, COMPUTE_S = 4, 1.24e6, 16, 0.05
RATE, TIME = 0.1, 0.1  # of the trace's
WRONG = 0.15  # of images; fp32 comes to 0.09 in its 400 steps
OVER_FP32, OVER_16_BITS, AUTO_WITHIN = 20.0, 5.0, 1.05
PAPERS = 104  # times as fast as DDP, at most
POWERSGD_DENSE = 10  # steps before its hook begins: start_powerSGD_iter of training/methods.py
FORWARD = 1 / 3  # of compute: FORWARD_SHARE of _emulate.py, which needs torch
COMPUTES_S = (0.1, 0.5, 1.0, 10.0)  # of the whole model, for which the first ratio is worked out
ROWS = Path(__file__).resolve().parent.parent / "results" / "convergence.jsonl"

FP32, HALF, POWERSGD = "DDP, gloo fp32", "DDP, gloo, torch's fp16 hook", "DDP, gloo, PowerSGD"
POWERSGD_LONG, OURS = f"{POWERSGD}, long", "DDP, ringcomm, PowerSGD"
AUTO, STELLA = "auto", "StellaTrain's path"
STELLA_LONG = f"{STELLA}, long"
MUON = ", Muon"  # ends the name of what is trained by Muon instead of AdamW
FP32_MUON = FP32 + MUON
FIXED = ("int8", "int4")
FAILED = "-"  # in place of a ratio

_DDP = ("image classifiers", "a GPT")

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
    "OuterStep int4, H = 10": (
        0.08,
        {**_OUTER, "per": 10, "settings": {"every": 10, "codec": "int4"}},
    ),
    "OuterStep int4, H = 30": (
        0.03,
        {**_OUTER, "per": 30, "settings": {"every": 30, "codec": "int4"}},
    ),
    "OuterStep sparse, H = 30": (
        0.01,
        {**_OUTER, "per": 30, "settings": {"every": 30, "outer": "sparse"}},
    ),
    STELLA: (0.2, {"kind": "sparse", "settings": {"density": 1 / 64}}),
    **{
        f"{STELLA}, 1/{part}": (6.3 / part, {"kind": "sparse", "settings": {"density": 1 / part}})
        for part in (20, 8)
    },
    **{
        f"{STELLA}, 1/{part}, stale": (
            6.3 / part,
            {
                "kind": "sparse",
                "optimizer": "SGD",
                "settings": {"density": 1 / part, "staleness": 1, "momentum": 0.9},
            },
        )
        for part in (100, 20, 8, 4)
    },
}
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
    **{f"{STELLA}, 1/{part}": (f"stellatrain-{part}", f"{STELLA}, 1/{part}") for part in (20, 8)},
    FP32_MUON: ("muon", FP32),
    f"int4{MUON}": ("muon-int4", "int4"),
    f"OuterStep int4, H = 10{MUON}": ("outer-muon", "OuterStep int4, H = 10"),
    f"OuterStep int4, H = 30{MUON}": ("outer-muon-30", "OuterStep int4, H = 30"),
}
#: The same of image classes.
IMAGES: Mapping[str, tuple[str, str]] = {
    FP32: ("images-none", FP32),
    HALF: ("images-fp16", HALF),
    "int4": ("images-int4", "int4"),
    **{
        f"{STELLA}, 1/{part}, stale": (f"images-sparse-{part}", f"{STELLA}, 1/{part}, stale")
        for part in (100, 20, 8, 4)
    },
    **{
        f"{STELLA}, 1/{part}": (f"images-sparse-{part}-sync", f"{STELLA}, 1/{part}")
        for part in (20, 8)
    },
}
BASELINES = (FP32, HALF, POWERSGD, POWERSGD_LONG, FP32_MUON)
_TRAINED_AS = {"none": "adamw", "bf16": "torch-fp16"}  # a codec's losses, by another name
_TIMED_AS = {"none": FP32, "bf16": HALF, "fp16": HALF}  # a codec's step, likewise
#: Of a picture's lines, by how a method's name begins; all others are codecs of DDP's hook.
_COLORS = {
    POWERSGD: "tab:purple",
    OURS: "tab:purple",
    "DDP": "black",
    "Outer": "tab:green",
    STELLA: "tab:red",
}
_DENSE_FIRST = {POWERSGD: POWERSGD_DENSE, OURS: POWERSGD_DENSE}


def points(quick: bool) -> list[Point]:
    """Times first, as they need a quiet machine."""
    model = {
        "hosts": HOSTS,
        "parameters": 2e4 if quick else PARAMETERS,
        "layers": LAYERS,
        "compute_s": COMPUTE_S,
        "rate": 1.0 if quick else RATE,
        "time": TIME,
        "cycles": 0.0 if quick else 1.0,
    }
    mbit = trace.MEAN_MBIT * float(model["rate"])
    timed = [
        Point(f"time {name}", {**model, "bytes": carried, "way": dict(way)}, mbit)
        for name, (carried, way) in WAYS.items()
    ]
    trained = list(dict.fromkeys(train for train, _ in METHODS.values() if train))
    if quick:
        trained = ["int4", "stellatrain"]
    learned = [
        Point(f"steps {name}", {"method": name, "steps": 8 if quick else None}) for name in trained
    ]
    if not quick:
        learned += [
            Point(f"steps {name}", {"method": name, "steps": None, "setting": "T5"})
            for name, _ in IMAGES.values()
        ]
    return timed + learned


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
        Site(asked["hosts"], asked["hosts"], [link.mean_mbit], slowest=min(link.mbit)) as site,
        trace.played(link, site.lab.slow, asked["hosts"]),
    ):
        runs = steps.run(site, job, 900)["way"]
    told = steps.summary(runs)
    taken = sorted(runs[0]["steps"])
    return {
        "iteration_s": told["step_s"] / told["per"],
        **told,
        "slowest_s": taken[-1] / told["per"],
        "codecs": _counted(runs[0]),
        "every_s": [*runs[0]["untimed"], *runs[0]["steps"]],
        "stretches": runs[0].get("codecs", []),
    }


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
    from report.rows import Row, Rows
    from training import pool
    from training.methods import METHODS as TRAINED
    from training.plan import Plan, Run

    method, setting = TRAINED[asked["method"]], asked.get("setting", "T1")
    if method.missing():
        raise RuntimeError(f"{method.missing()} is not there")
    rows = Rows(ROWS)
    plan = Plan(rows, [method])
    progress = convergence.Progress(rows, plan)
    broken: list[str] = []

    def failed(run: Run, why: str) -> None:
        broken.append(f"{run.method} seed {run.seed}: {why}")

    if asked["steps"]:
        middle = method.lrs[len(method.lrs) // 2]
        run = Run(setting, method.name, middle, 1, "quick", asked["steps"])
        found: dict[int, Row] = {}
        pool.run_all(
            lambda: [] if found or broken else [run],
            lambda one, row: found.update({one.seed: row}),
            failed,
            lambda _: Path("none"),
            jobs=1,
        )
    else:

        def due() -> list[Run]:
            names = [TRAINED[method.tuned_as]] if method.tuned_as else []
            runs = [run for one in names for run in plan.runs(one) if run.role == "tune"]
            runs += [run for run in plan.runs(method) if run.role in ("tune", "final")]
            return [run for run in runs if run.setting == setting and rows.find(run.key) is None]

        jobs = os.cpu_count() or 1
        pool.run_all(due, progress.done, failed, lambda _: Path("none"), jobs=jobs)
        found = plan.finals(setting, method.name)
    if broken or not found:
        raise RuntimeError("; ".join(broken) or f"{method.name} has no run")
    return {
        "curves": {str(seed): row["curve"] for seed, row in sorted(found.items())},
        "commits": sorted({row.get("git", "") for row in found.values()} - {""}),
        "lr": plan.tuned(method, setting),
    }


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
    codec = _main_codec(found[f"time {way}"])
    return _TRAINED_AS.get(codec, codec)


@dataclasses.dataclass(frozen=True)
class Pace:
    """How a method's steps go by, in seconds as they were timed.

    Attributes:
        first: steps before it exchanges in its own way.
        first_s: what they take together.
        each_s: what each later one takes.
    """

    first: int
    first_s: float
    each_s: float

    def seconds(self, many: float) -> float:
        """Of the first ``many`` steps."""
        if many < self.first:
            return self.first_s * many / self.first
        return self.first_s + (many - self.first) * self.each_s


def pace_of(found: Found, way: str, compute_s: float = COMPUTE_S / TIME) -> Pace | None:
    """A way's, for a whole model that computes for so long; None: not measured, or not all of what
    its first steps need."""
    timed = found.get(f"time {way}")
    if timed is None:
        return None
    first = first_steps(found, way, compute_s)
    if first is None:
        return None
    return Pace(len(first), math.fsum(first), _at(timed["iteration_s"], way, compute_s))


def first_steps(found: Found, way: str, compute_s: float) -> list[float] | None:
    """Seconds of each step that a way makes before its own; those that were not timed by
    themselves take what a step of that kind does elsewhere. None: that was not measured."""
    if way in _DENSE_FIRST:
        dense = pace_of(found, FP32, compute_s)
        return None if dense is None else [dense.each_s] * _DENSE_FIRST[way]
    timed = found[f"time {way}"]
    main = _main_codec(timed)
    if "stretches" in timed:
        codecs = [
            one["codec"]
            for one in timed["stretches"]
            for _ in range(one["last"] - one["first"] + 1)
        ]
        return (
            [
                _at(took_s, way, compute_s)
                for took_s, codec in zip(timed["every_s"], codecs, strict=True)
                if codec != main
            ]
            if codecs
            else []
        )
    first: list[float] = []
    for codec, many in timed["codecs"].items():
        if codec != main:
            other = pace_of(found, _TIMED_AS.get(codec, codec), compute_s)
            if other is None:
                return None
            first += [other.each_s] * many
    return first


def _main_codec(timed: Mapping[str, Any]) -> str:
    """The codec that a policy used most."""
    counts: Mapping[str, int] = timed["codecs"]
    return max(counts, key=lambda one: counts[one], default="")


def _at(took_s: float, way: str, compute_s: float) -> float:
    """What a step that was timed would take with another compute: DDP's exchange stays behind
    forward and hides behind backward, that of others follows compute."""
    changed = TIME * compute_s - COMPUTE_S
    if WAYS[way][1]["kind"] == "gradients":
        return max(took_s + FORWARD * changed, TIME * compute_s) if changed else took_s
    return took_s + changed


def times(
    found: Found, name: str, target: float, compute_s: float = COMPUTE_S / TIME
) -> dict[str, float] | None:
    """Seconds to the target by seed, inf for a run that failed; None: not measured."""
    curves = found.get(f"steps {train_of(found, name)}")
    pace = pace_of(found, METHODS[name][1], compute_s)
    if curves is None or pace is None:
        return None
    return {
        seed: math.inf if (many := steps_to(curve, target)) is None else pace.seconds(many)
        for seed, curve in curves["curves"].items()
    }


def faster(
    found: Found, name: str, than: str, target: float, compute_s: float = COMPUTE_S / TIME
) -> float | None:
    """How many times, as the median over the paired seeds; 0 if a run of ``name`` failed, inf if
    all of the other's did; None: not measured."""
    ours, theirs = (times(found, one, target, compute_s) for one in (name, than))
    if ours is None or theirs is None:
        return None
    if math.inf in ours.values():
        return 0.0
    return statistics.median(theirs[seed] / ours[seed] for seed in ours if seed in theirs)


def best(
    found: Found, than: str, target: float = TARGET, compute_s: float = COMPUTE_S / TIME
) -> tuple[float, str] | None:
    """Of ringcomm's methods with the same optimizer, the fastest, and how many times it is."""
    ratios = [
        (ratio, -statistics.median(taken.values()), name)
        for name in METHODS
        if name not in BASELINES
        and name.endswith(MUON) == than.endswith(MUON)
        and (ratio := faster(found, name, than, target, compute_s)) is not None
        and (taken := times(found, name, target, compute_s)) is not None
    ]
    top = max(ratios, default=None)  # by their own times where the other never gets there
    return None if top is None else (top[0], top[2])


def _times_text(ratio: float) -> str:
    if math.isinf(ratio):
        return "it never gets there"
    return f"{ratio:.1f}x" if ratio >= 0.95 else f"{ratio:.2f}x"


def claims(found: Found) -> list[Claim]:
    """Beside DDP, its hooks, and StellaTrain's own path."""
    made = []
    for than, document, bound in (
        (FP32, f"up to {PAPERS}x", OVER_FP32),
        (HALF, "-", OVER_16_BITS),
        (POWERSGD_LONG, "-", 1.0),
        (STELLA_LONG, "-", 1.0),
        (FP32_MUON, "-", OVER_FP32),
    ):
        top = best(found, than)
        said = "" if top is None else f"{_times_text(top[0])} ({top[1]})"
        ratio = None if top is None or than != FP32 else top[0] / PAPERS
        made.append(
            Claim(
                f"speed over {than}",
                document,
                said,
                f">= {bound:g}x",
                None if top is None else top[0] >= bound,
                ratio,
                _DDP if than == FP32 else ("", ""),
            )
        )
    paths = [
        (ratio, name)
        for name in METHODS
        if name.startswith(STELLA) and (ratio := faster(found, name, FP32, TARGET)) is not None
    ]
    ratio, path = max(paths, default=(None, ""))
    made.append(
        Claim(
            f"StellaTrain's path, speed over {FP32}",
            f"up to {PAPERS}x",
            ""
            if ratio is None
            else f"{_times_text(ratio)} ({path})"
            if ratio
            else "not all runs get there",
            f">= {OVER_FP32:g}x",
            None if ratio is None else ratio >= OVER_FP32,
            None if ratio is None else ratio / PAPERS,
            _DDP,
        )
    )
    fixed = [ratio for codec in FIXED if (ratio := faster(found, codec, AUTO, TARGET)) is not None]
    made.append(
        Claim(
            "time of auto over the best fixed codec",
            "-",
            f"{max(fixed):.2f}x" if fixed else "",
            f"<= {AUTO_WITHIN:g}x",
            max(fixed) <= AUTO_WITHIN if fixed else None,
        )
    )
    return made


def table(found: Found) -> list[Sequence[str]]:
    """A line for each method that is trained and timed; seconds are the emulated model's, times
    over 1 / TIME."""
    lines: list[Sequence[str]] = [
        ("method", "MB a step", "s a step", f"reach {TARGET}", "steps", "speed over fp32"),
    ]
    for name, (_, way) in METHODS.items():
        timed = found.get(f"time {way}")
        curves = found.get(f"steps {train_of(found, name)}")
        if timed is None or curves is None:
            continue
        runs = list(curves["curves"].values())
        there = [one for run in runs if (one := steps_to(run, TARGET)) is not None]
        ratio = faster(found, name, FP32, TARGET)
        lines.append(
            (
                name,
                f"{timed['port_bytes'] / timed['per'] / 1e6 * 100:.1f}",
                f"{timed['iteration_s'] / TIME:.2f}",
                f"{len(there)}/{len(runs)}",
                f"{statistics.median(there):.0f}" if there else "-",
                _times_text(ratio) if ratio else FAILED,
            )
        )
    return lines


def brief(found: Found) -> list[Sequence[str]]:
    """The lines of methods whose runs all reach the target, without saying so in each."""
    return [(*line[:3], *line[4:]) for line in table(found) if line[-1] != FAILED]


def notes(found: Found) -> list[str]:
    """Which methods fail, what the first ratio costs in samples and comes to for other computes,
    and image classes by the same clock."""
    failed = [f"{line[0]} ({line[3]}, {line[1]} MB)" for line in table(found) if line[-1] == FAILED]
    said = [f"Not all runs reach {TARGET}: {'; '.join(failed)}."] if failed else []
    return [*said, *_notes_of_the_best(found), *_images(found)]


def _images(found: Found) -> list[str]:
    """The methods of image classes, in one sentence; none before fp32's runs are there."""
    if f"steps {IMAGES[FP32][0]}" not in found:
        return []
    there, failed = [], []
    base: float | None = None
    for name, (train, way) in IMAGES.items():
        learned, pace = found.get(f"steps {train}"), pace_of(found, way)
        if learned is None:
            continue
        runs = list(learned["curves"].values())
        many = [math.inf if (one := steps_to(run, WRONG)) is None else one for run in runs]
        if max(many) == math.inf:
            failed.append(f"{name} ({sum(map(math.isfinite, many))}/{len(many)})")
            continue
        middle = statistics.median(many)
        took = None if pace is None else pace.seconds(middle)
        base = took if name == FP32 else base
        ratio = "" if took is None or base is None else f" ({_times_text(base / took)})"
        there.append(f"{name} {middle:.0f}{ratio}")
    said = f"Images by SGD, steps to {WRONG:.0%} wrong and speed over fp32: {'; '.join(there)}."
    return [said + (f" Not all runs get there: {'; '.join(failed)}." if failed else "")]


def _notes_of_the_best(found: Found) -> list[str]:
    top = best(found, FP32)
    if top is None:
        return []
    ours, theirs = (
        [
            steps_to(run, TARGET) or math.inf
            for run in found[f"steps {train_of(found, name)}"]["curves"].values()
        ]
        for name in (top[1], FP32)
    )
    samples = statistics.median(ours) / statistics.median(theirs)
    said = []
    for compute_s in COMPUTES_S:
        ratio, other = (
            faster(found, top[1], FP32, TARGET, compute_s),
            best(found, FP32, compute_s=compute_s),
        )
        if ratio is not None and other is not None:
            ahead = "" if other[1] == top[1] else f" ({other[1]} is faster there, {other[0]:.1f}x)"
            said.append(f"{compute_s:g} s: {_times_text(ratio)}{ahead}")
    return [
        f"{top[1]} sees {samples:.1f} times the samples of {FP32}; to {EASIER} nats it is "
        f"{_times_text(faster(found, top[1], FP32, EASIER) or 0.0)} as fast. By a step's compute, "
        f"behind which fp32's exchange hides: {', '.join(said)}.",
    ]


def draw(found: Found, figure: Any) -> None:
    """Loss over time, a line for each method: the mean over the seeds."""
    axes = figure.subplots()
    drawn: dict[str, int] = {}
    for name, (_, way) in METHODS.items():
        pace, curves = pace_of(found, way), found.get(f"steps {train_of(found, name)}")
        if pace is None or curves is None:
            continue
        runs = [run for run in curves["curves"].values() if None not in dict(run).values()]
        if not runs:
            continue
        hours = [pace.seconds(step) / TIME / 3600 for step, _ in runs[0]]
        losses = [statistics.fmean(loss for _, loss in same) for same in zip(*runs, strict=True)]
        color = next((_COLORS[one] for one in _COLORS if name.startswith(one)), "tab:blue")
        at = drawn[color] = drawn.get(color, -1) + 1
        axes.plot(
            hours,
            losses,
            label=name,
            color=color,
            linestyle=("-", "--", ":", "-.")[at % 4],
            marker="osx^Dv+*"[at % 8],
            markersize=4,
        )
    axes.axhline(TARGET, color="gray", lw=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("hours, a stand-in for 124 M parameters on 4 hosts, 115 Mbit/s on average")
    axes.set_ylabel("validation loss (nats)\nof a GPT of 0.47 M parameters")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), handlelength=4)
