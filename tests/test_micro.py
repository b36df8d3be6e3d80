"""The micro-benchmarks of bench/ and its table of kernels run, once each. What they measure is
nobody's concern here.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_every_micro_benchmark_runs() -> None:
    pytest.importorskip("pytest_benchmark")
    if shutil.which("gcc") is None:
        pytest.skip("gcc builds the inner functions, and is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "bench", "--benchmark-disable", "-p", "no:cacheprovider"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 25, done.stdout[-1000:]


@pytest.mark.slow
def test_kernels_beside_copies(tmp_path: Path) -> None:
    """Every codec and direction has a row for each set, the fastest set's with all goals."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc builds the kernels, and is not installed")
    told, table = tmp_path / "kernels.json", tmp_path / "kernels.md"
    done = subprocess.run(
        [sys.executable, "bench/kernels.py", "--elements", "5000", "--rounds", "3",
         "--json", str(told), "--markdown", str(table)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    records = json.loads(told.read_text(encoding="utf-8"))
    sets = {one["kernels"] for one in records}
    assert "scalar" in sets
    assert len(records) == len(sets) * 2 * 6 * 3
    assert all(one["seconds"] > 0 and one["low"] <= one["ratio"] <= one["high"] for one in records)
    lines = table.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2 + len(records) // 2
    assert sum("| met |" in line or "| short |" in line for line in lines) == 8


@pytest.mark.slow
def test_kernels_of_no_set() -> None:
    done = subprocess.run([sys.executable, "bench/kernels.py", "--sets", "none"], cwd=ROOT,
                          capture_output=True, text=True, check=False, timeout=110)  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr
