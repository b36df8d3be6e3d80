"""Rows of results: a line of JSON for each finished measurement, appended as it ends.

    rows = Rows(path)
    rows.find(key)             the row of a measurement, or None
    rows.append(row)           at once, so that an interrupted start loses nothing that is finished
    about()                    what a row says of the machine and the software
    Load()                     what else the machine did meanwhile
    is_dirty(row)              whether it was measured by files that are in no commit

Invariants: a file is only ever appended to; a line that was cut off is passed over. A key is made
of all that defines the measurement, so what has changed has another key, and its old rows are left
aside.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.steal import stolen

Row = dict[str, Any]
DIRTY = "-dirty"


class Rows:
    """All rows of a file, by key; the last one of a key counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: dict[str, Row] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                row = _read(line)
                if row is not None:
                    self._rows[row["key"]] = row

    def find(self, key: str) -> Row | None:
        """The row of that key."""
        return self._rows.get(key)

    def append(self, row: Row) -> None:
        """Keeps a row, and writes it to the file."""
        self._rows[row["key"]] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        ends_open = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * (ends_open and self.path.stat().st_size > 0))
            file.write(json.dumps(row, separators=(",", ":")) + "\n")

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)


def _read(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "key" in row else None


def about() -> dict[str, Any]:
    """What a row says of the machine and the software."""
    return {
        "git": commit_of(Path(__file__).resolve().parents[2]),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "cpu": _cpu(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%F"),
    }


class Load:
    """What else the machine does from now on."""

    def __init__(self) -> None:
        self._busy, self._stolen = os.getloadavg()[0], stolen()

    def about(self) -> dict[str, float]:
        """For a row: processes that were running or ready in the minute before, and seconds that
        the host of a virtual machine took from all processors since."""
        return {"load": round(self._busy, 2), "stolen_s": round(stolen() - self._stolen, 2)}


def is_dirty(row: Row) -> bool:
    """Whether it, or a row that it is made of, is of files in no commit, or git did not tell."""
    commits = [row.get("git", ""), *row.get("commits", ())]
    return any(not commit or commit.endswith(DIRTY) for commit in commits)


def commit_of(top: Path) -> str:
    """A tree's, with DIRTY where tracked files differ that are not rows and documents."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=top, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git(
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        ".",
        ":(exclude)bench/results",
        ":(exclude)docs",
    )
    return git("rev-parse", "--short=10", "HEAD") + DIRTY * bool(changed)


def _cpu() -> str:
    """The processor by name, family and model: a cloud's machines of one name differ in these."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    pairs = [[word.strip() for word in line.split(":", 1)] for line in lines if ":" in line]
    about = dict(reversed(pairs))  # of the first processor
    if "model name" not in about:
        return platform.machine()
    numbers = ", ".join(f"{w} {about[w]}" for w in ("cpu family", "model") if w in about)
    return f"{about['model name']} ({numbers})"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
