"""collectives: broadcasts along a pipelined chain, and small and middle all-reduces, beside gloo's
and MPI's (the abstracts of MVAPICH2-GDR's MPI_Bcast and of its CUDA-aware MPI_Allreduce).

Libraries run by turns, a job each, in rounds whose order rotates (comparison/rounds.py). A
broadcast is timed by itself, from the first rank's start to the last rank's end; all-reduces back
to back, as usual. A ratio is a library's time over ringcomm's in one round, then the median over
the rounds.

On the loopback "tcp" has every library on sockets; in "shared memory" each uses its own.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from comparison.rounds import Plan, find, run_rounds
from comparison.standings import SUBJECTS, Standing, merge
from lab.site import Site
from libraries.contenders import ENVS
from report.columns import size_name

from .source import Claim, Found, Point

DOCUMENT = (
    "MVAPICH2-GDR (two abstracts): a pipelined chain broadcasts between GPUs faster than NCCL, "
    "within a node up to 14 times; CUDA-aware all-reduces are faster than NCCL2's."
)
REAL = "the libraries (gloo in PyTorch, Open MPI, MPICH)."
EMULATED = (
    "links (1000 Mbit/s). All ranks share two cores, where libraries that poll suffer. There is no "
    "GPU: gloo and MPI stand for the documents' NCCL of 2017 and 2018."
)
WITHOUT_ROOT = (
    "bench/peers.py compares the same libraries' all-reduces on the loopback, and sweep.py "
    "--collective broadcast times broadcasts"
)
HARNESS = 1

KIB, MIB = 1 << 10, 1 << 20
BROADCASTS = (4 * KIB, 32 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
ALLREDUCES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 16 * MIB)
MIDDLE = MIB
HOSTS = (2, 4, 8)
MBIT = 1000.0
TCP = ("ringcomm", "gloo", "openmpi-tcp", "mpich")
SHARED = ("ringcomm-shm", "openmpi-shm", "mpich-shm")
#: Columns of the table: over TCP, and through memory.
OTHERS: Mapping[str, Sequence[str]] = {
    "gloo": ("gloo",),
    "Open MPI": ("openmpi-tcp", "openmpi-shm"),
    "MPICH": ("mpich", "mpich-shm"),
}
SECONDS = 300  # of a library's job
TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100)
FLAT = 1.10
AS_FAST = 1.05


def points(quick: bool) -> list[Point]:
    """Each collective between hosts, then on one."""
    if quick:
        size: dict[str, Any] = {"sizes": [4 * KIB, 64 * KIB], "rounds": 1, "budget": 0.02}
        return [
            _point(name, 2, 2, "tcp", {**size, "libraries": ["ringcomm", "gloo"]})
            for name in ("broadcast", "allreduce")
        ]
    made = []
    for collective, sizes, rounds in (("broadcast", BROADCASTS, 3), ("allreduce", ALLREDUCES, 5)):
        told = {"rounds": rounds, "budget": 0.3, "sizes": list(sizes)}
        made += [
            _point(collective, hosts, hosts, "tcp", {**told, "libraries": list(TCP)})
            for hosts in reversed(HOSTS)
        ]
        made.append(_point(collective, 0, 2, "tcp", {**told, "libraries": list(TCP)}))
        made.append(_point(collective, 0, 2, "shared memory", {**told, "libraries": list(SHARED)}))
    return made


def _point(collective: str, hosts: int, ranks: int, way: str, settings: Mapping[str, Any]) -> Point:
    where = f"{hosts} hosts" if hosts else f"one host, {way}"
    return Point(
        f"{collective}, {where}",
        {
            "collective": collective,
            "hosts": hosts,
            "way": way,
            "ranks": ranks,
            "mbit": MBIT,
            **settings,
        },
        MBIT if hosts else None,
    )


# --- measuring ---


def measure(point: Point) -> dict[str, Any]:
    """All libraries that can be had, by turns: a standing for each library and size."""
    asked = point.settings
    notes: list[str] = []

    def say(text: str) -> None:
        notes.append(text)
        print(f"# {text}", flush=True)

    apart = asked["collective"] == "broadcast"
    plan = Plan(
        asked["sizes"],
        rounds=asked["rounds"],
        budget=asked["budget"],
        floor=0.0,
        timeout=SECONDS,
        collective=asked["collective"],
        apart=apart,
    )
    found = find(asked["libraries"], ENVS, False, say)
    with Site(asked["hosts"], asked["ranks"], [asked["mbit"]]) as site:
        say(site.describe())
        record = run_rounds(site, found, plan, say)
    standings = merge(record.measurements, {}, {site.name: site.world})
    if not any(one.library in SUBJECTS for one in standings):
        raise RuntimeError(
            next(
                (note for note in notes if note.startswith("ringcomm")), "ringcomm was not measured"
            )
        )
    for one in standings:
        if one.wrong:
            raise RuntimeError(f"{one.wrong} elements of {one.label} are wrong")
    return {"standings": [_told(one) for one in standings], "notes": notes}


def _told(one: Standing) -> dict[str, Any]:
    kept = ("library", "size", "time_us", "spread", "rounds", "ratio", "ratio_range")
    return {name: value for name, value in dataclasses.asdict(one).items() if name in kept}


# --- what the rows say ---

Line = Mapping[str, Mapping[str, Any]]
"""The standings at one size, by library."""


def lines_of(row: Mapping[str, Any]) -> dict[int, Line]:
    """The standings of a row by size."""
    by_size: dict[int, dict[str, Mapping[str, Any]]] = {}
    for one in row["standings"]:
        by_size.setdefault(one["size"], {})[one["library"]] = one
    return by_size


def ours(line: Line) -> Mapping[str, Any]:
    """ringcomm's standing."""
    return next(line[name] for name in SUBJECTS if name in line)


def over(line: Line, library: str) -> float | None:
    """Its time over ringcomm's."""
    ratio = line.get(library, {}).get("ratio")
    return None if ratio is None else float(ratio)


def over_best(line: Line) -> float | None:
    """The fastest other library's time over ringcomm's."""
    ratios = [over(line, name) for name in line if name not in SUBJECTS]
    return min((ratio for ratio in ratios if ratio is not None), default=None)


def between_hosts(found: Found, collective: str) -> dict[int, dict[int, Line]]:
    """The rows between hosts, by hosts and size."""
    rows = sorted(
        (row["settings"]["hosts"], name)
        for name, row in found.items()
        if row["settings"]["collective"] == collective and row["settings"]["hosts"]
    )
    return {hosts: lines_of(found[name]) for hosts, name in rows}


def claims(found: Found) -> list[Claim]:
    """The documents' factors; and what can be said without NCCL."""
    broadcasts, reduces = (between_hosts(found, name) for name in ("broadcast", "allreduce"))
    small = {
        hosts: {size: line for size, line in lines.items() if size <= MIDDLE}
        for hosts, lines in reduces.items()
    }
    large = {
        hosts: {size: line for size, line in lines.items() if size > MIDDLE}
        for hosts, lines in reduces.items()
    }
    return [
        _factor(
            "broadcast between hosts: gloo's time over ours, best",
            "up to 16.6 (over NCCL)",
            16.6,
            _all(broadcasts, _gloo),
            max,
        ),
        _flat(broadcasts),
        _never_behind("broadcast between hosts", broadcasts),
        _factor(
            "all-reduce to 1 MiB between hosts: gloo's time over ours, best",
            "up to 17 (over NCCL2)",
            17.0,
            _all(small, _gloo),
            max,
        ),
        _factor(
            "large all-reduce between hosts: gloo's time over ours, median",
            "1.41: 29 % less (than NCCL2)",
            1 / (1 - 0.29),
            _all(large, _gloo),
            statistics.median,
        ),
        _never_behind("all-reduce between hosts", reduces),
    ]


def _gloo(line: Line) -> float | None:
    return over(line, "gloo")


def _all(
    by_hosts: Mapping[int, Mapping[int, Line]], of: Callable[[Line], float | None]
) -> list[tuple[float, str]]:
    """A figure of every line that has it, and where that is."""
    every = (
        (of(line), f"{size_name(size)}, {hosts} hosts")
        for hosts, lines in by_hosts.items()
        for size, line in lines.items()
    )
    return [(value, where) for value, where in every if value is not None]


def _factor(
    what: str,
    document: str,
    bound: float,
    ratios: Sequence[tuple[float, str]],
    chosen: Callable[[Iterable[float]], float],
) -> Claim:
    value = chosen([ratio for ratio, _ in ratios]) if ratios else None
    where = next((where for ratio, where in ratios if ratio == value), "")
    return Claim(
        what,
        document,
        "" if value is None else f"{value:.2f}" + f" ({where})" * bool(where),
        f">= {bound:.3g}",
        None if value is None else value >= bound,
        None if value is None else value / bound,
        ("NCCL", "gloo"),
    )


def _flat(by_hosts: Mapping[int, Mapping[int, Line]]) -> Claim:
    """What makes a chain a chain: each port carries the tensor once, however many hosts."""
    size = max((size for lines in by_hosts.values() for size in lines), default=max(BROADCASTS))
    times = {
        hosts: ours(lines[size])["time_us"] for hosts, lines in by_hosts.items() if size in lines
    }
    several = len(times) > 1
    value = times[max(times)] / times[min(times)] if several else None
    few, many = (min(times), max(times)) if several else (min(HOSTS), max(HOSTS))
    return Claim(
        f"broadcast of {size_name(size)}: time with {many} hosts over {few}",
        "-",
        "" if value is None else f"{value:.2f}",
        f"<= {FLAT}",
        None if value is None else value <= FLAT,
    )


def _never_behind(what: str, by_hosts: Mapping[int, Mapping[int, Line]]) -> Claim:
    ratios = _all(by_hosts, over_best)
    worst, where = min(ratios, default=(0.0, ""))
    return Claim(
        f"{what}, the fastest other's time over ours, worst",
        "-",
        f"{worst:.2f} ({where})" if ratios else "",
        f">= {1 / AS_FAST:.2f}",
        worst * AS_FAST >= 1 if ratios else None,
    )


def table(found: Found) -> list[Sequence[str]]:
    """A line for each size: ringcomm's time, and every library's over it."""
    heads = ("collective", "where", "size", "ringcomm", "spread", *(f"{name} x" for name in OTHERS))
    lines: list[Sequence[str]] = [heads]
    for name, row in found.items():
        collective, where = name.split(", ", 1)
        for size, line in lines_of(row).items():
            mine = ours(line)
            ratios = [
                next((over(line, way) for way in ways if way in line), None)
                for ways in OTHERS.values()
            ]
            lines.append(
                (
                    collective,
                    where,
                    size_name(size),
                    f"{mine['time_us']:.0f} us",
                    f"{100 * mine['spread']:.0f} %",
                    *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
                )
            )
    return lines


def notes(found: Found) -> list[str]:
    """The other libraries' lead within one host, of which no claim is."""
    worst = []
    for place, row in found.items():
        ratios = [(over_best(line) or math.inf, size) for size, line in lines_of(row).items()]
        if ratios and not row["settings"]["hosts"]:
            ratio, size = min(ratios)
            worst.append(f"{place.replace('one host, ', '')} {ratio:.2f} ({size_name(size)})")
    told = f"Within a host, the fastest other's time over ours, worst: {'; '.join(worst)}."
    return [told] if worst else []


def draw(found: Found, figure: Any) -> None:
    """Every library's time over ringcomm's by size, one axes for each place."""
    both = {collective: _places(found, collective) for collective in ("broadcast", "allreduce")}
    columns = max([len(places) for places in both.values()] + [1])
    figure.set_size_inches(max(9, 3 * columns), 6)
    grid = figure.subplots(2, columns, squeeze=False, sharey="row", sharex="row")
    for (collective, places), row in zip(both.items(), grid, strict=True):
        for (place, lines), axes in zip(places.items(), row, strict=False):
            _draw_one(axes, f"{collective}, {place}", lines)
        row[0].set_ylabel("time over ringcomm's", fontsize=8)


def _places(found: Found, collective: str) -> dict[str, dict[int, Line]]:
    """The rows by where: hosts by number, then the ways within one."""
    between = {f"{hosts} hosts": lines for hosts, lines in between_hosts(found, collective).items()}
    within = {
        name.split(", ", 1)[1]: lines_of(row)
        for name, row in found.items()
        if row["settings"]["collective"] == collective and not row["settings"]["hosts"]
    }
    return {**between, **within}


def _draw_one(axes: Any, title: str, lines: Mapping[int, Line]) -> None:
    sizes = sorted(lines)
    for number, (library, ways) in enumerate(OTHERS.items()):
        there = [
            (size, ratio)
            for size in sizes
            for way in ways
            if (ratio := over(lines[size], way)) is not None
        ]
        if there:
            axes.plot(
                *zip(*there, strict=True),
                marker="o",
                markersize=3,
                label=library,
                color=f"C{number + 1}",
            )
    axes.axhline(1, color="black", linewidth=1, label="ringcomm")
    axes.set_title(title, fontsize=9)
    axes.set(xscale="log", yscale="log")
    axes.tick_params(labelsize=7)
    axes.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_yticks([], minor=True)
    axes.set_xticks(sizes, [size_name(size) for size in sizes], fontsize=7, rotation=30)
    axes.set_xticks([], minor=True)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=7)
