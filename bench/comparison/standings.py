"""From the rounds of all libraries to one table: medians, ratios, files and the plot.

A Measurement is one library's row in one round; a Standing is what all rounds say of one library at
one size. Everything up to the files is a pure function of the measurements.

Invariants: a ratio to the subject is taken within a round and only then its median over the rounds,
so that a drift of the machine between rounds cancels. No figure is kept in this file.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from measure.physical import NEAR_BYTES, Physical
from report.columns import size_name

SUBJECTS = ("ringcomm", "ringcomm-shm")
"""The library that the others of a site are compared with: the first of these that was measured."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Of what something was measured.

    Attributes:
        where: the site, e.g. "loopback".
        library, wire: as in --libraries; the wire format.
        size: bytes of the tensor.
    """

    where: str
    library: str
    wire: str
    size: int

    @property
    def label(self) -> str:
        """For example "gloo" or "ringcomm bf16"."""
        return self.library if self.wire == "none" else f"{self.library} {self.wire}"


@dataclasses.dataclass(frozen=True)
class Measurement(Entry):
    """One library at one size in one round, from sweep.py's row.

    Attributes:
        turn: number of the round.
        time_us: microseconds of a call (median over the round's calls).
        busbw: GB/s that a port must carry each way.
        cpu: CPU seconds of all ranks per GB of payload sent.
        wrong: wrong elements over all ranks.
        stolen: cores that the machine's host took from it while it was timed.
    """

    turn: int
    time_us: float
    busbw: float
    cpu: float
    wrong: int
    stolen: float = 0.0


@dataclasses.dataclass(frozen=True)
class Standing(Entry):
    """One library at one size over all rounds.

    Attributes:
        time_us, busbw, cpu: medians over the rounds.
        spread: (slowest - fastest round) / median of the time.
        rounds: how many there were.
        wrong: wrong elements, summed over the rounds.
        ratio: its time over the subject's, the median over the rounds that have both; above 1
            ringcomm is faster. None where ringcomm was not measured.
        ratio_range: the smallest and the largest of these. Where 1 lies between them, the run does
            not tell which of the two is faster.
        floor_us: time that the bare machine takes for as much (floor_us()); None without a floor.
    """

    time_us: float
    busbw: float
    cpu: float
    spread: float
    rounds: int
    wrong: int
    ratio: float | None
    ratio_range: tuple[float, float] | None
    floor_us: float | None


# --- merging ---


def merge(
    measurements: Sequence[Measurement],
    floors: Mapping[str, Sequence[Physical]],
    worlds: Mapping[str, int],
    shared: Collection[str] = (),
) -> list[Standing]:
    """Standings by site, then size, then library, each in order of first appearance.

    ``floors``: the rounds' floors by site; ``worlds``: the number of ranks by site; ``shared``: the
    sites whose ranks meet in shared memory, so that copies and not sockets are the floor.
    """
    groups: dict[tuple[str, int, str], list[Measurement]] = {}
    for one in measurements:
        groups.setdefault((one.where, one.size, one.label), []).append(one)
    labels = list(dict.fromkeys(one.label for one in sorted(measurements, key=_by_subject)))
    sites = list(dict.fromkeys(one.where for one in measurements))
    order = sorted(groups, key=lambda key: (sites.index(key[0]), key[1], labels.index(key[2])))
    standings = []
    for where, size, label in order:
        mine = groups[where, size, label]
        best = best_floor(floors.get(where, ()))
        floor = None if best is None else floor_us(best, size, worlds[where], where in shared)
        subjects = (groups.get((where, size, subject)) for subject in SUBJECTS)
        base = next((found for found in subjects if found), [])
        standings.append(_standing(mine, base, floor))
    return standings


def _by_subject(one: Measurement) -> int:
    return SUBJECTS.index(one.library) if one.library in SUBJECTS else len(SUBJECTS)


def ratios_to(
    base: Sequence[Measurement], others: Sequence[Measurement], figure: str = "time_us"
) -> list[float]:
    """``figure`` of the others over that of the base, for each round that has both."""
    by_turn = {one.turn: float(getattr(one, figure)) for one in base}
    return [getattr(one, figure) / by_turn[one.turn] for one in others if by_turn.get(one.turn)]


def _standing(
    mine: Sequence[Measurement], subjects: Sequence[Measurement], floor: float | None
) -> Standing:
    times = [one.time_us for one in mine]
    ratios = ratios_to(subjects, mine)
    middle = statistics.median(times)
    first = mine[0]
    return Standing(
        where=first.where,
        library=first.library,
        wire=first.wire,
        size=first.size,
        time_us=middle,
        busbw=statistics.median(one.busbw for one in mine),
        cpu=statistics.median(one.cpu for one in mine),
        spread=(max(times) - min(times)) / middle,
        rounds=len(mine),
        wrong=sum(one.wrong for one in mine),
        ratio=statistics.median(ratios) if ratios else None,
        ratio_range=(min(ratios), max(ratios)) if ratios else None,
        floor_us=floor,
    )


def best_floor(floors: Sequence[Physical]) -> Physical | None:
    """Each figure's best over the rounds, the hardest to come up to; None without any."""
    if not floors:
        return None
    sizes = floors[0].half_trip_us
    return Physical(
        half_trip_us={size: min(floor.half_trip_us[size] for floor in floors) for size in sizes},
        stream=max(floor.stream for floor in floors),
        stream_cpu=min(floor.stream_cpu for floor in floors),
        copy=max(floor.copy for floor in floors),
        copy_near=max(floor.copy_near for floor in floors),
        copy_handed=max(floor.copy_handed for floor in floors),
        congestion=floors[0].congestion,
    )


def floor_us(floor: Physical, size: int, world: int, shared: bool = False) -> float | None:
    """What an all-reduce must take: one message's way, or the bytes' way.

    Whatever the algorithm, a rank must hear from the others once, and must send and receive
    2(N-1)/N of the size, as fast as the streams can. In shared memory those bytes must be copied,
    from where another core has written them; there is no floor of a message there, so none below a
    page.
    """
    sent = size * 2 * (world - 1) / world
    if shared:
        rate = floor.copy_handed if size <= NEAR_BYTES else floor.copy
        return sent / rate / 1e3 if size > 4096 else None
    hop = floor.half_trip_us[min(floor.half_trip_us)]
    return max(hop, sent / floor.stream / 1e3) if floor.stream else hop


# --- the table ---

_HEADS = (
    "size",
    "library",
    "time",
    "spread",
    "busbw",
    "cpu",
    "x ringcomm",
    "(range)",
    "x floor",
    "#wrong",
)
_UNITS = ("(B)", "", "(us)", "", "(GB/s)", "(s/GB)", "(time)", "", "(time)", "")
_WIDTHS = (11, 16, 11, 8, 9, 9, 12, 15, 9, 8)


def table(standings: Sequence[Standing], where: str) -> list[str]:
    """The lines of one site's table, with a blank line between sizes."""
    lines = [
        "".join(f"{text:>{width}}" for text, width in zip(texts, _WIDTHS, strict=True))
        for texts in (_HEADS, _UNITS)
    ]
    last = None
    for standing in standings:
        if standing.where != where:
            continue
        if last not in (None, standing.size):
            lines.append("")
        last = standing.size
        lines.append(
            "".join(
                f"{text:>{width}}" for text, width in zip(_cells(standing), _WIDTHS, strict=True)
            )
        )
    return lines


def _cells(standing: Standing) -> tuple[str, ...]:
    over = standing.time_us / standing.floor_us if standing.floor_us else None
    return (
        str(standing.size),
        standing.label,
        f"{standing.time_us:.1f}",
        f"{100 * standing.spread:.0f} %",
        f"{standing.busbw:.4f}",
        short(standing.cpu),
        "-" if standing.ratio is None else short(standing.ratio),
        _range(standing),
        "-" if over is None else short(over),
        str(standing.wrong),
    )


def _range(standing: Standing) -> str:
    if standing.ratio_range is None or standing.label in SUBJECTS:
        return ""
    low, high = standing.ratio_range
    return f"{short(low)}-{short(high)}"


def short(value: float) -> str:
    """Three significant figures, never an exponent."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 2
    return f"{value:.{max(0, min(4, digits))}f}"


def describe_floor(floor: Physical) -> str:
    """The floor in words."""
    trips = ", ".join(f"{size} B {us:.1f}" for size, us in floor.half_trip_us.items())
    return (
        f"floor, best of the rounds: half round trip in us: {trips}; duplex stream "
        f"{floor.stream:.4f} GB/s into each rank, {floor.stream_cpu:.3f} CPU s/GB; memory copy "
        f"{floor.copy:.1f} GB/s in each rank, {floor.copy_near:.1f} within the caches, "
        f"{floor.copy_handed:.1f} from another core's; "
        f"{floor.congestion}"
    )


# --- files ---


def write_json(
    path: Path,
    standings: Iterable[Standing],
    measurements: Iterable[Measurement],
    about: Mapping[str, Any],
) -> None:
    """What is known about the run, the standings, and every round's figures."""
    document = {
        **about,
        "standings": [dataclasses.asdict(one) for one in standings],
        "measurements": [dataclasses.asdict(one) for one in measurements],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def plot(path: Path, standings: Sequence[Standing], titles: Mapping[str, str]) -> None:
    """Time over size (log-log) and busbw over size, a row per site, with the floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(12, 4.5 * len(titles)), layout="constrained")
    labels = list(dict.fromkeys(standing.label for standing in standings))
    colors = {label: f"C{index}" for index, label in enumerate(labels)}
    rows = figure.subfigures(len(titles), 1, squeeze=False)[:, 0]
    for (where, title), row in zip(titles.items(), rows, strict=True):
        row.suptitle(title)  # of both axes, so that it has the whole width
        _plot_site(row.subplots(1, 2), [one for one in standings if one.where == where], colors)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _plot_site(pair: Sequence[Any], here: Sequence[Standing], colors: Mapping[str, str]) -> None:
    left, right = pair
    for label in dict.fromkeys(standing.label for standing in here):
        mine = [standing for standing in here if standing.label == label]
        sizes = [standing.size for standing in mine]
        for axes, values in (
            (left, [one.time_us for one in mine]),
            (right, [one.busbw for one in mine]),
        ):
            axes.plot(sizes, values, marker="o", markersize=3, label=label, color=colors[label])
    bound = {one.size: one.floor_us for one in here if one.floor_us}
    left.plot([*bound], [*bound.values()], color="black", linestyle=":", label="floor")
    left.set(yscale="log", ylabel="time (us)")
    right.set(ylabel="busbw (GB/s)", ylim=0)
    sizes = sorted({standing.size for standing in here})
    for axes in (left, right):
        axes.set(xscale="log", xlabel="size")
        axes.set_xticks(sizes, [size_name(size) for size in sizes], rotation=30, ha="right")
        axes.set_xticks([], minor=True)
        axes.grid(True, which="major", alpha=0.3)
        axes.legend(fontsize=8)
