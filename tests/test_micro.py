"""The micro-benchmarks of bench/ run, once each, beside the other tests (beside.py): what they
measure is nobody's concern here.
"""

from __future__ import annotations

import re
import shutil

import pytest
from beside import Done


@pytest.mark.slow
@pytest.mark.beside(
    "{python}", "-m", "pytest", "bench", "--benchmark-disable", "-p", "no:cacheprovider"
)
def test_every_micro_benchmark_runs(beside: Done) -> None:
    pytest.importorskip("pytest_benchmark")
    if shutil.which("gcc") is None:
        pytest.skip("gcc builds what is measured, and is not installed")
    assert beside.code == 0, beside.output[-4000:]
    passed = re.search(r"(\d+) passed", beside.output)
    assert passed is not None
    assert int(passed[1]) >= 25, beside.output[-1000:]
