"""bench/auto.py: its arithmetic and verdicts, and a short run."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from beside import Done

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

import auto  # noqa: E402
from netlab import why_unavailable  # noqa: E402

pytestmark = pytest.mark.torch
TAKEN = auto.Taken(1000.0, {"none": 0.5, "bf16": 0.3, "int8": 0.25}, 0.26, "int8")


@pytest.mark.parametrize(
    ("changes", "met"),
    [
        ({}, True),
        ({"auto": 0.27}, False),
        ({"fixed": {"none": 0.2, "bf16": 0.2, "int8": 0.2}, "auto": 0.203}, True),
        ({"fixed": {"none": 0.2, "bf16": 0.2, "int8": 0.2}, "auto": 0.208}, False),
    ],
)
def test_verdicts(changes: dict[str, Any], met: bool) -> None:
    one = dataclasses.replace(TAKEN, **changes)
    assert one.is_met is met
    line = auto.row(one)
    assert len(line) == len(auto.HEADS)
    assert line[-1] == ("met" if met else "short")


@pytest.mark.parametrize(
    ("codecs", "after"),
    [
        ([("none", 0), ("int8", 98)], 17),
        ([("int8", 0)], 0),
        ([("none", 0)], None),
        ([("none", 0), ("int8", 90), ("bf16", 100), ("int8", 110)], 29),
    ],
)
def test_when_a_drop_was_followed(codecs: list[tuple[str, int]], after: int | None) -> None:
    stretches = [{"codec": codec, "first": first} for codec, first in codecs]
    assert auto.followed_after(stretches, 81, TAKEN.fixed) == after


@pytest.mark.parametrize("argv", [["--hosts", "1"], ["--rates", "5"], ["--compute", "0"]])
def test_wrong_options(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        auto.main(argv)


@pytest.mark.slow
@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
@pytest.mark.beside(
    sys.executable, str(BENCH / "auto.py"), "--hosts", "2", "--parameters", "2e5", "--rates", "20",
    "--drop", "0", "--compute", "20", "--settle", "25", "--steps", "3", "--timeout", "1700",
)  # fmt: skip
def test_a_short_run(beside: Done) -> None:
    """The wire is so slow that compression pays under any load; by how much depends on that."""
    assert beside.code in (0, 1), beside.output
    (line,) = (line for line in beside.output.splitlines() if line.split()[:1] == ["20"])
    (taken,) = {"none", "bf16", "int8"} & set(line.split())
    assert taken != "none", beside.output
    if taken == "int8":  # it begins with bf16
        assert re.search("#   auto: int8 from step", beside.output), beside.output
