"""Ways of calling the kernel, beside each other: sendmsg and readv, MSG_ZEROCOPY, io_uring.

    python bench/ways.py
    python bench/ways.py --where loopback --sizes 64K,1M --rounds 5 --markdown ways.md

Two ranks stream both ways at once, a thread each, one call per segment (ways.c, built by gcc), on
the loopback and over an unshaped pair of namespaces. Each round measures every way in turn; ratios
are taken within a round. Exit code 1 if not even sendmsg and readv could be measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from _build import build
from _columns import aligned, markdown, size_name
from _rounds import rotated
from _site import Site
from _standings import short
from netlab import NetLabError
from sweep import _list_of, parse_sizes

WAYS = ("vectors", "zerocopy", "uring", "uring-zc")
BASE = WAYS[0]
SITES = ("loopback", "veth")
SOURCE = Path(__file__).with_name("ways.c")
HEADS = ("where", "per call", "way", "GB/s each way", "CPU s/GB", "x vectors", "(range)",
         "x vectors (CPU)", "copied")


@dataclasses.dataclass(frozen=True)
class Taken:
    """One way at one size in one round: of the slower rank's rate, and the CPU of both per GB."""

    where: str
    size: int
    way: str
    turn: int
    rate: float
    cpu: float
    copied: float


def take(
    site: Site, program: Path, way: str, size: int, seconds: float, turn: int
) -> Taken | str:
    """Run one way once; or why it cannot be had."""
    ended = site.run([str(program), way, str(size), str(seconds), site.congestion], {}, 30)
    told = [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]
    if len(told) != site.world:
        return ended.reason()
    return Taken(site.name, size, way, turn, min(one["rate"] for one in told),
                 statistics.mean(one["cpu"] for one in told),
                 max(one["copied"] for one in told))


def rows(taken: Sequence[Taken]) -> list[tuple[str, ...]]:
    """The table, a row for each way at each size and site, in order of appearance."""
    found = []
    for where, size, way in dict.fromkeys((one.where, one.size, one.way) for one in sorted(
            taken, key=lambda one: (SITES.index(one.where), one.size, WAYS.index(one.way)))):
        here = [one for one in taken if (one.where, one.size) == (where, size)]
        base = {one.turn: one for one in here if one.way == BASE}
        mine = [one for one in here if one.way == way]
        pairs = [(one, base[one.turn]) for one in mine if one.turn in base]
        ratios = [one.rate / other.rate for one, other in pairs]
        cpu = [one.cpu / other.cpu for one, other in pairs]
        found.append((
            where, size_name(size), way, f"{statistics.median(one.rate for one in mine):.2f}",
            f"{statistics.median(one.cpu for one in mine):.3f}",
            short(statistics.median(ratios)) if ratios else "-",
            f"{short(min(ratios))}-{short(max(ratios))}" if ratios else "-",
            short(statistics.median(cpu)) if cpu else "-",
            f"{100 * max(one.copied for one in mine):.0f} %" if way.endswith(("zerocopy", "zc"))
            else "-",
        ))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="ways.py", description="Ways of calling the kernel.")
    add = parser.add_argument
    add("--where", type=_list_of(SITES), default=",".join(SITES), metavar=",".join(SITES))
    add("--sizes", type=parse_sizes, default="64K,256K,1M", help="bytes per call")
    add("--ways", type=_list_of(WAYS), default=",".join(WAYS), metavar=",".join(WAYS))
    add("--rounds", type=int, default=3)
    add("--seconds", type=float, default=0.5, help="of each way at each size in each round")
    add("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    taken: list[Taken] = []
    lost: set[tuple[str, str]] = set()
    try:
        with tempfile.TemporaryDirectory(prefix="ways-") as folder:
            program = build(SOURCE, Path(folder), ["-std=gnu11", "-O2"])
            for where in options.where:
                try:
                    with Site(*((0, 2) if where == "loopback" else (2, 2, [0])),
                              name=where) as site:
                        print(f"# {where}: {site.describe()}", flush=True)
                        _rounds(site, program, options, taken, lost)
                except NetLabError as error:
                    print(f"# {where}: skipped: {error}")
    except OSError as error:
        print(f"ways: {error}", file=sys.stderr)
        return 2
    table = [HEADS, *rows(taken)]
    print("\n".join(aligned(table)))
    if options.markdown:
        options.markdown.write_text("\n".join(markdown(table)) + "\n", encoding="utf-8")
    return 0 if any(one.way == BASE for one in taken) else 1


def _rounds(
    site: Site, program: Path, options: argparse.Namespace, taken: list[Taken],
    lost: set[tuple[str, str]],
) -> None:
    """All rounds at a site; what cannot be had is told of once and left out."""
    for turn in range(options.rounds):
        for size in options.sizes:
            for way in rotated(options.ways, turn):
                if (site.name, way) in lost:
                    continue
                one = take(site, program, way, size, options.seconds, turn)
                if isinstance(one, Taken):
                    taken.append(one)
                else:
                    print(f"# {way} on {site.name}: left out: {one}", flush=True)
                    lost.add((site.name, way))


if __name__ == "__main__":
    sys.exit(main())
