"""bench/sources/collectives.py: what rows say, calls that are timed by themselves, a tiny run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from beside import Done

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

from comparison import rounds  # noqa: E402
from comparison.standings import Measurement  # noqa: E402
from measure import timing  # noqa: E402
from netlab import why_unavailable  # noqa: E402
from report.rows import Rows  # noqa: E402
from sources import collectives  # noqa: E402

OTHERS = {"gloo": 6.0, "openmpi-tcp": 1.5, "mpich": 1.2}


def standing(library: str, size: int, time_us: float, ratio: float) -> dict[str, Any]:
    return {
        "library": library,
        "size": size,
        "time_us": time_us,
        "spread": 0.1,
        "rounds": 5,
        "ratio": ratio,
        "ratio_range": [ratio, ratio],
    }


def rows(**others: float) -> dict[str, Any]:
    """ringcomm takes 100 us and more with the hosts, and the others so many times as long."""
    made = {}
    for point in collectives.points(False):
        asked = point.settings
        mine = 100.0 * (1 + asked["hosts"] / 100)
        standings = [
            standing(name, size, mine * ratio, ratio)
            for size in asked["sizes"]
            for name in asked["libraries"]
            for ratio in [{**OTHERS, **others}.get(name, 1.0)]
        ]
        made[point.name] = {
            "name": point.name,
            "settings": dict(asked),
            "date": "2026-01-01",
            "cpu": "a CPU",
            "torch": "2",
            "standings": standings,
        }
    return made


def test_claims_are_met_and_missed() -> None:
    made = collectives.claims(rows())
    assert [claim.verdict for claim in made] == ["short", "met", "met", "short", "met", "met"]
    assert made[1].ours == "1.06"
    assert made[0].ratio == pytest.approx(6 / 16.6)
    behind = collectives.claims(rows(mpich=0.9, gloo=17.0))
    assert [claim.verdict for claim in behind] == ["met", "met", "short", "met", "met", "short"]
    assert behind[5].ours.startswith("0.90")


def test_a_call_by_itself_lasts_until_the_last_rank_has_it() -> None:
    """Two calls of two ranks; the root of the first returns at once."""
    spans = np.array([[(0.0, 1.0), (10.0, 14.0)], [(0.5, 6.0), (9.0, 12.0)]])
    np.testing.assert_allclose(timing._seconds(spans, apart=True), [6.0, 5.0])
    np.testing.assert_allclose(timing._seconds(spans, apart=False), [3.25, 3.5])


class _NoSite:
    """Takes a Site's place, where nothing runs."""

    name, world = "netlab", 2

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> _NoSite:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def describe(self) -> str:
        return "a site"


def measured(monkeypatch: pytest.MonkeyPatch, library: str, wrong: int) -> dict[str, Any]:
    def run(site: object, found: object, plan: rounds.Plan, say: object) -> rounds.Record:
        assert (plan.collective, plan.apart) == ("broadcast", True)
        one = Measurement("netlab", library, "none", 4096, 0, 10.0, 1.0, 0.1, wrong)
        return rounds.Record([one])

    monkeypatch.setattr(collectives, "Site", _NoSite)
    monkeypatch.setattr(collectives, "run_rounds", run)
    return collectives.measure(collectives.points(True)[0])


def test_what_is_kept_of_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    row = measured(monkeypatch, "ringcomm", 0)
    assert row["standings"][0]["time_us"] == 10.0
    with pytest.raises(RuntimeError, match="3 elements of ringcomm are wrong"):
        measured(monkeypatch, "ringcomm", 3)
    with pytest.raises(RuntimeError, match="ringcomm was not measured"):
        measured(monkeypatch, "gloo", 0)


@pytest.mark.torch
@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
@pytest.mark.beside(
    "{python}",
    str(BENCH / "results.py"),
    "collectives",
    "--quick",
    "--only",
    "broadcast",
    "--rows",
    "{folder}/rows",
)
def test_a_tiny_run(beside: Done) -> None:
    """Its rows; its times are for a quiet machine."""
    pytest.importorskip("torch")
    assert beside.code == 0, beside.output
    (row,) = Rows(beside.folder / "rows")
    assert {(one["library"], one["size"]) for one in row["standings"]} == {
        (library, size) for library in ("ringcomm", "gloo") for size in (4096, 65536)
    }
    assert all(one["time_us"] > 0 for one in row["standings"])
