"""The micro-benchmarks of bench/ run, once each; their figures are nobody's concern here."""

from __future__ import annotations

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
