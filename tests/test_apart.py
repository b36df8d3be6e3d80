"""Tests that run in processes of their own, beside the others (beside.py). Their files are named in
beside.APART; who names one of them to pytest runs it as any other.
"""

from __future__ import annotations

import sys

import pytest
from beside import APART, Done

LIMIT = "--timeout=1800"  # of a test, on a busy machine, where all else goes first


def file_beside(name: str) -> pytest.MarkDecorator:
    pytest_itself = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", LIMIT, "-rs")
    return pytest.mark.beside(*pytest_itself, f"tests/{name}")


@pytest.mark.slow
@pytest.mark.parametrize("file", [pytest.param(name, marks=file_beside(name)) for name in APART])
def test_a_file(file: str, beside: Done) -> None:
    if beside.code == pytest.ExitCode.NO_TESTS_COLLECTED:
        pytest.skip(beside.output[-200:])
    assert beside.code == pytest.ExitCode.OK, f"{file}:\n{beside.output[-8000:]}"
