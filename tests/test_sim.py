"""The whole C core on a system that is simulated, under seeds: tests/sim. Built and run under
sanitizers, beside the other tests (beside.py); `make sim SEEDS=10000` runs more of them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from beside import Done
from test_c import C_TESTS, require, require_sanitizer

SANITIZER = "address,undefined"
SIMULATE = C_TESTS.parents[1] / "build" / "ctest" / SANITIZER.replace(",", "-") / "simulate"
SEEDS = 1000
FOUND = (20015696, 20018549, 20019185)  # a goodbye was dropped where all lanes were probed
LEAST_KILLS, LEAST_DEATHS = 2000, 300

MAKE = ("flock", str(C_TESTS), "make", "--no-print-directory", "-C", str(C_TESTS))
simulated = pytest.mark.beside(
    *(*MAKE, f"SANITIZER={SANITIZER}", f"SEEDS={SEEDS}", "HOW=--until-fails", "simulate"), lane="c"
)


@pytest.fixture(autouse=True)
def tools(tmp_path: Path) -> None:
    require("make", "flock")
    require_sanitizer(SANITIZER, tmp_path)


@pytest.mark.slow
@simulated
def test_every_seed_is_safe_and_ends(beside: Done) -> None:
    assert beside.code == 0, beside.output[-8000:]
    assert beside.output.splitlines()[-1] == f"0 of {SEEDS} seeds failed"


@pytest.mark.slow
@simulated
def test_seeds_that_have_failed(beside: Done) -> None:
    assert beside.code == 0, beside.output[-8000:]
    for seed in FOUND:
        subprocess.run([str(SIMULATE), "--seed", str(seed)], check=True)


def check_counted(done: Done, what: str, least: int) -> None:
    assert done.code == 0, done.output[-8000:]
    counted = re.fullmatch(rf"0 of (\d+) {what} failed", done.output.splitlines()[-1])
    assert counted, done.output[-8000:]
    assert int(counted[1]) >= least


@pytest.mark.slow
@pytest.mark.beside(*MAKE, f"SANITIZER={SANITIZER}", "kills", lane="c")
def test_a_rank_may_be_killed_at_every_event(beside: Done) -> None:
    check_counted(beside, "kills", LEAST_KILLS)


@pytest.mark.slow
@pytest.mark.beside(*MAKE, f"SANITIZER={SANITIZER}", "deaths", lane="c")
def test_lanes_may_die_at_any_event(beside: Done) -> None:
    check_counted(beside, "deaths", LEAST_DEATHS)


@pytest.mark.slow
@simulated
def test_a_seed_is_replayed_event_by_event(beside: Done) -> None:
    assert beside.code == 0, beside.output[-8000:]
    faults = set[str]()
    for seed in range(1, 60):
        command = [str(SIMULATE), "--seed", str(seed), "--trace"]
        once, again = (subprocess.check_output(command, text=True) for _ in range(2))
        assert once == again, f"seed {seed}"
        faults |= set(re.findall(r"^\d+ - fault (\w+)", once, re.MULTILINE))
        assert re.search(r"^\d+ \d gone", once, re.MULTILINE)
    assert len(faults) >= 6, faults
