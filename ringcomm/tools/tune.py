"""``python -m ringcomm tune``: measures which algorithm is fastest, and keeps a table of it.

Started on all ranks as any program is. Rank 0 shows and writes, the others are silent. What a
measurement is and when it counts is tuning.py's; what a table is, and who follows it,
bootstrap/tuned.py's.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .. import __version__
from ..bootstrap import tuned
from ..bootstrap.tuned import Cluster, Document, Measured, Row
from ..communicator import Communicator
from ..config import TUNE_TABLE_OFF, Config
from ..errors import ConfigError, RingcommError, naming
from . import costs, tuning
from .tuning import MODEL, Contenders, Sample

_ABOUT = """\
Measure every all-reduce algorithm over message sizes on this cluster, and write a table that later
jobs on it follow. Start it on all ranks as any program:

    torchrun --nproc-per-node 2 -m ringcomm tune
    mpirun -n 2 python -m ringcomm tune
"""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def main(argv: Sequence[str] | None = None) -> int:
    """Tunes, checks or shows. Returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        if options.show is not None:
            return _show(options.show)
        return _check(options) if options.check else _tune(options)
    except RingcommError as error:
        print(f"tune: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ringcomm tune",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--smallest",
        type=_size,
        default="1K",
        metavar="SIZE",
        help="smallest message: bytes, or with K, M, G in binary (default 1K)",
    )
    add(
        "--largest", type=_size, default="16M", metavar="SIZE", help="largest message (default 16M)"
    )
    add(
        "--seconds",
        type=float,
        default=1.0,
        metavar="S",
        help="to measure each size for, more or less (default 1)",
    )
    add(
        "--output",
        metavar="FILE",
        help="where to write the table (default: RINGCOMM_TUNE_TABLE, or a file in the user's "
        "cache that later jobs find by themselves)",
    )
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--check",
        action="store_true",
        help="measure the table in use beside the cost model, at its bounds too; write nothing",
    )
    either.add_argument(
        "--show",
        nargs="?",
        const="",
        metavar="FILE",
        help="print a table, or all in the user's cache, and end",
    )
    return parser


def _size(text: str) -> int:
    parts = re.fullmatch(r"(\d{1,12})([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    if parts is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; give bytes, or such as 64K or 16M")
    return int(parts[1]) * _UNITS[parts[2].upper()]


# ---- measuring ----


@naming("python -m ringcomm tune")
def _tune(options: argparse.Namespace) -> int:
    asked = Config.from_env()
    sizes = _sizes(options)
    config = Config.from_env(algorithm="auto", tune_table=TUNE_TABLE_OFF)
    with Communicator.create(config=config) as comm:
        cluster = _cluster(comm)
        console = _console(comm.rank)
        console.print(f"cluster  {cluster.describe()}", soft_wrap=True)
        contenders = tuning.algorithms()
        console.print(_heading(contenders))
        samples = list(_shown(console, comm, contenders, sizes, options.seconds))
    found = sorted((sample.measured() for sample in samples), key=lambda size: size.bytes)
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    table = tuning.rows([(size.bytes, size.chosen) for size in found])
    memory = comm._joined.mesh.in_memory
    document = Document(cluster, tuple(table), memory, tuple(found), __version__, date)
    if comm.rank == 0:
        path = os.path.expanduser(options.output or tuned.path_of(asked, cluster))
        document.write(path)
        console.print(f"{_judged(document)}\nwrote {path}", soft_wrap=True)
        if asked.algorithm != "auto":
            console.print(f"algorithm={asked.algorithm} is set, and no table counts beside it")
    return 0


@naming("python -m ringcomm tune")
def _check(options: argparse.Namespace) -> int:
    sizes = _sizes(options)
    with Communicator.create(config=Config.from_env()) as comm:
        cluster = _cluster(comm)
        table = comm._joined.mesh.table
        console = _console(comm.rank)
        if table is None:
            console.print(
                f"no table is in use (algorithms: {comm.algorithms}): run "
                "python -m ringcomm tune first",
                soft_wrap=True,
            )
            return 1
        console.print(f"cluster  {cluster.describe()}\n{table.path}", soft_wrap=True)
        contenders = {MODEL: (), "table": table.rows}
        console.print(_heading(contenders, "table / model"))
        edges = tuning.with_edges(sizes, table.rows)
        for sample in tuning.measure(comm, contenders, edges, options.seconds):
            ratios = sample.ratios("table")
            spread = f"{ratios[len(ratios) // 4]:.2f} to {ratios[len(ratios) * 3 // 4]:.2f}"
            tail = f"{ratios[len(ratios) // 2]:.2f}  ({spread}, {len(ratios)} rounds)"
            tail += f"  {tuned.choose(table.rows, sample.bytes).replace(MODEL, 'model')}"
            console.print(_line(sample.measured(), contenders, tail))
    return 0


def _sizes(options: argparse.Namespace) -> list[int]:
    found = tuning.sizes(options.smallest, options.largest)
    if not found or len(found) > tuned.MAX_ROWS or not 0 < options.seconds < 1e6:
        raise ConfigError(
            "give --smallest and --largest with a power of two from 4 bytes on "
            "between them, and --seconds above 0"
        )
    return found


def _cluster(comm: Communicator) -> Cluster:
    cluster = comm._joined.mesh.cluster
    if cluster is None:
        raise ConfigError(
            "one rank has nothing to tune: start this on all ranks of the cluster, "
            "such as torchrun --nproc-per-node 2 -m ringcomm tune"
        )
    return cluster


def _shown(
    console: Console,
    comm: Communicator,
    contenders: Contenders,
    sizes: Sequence[int],
    seconds: float,
) -> Iterator[Sample]:
    """The samples as they come, with a line for each and, on a terminal, a bar; how many sizes are
    measured again between two is not known before."""
    bar = Progress(
        TextColumn("sizes"),
        MofNCompleteColumn(),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=comm.rank != 0 or not console.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=len(sizes))
        for done, sample in enumerate(tuning.measure_closely(comm, contenders, sizes, seconds), 1):
            bar.update(task, completed=done, total=max(done, len(sizes)))
            size = sample.measured()
            console.print(_line(size, contenders, size.chosen.replace(MODEL, "model")))
            yield sample


# ---- what people see ----


def _console(rank: int) -> Console:
    """On rank 0. mpirun gives its ranks a terminal for standard output alone, which is none."""
    terminal = sys.stdout.isatty() and sys.stderr.isatty()
    return Console(
        quiet=rank != 0,
        highlight=False,
        markup=False,
        force_terminal=terminal,
        width=None if terminal else 160,
    )


def _heading(contenders: Sequence[str] | Contenders, last: str = "fastest") -> str:
    names = "".join(f"{name.replace(MODEL, 'model'):>11}" for name in contenders)
    return f"{'size':>10}{names}  {last}"


def _line(size: Measured, names: Sequence[str] | Contenders, tail: str) -> str:
    times = [_time(size.seconds[name]) if name in size.seconds else "-" for name in names]
    return f"{_bytes(size.bytes):>10}" + "".join(f"{t:>11}" for t in times) + f"  {tail}"


def _bytes(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def _ranges(rows: Sequence[Row]) -> str:
    if not rows:
        return "the cost model is right at every size"
    parts = [f"up to {row.up_to} B {row.algorithm.replace(MODEL, 'model')}" for row in rows]
    return f"{', '.join(parts)}, above that model"


def _judged(document: Document) -> str:
    """The table, and what the model's constants would be; of times over links only."""
    lines = [_ranges(document.rows)]
    if document.measured and not document.memory:
        lines.append(costs.line(document.measured, document.cluster.world_size))
    return "\n".join(lines)


def _show(path: str) -> int:
    asked = path or Config.from_env().tune_table
    named = asked not in ("", TUNE_TABLE_OFF)
    paths = [os.path.expanduser(asked)] if named else tuned.default_tables()
    if not paths:
        print(f"no tables in {tuned.default_folder()}: run python -m ringcomm tune on all ranks")
        return 0
    for each in paths:
        print(_described(each))
    return 0


def _described(path: str) -> str:
    try:
        found = tuned.read(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no tuned table: {error}") from None
    names = list(dict.fromkeys(name for size in found.measured for name in size.seconds))
    lines = [_line(size, names, size.chosen.replace(MODEL, "model")) for size in found.measured]
    return "\n".join(
        [
            f"{path}\ncluster  {found.cluster.describe()} (digest {found.cluster.digest})",
            f"measured {found.date} by ringcomm {found.version}"
            f"{', memory shared on each host' if found.memory else ''}",
            _heading(names),
            *lines,
            _judged(found),
        ]
    )
