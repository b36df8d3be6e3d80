"""bench/members.py: its verdicts, and a trial."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

import members  # noqa: E402
from netlab import why_unavailable  # noqa: E402


@pytest.mark.parametrize(("slowest", "verdict"), [(2.9, "met"), (3.1, "short")])
def test_verdicts(slowest: float, verdict: str) -> None:
    line = members.row("paused", 3, 0, [2.1, slowest], 2.0)
    assert len(line) == len(members.HEADS)
    assert line[-1] == verdict


@pytest.mark.netns
@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_a_trial(capsys: pytest.CaptureFixture[str]) -> None:
    """Others go on; how soon is for a quiet machine."""
    code = members.main(["--hosts", "3", "--faults", "killed", "--trials", "1"])
    told = capsys.readouterr()
    assert code in (0, 1), told.err
    assert len(told.out.splitlines()) == 5
