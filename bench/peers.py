"""ringcomm beside its peers: the same sizes, in turn, round by round, in one run.

    python bench/peers.py --where loopback --sizes 4K,1M,64M --rounds 5 --plot peers.png
    python bench/peers.py --where loopback,netlab --hosts 2 --nics 1000,1000 --json peers.json
    python bench/peers.py --install --libraries ringcomm,mpich,oneccl

Each round starts each library's job in turn (sweep.py with that library alone), the order rotated
by one from round to round, and the physical floor. The table takes medians over the rounds. What
cannot be had is skipped with its reason. README.md explains the columns. The exit code is 1 if an
element was wrong or ringcomm could not be measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _standings
from _contenders import CONTENDERS, WHEELS, Contender, install
from _physical import Physical
from _site import Site
from _standings import SUBJECT, Measurement
from netlab import NetLabError
from sweep import _list_of, parse_sizes

SITES = ("loopback", "netlab")
FLOOR = Path(__file__).with_name("_physical.py")
_ENVS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ringcomm-peers")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; exits with a sentence on wrong ones."""
    parser = argparse.ArgumentParser(prog="peers.py", description="ringcomm beside its peers.")
    add = parser.add_argument
    add("--where", type=_list_of(SITES), default="loopback", metavar=",".join(SITES))
    add("--ranks", type=int, default=2, help="on the loopback; 2 unless given")
    add("--hosts", type=int, default=2, help="of the netlab, one rank each; 2 unless given")
    add("--nics", type=_rates, default="1000", metavar="MBIT[,MBIT...]",
        help="rate of each NIC of a netlab host in Mbit/s, 0: unshaped; 1000 unless given")
    add("--sizes", type=parse_sizes, default="4K,64K,1M,16M", metavar="LIST or FIRST:LAST[:FACTOR]",
        help="bytes; K M G are binary, KB MB GB decimal; 4K,64K,1M,16M unless given")
    add("--rounds", type=int, default=3, help="3 unless given")
    add("--budget", type=float, default=0.3, metavar="S",
        help="seconds for each size of each job; 0.3 unless given")
    add("--floor", type=float, default=1.0, metavar="S",
        help="seconds of bare streams in each round; 0: no floor; 1 unless given")
    add("--libraries", type=_list_of(tuple(CONTENDERS)), default=",".join(CONTENDERS),
        metavar="LIST", help=f"of {','.join(CONTENDERS)}; all unless given")
    add("--compression", type=_list_of(None), default="none", metavar="LIST",
        help="wire formats of ringcomm, a row each; none unless given")
    add("--envs", type=Path, default=_ENVS, metavar="FOLDER",
        help=f"holds a virtual environment for each of {', '.join(WHEELS)}; {_ENVS} unless given")
    add("--install", action="store_true", help="make the missing ones with pip (oneccl: 2 GB)")
    add("--timeout", type=float, default=300, metavar="S", help="of each job; 300 unless given")
    for name in ("csv", "json", "plot"):
        add(f"--{name}", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    for name in ("rounds", "budget", "timeout"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name} must be more than 0")
    if options.floor < 0:
        parser.error("--floor must not be less than 0")
    if min(options.ranks, options.hosts) < 2:
        parser.error("--ranks and --hosts must be 2 or more")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib (pip install 'ringcomm[bench]')")
    return options


def _rates(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers, as in 1000,100") from None


# --- finding ---


def find(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Path]:
    """The interpreter of each library that is there, installed first if so asked."""
    found: dict[str, Path] = {}
    for contender in (CONTENDERS[name] for name in options.libraries):
        python = contender.find(options.envs)
        if isinstance(python, str) and options.install:
            say(f"installing {', '.join(WHEELS[contender.home])} in {options.envs}")
            python = install(options.envs, contender.home) or contender.find(options.envs)
        if isinstance(python, str):
            say(f"{contender.name}: skipped: {python}")
        else:
            found[contender.name] = python
    return found


# --- running ---


@dataclasses.dataclass
class Record:
    """What one site's rounds gave."""

    measurements: list[Measurement] = dataclasses.field(default_factory=list)
    floors: list[Physical] = dataclasses.field(default_factory=list)
    congestion: dict[str, str] = dataclasses.field(default_factory=dict)
    """By library: the default that its ranks saw."""


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The order of round ``turn``: each library comes first as often as any other."""
    at = turn % max(1, len(names))
    return [*names[at:], *names[:at]]


def run_rounds(
    site: Site, found: dict[str, Path], options: argparse.Namespace, say: Callable[[str], None]
) -> Record:
    """All rounds at one site. A library that fails is told of and left out from then on."""
    record = Record()
    names = list(found)
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        target = Path(folder, "result.json")
        for turn in range(options.rounds):
            if options.floor:
                _take_floor(site, target, record, options, say)
            for name in rotated(list(found), turn):
                if name not in names:
                    continue
                reason = _take(site, CONTENDERS[name], found[name], target, options, turn, record)
                if reason:
                    say(f"{name} on {site.name}: skipped from round {turn + 1} on: {reason}")
                    names.remove(name)
    return record


def _take(
    site: Site, contender: Contender, python: Path, target: Path, options: argparse.Namespace,
    turn: int, record: Record,
) -> str | None:
    """One job; its rows go into the record. The reason if it failed."""
    target.unlink(missing_ok=True)
    wires = options.compression if contender.subject == SUBJECT else ["none"]
    ended = contender.run(site, python, [
        "--sizes", ",".join(map(str, options.sizes)), "--compression", ",".join(wires),
        "--budget", str(options.budget), "--floor", "0", "--json", str(target),
    ], options.timeout)
    if isinstance(ended, str):
        return ended
    if not target.exists():  # an exit code of 1 with a result: an element was wrong
        return ended.reason()
    if f"# mpi: {contender.brand}" not in ended.output and contender.brand:
        return f"mpi4py has found another MPI than {contender.brand}"
    document = json.loads(target.read_text())
    record.congestion[contender.name] = document["congestion"]
    record.measurements += [
        Measurement(site.name, turn, contender.name, row["compression"], row["size"],
                    row["time_us"], row["busbw"], row["cpu_s_per_gb"], row["wrong"])
        for row in document["rows"]
    ]
    return None


def _take_floor(
    site: Site, target: Path, record: Record, options: argparse.Namespace,
    say: Callable[[str], None],
) -> None:
    target.unlink(missing_ok=True)
    ended = site.run([sys.executable, str(FLOOR), "--congestion", site.congestion,
                      "--seconds", str(options.floor), "--json", str(target)], {},
                     options.timeout)
    if target.exists():
        record.floors.append(Physical.read(target))
    else:
        say(f"floor on {site.name}: not measured: {ended.reason()}")


def compare(options: argparse.Namespace) -> int:
    """Measure, print and write; the exit code."""
    began = os.getloadavg()
    notes: list[str] = []

    def say(text: str) -> None:
        notes.append(text)
        print(f"# {text}", flush=True)

    found = find(options, say)
    records: dict[str, Record] = {}
    worlds: dict[str, int] = {}
    titles: dict[str, str] = {}
    for where in options.where:
        try:
            with (Site(0, options.ranks) if where == "loopback"
                  else Site(options.hosts, options.hosts, options.nics)) as site:
                worlds[where], titles[where] = site.world, f"{where}: {site.describe()}"
                records[where] = run_rounds(site, found, options, say)
        except NetLabError as error:
            say(f"{where}: skipped: {error}")
    measurements = [one for record in records.values() for one in record.measurements]
    floors = {where: record.floors for where, record in records.items()}
    standings = _standings.merge(measurements, floors, worlds)
    about = describe(options, titles, floors, began, notes)
    print(f"# {about['cpus']} CPUs, {about['cpu']}; kernel {about['kernel']}; load before and "
          f"after {about['load']}; rounds: {options.rounds}")
    for where, record in records.items():
        report(where, titles[where], record, standings)
    if options.csv:
        _standings.write_csv(options.csv, standings)
    if options.json:
        _standings.write_json(options.json, standings, measurements, about)
    if options.plot and standings:
        _standings.plot(options.plot, standings, titles)
    wrong = sum(standing.wrong for standing in standings)
    lost = SUBJECT in options.libraries and not all(
        any(one.library == SUBJECT for one in record.measurements) for record in records.values())
    return 1 if wrong or lost or not records else 0


def report(
    where: str, title: str, record: Record, standings: Sequence[_standings.Standing]
) -> None:
    """Print one site's table."""
    print(f"\n# {title}")
    seen = dict.fromkeys(record.congestion.values())
    print(f"# congestion control that the libraries' ranks found: {', '.join(seen) or 'none ran'}")
    best = _standings.best_floor(record.floors)
    if best is not None:
        print(f"# {_standings.describe_floor(best)}")
    print("\n".join(_standings.table(standings, where)), flush=True)


def describe(
    options: argparse.Namespace, titles: dict[str, str], floors: dict[str, list[Physical]],
    began: tuple[float, float, float], notes: list[str],
) -> dict[str, Any]:
    """What is known about the run."""
    return {
        "sites": titles,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "load": f"{began[0]:.2f}, {os.getloadavg()[0]:.2f}",
        "rounds": options.rounds,
        "budget_s": options.budget,
        "floors": {where: [dataclasses.asdict(floor) for floor in taken]
                   for where, taken in floors.items()},
        "notes": notes,
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    try:
        return compare(parse(argv))
    except OSError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
