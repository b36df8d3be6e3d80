"""overlap: what a ring and overlap with backward are worth (article 004), and how a rank's cost
grows with the hosts.

The article's model has 300 million parameters; its exchange takes 400 ms, however many GPUs there
are. It does not say for how long a GPU computes; here it is twice as long as the exchange at its
limit, so that backward, two thirds of that, is longer than the exchange. Ports and gradient have a
tenth of the size. With overlap buckets hold a thirtieth of the gradient, and the last one follows
after backward: that bounds 8 hosts by 98.6 % of linear.

Measured exchanges are held against the cost model by which the library chooses its algorithm
(csrc/plan/choose.c), which of so many bytes is the ring, with the port's goodput for the price of a
byte. Lines end with the hosts that were measured: what a hop takes shows little beside the
bytes up to there, and would decide how they go on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from lab.site import Site

from . import steps
from .source import Claim, Found, Point

DOCUMENT = (
    "Baidu's ring all-reduce, with a language model of 300 million parameters: the exchange costs "
    "each GPU as much however many there are (400 ms), and less where it overlaps with backward."
)
REAL = "every byte, DDP, 1 to 8 hosts."
EMULATED = (
    "compute (layers sleep, twice as long as the exchange at its limit) and links (1000 Mbit/s), "
    "at a tenth of the model."
)
WITHOUT_ROOT = "bench/sweep.py under torchrun times all-reduces on the loopback"
HARNESS = 1

MBIT, PARAMETERS, LAYERS = 1000.0, 30e6, 30
COMPUTE_PER_EXCHANGE, FORWARD = 2.0, 1 / 3
MEASURED = (8, 1, 2, 4, 3, 5, 6, 7)
HOP_S = 50e-6  # HOP_NS of csrc/plan/schedule.h
LINEAR, MODEL_WITHIN = 0.95, 0.10
AFTER, DURING = "after backward", "during backward"


def points(quick: bool) -> list[Point]:
    """One for each number of hosts."""
    size = {"parameters": PARAMETERS, "rounds": 3, "steps": 1, "settle": 2}
    if quick:
        size = {"parameters": 3e5, "rounds": 1, "steps": 1, "settle": 2}
    return [
        Point(
            f"{hosts} host{'s' * (hosts > 1)}",
            {
                "hosts": hosts,
                "mbit": MBIT,
                "layers": LAYERS,
                "compute": COMPUTE_PER_EXCHANGE,
                **size,
            },
            MBIT,
        )
        for hosts in ((2, 1) if quick else MEASURED)
    ]


def limit_s(parameters: int, mbit: float) -> float:
    """What an exchange takes with ever more hosts, by the bytes alone: 2 S/B."""
    return 2 * 4 * parameters * 8 / (mbit * 1e6 * steps.GOODPUT)


def measure(point: Point) -> dict[str, Any]:
    """Compute alone, and the exchange after and during backward, by turns."""
    asked = point.settings
    hosts, layers = asked["hosts"], steps.square(asked["parameters"], asked["layers"])
    parameters = sum(rows * columns for rows, columns in layers)
    compute_s = asked["compute"] * limit_s(parameters, asked["mbit"])
    bucket_mb = 4 * parameters / len(layers) / 2**20
    hook = {"kind": "gradients", "codec": "none", "untimed": 0}
    ways = {
        steps.ALONE: {"kind": "alone", "untimed": 0},
        AFTER: {**hook, "bucket_mb": None},
        DURING: {**hook, "bucket_mb": 0.9 * bucket_mb},
    }
    job = steps.Job(layers, compute_s, ways, asked["rounds"], asked["steps"], asked["settle"])
    with Site(hosts, hosts, [asked["mbit"]]) as site:
        print(f"# {site.describe()}", flush=True)
        told = steps.run(site, job, 900)
    return {
        "compute_s": compute_s,
        "parameters": parameters,
        "ways": {way: steps.summary(runs) for way, runs in told.items()},
    }


# ---- the model ----


def predicted_s(hosts: int, parameters: int, mbit: float) -> float:
    """The exchange of one tensor by the cost model."""
    bytes_s = 2 * (hosts - 1) / hosts * 4 * parameters * 8 / (mbit * 1e6 * steps.GOODPUT)
    return 2 * (hosts - 1) * HOP_S + bytes_s


@dataclasses.dataclass(frozen=True)
class Line:
    """One number of hosts.

    Attributes:
        after, during: samples a second over linear.
        exchange, model: seconds over limit_s(); one host has no exchange.
        hop_s: what is left of the exchange for each of a ring's hops beyond the bytes.
    """

    hosts: int
    after: float
    during: float
    exchange: float | None
    hop_s: float | None
    model: float

    @property
    def off(self) -> float | None:
        """How far the model is from what was measured, as a part of that."""
        return None if not self.exchange else self.model / self.exchange - 1


def lines(found: Found) -> list[Line]:
    """In order of hosts."""
    made = []
    for row in sorted(found.values(), key=lambda row: int(row["settings"]["hosts"])):
        hosts, mbit = row["settings"]["hosts"], row["settings"]["mbit"]
        limit = limit_s(row["parameters"], mbit)
        model = predicted_s(hosts, row["parameters"], mbit)
        exchange = hop_s = None
        if hosts > 1:
            taken_s = steps.exchange_s(row["ways"], AFTER)
            exchange = taken_s / limit
            bytes_s = steps.wire_s("none", row["parameters"], hosts, mbit)
            hop_s = (taken_s - bytes_s) / (2 * (hosts - 1))
        made.append(
            Line(
                hosts,
                steps.efficiency(row["ways"], AFTER),
                steps.efficiency(row["ways"], DURING),
                exchange,
                hop_s,
                model / limit,
            )
        )
    return made


# ---- what the rows say ----


def claims(found: Found) -> list[Claim]:
    """Of the largest number of hosts that was measured, and of the model."""
    measured = [line for line in lines(found) if line.exchange is not None]
    last = measured[-1] if measured else None
    off = max((abs(line.off or 0.0) for line in measured), default=None)
    grown = max((line.exchange or 0.0 for line in measured), default=None)
    faster = last.during / last.after if last else None
    return [
        Claim(
            f"{last.hosts if last else 8} hosts, overlap: samples/s over linear",
            "near 1 (a plot)",
            f"{last.during:.3f}" if last else "",
            f">= {LINEAR:g}",
            last.during >= LINEAR if last else None,
            baselines=("one host", "one host"),
        ),
        Claim(
            "the same over no overlap",
            "may lose less than 400 ms",
            f"{faster:.2f} times" if faster else "",
            "> 1",
            faster > 1 if faster else None,
        ),
        Claim(
            "exchange of 2 to 8 hosts over its limit for any number",
            "1 (flat)",
            f"at most {grown:.2f}" if grown else "",
            "<= 1",
            grown <= 1 if grown else None,
        ),
        Claim(
            "cost model beside measured exchanges",
            "-",
            f"off by at most {100 * off:.1f} %" if off is not None else "",
            f"<= {100 * MODEL_WITHIN:g} %",
            off <= MODEL_WITHIN if off is not None else None,
        ),
    ]


def table(found: Found) -> list[Sequence[str]]:
    """A line for each number of hosts."""

    def number(value: float | None, digits: int = 3) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    heads = (
        "hosts",
        "samples/s over linear, exchange after backward",
        "during backward",
        "exchange over 2 S/B",
        "cost model",
        "model's error",
    )
    made: list[Sequence[str]] = [heads]
    for line in lines(found):
        off = "-" if line.off is None else f"{100 * line.off:+.1f} %"
        made.append(
            (
                str(line.hosts),
                number(line.after),
                number(line.during),
                number(line.exchange),
                number(line.model),
                off,
            )
        )
    return made


def notes(found: Found) -> list[str]:
    """Why there is no figure of more hosts."""
    hops = [1e3 * line.hop_s for line in lines(found) if line.hop_s is not None]
    if not hops:
        return []
    return [
        f"Beyond its bytes the exchange takes {min(hops):.1f} to {max(hops):.1f} ms for each hop, "
        f"on shared cores; the cost model has {1e3 * HOP_S:g} ms."
    ]


def draw(found: Found, figure: Any) -> None:
    """Samples a second over hosts, and a rank's cost over hosts."""
    left, right = figure.subplots(1, 2)
    measured = lines(found)
    hosts = [line.hosts for line in measured]
    left.plot(hosts, hosts, color="gray", linestyle=":", label="linear")
    for name, style, color in (("during", "o-", "tab:blue"), ("after", "s-", "tab:orange")):
        left.plot(
            hosts,
            [line.hosts * getattr(line, name) for line in measured],
            style,
            color=color,
            label=f"exchange {name} backward",
        )
    left.set(xlabel="hosts", ylabel="samples a second, of one host's")
    left.set(xlim=(0, None), ylim=(0, None))
    left.legend()
    several = [line for line in measured if line.exchange is not None]
    hosts = [line.hosts for line in several]
    right.plot(hosts, [line.model for line in several], color="gray", label="cost model")
    right.plot(
        hosts,
        [line.exchange for line in several],
        "s",
        color="tab:orange",
        label="measured, after backward",
    )
    right.set(
        xlim=(0, None),
        ylim=(0, 1.2),
        xlabel="hosts",
        ylabel="exchange of a rank, over its limit for any number",
    )
    right.legend()
