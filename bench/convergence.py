"""Does a method learn as well? Losses of small models, paired by seed, with margins set before.

    python bench/convergence.py                     what is still due of the full set
    python bench/convergence.py --quick             within 12 minutes on two cores
    python bench/convergence.py --only int8,int4 --minutes 60 --jobs 2
    python bench/convergence.py --table > table.md
    python bench/convergence.py --write             tables of docs/METHODS.md and RESULTS.md, plot

Settings: T0, counter-examples whose outcome is known exactly (training/exact.py); T1, a GPT of
471,936 parameters over the characters of the language reference, on 4 ranks with contiguous shards;
T4, its weights trained on with the standard library's sources; T5, a ResNet of 77,562 parameters
over scikit-learn's digits, turned, shifted and in noise, judged by the share it has wrong. Ranks
are threads of a process, joined by sockets, and everything that passes between them is the
library's own; one seed per method runs again with a process for each rank, to the same bits.

Rows are added to bench/results/convergence.jsonl one by one, so that starts add up. Table and plot
are made of them alone. Exit code: 0, 1 if a run failed or a counter-example came out wrong, 2 if
it cannot run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from report import columns
from report.rows import Row, Rows, about
from training import pool, report
from training.exact import EXAMPLES, Exact
from training.methods import METHODS, Method
from training.plan import CHECKPOINT, SETTINGS, Plan, Run, quick_runs
from training.tasks import task_of

HERE = Path(__file__).resolve().parent
ROWS = HERE / "results" / "convergence.jsonl"
DOCS = HERE.parent / "docs"
QUICK = (
    "adamw",
    "int8",
    "int4",
    "onebit-adamw",
    "onebit-adam",
    "lion",
    "lion-momentum",
    "outer",
    "outer-int4",
)
QUICK_MINUTES = 11.0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", metavar="METHODS", default="", help="these methods alone, in this order"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="runs side by side, one core each (default: all cores)",
    )
    parser.add_argument("--minutes", type=float, help="begin no run after so many minutes")
    parser.add_argument(
        "--quick", action="store_true", help="T0, and T1 at half the steps: few methods, 3 seeds"
    )
    parser.add_argument("--rows", type=Path, default=None, help=f"file of rows (default: {ROWS})")
    parser.add_argument("--table", action="store_true", help="print the table of the rows and end")
    parser.add_argument(
        "--write",
        action="store_true",
        help="fill docs/METHODS.md and RESULTS.md, draw the plot, end",
    )
    options = parser.parse_args(arguments)
    options.rows = options.rows or (ROWS.with_name("quick.jsonl") if options.quick else ROWS)
    return options


def chosen(only: str) -> list[Method]:
    """The methods of --only, or all. Raises SystemExit for a name that is none."""
    names = only.split(",") if only else list(METHODS)
    for name in names:
        if name not in METHODS:
            print(
                f"convergence: no method {name!r}; there are {', '.join(METHODS)}", file=sys.stderr
            )
            raise SystemExit(2)
    return [METHODS[name] for name in names]


class Progress:
    """Says how far it is, and keeps the rows."""

    def __init__(self, rows: Rows, plan: Plan | None, total: int = 0) -> None:
        self.rows, self._plan, self._total = rows, plan, total
        self._about = about()
        self.failures = 0

    def done(self, run: Run, result: Row) -> None:
        """A run is over."""
        self.rows.append(row_of(run, result, self._about))
        loss = "diverged" if result["loss"] is None else f"{result['loss']:.4f}"
        said = f"{run.setting} {run.method} {run.role} rate {run.lr:g} seed {run.seed}: {loss}"
        print(f"{said}, {result['cpu_s']:.0f} CPU s; {self.left()}", flush=True)

    def failed(self, run: Run, why: str) -> None:
        """A run has no result."""
        self.failures += 1
        print(f"convergence: {run.method} seed {run.seed} rate {run.lr:g}: {why}", file=sys.stderr)

    def left(self) -> str:
        """How much is done, and what the rest takes."""
        if self._plan is None:
            return f"{len(self.rows)} of {self._total}"
        done, total, seconds = self._plan.count()
        return f"{done} of {total} runs, {seconds / 3600:.1f} CPU hours left"


def row_of(run: Run, result: Row, about: dict[str, object]) -> Row:
    """What is kept of a run."""
    digest = task_of(SETTINGS[run.setting]).digest
    method = METHODS[run.method]
    return {
        "key": run.key,
        "setting": run.setting,
        "method": run.method,
        "role": run.role,
        "lr": run.lr,
        "seed": run.seed,
        "steps": run.steps,
        "options": dict(method.options),
        **{
            name: result[name]
            for name in ("loss", "curve", "train", "weights", "sent", "seconds", "cpu_s")
        },
        "alike": result.get("alike"),
        "text": digest,
        **about,
    }


def checkpoint_of(folder: Path) -> Path:
    """Where T4's first weights are; not in the repository, for they can be made again."""
    return folder / f"checkpoint-{CHECKPOINT.key}.pt"


def exact() -> list[Exact]:
    """T0, told as it goes."""
    found = []
    for example in EXAMPLES.values():
        one = example()
        found.append(one)
        print(
            f"T0 {one.what}: {one.good:.2g} with, {one.bad:.3g} without: "
            f"{'as it must' if one.holds else 'WRONG'}",
            flush=True,
        )
    return found


def quick(options: argparse.Namespace, rows: Rows) -> int:
    """Few methods at the rates of the full set, where they are known."""
    methods = [
        one
        for one in (chosen(options.only) if options.only else [METHODS[name] for name in QUICK])
        if not one.missing()
    ]
    tuned = Plan(Rows(ROWS), methods)
    rates = {one.name: tuned.tuned(one) or sorted(one.lrs)[len(one.lrs) // 2] for one in methods}
    runs = quick_runs([one.name for one in methods], rates)
    progress = Progress(rows, None, len(runs))
    until = time.monotonic() + 60 * (options.minutes or QUICK_MINUTES)
    examples = exact()
    pool.run_all(
        lambda: [run for run in runs if rows.find(run.key) is None],
        progress.done,
        progress.failed,
        lambda _: Path("none"),
        jobs=options.jobs,
        until=until,
    )
    for name in rates:
        found = [
            row["loss"]
            for run in runs
            if run.method == name and (row := rows.find(run.key)) is not None
        ]
        shown = " ".join("diverged" if one is None else f"{one:.3f}" for one in found)
        print(f"{name:20} rate {rates[name]:g}: {shown}")
    return int(progress.failures > 0 or not all(one.holds for one in examples))


def full(options: argparse.Namespace, rows: Rows) -> int:
    """What is due of the full set."""
    plan = Plan(rows, chosen(options.only))
    progress = Progress(rows, plan)
    for method in chosen(options.only):
        if method.missing():
            print(f"{method.name}: not built yet ({method.missing()})")
    print(progress.left(), flush=True)
    examples = [] if options.only else exact()
    folder = options.rows.parent

    def due() -> list[Run]:
        return ready(plan, folder)

    until = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    pool.run_all(
        due,
        progress.done,
        progress.failed,
        lambda _: checkpoint_of(folder),
        jobs=options.jobs,
        until=until,
    )
    print(progress.left())
    return int(progress.failures > 0 or not all(one.holds for one in examples))


def ready(plan: Plan, folder: Path) -> list[Run]:
    """What is due and can start: T4 waits for its checkpoint, which is made again if it is lost."""
    runs = plan.due()
    others = [run for run in runs if not SETTINGS[run.setting].starts_at and run != CHECKPOINT]
    if len(others) == len(runs) or checkpoint_of(folder).exists():
        return runs
    return [*others, CHECKPOINT]


def pages(plan: Plan) -> dict[Path, str]:
    """docs/METHODS.md and docs/RESULTS.md with the parts that rows make."""
    picture = "\n\n![what methods end at](plots/convergence.png)"
    found = {}
    for page, advised in ((DOCS / "METHODS.md", True), (DOCS / "RESULTS.md", False)):
        text, body = page.read_text(encoding="utf-8"), report.document(plan, advised) + picture
        found[page] = columns.filled(text, "convergence", body, "bench/convergence.py")
    return found


def write(plan: Plan) -> None:
    """Fills the pages, and draws their plot."""
    for page, text in pages(plan).items():
        page.write_text(text, encoding="utf-8")
    report.plot(plan, DOCS / "plots" / "convergence.png")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    options = parse(arguments)
    rows = Rows(options.rows)
    plan = Plan(rows, METHODS.values())
    if options.table:
        print(report.markdown(plan, []), end="")
    if options.write:
        write(plan)
    if options.table or options.write:
        return 0
    return quick(options, rows) if options.quick else full(options, rows)


if __name__ == "__main__":
    sys.exit(main())
