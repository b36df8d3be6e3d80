"""real: training by the clock, from the first step to the last, on four hosts with a slow link.

Nothing is composed: each run is convergence.py's T1 (its GPT of 471,936 parameters, its text, its
schedule, each method at its tuned rate) by four processes in network namespaces of their own, whose
ports are shaped; DDP and its hooks as a user has them. The link is slow: how many times the
compute an fp32 exchange takes depends on how idle the machine is, so compute is timed beside each
run, and reported.

The clock stands still while rank 0 evaluates the loss, on all held-out windows, and the other ranks
wait. A run ends after its steps or at the first evaluation behind LIMIT_S: what it had not reached
by then, it has not reached. A method that ends soon and short of the target runs once more with
twice the steps, over which its rate falls. Two cores serve four processes, so compute is that of
half a core.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lab.site import Site, finish

from .slow import ROWS, TARGET, steps_to
from .source import Claim, Found, Point

DOCUMENT = (
    "No document's figure: how much sooner ringcomm's fastest method trains four hosts to "
    f"{TARGET} nats than torch's DDP and its hooks, by the clock."
)
REAL = "model, data, optimizers, codecs and the clock."
WITHOUT_ROOT = "bench/convergence.py trains the same methods"
HARNESS = 1

HOSTS, STEPS, EVERY, LIMIT_S = 4, 400, 20, 900.0
RATE = 16.0  # Mbit/s: 2.83 MB of fp32 gradients take 1.6 s, forward and backward 0.08 s
EMULATED = f"the link, ports shaped to {RATE:g} Mbit/s without delay; two cores for four hosts."
SEEDS = (1, 2, 3)
RANK = Path(__file__).with_name("_real_rank.py")

FP32, HALF, POWERSGD = "DDP, gloo fp32", "DDP, gloo, torch's fp16 hook", "DDP, gloo, PowerSGD"
POWERSGD_LONG = f"{POWERSGD}, {2 * STEPS} steps"
OUTER = "OuterStep int4, H = 10"


class Way(NamedTuple):
    """What is compared: the name that convergence.py has for it, a color, and the steps."""

    method: str
    color: str
    steps: int = STEPS


#: In the order of the picture's legend.
METHODS: Mapping[str, Way] = {
    FP32: Way("torch-fp32", "black"),
    HALF: Way("torch-fp16", "dimgray"),
    POWERSGD: Way("powersgd-4", "tab:purple"),
    POWERSGD_LONG: Way("powersgd-4", "tab:purple", 2 * STEPS),
    "int4 hook": Way("int4", "tab:orange"),
    "OneBitAdam": Way("onebit-adam", "tab:red"),
    OUTER: Way("outer-int4", "tab:blue"),
    f"{OUTER}, {2 * STEPS} steps": Way("outer-int4", "tab:blue", 2 * STEPS),
    f"{OUTER}, Muon": Way("outer-muon", "tab:green"),
}
BASELINES = (FP32, HALF, POWERSGD, POWERSGD_LONG)
BEHIND_S = 600.0  # of a run's limit, for its start, its evaluations and its end


def points(quick: bool) -> list[Point]:
    """All methods with the first seed, then with the next."""
    names, seeds = list(METHODS), SEEDS
    rate, every, limit_s, at_most = RATE, EVERY, LIMIT_S, 2 * STEPS
    if quick:
        names, seeds = ["int4 hook"], SEEDS[:1]
        rate, every, limit_s, at_most = 1000.0, 2, 300.0, 4

    def point(name: str, seed: int) -> Point:
        way = METHODS[name]
        settings: dict[str, Any] = {
            "method": way.method,
            "seed": seed,
            "hosts": HOSTS,
            "rate": rate,
            "steps": min(way.steps, at_most),
            "every": every,
            "limit_s": limit_s,
        }
        return Point(f"{name}, seed {seed}", settings, rate)

    return [point(name, seed) for seed in seeds for name in names]


def measure(point: Point) -> Mapping[str, Any]:
    """A run."""
    asked = point.settings
    lr = rate_of(asked["method"])
    run = {
        "setting": "T1",
        "method": asked["method"],
        "lr": lr,
        "seed": asked["seed"],
        "role": "final",
        "steps": asked["steps"],
    }
    told = json.dumps({"run": run, "every": asked["every"], "limit_s": asked["limit_s"]})
    with Site(asked["hosts"], asked["hosts"], [asked["rate"]]) as site:
        started = site.start([sys.executable, str(RANK), told], {"GLOO_SOCKET_IFNAME": "eth0"})
        (row,) = (
            one for one in finish(started, asked["limit_s"] + BEHIND_S).records() if "curve" in one
        )
    return {**row, "lr": lr}


def rate_of(method: str) -> float:
    """At which a method is trained, by convergence.py's rows. RuntimeError before it is tuned."""
    from report.rows import Rows
    from training.methods import METHODS as TRAINED
    from training.plan import Plan

    rate = Plan(Rows(ROWS), []).tuned(TRAINED[method])
    if rate is None:
        raise RuntimeError(f"{method} is not tuned: bench/convergence.py --only {method}")
    return rate


# ---- what the rows say ----


def runs_of(found: Found, name: str) -> list[Mapping[str, Any]]:
    """The rows of a method."""
    return [found[key] for seed in SEEDS if (key := f"{name}, seed {seed}") in found]


def seconds_to(run: Mapping[str, Any], target: float) -> float:
    """When a run first came to a loss, on a line between evaluations; inf: not by its end."""
    by_clock = [(seconds, loss) for _, loss, seconds, _ in run["curve"]]
    reached = steps_to(by_clock, target)
    return math.inf if reached is None else reached


def median_to(found: Found, name: str, target: float = TARGET) -> float | None:
    """The median over the seeds; None: not measured."""
    runs = runs_of(found, name)
    return statistics.median(seconds_to(run, target) for run in runs) if runs else None


def _over(found: Found, name: str, than: str) -> str:
    ours, theirs = median_to(found, name), median_to(found, than)
    if ours is None or theirs is None or math.isinf(ours):
        return "-"
    if math.isinf(theirs):
        last = statistics.median(run["curve"][-1][2] for run in runs_of(found, than))
        return f"> {last / ours:.1f}x"
    return f"{theirs / ours:.1f}x"


def table(found: Found) -> list[Sequence[str]]:
    """A line for each method; medians over the seeds."""
    lines: list[Sequence[str]] = [
        (
            "method",
            "s per step",
            "KB per step",
            f"s to {TARGET} nats",
            "speed over fp32",
            "last loss",
            "at s",
        ),
    ]
    for name in METHODS:
        runs = runs_of(found, name)
        if not runs:
            continue
        ends = [run["curve"][-1] for run in runs]

        def middle(values: Sequence[float]) -> float:
            return statistics.median(values)

        to = median_to(found, name)
        lines.append(
            (
                name + f" ({len(runs)} of {len(SEEDS)} seeds)" * (len(runs) < len(SEEDS)),
                f"{middle([end[2] / end[0] for end in ends]):.3f}",
                f"{middle([end[3] / end[0] for end in ends]) / 1e3:.0f}",
                "not by then" if to is None or math.isinf(to) else f"{to:.0f}",
                _over(found, name, FP32),
                f"{middle([math.inf if end[1] is None else end[1] for end in ends]):.3f}",
                f"{middle([end[2] for end in ends]):.0f}",
            )
        )
    return lines


brief = table


def notes(found: Found) -> list[str]:
    """How much longer than its compute an fp32 exchange took, and under what load."""
    runs = runs_of(found, FP32)
    if not runs:
        return []
    shares = [run["curve"][-1][2] / run["curve"][-1][0] / run["compute_s"] - 1 for run in runs]
    loads = [run["load"] for name in METHODS for run in runs_of(found, name)]
    return [
        f"Medians of {len(SEEDS)} seeds. An fp32 exchange takes {statistics.median(shares):.0f} "
        f"times the compute of a step. The clock stands still while the loss is evaluated, every "
        f"{EVERY} steps. Load at the start: {min(loads):.1f} to {max(loads):.1f}."
    ]


def claims(found: Found) -> list[Claim]:
    """The fastest of ringcomm's methods beside each of torch's."""
    ours = {
        name: to
        for name in METHODS
        if name not in BASELINES and (to := median_to(found, name)) is not None
    }
    best = min(ours, key=ours.__getitem__, default=None)
    made = []
    for than in BASELINES:
        theirs = median_to(found, than)
        met = None if best is None or theirs is None else ours[best] < theirs
        said = "" if best is None or theirs is None else f"{_over(found, best, than)} ({best})"
        made.append(
            Claim(
                f"speed over {than}",
                "-",
                said,
                "> 1x",
                met,
            )
        )
    return made


def draw(found: Found, figure: Any) -> None:
    """Loss by the clock: a line for each method, the mean over the seeds, in a band of them all."""
    axes = figure.subplots()
    for name, way in METHODS.items():
        runs = [run["curve"] for run in runs_of(found, name)]
        if not runs or any(loss is None for run in runs for _, loss, _, _ in run):
            continue
        same = list(zip(*runs, strict=False))  # one that its limit ended is as long as the shortest
        seconds = [statistics.fmean(point[2] for point in points) for points in same]
        losses = [[point[1] for point in points] for points in same]
        style = ("--" if name in BASELINES else "-") if way.steps == STEPS else ":"
        axes.plot(
            seconds,
            [statistics.fmean(each) for each in losses],
            style,
            color=way.color,
            label=name,
            lw=2,
        )
        axes.fill_between(
            seconds,
            [min(each) for each in losses],
            [max(each) for each in losses],
            color=way.color,
            alpha=0.2,
            lw=0,
        )
    axes.axhline(TARGET, color="gray", lw=0.8)
    axes.annotate(
        f"{TARGET} nats",
        (1, TARGET),
        xycoords=("axes fraction", "data"),
        va="bottom",
        ha="right",
        xytext=(-4, 2),
        textcoords="offset points",
        color="gray",
    )
    axes.set_xscale("log")
    axes.set_ylim(1.3, 3.0)
    axes.set_xlabel(f"seconds of training, four hosts, {RATE:g} Mbit/s")
    axes.set_ylabel("validation loss (nats)")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=11, loc="center left", bbox_to_anchor=(1, 0.5))
