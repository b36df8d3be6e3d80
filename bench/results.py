"""The sources' results, reproduced by one command each, and what ringcomm makes of them beyond.

    python bench/results.py                       what there is, and how much of it is measured
    python bench/results.py scaling               measures what is due; then table and claims
    python bench/results.py scaling --quick       a tiny run, to see that it works
    python bench/results.py scaling --table       from the rows that are there
    python bench/results.py --write               docs/RESULTS.md and its pictures, from the rows

A row is due again where it was measured by files that are in no commit, or over a slow link as
netlab once had it; --write refuses such rows unless told --with-due, and then the page names them.
Rows are added to bench/results/NAME.jsonl one by one, so an interrupted run goes on where it was;
--again measures anew. Table, claims and pictures are made of them alone. Ratios, never seconds, are
compared with the documents. Most sources need root for their networks; each says what it can do
without.

Exit code: 0; 1 if a claim came out short (--quick is too small to tell); 2 if it cannot run, which
it does not where files differ from the last commit (but with --quick or --rows); 130 if it was
interrupted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lab.wiring import CABLES
from netlab import NetLabError, why_unavailable
from report.columns import aligned
from report.rows import Load, Row, Rows, about, is_dirty
from sources import page
from sources.source import Claim, Point, Source, due, due_of, found, load, names, optional

HERE = Path(__file__).resolve().parent


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
    parser.add_argument(
        "--write", action="store_true", help="put tables, claims and pictures into docs, and end"
    )
    parser.add_argument(
        "--with-due", action="store_true", help="with --write: also rows that are due again"
    )
    options = parser.parse_args(arguments)
    if options.name is None and (options.quick or options.again or options.only or options.table):
        parser.error(f"give a source as well: {', '.join(names())}")
    return options


def rows_of(name: str, options: argparse.Namespace) -> Rows:
    """The file of a source."""
    file = "quick.jsonl" if options.quick else f"{name}.jsonl"
    return Rows(options.rows or HERE / "results" / file)


def show(source: Source, rows: dict[str, Row], judged: bool) -> list[Claim]:
    """Prints what the rows say; returns the claims."""
    print(f"\n{source.DOCUMENT}\n\nreal: {source.REAL}\nemulated: {source.EMULATED}\n")
    table = source.table(rows)
    if len(table) > 1:
        print("\n".join(aligned(table, left={0})), "\n")
    for note in optional(source, "notes", rows):
        print(note, "\n")
    claims = list(source.claims(rows))
    lines = [page.HEADS, *map(page.line_of, claims)]
    print("\n".join(aligned(lines if judged else [line[:-1] for line in lines], left={0, 3, 4})))
    return claims


def published(options: argparse.Namespace) -> bool:
    """Whether rows go where the page is made from."""
    return not (options.quick or options.rows)


def unable(name: str, source: Source, points: list[Point], options: argparse.Namespace) -> str:
    """Why these points cannot be measured, in a sentence; empty where they can."""
    if not points:
        there = ", ".join(repr(point.name) for point in source.points(options.quick))
        return f"no point has {options.only!r} in its name; there are {there}"
    if published(options) and is_dirty(about()):
        return (
            "files differ from the last commit, or there is none, so that rows would not tell "
            "what was measured; commit first, or give --rows another file"
        )
    why = why_unavailable() if any(point.mbit is not None for point in points) else None
    if why is None:
        return ""
    return (
        f"{why} Without: {source.WITHOUT_ROOT}; and --table and --write show the rows that "
        "are there."
    )


def measure(
    name: str, source: Source, rows: Rows, points: list[Point], options: argparse.Namespace
) -> int:
    """Those that are due, each kept as it ends; how many failed."""
    print(f"{name}: {len(points)} measurements; {rows.path}", flush=True)
    failed = 0
    for number, point in enumerate(points, 1):
        key = point.key(name, source.HARNESS)
        head = f"[{number}/{len(points)}] {point.name}"
        row = rows.find(key)
        again = options.again or (published(options) and row is not None and due(point, row))
        if row is not None and not again:
            print(f"{head}: is there", flush=True)
            continue
        print(f"{head} ...", flush=True)
        began = time.monotonic()
        try:
            row = measured(name, key, point, source)
        except (NetLabError, RuntimeError) as error:
            failed += 1
            print(f"results: {name}, {point.name}: {error}", file=sys.stderr)
            continue
        rows.append(row)
        print(f"{head}: {time.monotonic() - began:.0f} s", flush=True)
    return failed


def measured(name: str, key: str, point: Point, source: Source) -> Row:
    """The row of a point. Raises what its source does."""
    load_of = Load()
    return {
        "key": key,
        "source": name,
        "name": point.name,
        "settings": dict(point.settings),
        **source.measure(point),
        **about(),
        **load_of.about(),
        "cables": CABLES,
    }


def one(name: str, options: argparse.Namespace) -> int:
    """A source; returns the exit code."""
    source, rows = load(name), rows_of(name, options)
    failed = 0
    if not options.table:
        points = [point for point in source.points(options.quick) if options.only in point.name]
        why = unable(name, source, points, options)
        if why:
            print(f"results: {name}: {why}", file=sys.stderr)
            return 2
        failed = measure(name, source, rows, points, options)
    claims = show(source, found(rows, name, options.quick), not options.quick)
    if options.quick:
        print("\n--quick only shows that the command works: its sizes prove no claim")
    judges = not (options.table or options.quick)
    short = any(claim.met is False for claim in claims)
    return 2 if failed else int(short and judges)


def overview(options: argparse.Namespace) -> None:
    """A line for each source."""
    for name in names():
        source = load(name)
        there, points = found(rows_of(name, options), name, False), source.points(False)
        again = due_of(source, there)
        rooted = sum(point.mbit is not None for point in points)
        print(
            f"{name:12} {len(there)} of {len(points)} measured, {len(again)} due again; "
            f"{rooted} need root\n             {source.DOCUMENT}"
        )
        for point, why in again.items():
            print(f"             due: {point} ({why})")


def write(everything: page.Everything, chosen: list[str], with_due: bool) -> int:
    """The page; returns the exit code."""
    again = sum(len(due_of(*everything[name])) for name in chosen)
    if again and not with_due:
        print(
            f"results: {again} rows are due again (`results.py` names them); measure them, or "
            "give --with-due, and the page says so",
            file=sys.stderr,
        )
        return 2
    page.write(everything, chosen)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    options = parse(arguments)
    try:
        if options.write:
            chosen = names() if options.name is None else [options.name]
            everything = {
                name: (load(name), found(rows_of(name, options), name, False)) for name in names()
            }
            return write(everything, chosen, options.with_due)
        if options.name is None:
            overview(options)
            return 0
        return one(options.name, options)
    except KeyboardInterrupt:
        print(
            "results: interrupted; what was finished is kept, and the same command goes on",
            file=sys.stderr,
        )
        return 130


if __name__ == "__main__":
    sys.exit(main())
