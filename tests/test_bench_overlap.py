"""bench/overlap.py: its arithmetic and verdicts, and a short run."""

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

import overlap  # noqa: E402
from netlab import why_unavailable  # noqa: E402

pytestmark = pytest.mark.torch
TAKEN = overlap.Taken(
    compute_s=0.6, finite=True, buckets=16, step_s=0.65, hidden_s=0.5, exposed_s=0.1,
    wire_bytes=75e6, port_bytes=79e6, cpu_s=0.1,
)  # fmt: skip


def test_floors_and_bounds() -> None:
    assert overlap.floor_s("none", 25_000_000, 2, 1000) == pytest.approx(0.8)
    assert overlap.floor_s("bf16", 25_000_000, 4, 1000) == pytest.approx(0.6)
    assert overlap.floor_s("onebit", 25_000_000, 4, 1000) == pytest.approx(0.03984, rel=1e-3)
    assert overlap.ddp_bound_s(0.6, 0.6, 1 / 3) == pytest.approx(0.8)
    assert overlap.ddp_bound_s(1.8, 0.6, 1 / 3) == pytest.approx(1.8)
    assert overlap.ddp_bound_s(0.0, 0.6, 1 / 3) == 0.6


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [({}, "met"), ({"step_s": 0.67}, "short"), ({"compute_s": 0.1}, "met"),
     ({"finite": False}, "wrong")],
)  # fmt: skip
def test_verdicts(changes: dict[str, float], verdict: str) -> None:
    one = dataclasses.replace(TAKEN, **changes)
    line = overlap.row("bf16", one, 0.6, 75e6, overlap._parse([]))
    assert len(line) == len(overlap.HEADS)
    assert verdict in line


@pytest.mark.parametrize(
    "argv", [["--codecs", "int3"], ["--hosts", "1"], ["--forward", "1"], ["--factors", "-1"]]
)
def test_wrong_options(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        overlap.main(argv)


@pytest.mark.slow
@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
@pytest.mark.beside(
    sys.executable, str(BENCH / "overlap.py"), "--hosts", "2", "--parameters", "1e6",
    "--codecs", "int8", "--factors", "3", "--steps", "2", "--rate", "100",
)  # fmt: skip
def test_a_short_run(beside: Done) -> None:
    assert beside.code == 0, beside.output
    (line,) = (line for line in beside.output.splitlines() if line.split()[:1] == ["int8"])
    assert "1.000" in line
