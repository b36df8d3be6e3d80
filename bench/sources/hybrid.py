"""HyPar-Flow: stages of a pipeline by send and receive, each of them data-parallel.

Real training of a GPT and of a ResNet of hundreds of layers, cut into two stages with two replicas
each, has the weights of single-process training: to the bit where that sums the same micro-batches
in the same order, else within TOLERANCE of the way that the weights have come. Sums in another
order differ by float32's half unit, 2**-24 = 6e-8 of their terms, and so do kernels for other batch
sizes; TOLERANCE is 1e-3, as a step's difference goes through some hundreds of layers and through
the steps behind it. A missing or doubled micro-batch or replica changes gradients by a quarter and
more.

Throughput is of models of 30 M parameters at a tenth of rate and size, whose layers sleep.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.site import Site

from .source import Claim, Found, Point
from .steps import ENVIRONMENT, GOODPUT

DOCUMENT = (
    "HyPar-Flow (arXiv 1911.05146): pipeline stages by send and receive, replicas by all-reduce, "
    "beside sequential training and data-parallel Horovod. Ours: 2 stages with 2 replicas."
)
REAL = (
    "bytes of gradients and activations, sums; for weights the whole training, by "
    "torch.distributed.pipelining over backend ringcomm."
)
EMULATED = "links (a tenth of rate and size); for times the layers' compute, which sleeps."
WITHOUT_ROOT = "the points named `weights` (over loopback)"
HARNESS = 1

RANK = Path(__file__).with_name("_hybrid_rank.py")
TOLERANCE = 1e-3
SCHEDULES = ("1f1b", "gpipe")
HOSTS, MBIT, MICRO = 4, 100.0, 8
PARAMETERS = 3e6  # nearly, of either emulated model
SAMPLES = {"gpt": 32, "resnet": 128}  # of a step of all ranks
FACTORS = (0.25, 4.0, 1.0, 0.5, 0.1)  # sequential beside the second, where all can be hidden
WAYS = ("gloo", "data parallel", "hybrid")
OVER_SEQUENTIAL, OVER_DATA_PARALLEL = 3.1, 1.6
NAMES = {"gpt": "GPT", "resnet": "ResNet"}
REAL_TRAINING = {
    "gpt": {"depth": 4, "width": 32, "lr": 0.1},
    "resnet": {"depth": 206, "width": 4, "lr": 0.02},
}


def points(quick: bool) -> Sequence[Point]:
    """Weights first, then times with less compute than the gradients' way takes, and more."""
    found = []
    for kind in ("resnet", "gpt"):
        for schedule in SCHEDULES:
            settings: dict[str, Any] = {
                "kind": kind,
                "schedule": schedule,
                "micro": 4,
                "samples": 8,
                "seed": 1,
                "steps": 2 if quick else 6,
                **REAL_TRAINING[kind],
            }
            if quick and kind == "resnet":
                settings["depth"] = 20
            found.append(Point(f"weights {kind} {schedule}", settings))
    for factor in FACTORS[: 1 if quick else None]:
        for kind in ("resnet", "gpt"):
            ways = [*WAYS, *(["sequential"] if factor == max(FACTORS) else [])]
            settings = {
                "kind": kind,
                "factor": factor,
                "mbit": 10 * MBIT if quick else MBIT,
                "schedule": "gpipe",
                "samples": SAMPLES[kind],
                "micro": MICRO,
                "bucket_mb": 1.0,
                "ways": ways,
                "rounds": 1 if quick else 3,
                "steps": 1 if quick or factor > 1 else 3,
            }
            found.append(Point(f"time {kind} {factor:g}", settings, settings["mbit"]))
    return found


def measure(point: Point) -> Mapping[str, Any]:
    """Either kind of point."""
    if point.name.startswith("weights"):
        return _weights(point.settings)
    return _times(point.settings)


# ---- weights ----


def _weights(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory(prefix="hybrid-") as folder, Site(0, HOSTS) as site:
        asked = {"do": "train", "folder": folder, **settings}
        told = site.run(_command(asked), {"GLOO_SOCKET_IFNAME": "lo"}, 600).records()
    return told[0]


def _command(asked: Mapping[str, Any]) -> list[str]:
    return [sys.executable, str(RANK), json.dumps(asked)]


# ---- times ----


def compute_s(settings: Mapping[str, Any]) -> float:
    """Of all samples of a step on one device, as long that a rank of data parallel computes
    ``factor`` times what its gradients take on the wire."""
    exchange = 4 * PARAMETERS * 2 * (HOSTS - 1) / HOSTS * 8e-6 / (settings["mbit"] * GOODPUT)
    return HOSTS * float(settings["factor"]) * exchange


def _times(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    from ._hybrid_model import cut, shapes

    kind, total = settings["kind"], compute_s(settings)
    made = shapes(kind)
    at = cut(
        made, settings["samples"] // 2, settings["micro"], total / 2, settings["mbit"] * GOODPUT
    )
    asked = {"do": "time", "compute_s": total, "at": at, **settings}
    with Site(HOSTS, HOSTS, [settings["mbit"]]) as site:
        told = site.run(_command(asked), ENVIRONMENT, 900).records()
    if not all(one["finite"] for one in told):
        raise RuntimeError("a gradient is not finite")
    ways: dict[str, Any] = {}
    for way in settings["ways"]:
        rounds = [one["step_s"] for one in told if one["way"] == way]
        sent = statistics.median(one["port_bytes"] for one in told if one["way"] == way)
        ways[way] = {"step_s": statistics.median(rounds), "rounds": rounds, "port_bytes": sent}
    first = sum(piece.parameters for piece in made[:at])
    costs = sum(piece.cost for piece in made[:at]) / sum(piece.cost for piece in made)
    return {
        "parameters": sum(piece.parameters for piece in made),
        "compute_s": total,
        "at": at,
        "pieces": len(made),
        "first_parameters": first,
        "first_cost": costs,
        "cut_bytes": made[at - 1].bytes_behind * settings["samples"] // 2,
        "ways": ways,
    }


# ---- what the rows say ----


def _ratio(row: Mapping[str, Any], *over: str) -> float:
    """How much faster hybrid is than the fastest of these ways."""
    ways = row["ways"]
    return float(min(ways[way]["step_s"] for way in over) / ways["hybrid"]["step_s"])


def _best(found: Found, kind: str, over: Sequence[str]) -> tuple[float, str] | None:
    """The largest such ratio, and the point it is at."""
    rows = {
        name: row
        for name, row in found.items()
        if name.startswith(f"time {kind}") and row["ways"].keys() >= set(over)
    }
    return max(((_ratio(row, *over), name) for name, row in rows.items()), default=None)


def _weighed(found: Found, kind: str, called: str) -> Claim:
    """Judges weights beside one process by the worse of the schedules."""
    rows = [row for schedule in SCHEDULES if (row := found.get(f"weights {kind} {schedule}"))]
    said, met = "", None
    if len(rows) == len(SCHEDULES):
        apart, in_order = (max(row[key] for row in rows) for key in ("apart", "apart_in_order"))
        same = all(row["same_bits"] for row in rows)
        said = (
            f"{'same bits' if same else f'{in_order:.1e} off'} in the same order, else {apart:.1e}"
        )
        met = same and all(row["replicas_same"] for row in rows) and apart <= TOLERANCE
    return Claim(
        f"{called}, weights by {' and '.join(SCHEDULES)} beside one process",
        "-",
        said,
        f"same bits, within {TOLERANCE:g}",
        met,
    )


def claims(found: Found) -> Sequence[Claim]:
    """Weights, then times."""
    made = []
    for kind, called in NAMES.items():
        made.append(_weighed(found, kind, called))
        for over, document, bound, baselines in (
            (
                ("sequential",),
                "up to 3.1x (ResNet-110)",
                OVER_SEQUENTIAL,
                ("one device, a ResNet", f"one device, a {called}"),
            ),
            (
                ("data parallel", "gloo"),
                "up to 1.6x (ResNet-1001)",
                OVER_DATA_PARALLEL,
                ("Horovod", "ringcomm or gloo"),
            ),
        ):
            best = _best(found, kind, over)
            said = f"{best[0]:.2f}x (compute/exchange {best[1].split()[-1]})" if best else ""
            made.append(
                Claim(
                    f"{called}, throughput over {over[0]}",
                    document,
                    said,
                    f"{bound}x",
                    best and best[0] >= bound,
                    best and best[0] / bound,
                    baselines,
                )
            )
    return made


def table(found: Found) -> list[Sequence[str]]:
    """A line for each point."""
    lines: list[Sequence[str]] = [
        (
            "model",
            "compute / exchange",
            "sequential",
            "gloo",
            "data parallel",
            "hybrid",
            "over gloo",
            "over data parallel",
            "sent, data parallel",
            "sent, hybrid",
            "cut at",
        ),
    ]
    timed = [(*name.split()[1:], row) for name, row in found.items() if name.startswith("time")]
    for kind, factor, row in sorted(timed, key=lambda one: (one[0], float(one[1]))):
        ways = row["ways"]
        seconds = [
            f"{ways[way]['step_s']:.2f} s" if way in ways else "-" for way in ("sequential", *WAYS)
        ]
        sent = [f"{ways[way]['port_bytes'] / 1e6:.1f} MB" for way in ("data parallel", "hybrid")]
        lines.append(
            (
                NAMES[kind],
                factor,
                *seconds,
                f"{_ratio(row, 'gloo'):.2f}x",
                f"{_ratio(row, 'data parallel'):.2f}x",
                *sent,
                f"{row['at']}/{row['pieces']}, {row['first_cost']:.0%}",
            )
        )
    return lines


def notes(found: Found) -> list[str]:
    """How much faster hybrid is than data parallel, by compute over exchange."""
    said = []
    for kind, called in NAMES.items():
        rows = {by: found.get(f"time {kind} {by:g}") for by in sorted(FACTORS)}
        ratios = [f"{by:g}: {_ratio(row, 'data parallel'):.2f}x" for by, row in rows.items() if row]
        said += [f"{called} {', '.join(ratios)}"] if ratios else []
    return [f"Over data parallel, by compute/exchange: {'; '.join(said)}."] if said else []


def draw(found: Found, figure: Any) -> None:
    """Speed-up over data parallel by compute over exchange."""
    axes = figure.subplots()
    for kind, called in NAMES.items():
        for way, style in (("data parallel", "-"), ("gloo", "--")):
            dots = sorted(
                (float(name.split()[-1]), _ratio(row, way))
                for name, row in found.items()
                if name.startswith(f"time {kind}") and way in row["ways"]
            )
            if dots:
                over = "ringcomm" if way == "data parallel" else way
                axes.plot(
                    *zip(*dots, strict=True),
                    style,
                    marker="o" if style == "-" else "x",
                    color="tab:blue" if kind == "gpt" else "tab:orange",
                    label=f"{called}, over data parallel by {over}",
                )
    axes.axhline(OVER_DATA_PARALLEL, color="gray", lw=0.8)
    axes.text(
        axes.get_xlim()[1],
        OVER_DATA_PARALLEL,
        "HyPar-Flow's ResNet-1001, over Horovod ",
        va="bottom",
        ha="right",
    )
    axes.set_ylim(0, None)
    axes.set_xlabel("compute of a rank over its exchange in data parallel")
    axes.set_ylabel("throughput of 2 stages x 2 replicas, relative")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
