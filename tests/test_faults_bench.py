"""bench/faults.py: what it tries, how it judges, and that it goes on where it was interrupted."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from patience import PATIENCE, until

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

from lab import wiring  # noqa: E402
from trials.fault_lab import Trial  # noqa: E402
from trials.fault_table import judge, table  # noqa: E402


def _load(path: Path) -> ModuleType:
    """A command as a module; its name would be that of the tests' package."""
    spec = importlib.util.spec_from_file_location(f"bench_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


faults = _load(BENCH / "faults.py")
SETTINGS = {"peer_timeout": 3.0, "connect_timeout": 9.0, "heartbeat": 0.3, "timeout": 20.0}


def row(
    *errors: dict[str, Any],
    phase: str = "idle",
    fault: str = "cut",
    host: int = 1,
    nic: int = 1,
    to: int = -1,
    ports: int = 2,
    **ranks: Any,
) -> dict[str, Any]:
    """A row of as many ranks as there are errors; an empty one is that of a rank without any."""
    trial = Trial(ports, len(errors), phase, fault, host, nic, to, 0)
    told = [
        {
            "after": {"opened": -1.0, **({"failed": error.pop("at", 0.5)} if error else {})},
            "error": error
            and {
                "kind": "PeerLostError",
                "typed": True,
                "text": "",
                "rank": None,
                "rail": None,
                **error,
            },
            "lanes": [],
            "logged": [],
            "wrong": 0,
            "code": 0,
            **ranks,
        }
        for error in errors
    ]
    return {"trial": vars(trial), "settings": SETTINGS, "delay": 0.1, "ranks": told}


# ---- which trials ----


def planned(*argv: str) -> list[Trial]:
    return faults.plan(faults._parse(argv))


def test_every_port_of_every_host_in_every_phase() -> None:
    trials = planned()
    assert len(trials) >= 500
    assert len({trial.key for trial in trials}) == len(trials)
    cuts = {
        (t.host, t.nic)
        for t in trials
        if (t.ports, t.world, t.phase, t.fault) == (2, 3, "split", "cut")
    }
    assert cuts == {(host, nic) for host in range(3) for nic in range(2)}
    mutes = {
        (t.host, t.to)
        for t in trials
        if (t.ports, t.world, t.phase, t.fault, t.nic) == (2, 3, "small", "mute", 0)
    }
    assert mutes == {(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)}


# ---- verdicts ----


LOST = {"text": "rank 1 (host1) is lost: rail 1, eth1 to eth1", "rank": 1, "rail": 1}


def test_a_rank_that_names_rail_and_host_in_time_is_right() -> None:
    verdict = judge(row(dict(LOST), {**LOST, "rank": 0, "text": "rank 0 (host0)", "at": 0.75}))
    assert verdict.short == ()
    assert (verdict.seconds, verdict.rail, verdict.blame) == (0.75, "rail", "own end")


@pytest.mark.parametrize(
    ("errors", "short"),
    [
        ([dict(LOST), {}], "1 of 2 ranks never noticed"),
        ([dict(LOST), {**LOST, "at": 5.1}], "late"),
        ([dict(LOST), {**LOST, "rail": 0}], "rail: wrong"),
        ([dict(LOST), {**LOST, "rail": None, "text": "rank 1 is gone"}], "rail: none"),
        ([{**LOST, "rank": 2, "text": "rank 2 (host2)"}, dict(LOST), dict(LOST)], "host: wrong"),
        ([dict(LOST), {"rail": 1}], "host: nobody"),
        ([dict(LOST), {**LOST, "typed": False}], "an untyped error"),
    ],
)
def test_what_falls_short_is_said(errors: list[dict[str, Any]], short: str) -> None:
    assert judge(row(*errors)).short == (short,)


def test_its_own_place_in_a_ranks_message_blames_nobody() -> None:
    text = "barrier() #3 failed on rank 1 (host1) after 3.00 s: nothing came on rail 1"
    assert judge(row({"text": text}, dict(LOST))).blame == "nobody"


def test_a_job_may_start_without_the_port_if_it_says_so() -> None:
    left_out = row({}, {}, phase="bring-up", after={"opened": 2.5}, lanes=[[0, 0], [1, 0]])
    assert judge(left_out).short == ("left out without a word",)
    left_out["ranks"][0]["logged"] = ["rail 1 (eth1) does not reach rank 1: no answer"]
    verdict = judge(left_out)
    assert (verdict.short, verdict.left_out, verdict.seconds) == ((), True, 2.5)
    left_out["ranks"][1]["lanes"] = [[0, 0], [0, 1]]
    assert judge(left_out).short[0] == "2 of 2 ranks never noticed"


def test_the_table_has_a_line_for_each_fault_world_and_phase() -> None:
    rows = [
        row(dict(LOST), dict(LOST)),
        row(dict(LOST), dict(LOST), phase="split"),
        row(dict(LOST), {}, fault="mute", to=0),
    ]
    text = table(rows)
    assert text.startswith("3 trials; 1 fall short, of which in 1 a rank never noticed")
    assert "| cut | 2 | idle | 1 | 0.50 s | 0.50 s | rail 2 | host 2 |  |" in text
    assert "| mute | 2 | idle | 1 | never | never |" in text
    assert table([]) == "No trials yet."


# ---- the command ----


def faults_command(*argv: str) -> list[str]:
    return [sys.executable, str(BENCH / "faults.py"), *argv]


@pytest.fixture
def possible() -> None:
    reason = wiring.why_unavailable()
    if reason:
        pytest.skip(reason)


@pytest.mark.netns
def test_an_interrupted_run_goes_on_and_leaves_nothing(possible: None, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    argv = faults_command(
        "--out",
        str(out),
        "--jobs",
        "1",
        "--worlds",
        "2",
        "--ports",
        "1",
        "--faults",
        "cut,mute",
        "--phases",
        "idle,split",
        "--peer-timeout",
        "1",
    )
    with _started(argv) as command:
        assert until(lambda: out.exists() and out.read_text().count("\n") == 1)
        command.send_signal(signal.SIGINT)
        assert command.wait(PATIENCE) == 130
        assert not wiring.list_namespaces(f"netlab-{command.pid}-")
    made = out.read_text().count("\n")
    assert made < 4
    out.write_text(out.read_text() + '{"trial": {"ports"')
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, check=False)
    rows = faults.read_rows(out)
    assert len({Trial(**row["trial"]).key for row in rows}) == len(rows) == 4, ended.stderr
    assert ended.stdout.startswith("4 trials;")
    for one in rows:
        assert [rank["error"]["typed"] for rank in one["ranks"]] == [True, True], json.dumps(one)


@contextlib.contextmanager
def _started(argv: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as command:
        try:
            yield command
        finally:
            command.kill()
