"""onebit: what 1-bit Adam and 1-bit LAMB save (papers of article 003): bytes and time.

Models have the papers' shapes at a hundredth of the size: BERT-Large, and the small GPT-2. Links
have a whole fraction of the rate that is named, and compute a time that keeps all ratios:

    1/100 of the bytes at 1/d of the rate take d/100 of the time; so does compute of its own

A step of BERT-Large computes for 172 ms on the 1-bit Adam paper's GPUs, and exchanges 16-bit
gradients for 2275 ms (its table 1: 64 GPUs, 16 samples each, Ethernet): 93 % of a step. 8 hosts at
4.2 Gbit/s take that long, and 2 hosts at 2.4, so these are the rates where the paper's figure is
compared ("papers").

End to end, as in table and claims, a fifth of the steps is dense, the rest at 1 bit; of these, one
in about a hundred also renews the variance (renewals(), of 10,000 steps), which the papers do not
do. Renewals count as those at bf16, also behind a dense stage at int8.

The optimizers' arithmetic is real, and all hosts share this machine's cores. It is in the steps at
1 bit and in none of the others: what others have of it is part of the compute that is emulated.

In the dense stage gradients travel at bf16, or, as an own line, at int8; docs/METHODS.md has how
well AdamW learns by that.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lab.site import Site

from . import steps
from .source import Claim, Found, Point

DOCUMENT = (
    "1-bit Adam and 1-bit LAMB (two papers): less communication and more throughput than "
    "uncompressed Adam in BERT-Large's pre-training."
)
REAL = "every byte, DDP, OneBitAdam and OneBitLamb with their codecs and arithmetic."
EMULATED = (
    "compute (layers sleep) and links, at a hundredth of the models and a fraction of the rates; "
    "figures end to end are composed of measured steps: dense, at 1 bit, and renewing."
)
WITHOUT_ROOT = "bench/codecs.py and tests/test_optim_adam.py run the same exchanges on the loopback"
HARNESS = 1

SHRUNK = 100
WARMUP = 0.20
STEPS = 10_000
RENEWS = 1.5  # a step that sends so many times the bytes of the least one renews
PAPERS_MBIT = {8: 4200, 2: 2400}  # by hosts
RATES = {4200: 200, 2400: 200, 10_000: 200, 1000: 40, 100: 8}  # Mbit/s: d
VOLUME, THROUGHPUT = 5.0, 3.3
PAPERS_BASELINE = "16-bit gradients"
FP32, BF16, DENSE, DENSE8, ADAM, LAMB = (
    "fp32 gradients",
    "bf16 gradients",
    "dense stage",
    "dense stage, int8",
    "1-bit Adam",
    "1-bit LAMB",
)
BF16_HIDDEN, INT8_HIDDEN = "bf16, overlap", "int8, overlap"
BESIDE = (BF16, BF16_HIDDEN, INT8_HIDDEN)


def transformer(blocks: int, width: int, vocabulary: int) -> list[list[int]]:
    """Weights of a block: attention's four, and two of four times the width; and the embedding."""
    block = [[width, 4 * width], [width, 4 * width], [4 * width, width]]
    return [[vocabulary, width], *(block * blocks)]


MODELS: Mapping[str, tuple[list[list[int]], float]] = {
    "BERT": (transformer(24, 102, 3052), 0.172),
    "GPT": (transformer(12, 77, 5026), 0.172 * 124 / 334),
}
"""Layers at a hundredth, and seconds that a step of the whole model computes for."""


def points(quick: bool) -> list[Point]:
    """The papers' rate first."""
    if quick:
        layers = transformer(2, 100, 100)
        return [_point("BERT", 2, 1000, layers, rounds=1, settle=7)]
    named = [(model, 8, PAPERS_MBIT[8]) for model in MODELS] + [("BERT", 2, PAPERS_MBIT[2])]
    named += [(model, 8, mbit) for mbit in (1000, 10_000, 100) for model in MODELS]
    return [
        _point(model, hosts, mbit, MODELS[model][0], rounds=3, settle=7)
        for model, hosts, mbit in named
    ]


def _point(
    model: str, hosts: int, mbit: int, layers: list[list[int]], rounds: int, settle: int
) -> Point:
    slower = RATES[mbit]
    rate = "papers" if mbit == PAPERS_MBIT.get(hosts) else f"{mbit} Mbit/s"
    return Point(
        f"{model}, {hosts} hosts, {rate}",
        {
            "model": model,
            "hosts": hosts,
            "mbit": mbit,
            "link_mbit": mbit / slower,
            "layers": layers,
            "compute_s": MODELS[model][1] * slower / SHRUNK,
            "rounds": rounds,
            "settle": settle,
        },
        mbit / slower,
    )


def ways(layers: Sequence[Sequence[int]], settle: int) -> dict[str, steps.Way]:
    """What is timed by turns. Steps at 1 bit are two to a round, so that some do not renew."""
    gradient_mb = 4 * sum(rows * columns for rows, columns in layers) / 2**20
    plain = {"kind": "gradients", "settle": 2, "untimed": 0, "bucket_mb": None}
    hidden = {**plain, "bucket_mb": gradient_mb / 20}
    momentum = {"kind": "momentum", "untimed": 0, "steps": 2, "settle": settle}
    during = {"overlap": True, "span_bytes": round(gradient_mb / 20 * 2**20)}
    late, early = {**during, "freeze": 10**6}, {**during, "freeze": 2}
    return {
        steps.ALONE: {"kind": "alone", "settle": 1, "untimed": 0},
        FP32: {**plain, "codec": "none"},
        BF16: {**plain, "codec": "bf16"},
        BF16_HIDDEN: {**hidden, "codec": "bf16"},
        INT8_HIDDEN: {**hidden, "codec": "int8"},
        DENSE: {**momentum, "optimizer": "OneBitAdam", "settings": late, "steps": 1, "settle": 2},
        DENSE8: {
            **momentum,
            "optimizer": "OneBitAdam",
            "settings": {**late, "dense": "int8"},
            "steps": 1,
            "settle": 2,
        },
        ADAM: {**momentum, "optimizer": "OneBitAdam", "settings": early},
        LAMB: {**momentum, "optimizer": "OneBitLamb", "settings": early},
    }


def measure(point: Point) -> dict[str, Any]:
    """All ways by turns."""
    asked = point.settings
    made = ways(asked["layers"], asked["settle"])
    job = steps.Job(asked["layers"], asked["compute_s"], made, asked["rounds"], steps=1)
    with Site(asked["hosts"], asked["hosts"], [asked["link_mbit"]]) as site:
        print(f"# {site.describe()}", flush=True)
        told = steps.run(site, job, 1500)
    return {
        "compute_s": asked["compute_s"],
        "ways": {way: summary(runs) for way, runs in told.items()},
    }


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median seconds and bytes of payload of a step; those of steps that renew apart."""
    made = steps.summary(runs)
    every = [step for one in runs for step in zip(one["steps"], one["sent"], strict=True)]
    if "wire_bytes" in runs[0]:  # DDP's hook knows better than the port, which counts headers
        every = [(step_s, runs[0]["wire_bytes"]) for step_s, _ in every]
    least = min(sent for _, sent in every)
    few = [step_s for step_s, sent in every if sent <= RENEWS * least]
    many = [step for step in every if step[1] > RENEWS * least]
    made |= {"step_s": statistics.median(few), "sent": least}
    if many:
        made |= {
            "renewing_s": statistics.median(step_s for step_s, _ in many),
            "renewing_sent": statistics.median(sent for _, sent in many),
        }
    return made


# ---- of a whole training ----


def renewals(first: int, total: int) -> int:
    """After 1, 1, 1, 1, 2, 2, 2, 2, 4, ... and at most 128 steps, from step ``first`` on."""
    made, step, interval = 0, first, 1
    while step + interval <= total:
        step += interval
        made += 1
        if made % 4 == 0 and interval < 128:
            interval *= 2
    return made


def whole(
    ways: Mapping[str, Mapping[str, Any]], name: str, figure: str, dense: str = DENSE
) -> float:
    """Seconds ("step_s") or bytes ("sent") of a mean step, the dense stage and renewals included.

    The dense stage is timed with Adam; LAMB's sends the same."""
    one = ways[name]
    many = "renewing_s" if figure == "step_s" else "renewing_sent"
    share = renewals(round(WARMUP * STEPS), STEPS) / ((1 - WARMUP) * STEPS)
    bit = (1 - share) * one[figure] + share * one.get(many, one[figure])
    return float(WARMUP * ways[dense][figure] + (1 - WARMUP) * bit)


def over(row: Mapping[str, Any], baseline: str, name: str, figure: str, dense: str = "") -> float:
    """How many times less than the baseline's; ``dense``: end to end, with that dense stage."""
    ways = row["ways"]
    ours = whole(ways, name, figure, dense) if dense else ways[name][figure]
    return float(ways[baseline][figure] / ours)


def claims(found: Found) -> list[Claim]:
    """Of BERT on 8 hosts at the papers' rate."""
    row = found.get("BERT, 8 hosts, papers")
    made = []
    for what, name, baseline, figure, dense, paper, bound in (
        ("1-bit Adam: bytes saved end to end", ADAM, BF16, "sent", DENSE, 5.0, VOLUME),
        ("1-bit LAMB: bytes saved end to end", LAMB, BF16, "sent", DENSE, 4.6, 4.6),
        ("1-bit Adam after an int8 stage: bytes saved", ADAM, BF16, "sent", DENSE8, 5.0, VOLUME),
        ("1-bit Adam: bytes saved end to end, of fp32", ADAM, FP32, "sent", DENSE, 5.0, VOLUME),
        ("1-bit Adam: throughput end to end", ADAM, BF16, "step_s", DENSE, 3.3, THROUGHPUT),
        ("1-bit LAMB: throughput end to end", LAMB, BF16, "step_s", DENSE, 2.8, 2.8),
        (
            "1-bit Adam after an int8 stage: throughput",
            ADAM,
            BF16,
            "step_s",
            DENSE8,
            3.3,
            THROUGHPUT,
        ),
        (
            "1-bit Adam: throughput end to end, of fp32",
            ADAM,
            FP32,
            "step_s",
            DENSE,
            3.3,
            THROUGHPUT,
        ),
        ("1-bit Adam: throughput, steps at 1 bit alone", ADAM, BF16, "step_s", "", 3.3, THROUGHPUT),
    ):
        ours = None if row is None else over(row, baseline, name, figure, dense)
        beside = PAPERS_BASELINE if baseline == BF16 else baseline
        made.append(
            Claim(
                what,
                f"up to {paper:g}x",
                "" if ours is None else f"{ours:.2f}x",
                f">= {bound:g}x",
                None if ours is None else ours >= bound,
                None if ours is None else ours / paper,
                (PAPERS_BASELINE, beside if dense else f"{beside}, without the dense stage"),
            )
        )
    return made


def table(found: Found) -> list[Sequence[str]]:
    """A line for each point: bytes and throughput, over those of fp32 and bf16 gradients that are
    exchanged after backward."""
    heads = (
        "model, hosts, rate",
        "bytes saved, of fp32: Adam",
        "LAMB",
        "of bf16: Adam",
        "after int8",
        "throughput, of fp32: bf16",
        "bf16, overlap",
        "int8, overlap",
        "Adam at 1 bit",
        "Adam end to end",
        "LAMB end to end",
        "of bf16: Adam",
        "after int8",
    )
    made: list[Sequence[str]] = [heads]
    for name, row in found.items():
        figures = [
            over(row, FP32, ADAM, "sent", DENSE),
            over(row, FP32, LAMB, "sent", DENSE),
            over(row, BF16, ADAM, "sent", DENSE),
            over(row, BF16, ADAM, "sent", DENSE8),
            *(over(row, FP32, way, "step_s") for way in (*BESIDE, ADAM)),
            over(row, FP32, ADAM, "step_s", DENSE),
            over(row, FP32, LAMB, "step_s", DENSE),
            over(row, BF16, ADAM, "step_s", DENSE),
            over(row, BF16, ADAM, "step_s", DENSE8),
        ]
        made.append((name, *(f"{figure:.2f}" for figure in figures)))
    return made


def draw(found: Found, figure: Any) -> None:
    """Throughput over that of bf16 gradients, the paper's baseline, by rate, a line for each way;
    a panel per model."""
    models = [
        one for one in MODELS if any(row["settings"]["model"] == one for row in found.values())
    ]
    panels = figure.subplots(1, max(1, len(models)), sharey=True, squeeze=False)[0]
    shown = (
        (BF16_HIDDEN, ""),
        (INT8_HIDDEN, ""),
        (ADAM, ""),
        (ADAM, DENSE),
        (ADAM, DENSE8),
        (LAMB, DENSE),
    )
    for axes, model in zip(panels, models, strict=False):
        most = max(
            (
                row["settings"]["hosts"]
                for row in found.values()
                if row["settings"]["model"] == model
            ),
            default=0,
        )
        rows = sorted(
            (
                row
                for row in found.values()
                if row["settings"]["model"] == model and row["settings"]["hosts"] == most
            ),
            key=lambda row: float(row["settings"]["mbit"]),
        )
        rates = [row["settings"]["mbit"] for row in rows]
        for way, dense in shown:
            axes.plot(
                rates,
                [over(row, BF16, way, "step_s", dense) for row in rows],
                "o-",
                label=f"{way} after {dense}"
                if dense
                else f"{way}, steps at 1 bit"
                if way == ADAM
                else way,
            )
        axes.axhline(THROUGHPUT, color="gray", linestyle=":")
        axes.set(title=f"{model}, {most} hosts", xlabel="Mbit/s", xscale="log", ylim=(0, None))
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates], rotation=30)
        axes.set_xticks([], minor=True)
    panels[0].set_ylabel("throughput over bf16 gradients';\ndotted: the paper's 3.3")
    if models:
        lines = panels[0].get_legend_handles_labels()
        figure.legend(*lines, loc="outside lower center", ncols=4, fontsize=7)
