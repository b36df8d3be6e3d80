"""Tests that run in a process of their own, beside the others (beside.py). Their files are named in
beside.APART; who names one of them to pytest runs it as any other.
"""

from __future__ import annotations

import pytest
from beside import APART, Done

LIMIT = "--timeout=1800"  # of a test, on a busy machine, where all else goes first
FILES = [f"tests/{name}" for name in APART]


@pytest.mark.slow
@pytest.mark.beside("{python}", "-m", "pytest", "-p", "no:cacheprovider", LIMIT, "-rs", *FILES)
def test_files_beside(beside: Done) -> None:
    if beside.code == pytest.ExitCode.NO_TESTS_COLLECTED:
        pytest.skip(beside.output[-200:])
    assert beside.code == pytest.ExitCode.OK, beside.output[-8000:]
