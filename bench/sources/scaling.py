"""scaling: what four hosts of a cheap cluster lose to communication (article 000), and what is left
of that loss with ringcomm.

The article's step computes for 234 ms and then exchanges 100 MB of gradients for 106 ms. Here the
ports have a tenth of the rate and the gradient a tenth of the size, and compute is as long beside
the exchange as there: 234/106 times what the gradient's bytes take by a port's goodput. (106 ms are
less than 100 MB can take on 10 Gbit/s. So the ratio is kept, not the milliseconds.)

Buckets with overlap: 0.5 MB of 10, as who tunes them would have it. DDP sends a bucket when all its
gradients are there, so the last one, that of the first layers, always follows after backward; the
less is in it, the less is exposed, until each bucket's own handling shows. That alone bounds bf16
over both ports by 99.4 %, and over one port by 98.9 %.

Efficiency is what compute takes alone over what a step takes, both measured, round by round, as the
article's is.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lab.site import Site

from . import steps
from .source import Claim, Found, Point

DOCUMENT = (
    "A GPU poor's multi-node training cluster (an article): scaling efficiency of ResNet-50 on 4 "
    "hosts with 10 Gbit/s Ethernet."
)
REAL = "every byte, DDP and its hooks, codecs."
EMULATED = (
    "compute (layers sleep) and links, at a tenth of the article's rate and gradient, so the "
    "processor's part of a step is lighter."
)
WITHOUT_ROOT = "pytest bench/micro -k backend: ringcomm beside gloo on the loopback"
HARNESS = 1

HOSTS, MBIT = 4, 1000.0
PARAMETERS, LAYERS = 2.5e6, 50
COMPUTE_PER_EXCHANGE = 234 / 106
BUCKET_MB = 0.5
WITHIN, OVERLAPPED, ONEBIT, UNEQUAL = 3.0, 98.0, 97.0, 0.95

_PLAIN = {"kind": "gradients", "bucket_mb": None}
_HIDDEN = {"kind": "gradients", "bucket_mb": BUCKET_MB}
_OUTER = {
    "kind": "apart",
    "per": 30,
    "steps": 1,
    "untimed": 0,
    "settle": 1,
    "settings": {"every": 30, "codec": "int4", "fragments": 4, "delay": 5},
}
WAYS: Mapping[str, Mapping[str, steps.Way]] = {
    "one port": {
        steps.ALONE: {"kind": "alone"},
        "fp32": {**_PLAIN, "codec": "none"},
        "bf16": {**_PLAIN, "codec": "bf16"},
        "bf16, 2 batches": {**_PLAIN, "codec": "bf16", "per": 2},
        "gloo fp32": {**_PLAIN, "over": "gloo"},
        "gloo fp16 hook": {**_PLAIN, "over": "gloo", "hook": "fp16"},
        "gloo fp32, overlap": {**_HIDDEN, "over": "gloo"},
        "fp32, overlap": {**_HIDDEN, "codec": "none"},
        "bf16, overlap": {**_HIDDEN, "codec": "bf16"},
        "int8, overlap": {**_HIDDEN, "codec": "int8"},
        "onebit, overlap": {**_HIDDEN, "codec": "onebit"},
        "outer steps, int4": _OUTER,
    },
    "two ports": {
        steps.ALONE: {"kind": "alone"},
        "fp32": {**_PLAIN, "codec": "none"},
        "bf16, 2 batches": {**_PLAIN, "codec": "bf16", "per": 2},
        "fp32, overlap": {**_HIDDEN, "codec": "none"},
        "bf16, overlap": {**_HIDDEN, "codec": "bf16"},
    },
    "unequal ports": {
        steps.ALONE: {"kind": "alone"},
        "fp32": {**_PLAIN, "codec": "none"},
        "bf16, overlap": {**_HIDDEN, "codec": "bf16"},
    },
    "one port, torch's hook": {
        steps.ALONE: {"kind": "alone"},
        "gloo fp16 hook, overlap": {**_HIDDEN, "over": "gloo", "hook": "fp16"},
    },
}
PORTS = {
    "one port": [MBIT],
    "two ports": [MBIT, MBIT],
    "unequal ports": [MBIT, MBIT / 10],
    "one port, torch's hook": [MBIT],
}
_COLORS = {"two ports": "tab:green", "unequal ports": "tab:orange"}
ALONE = steps.ALONE
#: Compute was set so that fp32 on one port has the article's share of a step; half the bytes and
#: half the exchanges follow from that. The second port does not.
ARTICLE = (
    ("one port", "fp32", 68.8),
    ("one port", "bf16", 81.5),
    ("one port", "bf16, 2 batches", 89.8),
    ("two ports", "bf16, 2 batches", 94.5),
)


def points(quick: bool) -> list[Point]:
    """One for each set of ports."""
    size = {"hosts": HOSTS, "parameters": PARAMETERS, "rounds": 5, "steps": 4, "settle": 12}
    if quick:
        size = {"hosts": 2, "parameters": 1e5, "rounds": 1, "steps": 1, "settle": 3}
    return [
        Point(
            ports,
            {
                "nics": PORTS[ports],
                "layers": LAYERS,
                **size,
                "compute": COMPUTE_PER_EXCHANGE,
                "ways": ways,
            },
            min(PORTS[ports]),
        )
        for ports, ways in WAYS.items()
    ]


def measure(point: Point) -> dict[str, Any]:
    """All ways by turns."""
    asked = point.settings
    hosts, layers = asked["hosts"], steps.square(asked["parameters"], asked["layers"])
    parameters = sum(rows * columns for rows, columns in layers)
    exchange_s = steps.wire_s("none", parameters, hosts, max(asked["nics"]))
    compute_s = asked["compute"] * exchange_s
    job = steps.Job(
        layers, compute_s, asked["ways"], asked["rounds"], asked["steps"], asked["settle"]
    )
    with Site(hosts, hosts, asked["nics"]) as site:
        print(f"# {site.describe()}", flush=True)
        told = steps.run(site, job, 900)
    return {
        "compute_s": compute_s,
        "parameters": parameters,
        "ways": {way: steps.summary(runs) for way, runs in told.items()},
    }


def efficiency(found: Found, ports: str, way: str) -> float | None:
    """In percent."""
    if ports not in found:
        return None
    return 100 * steps.efficiency(found[ports]["ways"], way)


def share_of_sum(found: Found) -> float | None:
    """What the unequal ports move beside the sum of their rates: fp32, all after backward."""
    if "unequal ports" not in found:
        return None
    row = found["unequal ports"]
    asked = row["settings"]
    least_s = steps.wire_s("none", row["parameters"], asked["hosts"], sum(asked["nics"]))
    return least_s / steps.exchange_s(row["ways"], "fp32")


def claims(found: Found) -> list[Claim]:
    """The article's rows, and ours beyond."""
    made = [_beside(found, *line) for line in ARTICLE]
    for what, ports, way, least in (
        ("bf16, both ports, overlap", "two ports", "bf16, overlap", OVERLAPPED),
        ("onebit, one port, overlap", "one port", "onebit, overlap", ONEBIT),
    ):
        ours = efficiency(found, ports, way)
        made.append(
            Claim(
                what,
                "94.5 % (its best)",
                "" if ours is None else f"{ours:.1f} %",
                f">= {least:g} %",
                None if ours is None else ours >= least,
                None if ours is None else _lost(94.5) / _lost(ours),
                (ALONE, ALONE),
            )
        )
    share = share_of_sum(found)
    made.append(
        Claim(
            "rate over the sum of ports of 1000 and 100 Mbit/s",
            "-",
            "" if share is None else f"{100 * share:.1f} %",
            f">= {100 * UNEQUAL:g} %",
            None if share is None else share >= UNEQUAL,
        )
    )
    return made


def _lost(percent: float) -> float:
    """To communication: what the picture compares, as efficiency itself ends at 100."""
    return max(100 - percent, 0.1)


def _beside(found: Found, ports: str, way: str, article: float) -> Claim:
    ours = efficiency(found, ports, way)
    return Claim(
        f"{way}, {ports}",
        f"{article} %",
        "" if ours is None else f"{ours:.1f} %",
        f"within {WITHIN:g} points",
        None if ours is None else abs(ours - article) <= WITHIN,
        None,
        (ALONE, ALONE),
        calibrated=ports == "one port",
    )


def table(found: Found) -> list[Sequence[str]]:
    """A line for each way and set of ports."""
    article = {line[:2]: f"{line[2]} %" for line in ARTICLE}
    lines: list[Sequence[str]] = [
        ("ports", "way", "article", "efficiency", "rounds", "of a step: MB sent", "ms")
    ]
    for ports, row in found.items():
        for way, one in row["ways"].items():
            every = [100 * part for part in steps.efficiencies(row["ways"], way)]
            if way == steps.ALONE:  # beside what was asked for
                every = [100 * row["compute_s"] / step_s for step_s in one["rounds"]]
            lines.append(
                (
                    ports,
                    way,
                    article.get((ports, way), "-"),
                    f"{statistics.median(every):.1f} %",
                    f"{min(every):.1f}-{max(every):.1f}",
                    f"{one['port_bytes'] / 1e6:.2f}",
                    f"{1e3 * one['step_s']:.0f}",
                )
            )
    return lines


def notes(found: Found) -> list[str]:
    """Efficiency of gloo, which no claim has."""
    there = [
        f"{way} {efficiency(found, ports, way):.1f} %"
        for ports, row in found.items()
        for way in row["ways"]
        if way.startswith("gloo")
    ]
    return [f"Efficiency over one port: {', '.join(there)}."] if there else []


def draw(found: Found, figure: Any) -> None:
    """Bars; the article's figures as marks."""
    axes = figure.add_subplot()
    bars = [(ports, way) for ports, row in found.items() for way in row["ways"]]
    article = {line[:2]: line[2] for line in ARTICLE}
    for place, (ports, way) in enumerate(reversed(bars)):
        ours = efficiency(found, ports, way) or 0.0
        axes.barh(
            place,
            ours,
            color="silver" if "gloo" in way or "alone" in way else _COLORS.get(ports, "tab:blue"),
        )
        axes.annotate(
            f"{ours:.1f}",
            (ours, place),
            xytext=(-28, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            color="black",
        )
        if (ports, way) in article:
            axes.plot(article[ports, way], place, marker="D", color="black", markersize=5)
    axes.set_yticks(
        range(len(bars)), [f"{way} ({ports})" for ports, way in reversed(bars)], fontsize=7
    )
    axes.set_xlim(0, 102)
    axes.set_xlabel(
        "scaling efficiency of 4 hosts, percent; diamonds: the article's; grey: not "
        "ringcomm,\nblue: one port, green: two, orange: unequal ones"
    )
