"""bench/sources/slow.py: its trace, its arithmetic and claims, and two short measurements."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

from netlab import why_unavailable
from sources import slow, trace
from sources.source import Point

pytestmark = pytest.mark.torch

FAST, LATE, NEVER = [[100, 2.0], [200, 1.5]], [[300, 2.0], [600, 1.5]], [[200, 2.5], [400, 1.9]]


def row_of_time(iteration_s: float, **codecs: int) -> dict[str, Any]:
    """By hand."""
    return {"iteration_s": iteration_s, "port_bytes": 1e6, "per": 1, "codecs": codecs}


def rows() -> dict[str, Any]:
    """fp32 and int4 learn alike, int4 in a tenth of the time; PowerSGD fails in one of two runs;
    StellaTrain's path needs three times the steps."""
    return {
        "steps adamw": {"curves": {"1": FAST, "2": FAST}},
        "steps int4": {"curves": {"1": FAST, "2": FAST}},
        "steps powersgd-4": {"curves": {"1": FAST, "2": NEVER}},
        "steps stellatrain": {"curves": {"1": LATE, "2": LATE}},
        f"time {slow.FP32}": row_of_time(5.0),
        "time int4": row_of_time(0.5),
        "time int8": row_of_time(1.5),
        f"time {slow.AUTO}": row_of_time(0.5, int8=1, int4=9),
        f"time {slow.POWERSGD}": row_of_time(0.2),
        f"time {slow.STELLA}": row_of_time(0.1),
    }


# ---- the trace ----


def test_the_trace_that_ships_is_the_one_that_is_made() -> None:
    made = trace.make()
    assert trace.load() == made
    assert trace.FILE.read_text(encoding="utf-8") == trace.text(made)


# ---- arithmetic ----


def test_steps_to_a_target() -> None:
    assert slow.steps_to(FAST, 1.75) == 150
    assert slow.steps_to(FAST, 2.0) == 100
    assert slow.steps_to(FAST, 1.5) == 200
    assert slow.steps_to(NEVER, 1.75) is None
    assert slow.steps_to([[10, None], [20, 1.0]], 1.75) is None  # it diverged in between


def test_time_is_steps_times_seconds_and_failures_count() -> None:
    found = rows()
    assert slow.times(found, slow.FP32, 1.75) == {"1": 750, "2": 750}
    assert slow.times(found, slow.POWERSGD, 1.75) == {"1": 10 * 5.0 + 140 * 0.2, "2": math.inf}
    assert slow.times(found, slow.HALF, 1.75) is None
    assert slow.faster(found, "int4", slow.FP32, 1.75) == pytest.approx(10)
    assert slow.faster(found, slow.STELLA, slow.FP32, 1.75) == pytest.approx(750 / 45)
    assert slow.faster(found, slow.POWERSGD, slow.FP32, 1.75) == 0  # one of its runs failed


def test_the_fastest_has_the_optimizer_of_what_it_is_beside() -> None:
    """Muon needs fewer steps whatever the exchange, so AdamW's baselines are not beside it."""
    found = rows()
    for name in ("muon", "muon-int4"):
        found[f"steps {name}"] = {"curves": {"1": [[50, 1.5]], "2": [[50, 1.5]]}}
    ratio, name = slow.best(found, slow.FP32) or (0.0, "")
    assert (ratio, name) == (pytest.approx(750 / 45), slow.STELLA)
    ratio, name = slow.best(found, slow.FP32_MUON) or (0.0, "")
    assert (ratio, name) == (pytest.approx(10), f"int4{slow.MUON}")


def test_steps_before_a_methods_own_are_paid_for() -> None:
    """PowerSGD's dense ones as those of DDP; auto's as they were timed, or as its codecs are."""
    found = rows()
    assert slow.pace_of(found, slow.POWERSGD) == slow.Pace(10, 50.0, 0.2)
    assert slow.pace_of(found, slow.AUTO) == slow.Pace(1, 1.5, 0.5)
    timed = found[f"time {slow.AUTO}"]
    timed["stretches"] = [
        {"codec": "int4", "first": 0, "last": 0},
        {"codec": "int8", "first": 1, "last": 2},
        {"codec": "int4", "first": 3, "last": 9},
    ]
    timed["every_s"] = [0.4, 2.0, 3.0, *[0.5] * 7]
    assert slow.pace_of(found, slow.AUTO) == slow.Pace(2, 5.0, 0.5)
    assert slow.Pace(2, 5.0, 0.5).seconds(1) == 2.5
    assert slow.Pace(2, 5.0, 0.5).seconds(4) == 6.0
    del found[f"time {slow.FP32}"]
    assert slow.pace_of(found, slow.POWERSGD) is None
    timed["codecs"], timed["stretches"] = {}, []
    assert slow.pace_of(found, slow.AUTO) == slow.Pace(0, 0.0, 0.5)


def test_auto_is_trained_as_the_codec_it_used_most() -> None:
    found = rows()
    assert slow.train_of(found, slow.AUTO) == "int4"
    found[f"time {slow.AUTO}"]["codecs"] = {"bf16": 3, "int8": 1}
    assert slow.train_of(found, slow.AUTO) == "torch-fp16"
    assert slow.train_of({}, slow.AUTO) == ""


def test_claims() -> None:
    claims = {one.what: one for one in slow.claims(rows())}
    first = claims[f"speed over {slow.FP32}"]
    assert first.ours == f"16.7x ({slow.STELLA})"
    assert first.met is False
    auto = claims["time of auto over the best fixed codec"]
    assert (auto.met, auto.ours) == (True, "1.01x"), "one step of 150 at 1.5 s"
    assert claims[f"speed over {slow.HALF}"].verdict == "not measured"
    assert {one.met for one in slow.claims({})} == {None}


def test_the_fastest_is_named_beside_a_method_that_never_gets_there() -> None:
    found = rows()
    found["steps stellatrain-long"] = {"curves": {"1": NEVER, "2": NEVER}}
    found["steps stellatrain"]["curves"] = {"1": NEVER, "2": NEVER}
    found["steps int8"] = found["steps int4"]
    claims = {one.what: one for one in slow.claims(found)}
    beside = claims[f"speed over {slow.STELLA_LONG}"]
    assert beside.ours == "it never gets there (int4)"
    assert beside.met


def test_auto_beside_the_fixed_codecs_falls_short_where_one_is_faster() -> None:
    found = rows()
    found[f"time {slow.AUTO}"]["codecs"] = {"bf16": 18, "int4": 109}
    found[f"time {slow.HALF}"] = row_of_time(2.5)
    auto = {one.what: one for one in slow.claims(found)}["time of auto over the best fixed codec"]
    assert (auto.met, auto.ours) == (False, "1.48x")


def test_what_is_compared_can_be_trained_and_timed() -> None:
    names = {point.name for point in slow.points(quick=False)}
    for train, way in (*slow.METHODS.values(), *slow.IMAGES.values()):
        assert f"time {way}" in names
        assert not train or f"steps {train}" in names
    from training.methods import METHODS

    few = {"stellatrain-20", "stellatrain-8", *(train for train, _ in slow.IMAGES.values())}
    for name in names:
        kind, _, method = name.partition(" ")
        if kind == "steps":
            assert len(METHODS[method].seeds) == (3 if method in few else 8)


# ---- measurements ----


@pytest.mark.slow
@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
@pytest.mark.parametrize("name", ["auto", slow.STELLA])
def test_steps_are_timed_while_the_link_changes(name: str) -> None:
    point = next(one for one in slow.points(quick=True) if one.name == f"time {name}")
    way = {**point.settings["way"]}
    row = slow.measure(Point(point.name, {**point.settings, "hosts": 2, "way": way}))
    assert row["iteration_s"] >= slow.COMPUTE_S
    assert row["port_bytes"] > 0
    assert bool(row["codecs"]) == (name == "auto")
    assert len(row["every_s"]) == slow.steps.UNTIMED + point.settings["way"].get("steps", 2)
    assert sum(row["codecs"].values()) == (len(row["every_s"]) if name == "auto" else 0)
