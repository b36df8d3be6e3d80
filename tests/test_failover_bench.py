"""bench/failover.py: how it judges, and that it goes on where it was interrupted."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

from lab import wiring  # noqa: E402

_spec = importlib.util.spec_from_file_location("bench_failover", BENCH / "failover.py")
assert _spec is not None
assert _spec.loader is not None
failover = importlib.util.module_from_spec(_spec)
sys.modules["bench_failover"] = failover
_spec.loader.exec_module(failover)


def row(**given: Any) -> dict[str, Any]:
    """A row that is as it should be."""
    fine = {"hosts": 2, "load": "64 MB", "fault": "unplug", "stall": 0.2, "left": 0.95, "back": 1.0}
    return {**fine, "uneven": 0.1, "wrong": 0, "fds": 0, **given}


@pytest.mark.parametrize(
    ("given", "short"),
    [
        ({}, []),
        ({"fault": "blackhole", "stall": 1.4}, []),
        ({"stall": 0.4}, ["stall"]),
        ({"fault": "mute", "stall": 1.6}, ["stall"]),
        ({"left": None}, []),
        ({"left": 0.8}, ["left"]),
        ({"back": 5.5}, ["back"]),
        ({"wrong": 1}, ["wrong"]),
        ({"fds": 1}, ["descriptors"]),
        ({"failed": "PeerLostError"}, ["failed"]),
    ],
)
def test_what_falls_short_is_said(given: dict[str, Any], short: list[str]) -> None:
    assert failover.short(row(**given)) == short


def test_the_table_counts_what_ran_to_the_end() -> None:
    rows = [row(), row(stall=0.4), row(wrong=1), {**row(), "failed": "hangs"}]
    line = "| 2, unplug | 4 | 2 | 0.20, 0.40 | 0.10 | 0.95, 0.95 | 1.00, 1.00 | 3 |"
    assert failover.table(rows).splitlines()[2:] == [line]


@pytest.mark.parametrize(
    ("hit", "slower", "late"),
    [
        (2.5, 2.0, 1.0),  # half of the step was to come, in a second
        (2.5, 1.0, 1.5),
        (9.0, 2.0, 1.5),
        (0.0, 2.0, 0.5),
    ],
)
def test_a_step_is_late_by_what_the_ports_that_are_left_do_not_explain(
    hit: float, slower: float, late: float
) -> None:
    drill = failover.Drill(2, "64 MB", 100.0)
    drill._usual = drill._usual_call = 1.0
    for rank in drill.ranks:
        for end in (0.0, 1.0, 2.0, 4.5, 6.5):
            rank.take({"ended": end, "step": [True, 2.0], "lanes": []})
    assert drill._stall(hit, slower) == pytest.approx(late)
    assert drill._left(2.5, 9.0, 2.0) == 1.0
    assert drill._left(6.5, 9.0, 2.0) == 0.0  # no step at all


def test_a_wrong_result_is_counted() -> None:
    rank = failover.Rank()
    for step in ([True, 0.1], None, [False, 0.1]):
        rank.take({"ended": 1.0, "step": step, "lanes": []})
    assert (rank.calls, rank.wrong) == (2, 1)


@pytest.mark.netns
def test_a_run_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    if reason := wiring.why_unavailable():
        pytest.skip(reason)
    out = tmp_path / "rows.jsonl"
    words = "--hosts 2 --loads idle --faults reset,unplug --trials 1 --mbit 100"
    argv = [sys.executable, str(BENCH / "failover.py"), "--out", str(out), *words.split()]
    known = {"hosts": 2, "load": "idle", "mbit": 100.0, "fault": "unplug", "seed": "0"}
    out.write_text(json.dumps(row(**known, left=None)) + '\n{"hosts": 2,\n')
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, check=False)
    rows = failover.read_rows(out)
    assert [one["fault"] for one in rows] == ["unplug", "reset"], ended.stderr
    assert "failed" not in rows[1], rows[1]
    assert rows[1]["wrong"] == 0
