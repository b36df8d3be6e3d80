"""Which codec for which link: all-reduces over emulated links of several rates, by each codec.

    python bench/codecs.py
    python bench/codecs.py --goals
    python bench/codecs.py --hosts 2 --rates 100,1000 --sizes 1MB,25MB --codecs none,bf16,onebit

Needs root (netlab). For each rate a job of one rank per host all-reduces each size by each codec in
turn; the first result of each is verified (same bits on all ranks, an error within the codec's).
The table has times beside those of plain float32 in the same round, the tensor's bytes per second,
bytes on the hosts' ports beside the formula, and CPU seconds; below it stands at which rate of the
link each codec begins to win on this machine. `--goals` measures what compression has to reach
instead, with a verdict in each row. Exit code 1 if a result was wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab.site import Site
from measure.options import list_of, parse_sizes
from netlab import NetLabError
from report.columns import aligned, markdown, size_name

from ringcomm.codecs import parse

RANK = Path(__file__).resolve().parent / "measure/codec_rank.py"
PLAIN = "none"
HEADERS = 52 + 66  # bytes of a frame, and of the packet that it begins: Ethernet, IP, TCP
ERRORS = {"none": 1e-6, "bf16": 0.01, "fp16": 0.002, "int8": 0.02, "fp8": 0.06, "int4": 0.25}
"""Relative errors that a sum of normally distributed values may have; others: 1.2."""
HEADS = (
    "hosts",
    "Mbit/s",
    "size",
    "codec",
    "time",
    "x fp32",
    "(range)",
    "goal",
    "algbw",
    "on the wire / formula",
    "CPU s/GB",
    "error",
    "verdict",
)


@dataclasses.dataclass(frozen=True)
class Scene:
    """Hosts with a port each, and what is all-reduced there.

    Attributes:
        goals: by codec: its time over plain float32's, at most.
    """

    hosts: int
    mbit: float
    sizes: Sequence[int]
    codecs: Sequence[str]
    goals: Mapping[str, float] = dataclasses.field(default_factory=dict)


GOALS = (
    Scene(
        4,
        1000,
        [100_000_000],
        ["none", "bf16", "int8", "int4", "onebit"],
        {"bf16": 0.52, "int8": 0.28, "int4": 0.15, "onebit": 0.05},
    ),
    Scene(2, 115, [100_000_000], ["none", "onebit"], {"onebit": 1 / 25}),
)


@dataclasses.dataclass(frozen=True)
class Taken:
    """One codec at one size of a scene.

    Attributes:
        seconds: of a call, by round: the median of the ranks' mean.
        sent: bytes that a host's port sent for a call, link headers included.
        frames: that a rank sent for a call.
        cpu_s: CPU seconds of a rank for a call.
        error: relative (L2), of the first call.
    """

    hosts: int
    mbit: float
    size: int
    codec: str
    seconds: Sequence[float]
    sent: float
    cpu_s: float
    error: float
    same_bits: bool
    frames: float

    @property
    def wrong(self) -> bool:
        """Ranks differ, or the result is farther from the sum than the codec may be."""
        return not self.same_bits or not self.error <= ERRORS.get(self.codec, 1.2)


def formula_bytes(codec: str, size: int, hosts: int) -> float:
    """What a rank must send of a float32 tensor: 2 (N-1)/N of its encoding; of few bits, between
    two ranks, the whole of it once, which is the same."""
    encoded = size / 4 * parse(codec).bits / 8
    return encoded * 2 * (hosts - 1) / hosts


def on_the_wire(one: Taken) -> float:
    """The formula, with the headers of so many frames."""
    return formula_bytes(one.codec, one.size, one.hosts) + one.frames * HEADERS


def ratios(one: Taken, plain: Taken) -> list[float]:
    """Times over those of another codec, round by round."""
    return [mine / other for mine, other in zip(one.seconds, plain.seconds, strict=True)]


def crossover(points: Sequence[tuple[float, float]]) -> str:
    """From (rate, time over the other's) at several rates: below which rate it is ahead."""
    points = sorted(points)
    ahead = [ratio < 1 for _, ratio in points]
    if all(ahead):
        return f"at every rate up to {points[-1][0]:g} Mbit/s"
    if not any(ahead):
        return f"at no rate from {points[0][0]:g} Mbit/s on"
    last = max(i for i, wins in enumerate(ahead) if wins)
    if last + 1 == len(points):
        return "at the highest rate, but not at all lower ones"
    (rate, ratio), (next_rate, next_ratio) = points[last], points[last + 1]
    share = -math.log(ratio) / (math.log(next_ratio) - math.log(ratio))
    meets = rate * (next_rate / rate) ** share
    return f"below about {round(meets, 1 - math.floor(math.log10(meets))):g} Mbit/s"


def measure(scene: Scene, rounds: int, budget: float) -> list[Taken]:
    """Runs a scene's job. Raises NetLabError, or RuntimeError with what the job said."""
    asked = {"sizes": scene.sizes, "codecs": scene.codecs, "rounds": rounds, "budget": budget}
    with Site(scene.hosts, scene.hosts, [scene.mbit]) as site:
        print(f"# {site.describe()}", flush=True)
        ended = site.run([sys.executable, str(RANK), json.dumps(asked)], {}, 900)
    return [Taken(scene.hosts, scene.mbit, **one) for one in ended.records()]


def row(one: Taken, plain: Taken | None, goal: float | None) -> tuple[str, ...]:
    """A line of the table."""
    time = statistics.median(one.seconds)
    over = ratios(one, plain) if plain is not None else []
    ratio = statistics.median(over) if over else math.nan
    verdict = "wrong" if one.wrong else "" if goal is None else "met" if ratio <= goal else "short"
    return (
        str(one.hosts),
        f"{one.mbit:g}",
        size_name(one.size),
        one.codec,
        f"{time * 1e3:.2f} ms",
        f"{ratio:.3f}" if over else "-",
        f"{min(over):.3f}-{max(over):.3f}" if over else "-",
        f"{goal:.3g}" if goal else "-",
        f"{one.size / time / 1e9:.3f} GB/s",
        f"{one.sent / on_the_wire(one):.3f}",
        f"{one.cpu_s / one.size * 1e9:.2f}",
        f"{one.error:.2g}",
        verdict,
    )


def wins(taken: Sequence[Taken]) -> list[str]:
    """For each size and codec: below which rate it beats plain float32, and the codec before it."""
    lines = []
    codecs = list(dict.fromkeys(one.codec for one in taken))
    for size in dict.fromkeys(one.size for one in taken):
        by = {(one.codec, one.mbit): one for one in taken if one.size == size}
        for before, codec in itertools.pairwise(codecs):
            against = []
            for other in dict.fromkeys((PLAIN, before)):
                points = [
                    (mbit, statistics.median(ratios(one, by[other, mbit])))
                    for (name, mbit), one in by.items()
                    if name == codec and (other, mbit) in by
                ]
                if points:
                    against.append(f"{other} {crossover(points)}")
            lines.append(f"{size_name(size)}: {codec} beats {', '.join(against)}")
    return lines


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="codecs.py", description="Codecs over links.")
    add = parser.add_argument
    add("--goals", action="store_true", help="measure what compression has to reach, with verdicts")
    add("--hosts", type=int, default=4)
    add(
        "--rates",
        type=lambda text: [float(part) for part in text.split(",")],
        default="100,1000,2500,10000",
        metavar="MBIT,...",
    )
    add("--sizes", type=parse_sizes, default="1MB,25MB", help="bytes of the float32 tensor")
    add(
        "--codecs",
        type=list_of(None),
        default="none,bf16,int8,int4,onebit",
        metavar="LIST",
        help="gentle ones first; none is plain float32",
    )
    add("--rounds", type=int, default=3)
    add("--budget", type=float, default=1.0, help="seconds of a codec at a size in a round")
    add("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.budget <= 0 or options.hosts < 2:
        parser.error("give --rounds of 1 or more, --hosts of 2 or more, and a --budget above 0")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = _parse(argv)
    scenes = (
        list(GOALS)
        if options.goals
        else [Scene(options.hosts, mbit, options.sizes, options.codecs) for mbit in options.rates]
    )
    taken: list[Taken] = []
    table = [HEADS]
    try:
        for scene in scenes:
            here = measure(scene, options.rounds, options.budget)
            plain = {one.size: one for one in here if one.codec == PLAIN}
            table += [row(one, plain.get(one.size), scene.goals.get(one.codec)) for one in here]
            taken += here
    except (NetLabError, RuntimeError) as error:
        print(f"codecs: {error}", file=sys.stderr)
        return 2
    print("\n".join(aligned(table)))
    notes = [] if options.goals else wins(taken)
    for note in notes:
        print(f"# {note}")
    if options.markdown:
        lines = [*markdown(table), "", *(f"- {note}" for note in notes)]
        options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if any(one.wrong for one in taken) else 0


if __name__ == "__main__":
    sys.exit(main())
