"""The micro-benchmarks of bench/ and its table of kernels run, once each, beside the other tests
(beside.py): what they measure is nobody's concern here.
"""

from __future__ import annotations

import json
import re
import shutil
import sys

import pytest
from beside import Done

KERNELS = (sys.executable, "bench/kernels.py")


def require_gcc() -> None:
    if shutil.which("gcc") is None:
        pytest.skip("gcc builds what is measured, and is not installed")


@pytest.mark.slow
@pytest.mark.beside(
    sys.executable, "-m", "pytest", "bench", "--benchmark-disable", "-p", "no:cacheprovider"
)  # fmt: skip
def test_every_micro_benchmark_runs(beside: Done) -> None:
    pytest.importorskip("pytest_benchmark")
    require_gcc()
    assert beside.code == 0, beside.output[-4000:]
    passed = re.search(r"(\d+) passed", beside.output)
    assert passed is not None
    assert int(passed[1]) >= 25, beside.output[-1000:]


@pytest.mark.slow
@pytest.mark.beside(
    *KERNELS, "--elements", "5000", "--rounds", "3", "--json", "{folder}/kernels.json",
    "--markdown", "{folder}/kernels.md",
)  # fmt: skip
def test_kernels_beside_copies(beside: Done) -> None:
    """Every codec and direction has a row for each set, the fastest set's with all goals."""
    require_gcc()
    assert beside.code == 0, beside.output[-4000:]
    records = json.loads((beside.folder / "kernels.json").read_text(encoding="utf-8"))
    sets = {one["kernels"] for one in records}
    assert "scalar" in sets
    assert len(records) == len(sets) * 2 * 6 * 3
    assert all(one["seconds"] > 0 and one["low"] <= one["ratio"] <= one["high"] for one in records)
    lines = (beside.folder / "kernels.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2 + len(records) // 2
    assert sum("| met |" in line or "| short |" in line for line in lines) == 8


@pytest.mark.slow
@pytest.mark.beside(*KERNELS, "--sets", "none")
def test_kernels_of_no_set(beside: Done) -> None:
    assert beside.code == 2
    assert beside.output.startswith("kernels: ")
    assert beside.output.count("\n") == 1
