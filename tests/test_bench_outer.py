"""bench/outer.py: its verdicts, and a short run."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest
from beside import Done

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

import outer  # noqa: E402
from netlab import why_unavailable  # noqa: E402

pytestmark = pytest.mark.torch
TAKEN = outer.Taken(alone=2.0, outer=2.05, sent=28e6, waited=0.03)


@pytest.mark.parametrize(("seconds", "verdict"), [(2.05, "met"), (2.07, "short")])
def test_verdicts(seconds: float, verdict: str) -> None:
    line = outer.row(outer.WAYS[0], dataclasses.replace(TAKEN, outer=seconds))
    assert len(line) == len(outer.HEADS)
    assert line[-1] == verdict


@pytest.mark.parametrize("argv", [["--hosts", "1"], ["--every", "20"], ["--compute", "0"]])
def test_wrong_options(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        outer.main(argv)


@pytest.mark.slow
@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
@pytest.mark.beside(
    sys.executable, str(BENCH / "outer.py"), "--hosts", "2", "--parameters", "1e6", "--rounds", "1",
    "--every", "24", "--compute", "5",
)  # fmt: skip
def test_a_short_run(beside: Done) -> None:
    """Its bytes; its times are for a quiet machine."""
    assert beside.code in (0, 1), beside.output
    dense, sparse = (line.split() for line in beside.output.splitlines() if "met" in line.split()
                     or "short" in line.split())  # fmt: skip
    assert float(dense[6]) == pytest.approx(1e6 * 4.25 / 8 / 1e6, rel=0.15)
    assert float(sparse[7]) < 0.1
