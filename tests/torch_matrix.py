"""The tests that concern PyTorch, on several of its releases, and the table of docs/TORCH.md.

    python tests/torch_matrix.py 2.13.0 2.15.0      both; make torch-matrix runs all supported ones
    python tests/torch_matrix.py 2.15.0 --only tests
    python tests/torch_matrix.py --table            writes the table of what was run last

Each release has an environment of its own in build/torch-matrix, with ringcomm as it is in this
folder. There run the tests that are marked "torch", the README's blocks among them, and PyTorch's
own distributed tests without their gates (torch_suite.py), on 2 and 3 ranks, by ringcomm and by
gloo. What came of it is kept beside the environment until it is run again.

A release takes half an hour to an hour on two cores, and 1 to 6 GB of disk.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "torch-matrix"
PAGE = ROOT / "docs" / "TORCH.md"
BEGIN, END = "<!-- made by tests/torch_matrix.py -->\n", "<!-- end -->\n"
RUNS = ("tests", "suite")


class Release:
    """One release of PyTorch: its environment and its results."""

    def __init__(self, version: str) -> None:
        self.version = version
        self._environment = FOLDER / version
        self._results = FOLDER / f"{version}.json"
        self.python = self._environment / "bin" / "python"

    @property
    def results(self) -> dict[str, Any]:
        return dict(json.loads(self._results.read_text())) if self._results.exists() else {}

    def keep(self, **results: Any) -> None:
        self._results.write_text(json.dumps({**self.results, **results}, indent=1))

    def prepare(self) -> None:
        """Makes the environment, if it is not there."""
        if (self._environment / "made").exists():
            return
        subprocess.run([sys.executable, "-m", "venv", self._environment], check=True)
        old = ["numpy<2.3"] if _number(self.version) < (2, 5) else []
        install = [self.python, "-m", "pip", "install", "-q", f"torch=={self.version}", *old]
        subprocess.run(install, check=True)
        subprocess.run([*install, "-e", f"{ROOT}[torch,test,bench]"], check=True)
        (self._environment / "made").touch()

    def run_tests(self) -> None:
        """The tests of this folder that are marked "torch"."""
        report, log = FOLDER / f"{self.version}.xml", FOLDER / f"{self.version}.log"
        command = [self.python, "-m", "pytest", "-q", "-m", "torch", f"--junitxml={report}"]
        report.unlink(missing_ok=True)
        with log.open("w") as output:
            subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, check=False)
        passed, failed, skipped = 0, [], collections.Counter[str]()
        for case in xml.etree.ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag: child for child in case}
            if "failure" in kinds or "error" in kinds:
                failed.append(f"{case.get('classname')}.{case.get('name')}")
            elif "skipped" in kinds:
                skipped[kinds["skipped"].get("message") or "no reason"] += 1
            else:
                passed += 1
        self.keep(passed=passed, failed=failed, skipped=dict(skipped))

    def run_suite(self) -> None:
        """PyTorch's own tests, by gloo and by ringcomm."""
        worlds = {}
        for world in (2, 3):
            log = FOLDER / f"{self.version}.suite{world}.log"
            command = [self.python, "tests/torch_suite.py", "compare", "--lifted"]
            with log.open("w") as output:
                done = subprocess.run(
                    [*command, "--world", str(world)],
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    text=True,
                    check=False,
                )
            found = re.search(
                r"of (\d+) tests (\d+) pass with gloo; of these (\d+) pass .*?, (\d+) fail, "
                r"\d+ are skipped by name(?:: (.*))?",
                done.stdout,
            )
            if found is None:
                raise RuntimeError(f"{self.version}, {world} ranks: see {log}\n{done.stdout}")
            worlds[str(world)] = {
                "all": int(found[1]),
                "gloo": int(found[2]),
                "ringcomm": int(found[3]),
                "failed": (found[5] or "").split(", ") if found[5] else [],
            }
        self.keep(suite=worlds)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def table() -> str:
    """The rows of all releases that have results, and why tests were skipped."""
    releases = [Release(path.stem) for path in FOLDER.glob("*.json")]
    releases.sort(key=lambda one: _number(one.version))
    lines = [
        "| torch | our tests: passed | failed | skipped | torch's own, 2 ranks: gloo passes "
        "| of these ringcomm | 3 ranks: gloo passes | of these ringcomm |",
        "|---|---|---|---|---|---|---|---|",
    ]
    reasons: dict[str, list[str]] = {}
    for one in releases:
        told = one.results
        cells = [
            one.version,
            told.get("passed", ""),
            len(told.get("failed", [])),
            sum(told.get("skipped", {}).values()),
        ]
        for world in ("2", "3"):
            suite = told.get("suite", {}).get(world, {})
            cells += [suite.get("gloo", ""), suite.get("ringcomm", "")]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
        for reason, count in told.get("skipped", {}).items():
            reasons.setdefault(reason, []).append(f"{count} on {one.version}")
    lines += ["", "Skipped:", ""]
    lines += [f"- {reason}: {', '.join(where)}" for reason, where in sorted(reasons.items())]
    return "\n".join(lines) + "\n"


def write_table() -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", help="releases of PyTorch, as 2.15.0")
    parser.add_argument("--only", choices=RUNS, help="one of the two")
    parser.add_argument("--table", action="store_true", help="write the table of docs/TORCH.md")
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    wrong = 0
    for release in map(Release, args.versions):
        print(f"torch {release.version}", flush=True)
        release.prepare()
        for name in RUNS if args.only is None else (args.only,):
            release.run_tests() if name == "tests" else release.run_suite()
        told = release.results
        failed = [*told.get("failed", [])]
        for world in told.get("suite", {}).values():
            failed += world["failed"]
        print(f"  {told.get('passed', 0)} passed; failed: {failed or 'none'}", flush=True)
        wrong += len(failed)
    if args.table:
        write_table()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
