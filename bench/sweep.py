"""Sizes, times and bandwidths of a collective, in nccl-tests' columns, beside what others reach.

    mpirun -n 4 python bench/sweep.py --sizes 4:64M
    torchrun --nproc-per-node 4 bench/sweep.py --against gloo
    python bench/netlab.py --hosts 4 --nics 1000 -- python bench/sweep.py --compression none,bf16

Every rank runs this file; rank 0 prints. Results are verified against a closed form before they are
timed. The same run measures the floor (what bare TCP streams carry over the same ports) and, with
--against, other libraries in the same process, round by round in turn. README.md explains the
columns. The exit code is 1 if an element was wrong.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from libraries.adapters import PEERS
from libraries.peer import COLLECTIVES, DTYPES, OPS, Peer, Place, What
from measure.closed_form import MAX_WORLD
from measure.control import address_of
from measure.floor import Floor, FloorError, measure_floor
from measure.options import list_of, parse_sizes
from measure.timing import Row, Variant, measure_size
from report.table import (
    Table,
    add_ratios,
    best_floor,
    comment,
    describe_floor,
    verdicts,
    write_json,
)

_RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


class UsageError(Exception):
    """The options cannot work together or here."""


# --- options ---


def _is_first_rank() -> bool:
    """By the launcher's word, for what is said before the ranks have met."""
    return next((os.environ[name] for name in _RANK_NAMES if name in os.environ), "0") == "0"


class _Parser(argparse.ArgumentParser):
    """Speaks on one rank only, or a wrong option is explained as often as there are ranks."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if _is_first_rank():
            super()._print_message(message, file)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; exits with a sentence on wrong ones."""
    parser = _Parser(prog="sweep.py", description="Sweep a collective over sizes.")
    add = parser.add_argument
    add(
        "--sizes",
        type=parse_sizes,
        default="4:64M",
        metavar="FIRST:LAST[:FACTOR] or LIST",
        help="bytes; K M G are binary, KB MB GB decimal; 4:64M unless given",
    )
    add("--collective", choices=COLLECTIVES, default="allreduce")
    add("--dtype", choices=DTYPES, default="f32")
    add("--op", choices=OPS, default="sum")
    add(
        "--compression",
        type=list_of(None),
        default="none,bf16",
        metavar="LIST",
        help="wire formats of ringcomm, a row each; none,bf16 unless given, where they apply",
    )
    add(
        "--against",
        type=list_of(("gloo", "mpi")),
        default="",
        metavar="gloo,mpi",
        help="other libraries to measure in the same job",
    )
    add(
        "--subject",
        choices=tuple(PEERS),
        default="ringcomm",
        help="the library that the others are compared with",
    )
    add(
        "--apart",
        action="store_true",
        help="each call after a barrier, from the first rank's "
        "start to the last rank's end: for ranks that share a machine and its clock",
    )
    add("--iters", type=int, metavar="N", help="timed calls; by --budget unless given")
    add(
        "--budget",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds for each size and library; at least 6 calls are timed; 1 unless given",
    )
    add(
        "--floor",
        type=float,
        default=2.0,
        metavar="S",
        help="seconds for each of the two measurements of the floor; 0: none; 2 unless given",
    )
    add("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    if options.budget <= 0 or options.floor < 0:
        parser.error("--budget must be more than 0 and --floor not less")
    if options.iters is not None and options.iters < 1:
        parser.error("--iters must be 1 or more")
    if "--compression" not in (sys.argv if argv is None else argv) and (
        options.dtype not in ("f32", "f64") or options.collective != "allreduce"
    ):
        options.compression = ["none"]
    return options


# --- the run ---


def join(options: argparse.Namespace) -> tuple[Peer, list[Peer], list[str]]:
    """The subject, the others that could be set up on all ranks, and why the rest could not."""
    subject = PEERS[options.subject]()
    reason = subject.why_not()
    if reason:
        raise UsageError(f"{subject.name} cannot be measured: {reason}")
    subject.setup(None)
    if subject.world > MAX_WORLD:
        raise UsageError(f"{subject.world} ranks: results are verified for up to {MAX_WORLD}")
    rails = rails_of(subject)
    name, address = rails[0] if rails else ("lo", "127.0.0.1")
    place = Place(subject.rank, subject.world, name, address, subject.gather)
    others, skipped = [], []
    for other in options.against:
        peer = PEERS[other]()
        reason = None if other != subject.name else "it is the subject"
        reason = _agree(subject, reason or peer.why_not() or peer.unsupported(what_of(options)))
        if reason is None:
            try:
                peer.setup(place)
            except Exception as error:  # whatever a foreign library raises
                reason = (str(error) or type(error).__name__).splitlines()[0]
            reason = _agree(subject, reason)
        if reason is None:
            others.append(peer)
        else:
            skipped.append(f"{other}: skipped: {reason}")
    return subject, others, skipped


def what_of(options: argparse.Namespace, compression: str = "none") -> What:
    """What the options ask to measure."""
    return What(options.collective, options.op, options.dtype, compression, options.apart)


def rails_of(subject: Peer) -> list[tuple[str, str]]:
    """(name, address) of this rank's ports, asked of the library or else of the environment."""
    found = subject.rails()
    names = [name for name in os.environ.get("RINGCOMM_INTERFACES", "").split(",") if name]
    if found or not names:
        return found or [("lo", "127.0.0.1")]
    return [(name, address_of(name)) for name in names]


def _agree(control: Peer, reason: str | None) -> str | None:
    """The first reason that any rank has; None if none has one."""
    mine = (reason or "").encode()[:200].ljust(200, b"\0")
    for rank, row in enumerate(control.gather(np.frombuffer(mine, np.uint8))):
        text = row.tobytes().rstrip(b"\0").decode(errors="replace")
        if text:
            return text if rank == 0 else f"{text} (rank {rank})"
    return None


def sweep(options: argparse.Namespace) -> int:
    """Measure, print and write; the exit code."""
    subject, others, notes = join(options)
    say = print if subject.rank == 0 else _silent
    variants = []
    for compression in options.compression:
        what = what_of(options, compression)
        reason = subject.unsupported(what)
        if reason:
            notes.append(f"{subject.name} {compression}: skipped: {reason}")
        else:
            variants.append(Variant(subject, what))
    if not variants:
        raise UsageError(f"nothing to measure: {'; '.join(notes)}")
    variants += [Variant(other, what_of(options)) for other in others]
    names = [other.name for other in others]
    about = describe(options, subject)
    for text in [
        f"{about['title']}; load {about['load']}; default congestion control {about['congestion']}",
        *notes,
    ]:
        say(comment(text))
    rails = rails_of(subject)
    floors = _take_floor(subject, rails, options.floor, say)
    table = Table([variant.label for variant in variants], names)
    say(table.header(), flush=True)
    rows: list[Row] = []
    for size in options.sizes:
        measured = measure_size(variants, size, calls=options.iters, budget=options.budget)
        add_ratios(measured, subject.name)
        for row in measured:
            say(table.line(row), flush=True)
        rows += measured
    floors += _take_floor(subject, rails, options.floor if floors else 0, _silent)
    for text in [
        *describe_floor(floors),
        *verdicts(rows, best_floor(floors)),
        *subject.notes(),
        *(note for other in others for note in other.notes()),
    ]:
        say(comment(text))
    if subject.rank == 0 and options.json:
        write_json(options.json, rows, floors, about)
    for peer in [*others, subject]:
        peer.close()
    return 1 if any(row.wrong for row in rows) else 0


def _take_floor(
    subject: Peer, rails: list[tuple[str, str]], seconds: float, say: Any
) -> list[Floor]:
    try:
        floor = measure_floor(subject, rails, seconds) if seconds else None
    except FloorError as error:
        say(comment(str(error)))
        return []
    for text in describe_floor([floor] if floor else []):
        say(comment(text))
    return [floor] if floor else []


def _silent(*words: object, **options: object) -> None:
    """Takes print's place on the ranks that do not print."""


def describe(options: argparse.Namespace, subject: Peer) -> dict[str, Any]:
    """What is known about the run, for the title and the JSON file."""
    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return {
        "title": f"{options.collective} {options.op} {options.dtype}, {subject.world} ranks",
        "world_size": subject.world,
        "collective": options.collective,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "congestion": congestion.read_text().strip() if congestion.exists() else "unknown",
        "rails": [f"{name} {address}" for name, address in rails_of(subject)],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = parse(argv)
    try:
        return sweep(options)
    except UsageError as error:  # the same on all ranks
        if _is_first_rank():
            print(f"sweep: {error}", file=sys.stderr)
        return 2
    except (OSError, RuntimeError) as error:
        print(f"sweep: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
