"""ringcomm beside its peers: the same sizes, in turn, round by round, in one run.

    python bench/peers.py --all --json all.json --markdown all.md --plot all.png
    python bench/peers.py --all --quick --rows loopback,ports
    python bench/peers.py --where loopback --sizes 4K,1M,64M --rounds 5 --plot peers.png
    python bench/peers.py --where loopback,netlab --hosts 2 --nics 1000,1000 --json peers.json
    python bench/peers.py --install --libraries ringcomm,mpich

Each round starts each library's job in turn (sweep.py with that library alone), the order rotated
by one from round to round, and the physical floor. The table takes medians over the rounds. With
--all the sites, sizes and goals are those of comparison/scenes.py, and each row of them gets a
verdict. What cannot be had is skipped with its reason. README.md explains the columns. The exit
code is 1 if an element was wrong or ringcomm could not be measured; with --all rows that fall short
do not count.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comparison import all_scenes, output
from comparison.rounds import Plan, Record, Say, find, run_rounds
from comparison.scenes import GROUPS, SCENES, Scene
from comparison.standings import (
    SUBJECTS,
    Standing,
    best_floor,
    describe_floor,
    merge,
    plot,
    table,
    write_json,
)
from lab.site import Site
from libraries.contenders import CONTENDERS, ENVS, WHEELS
from measure.options import list_of, parse_sizes
from measure.physical import Physical
from netlab import NetLabError

SITES = ("loopback", "netlab")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; exits with a sentence on wrong ones."""
    parser = argparse.ArgumentParser(prog="peers.py", description="ringcomm beside its peers.")
    add = parser.add_argument
    add("--all", action="store_true", help="every scene, with goals and verdicts")
    add(
        "--rows",
        type=list_of(GROUPS),
        default=",".join(GROUPS),
        metavar="LIST",
        help=f"with --all, of {','.join(GROUPS)}; all unless given",
    )
    add("--quick", action="store_true", help="with --all, one round and little time for each size")
    add(
        "--minutes",
        type=float,
        metavar="M",
        help="with --all, begin nothing after; 25 unless given, 5 with --quick",
    )
    add("--markdown", type=Path, metavar="FILE", help="with --all, the table in full")
    add("--where", type=list_of(SITES), default="loopback", metavar=",".join(SITES))
    add("--ranks", type=int, default=2, help="on the loopback; 2 unless given")
    add("--hosts", type=int, default=2, help="of the netlab, one rank each; 2 unless given")
    add(
        "--nics",
        type=_rates,
        default="1000",
        metavar="MBIT[,MBIT...]",
        help="rate of each NIC of a netlab host in Mbit/s, 0: unshaped; 1000 unless given",
    )
    add(
        "--sizes",
        type=parse_sizes,
        default="4K,64K,1M,16M",
        metavar="LIST or FIRST:LAST[:FACTOR]",
        help="bytes; K M G are binary, KB MB GB decimal; 4K,64K,1M,16M unless given",
    )
    add("--rounds", type=int, default=3, help="3 unless given")
    add(
        "--budget",
        type=float,
        default=0.3,
        metavar="S",
        help="seconds for each size of each job; 0.3 unless given",
    )
    add(
        "--floor",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds of bare streams in each round; 0: no floor; 1 unless given",
    )
    add(
        "--libraries",
        type=list_of(tuple(CONTENDERS)),
        default=",".join(CONTENDERS),
        metavar="LIST",
        help=f"of {','.join(CONTENDERS)}; all unless given",
    )
    add(
        "--compression",
        type=list_of(None),
        default="none",
        metavar="LIST",
        help="wire formats, a row each, of the libraries that have any; none unless given",
    )
    add(
        "--envs",
        type=Path,
        default=ENVS,
        metavar="FOLDER",
        help=f"holds a virtual environment for each of {', '.join(WHEELS)}; {ENVS} unless given",
    )
    add("--install", action="store_true", help="make the missing ones with pip")
    add("--timeout", type=float, default=300, metavar="S", help="of each job; 300 unless given")
    for name in ("json", "plot"):
        add(f"--{name}", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    _check(parser, options)
    return options


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    for name in ("rounds", "budget", "timeout", "minutes"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name} must be more than 0")
    if options.floor < 0:
        parser.error("--floor must not be less than 0")
    if min(options.ranks, options.hosts) < 2:
        parser.error("--ranks and --hosts must be 2 or more")
    if not options.all and (options.quick or options.minutes or options.markdown):
        parser.error("--quick, --minutes and --markdown go with --all")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib (pip install 'ringcomm[bench]')")


def _rates(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers, as in 1000,100") from None


# --- one comparison ---


def compare(options: argparse.Namespace) -> int:
    """Measure, print and write; the exit code."""
    began = os.getloadavg()
    say, notes = _notes()
    found = find(options.libraries, options.envs, options.install, say)
    plan = Plan(
        options.sizes,
        options.compression,
        options.rounds,
        options.budget,
        options.floor,
        options.timeout,
    )
    records: dict[str, Record] = {}
    worlds: dict[str, int] = {}
    titles: dict[str, str] = {}
    for where in options.where:
        try:
            with (
                Site(0, options.ranks)
                if where == "loopback"
                else Site(options.hosts, options.hosts, options.nics)
            ) as site:
                worlds[where], titles[where] = site.world, f"{where}: {site.describe()}"
                records[where] = run_rounds(site, found, plan, say)
        except NetLabError as error:
            say(f"{where}: skipped: {error}")
    measurements = [one for record in records.values() for one in record.measurements]
    floors = {where: record.floors for where, record in records.items()}
    standings = merge(measurements, floors, worlds)
    about = {
        **describe(options, began, notes),
        "sites": titles,
        "floors": {
            where: [dataclasses.asdict(floor) for floor in taken] for where, taken in floors.items()
        },
    }
    print(head(about))
    for where, record in records.items():
        report(where, titles[where], record, standings)
    if options.json:
        write_json(options.json, standings, measurements, about)
    if options.plot and standings:
        plot(options.plot, standings, titles)
    wrong = sum(standing.wrong for standing in standings)
    asked = [name for name in SUBJECTS if name in options.libraries]
    lost = asked and not all(
        any(one.library in asked for one in record.measurements) for record in records.values()
    )
    return 1 if wrong or lost or not records else 0


def _notes() -> tuple[Say, list[str]]:
    """A function that prints and keeps a note, and the list in which it keeps them."""
    notes: list[str] = []

    def say(text: str) -> None:
        notes.append(text)
        print(f"# {text}", flush=True)

    return say, notes


def report(where: str, title: str, record: Record, standings: Sequence[Standing]) -> None:
    """Print one site's table."""
    print(f"\n# {title}")
    seen = dict.fromkeys(record.congestion.values())
    print(f"# congestion control that the libraries' ranks found: {', '.join(seen) or 'none ran'}")
    best: Physical | None = best_floor(record.floors)
    if best is not None:
        print(f"# {describe_floor(best)}")
    for remark in record.remarks:
        print(f"# {remark}")
    print("\n".join(table(standings, where)), flush=True)


def head(about: dict[str, Any]) -> str:
    """The machine and the run in one line."""
    return (
        f"# {about['cpus']} CPUs, {about['cpu']}; kernel {about['kernel']}; load before and "
        f"after {about['load']}; rounds: {about['rounds']}"
    )


def describe(
    options: argparse.Namespace, began: tuple[float, float, float], notes: list[str]
) -> dict[str, Any]:
    """What is known about the run."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "load": f"{began[0]:.2f}, {os.getloadavg()[0]:.2f}",
        "rounds": options.rounds,
        "budget_s": options.budget,
        "notes": notes,
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# --- every row ---


def run_all(options: argparse.Namespace, scenes: Sequence[Scene] = SCENES) -> int:
    """Measure the scenes of the groups asked for, print and write; the exit code."""
    began = os.getloadavg()
    say, notes = _notes()
    if options.quick:
        options.rounds, options.budget, options.floor = 1, 0.1, 0.3
    minutes = options.minutes or (5.0 if options.quick else 25.0)
    scenes = [scene for scene in scenes if scene.group in options.rows]
    outcome = all_scenes.run(
        scenes,
        all_scenes.Settings(
            options.libraries,
            options.envs,
            options.install,
            options.rounds,
            options.budget,
            options.floor,
            min(options.timeout, 120.0),
            3.0 if options.quick else 5.0,
            time.monotonic() + 60 * minutes,
        ),
        say,
    )
    about = describe(options, began, notes)
    print(
        "\n".join(
            [
                head(about),
                "",
                *output.table(outcome.findings),
                "",
                f"# {output.summary(outcome.findings)}",
            ]
        ),
        flush=True,
    )
    if options.markdown:
        options.markdown.write_text(output.markdown(outcome.findings, about))
    if options.json:
        options.json.write_text(output.document(outcome, about))
    if options.plot:
        for path in output.plots(options.plot, scenes, outcome):
            print(f"# {path}")
    wrong = any(one.wrong for one in outcome.measurements)
    return 1 if wrong or all(one.value is None for one in outcome.findings) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = parse(argv)
    try:
        return run_all(options) if options.all else compare(options)
    except OSError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
