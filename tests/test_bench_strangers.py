"""bench/strangers.py: a start among strangers, measured, and nothing of it left."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"
sys.path.insert(0, str(BENCH))

import strangers  # noqa: E402


def test_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    wanted = ["--ranks", "2", "--rate", "200", "--rounds", "1", "--kinds", "hello"]
    assert strangers.main([*wanted, "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())
    assert (row["kind"], row["failed"], row["starts"], row["error"]) == ("hello", 0, 1, "")
    assert row["rate"] > 0
    assert row["lines"] >= 1  # somebody was turned away
    assert "| hello " in capsys.readouterr().out
