"""bench/sources/real.py: its arithmetic, the clock that stands still, and one short run."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

from beside import Done  # noqa: E402
from netlab import why_unavailable  # noqa: E402
from ranks import run_ranks  # noqa: E402
from report.rows import Rows  # noqa: E402
from sources import real  # noqa: E402
from sources.source import found  # noqa: E402
from training.methods import METHODS  # noqa: E402
from training.watch import Watch  # noqa: E402

pytestmark = pytest.mark.torch


def row_of(step_s: float, steps: int = 400, last: float = 1.6) -> dict[str, Any]:
    """Losses fall by a line; a tenth of a second of compute."""
    curve = [
        [at, 3.0 - (3.0 - last) * at / 400, at * step_s, at * 1000]
        for at in range(10, steps + 1, 10)
    ]
    return {
        "curve": curve,
        "compute_s": 0.1,
        "over": steps < 400,
        "lr": 0.01,
        "load": 0.5,
        "git": "abc",
        "date": "2026-01-01",
        "cpu": "one",
        "torch": "2",
    }


def rows() -> dict[str, Any]:
    """int4 is eight times as fast as fp32, which its limit ended; OuterStep has one seed."""
    return {
        **{f"{real.FP32}, seed {seed}": row_of(2.0, 240) for seed in real.SEEDS},
        **{f"int4 hook, seed {seed}": row_of(0.25) for seed in real.SEEDS},
        "OuterStep int4, H = 10, seed 1": row_of(0.125),
    }


def test_seconds_to_a_loss() -> None:
    assert real.seconds_to(row_of(1.0), 2.3) == pytest.approx(200)
    assert real.seconds_to(row_of(1.0, 190), 2.3) == math.inf
    assert real.median_to(rows(), "OneBitAdam") is None


def test_the_fastest_is_named_beside_each_of_torchs() -> None:
    first, *others = real.claims(rows())
    assert (first.ours, first.verdict) == ("> 10.8x (OuterStep int4, H = 10)", "met")
    assert {claim.verdict for claim in others} == {"not measured"}
    assert {claim.verdict for claim in real.claims({})} == {"not measured"}


def test_what_is_compared_is_tuned() -> None:
    assert {point.settings["method"] for point in real.points(quick=False)} <= set(METHODS)
    assert {real.rate_of(method) for method, _, _ in real.METHODS.values()} <= {
        0.01,
        0.02,
        0.04,
        0.08,
    }


def test_the_clock_stands_still_while_a_model_is_judged() -> None:
    """Of two ranks one judges; the time is the same for both, and none of it is the judge's."""

    def rank(comm: Any) -> Watch:
        watch = Watch(comm, every=1, limit_s=1e9, sent=lambda: 7)
        watch.start()
        for step in (1, 2):
            with watch.stopped():
                if comm.rank == 0:
                    time.sleep(0.3)
                    watch.note(step, 1.0)
        return watch

    began = time.perf_counter()
    first, second = run_ranks(2, rank)
    assert first.seconds == second.seconds
    assert first.seconds <= time.perf_counter() - began - 0.6
    assert [(step, sent) for step, _, _, sent in first.curve] == [(1, 0), (2, 0)]
    assert second.curve == []


def test_time_that_is_up_is_up_for_all() -> None:
    def rank(comm: Any) -> bool:
        watch = Watch(comm, every=1, limit_s=0.1, sent=lambda: 0)
        watch.start()
        time.sleep(0.2 * comm.rank)  # one rank alone is late
        with watch.stopped():
            pass
        return watch.is_over

    assert run_ranks(2, rank) == [True, True]


@pytest.mark.slow
@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
@pytest.mark.beside(
    "{python}", str(BENCH / "results.py"), "real", "--quick", "--rows", "{folder}/rows"
)
def test_a_short_run(beside: Done) -> None:
    """Four hosts train for four steps, and the loss is evaluated after two and after all."""
    assert beside.code == 0, beside.output
    (row,) = found(Rows(beside.folder / "rows"), "real", True).values()
    (two, *_), (four, loss, seconds, sent) = row["curve"]
    assert (two, four) == (2, 4)
    assert loss < 5
    assert seconds > 0
    assert 0.8 < sent / four / 471_936 < 1.6, "int4 and the links' own headers"
    assert row["compute_s"] > 0
