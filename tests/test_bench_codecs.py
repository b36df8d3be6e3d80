"""bench/codecs.py: what it concludes, and a short run."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

from netlab import why_unavailable  # noqa: E402


def _load() -> Any:
    """By its path: a module of the standard library has its name."""
    spec = importlib.util.spec_from_file_location("bench_codecs", BENCH / "codecs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_codecs"] = module
    spec.loader.exec_module(module)
    return module


codecs = _load()
PLAIN = codecs.Taken(4, 1000, 1_000_000, "none", [0.010, 0.012], 1.5e6, 0.001, 0.0, True, 12.0)
INT8 = dataclasses.replace(PLAIN, codec="int8", seconds=[0.003, 0.003], sent=0.38e6, error=0.01)


@pytest.mark.parametrize(
    ("codec", "hosts", "per_elem"),
    [
        ("none", 4, 6.0),
        ("bf16", 4, 3.0),
        ("int8", 4, 1.512),
        ("int4", 4, 0.797),
        ("onebit", 4, 0.199),
        ("onebit", 2, 0.133),
    ],
)
def test_the_formula_is_the_table_of_the_literature(
    codec: str, hosts: int, per_elem: float
) -> None:
    assert codecs.formula_bytes(codec, 4000, hosts) / 1000 == pytest.approx(per_elem, abs=6e-4)


def test_a_codec_wins_below_the_rate_at_which_the_ratio_is_one() -> None:
    assert codecs.crossover([(1000, 2.0), (100, 0.5)]) == "below about 320 Mbit/s"
    assert codecs.crossover([(100, 0.5), (1000, 0.9)]) == "at every rate up to 1000 Mbit/s"
    assert codecs.crossover([(100, 1.5), (1000, 1.9)]) == "at no rate from 100 Mbit/s on"
    assert "not at all lower" in codecs.crossover([(100, 1.5), (1000, 0.9)])


def test_verdicts_follow_the_ratio_and_the_bits() -> None:
    assert codecs.row(INT8, PLAIN, 0.28)[-1] == "met"
    assert codecs.row(INT8, PLAIN, 0.26)[-1] == "short"
    assert codecs.row(INT8, None, None)[-1] == ""
    assert codecs.row(dataclasses.replace(INT8, same_bits=False), PLAIN, 0.28)[-1] == "wrong"
    assert codecs.row(dataclasses.replace(INT8, error=0.5), PLAIN, 0.28)[-1] == "wrong"
    assert codecs.row(dataclasses.replace(INT8, error=float("nan")), PLAIN, 0.28)[-1] == "wrong"


def test_ratios_are_taken_within_a_round() -> None:
    assert codecs.ratios(INT8, PLAIN) == pytest.approx([0.3, 0.25])
    (line,) = codecs.wins([PLAIN, INT8])
    assert line == "1 MB: int8 beats none at every rate up to 1000 Mbit/s"


def test_a_short_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    reason = why_unavailable()
    if reason:
        pytest.skip(reason)
    table = tmp_path / "table.md"
    code = codecs.main(
        [
            "--hosts",
            "2",
            "--rates",
            "1000",
            "--sizes",
            "100KB",
            "--codecs",
            "none,int8,onebit",
            "--rounds",
            "1",
            "--budget",
            "0.05",
            "--markdown",
            str(table),
        ]
    )
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert len(table.read_text().splitlines()) > 5
    assert "int8 beats none" in shown
    assert "wrong" not in shown
