"""The sources' results, reproduced by one command each, and what ringcomm makes of them beyond.

    python bench/results.py                       what there is, and how much of it is measured
    python bench/results.py scaling               measures what is due; then table and claims
    python bench/results.py scaling --quick       a tiny run, to see that it works
    python bench/results.py scaling --table       from the rows that are there; --plot PNG as well
    python bench/results.py --write               docs/RESULTS.md and its pictures, from the rows

Rows are added to bench/results/NAME.jsonl one by one, so an interrupted run goes on where it was;
--again measures anew. Table, claims and pictures are made of them alone. Ratios, never seconds, are
compared with the documents. Most sources need root for their networks; each says what it can do
without.

Exit code: 0; 1 if a claim came out short (--quick is too small to tell); 2 if it cannot run; 130 if
it was interrupted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import _columns
from _rows import Row, Rows, about
from netlab import NetLabError, why_unavailable
from sources import page
from sources.source import Claim, Point, Source, found, load, names, notes_of

HERE = Path(__file__).resolve().parent
CLAIM_HEADS = ("claim", "document", "ours", "bound", "")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="results.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=names(), help="a source; none: all of them")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="(default: results/NAME.jsonl)")
    parser.add_argument("--again", action="store_true", help="measure what is there once more")
    parser.add_argument("--only", metavar="TEXT", default="", help="points with TEXT in their name")
    parser.add_argument("--table", action="store_true", help="print table and claims, and end")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the rows, and end")
    parser.add_argument("--write", action="store_true",
                        help="put tables, claims and pictures into docs, and end")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.name is None and (options.quick or options.again or options.only or options.table):
        parser.error(f"give a source as well: {', '.join(names())}")
    return options


def rows_of(name: str, options: argparse.Namespace) -> Rows:
    """The file of a source."""
    file = "quick.jsonl" if options.quick else f"{name}.jsonl"
    return Rows(options.rows or HERE / "results" / file)


def show(name: str, source: Source, rows: dict[str, Row]) -> list[Claim]:
    """Prints what the rows say; returns the claims."""
    print(f"\n{source.DOCUMENT}\n\nreal: {source.REAL}\nemulated: {source.EMULATED}\n")
    table = source.table(rows)
    if len(table) > 1:
        print("\n".join(_columns.aligned(table, left={0})), "\n")
    for note in notes_of(source, rows):
        print(note, "\n")
    claims = list(source.claims(rows))
    lines = [(one.what, one.document, one.ours or "-", one.bound, one.verdict) for one in claims]
    print("\n".join(_columns.aligned([CLAIM_HEADS, *lines], left={0, 4})))
    return claims


def measure(name: str, source: Source, rows: Rows, options: argparse.Namespace) -> int:
    """What is due, each kept as it ends; how many failed."""
    due = [point for point in source.points(options.quick) if options.only in point.name]
    print(f"{name}: {len(due)} measurements; {rows.path}", flush=True)
    failed = 0
    for number, point in enumerate(due, 1):
        key = point.key(name, source.HARNESS)
        head = f"[{number}/{len(due)}] {point.name}"
        if rows.find(key) is not None and not options.again:
            print(f"{head}: is there", flush=True)
            continue
        print(f"{head} ...", flush=True)
        began = time.monotonic()
        try:
            row = _row(name, key, point, source)
        except (NetLabError, RuntimeError) as error:
            failed += 1
            print(f"results: {name}, {point.name}: {error}", file=sys.stderr)
            continue
        rows.append(row)
        print(f"{head}: {time.monotonic() - began:.0f} s", flush=True)
    return failed


def _row(name: str, key: str, point: Point, source: Source) -> Row:
    return {"key": key, "source": name, "name": point.name, "settings": dict(point.settings),
            **source.measure(point), **about()}  # fmt: skip


def one(name: str, options: argparse.Namespace) -> int:
    """A source; returns the exit code."""
    source, rows = load(name), rows_of(name, options)
    failed = 0
    if options.plot:
        page.draw(source, found(rows, name, options.quick), options.plot)
    elif not options.table:
        why = why_unavailable() if source.NEEDS_ROOT else None
        if why is not None:
            print(f"results: {name}: {why} Without: {source.WITHOUT_ROOT}; and --table, --plot and "
                  "--write show the rows that are there.", file=sys.stderr)  # fmt: skip
            return 2
        failed = measure(name, source, rows, options)
    claims = show(name, source, found(rows, name, options.quick))
    if options.quick:
        print("\n--quick only shows that the command works: its sizes prove no claim")
    judges = not (options.table or options.plot or options.quick)
    short = any(claim.met is False for claim in claims)
    return 2 if failed else int(short and judges)


def overview(options: argparse.Namespace) -> None:
    """A line for each source."""
    for name in names():
        source = load(name)
        there = len(found(rows_of(name, options), name, False))
        root = "; needs root" if source.NEEDS_ROOT else ""
        print(f"{name:12} {there} of {len(source.points(False))} measured{root}\n"
              f"             {source.DOCUMENT}")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    options = parse(arguments)
    try:
        if options.write or (options.plot and options.name is None):
            chosen = names() if options.name is None else [options.name]
            everything = {name: (load(name), found(rows_of(name, options), name, False))
                          for name in names()}  # fmt: skip
            if options.plot:
                page.draw_summary(everything, options.plot)
            if options.write:
                page.write(everything, chosen)
            return 0
        if options.name is None:
            overview(options)
            return 0
        return one(options.name, options)
    except KeyboardInterrupt:
        print("results: interrupted; what was finished is kept, and the same command goes on",
              file=sys.stderr)  # fmt: skip
        return 130


if __name__ == "__main__":
    sys.exit(main())
