"""`peers.py --all`: the rows as data, how they are judged, and a run of small scenes."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import small_scenes
from beside import Done

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

import netlab  # noqa: E402
from comparison import all_scenes, verdicts  # noqa: E402
from comparison.scenes import LINE_SHARE, SCENES, Goal, Scene  # noqa: E402
from comparison.standings import SUBJECTS, Measurement  # noqa: E402
from comparison.verdicts import followed, judge  # noqa: E402
from libraries.contenders import CONTENDERS  # noqa: E402
from measure.physical import Physical  # noqa: E402

FLOOR = Physical(
    {4: 5.0},
    stream=2.0,
    stream_cpu=0.2,
    copy=9.0,
    copy_near=20.0,
    copy_handed=10.0,
    congestion="reno",
)
SIZE = 1_000_000


def one(library: str, turn: int, time_us: float, wire: str = "none", wrong: int = 0) -> Measurement:
    return Measurement(
        "here", library, wire, SIZE, turn, time_us, SIZE / time_us / 1e3, 0.25, wrong
    )


def scene(goal: Goal, **settings: object) -> Scene:
    return Scene("group", "here", 2, ("ringcomm", "gloo", "mpich"), (goal,), **settings)


def judged(goal: Goal, rows: list[Measurement], **settings: object) -> verdicts.Finding:
    (found,) = judge(scene(goal, **settings), rows, [FLOOR])
    return found


# --- the rows ---


def test_the_rows_can_be_measured() -> None:
    names = [scene.name for scene in SCENES]
    assert len(names) == len(set(names))
    for scene in SCENES:
        assert set(scene.libraries) <= set(CONTENDERS), scene.name
        assert scene.libraries[0] in SUBJECTS
        assert scene.goals
        assert scene.kind in all_scenes._RUNNERS
        assert (scene.line() > 0) == any(
            goal.figure in ("share", "follow_s") for goal in scene.goals
        ) or scene.hosts
        assert not any(CONTENDERS[name].local for name in scene.libraries) or scene.hosts == 0


def test_tcp_rows_switch_shared_memory_off() -> None:
    assert CONTENDERS["ringcomm"].env == {"RINGCOMM_SHARED_MEMORY": "0"}
    assert not CONTENDERS["ringcomm-shm"].env


# --- verdicts ---


@pytest.mark.parametrize(
    ("limit", "verdict"), [(1000, "met"), (999, "short"), (499, "short: the floor is 500 us")]
)
def test_a_time(limit: float, verdict: str) -> None:
    rows = [one("ringcomm", turn, us) for turn, us in enumerate([900.0, 1000.0, 1100.0])]
    rows += [one("gloo", turn, us) for turn, us in enumerate([1800.0, 3000.0, 4400.0])]
    found = judged(Goal("time_us", limit, SIZE), rows)
    assert (found.value, found.verdict, found.measured) == (1000.0, verdict, "1.00 ms")
    assert found.peers == {"gloo": 3.0}
    assert found.over_floor == pytest.approx(2)
    assert found.spread == pytest.approx(0.2)


@pytest.mark.parametrize(("share", "verdict"), [(0.95, "met"), (0.97, "short")])
def test_a_share_of_the_ports(share: float, verdict: str) -> None:
    line = 2000e6 / 8 * LINE_SHARE
    rows = [one("ringcomm", 0, SIZE / (0.96 * line) * 1e6)]
    found = judged(Goal("share", share, SIZE), rows, hosts=2, nics=(1000, 1000))
    assert found.value == pytest.approx(0.96)
    assert found.verdict == verdict
    slow = dataclasses.replace(FLOOR, stream=0.9 * line / 1e9)
    (beyond,) = judge(scene(Goal("share", 0.97, SIZE), hosts=2, nics=(1000, 1000)), rows, [slow])
    assert beyond.verdict == "short: the floor is 90.0 %"


def test_the_best_peer_is_that_of_the_round() -> None:
    rows = [one("ringcomm", turn, 100.0) for turn in range(3)]
    rows += [one("gloo", 0, 50.0), one("gloo", 1, 200.0), one("gloo", 2, 200.0)]
    rows += [one("mpich", 0, 80.0), one("mpich", 1, 125.0), one("mpich", 2, 125.0)]
    best = judged(Goal("best", 1.0, SIZE), rows)
    assert (best.value, best.verdict) == (0.8, "met")  # of 2, 0.8 and 0.8
    gloo = judged(Goal("gloo", 1.2, SIZE), rows[:1] + rows[3:4])
    assert (gloo.value, gloo.verdict) == (2.0, "short")
    assert judged(Goal("best", 1.0, SIZE), rows[:3]).verdict == "not measured"


def test_cpu_is_compared_with_cpu() -> None:
    rows = [one("ringcomm", 0, 10.0), dataclasses.replace(one("gloo", 0, 10.0), cpu=1.0)]
    found = judged(Goal("cpu", 0.3, SIZE), rows)
    assert (found.value, found.over_floor, found.peers) == (0.25, pytest.approx(1.25), {"gloo": 4})
    over = judged(Goal("cpu_floor", 1.25, SIZE), rows)
    assert (over.value, over.verdict) == (pytest.approx(1.25), "met")


def test_a_wrong_element_is_no_success() -> None:
    found = judged(Goal("time_us", 100, SIZE), [one("ringcomm", 0, 1.0, wrong=3)])
    assert found.verdict == "wrong: 3 elements"


def test_wire_formats_stay_apart() -> None:
    rows = [one("ringcomm", 0, 100.0), one("ringcomm", 0, 60.0, "bf16"), one("gloo", 0, 90, "bf16")]
    found = judged(Goal("time_us", 70, SIZE, "bf16"), rows)
    assert (found.value, found.peers) == (60.0, {"gloo bf16": 1.5})
    assert found.over_floor == pytest.approx(60 / 250)


def test_a_new_rate_must_hold() -> None:
    """20 calls a second; the new rate is there after a second, but for one lull."""
    stamps = [0.05 * call for call in range(20)] + [1.0 + 0.01 * call for call in range(40)]
    rate = SIZE / 0.01 / 1e9
    assert followed(stamps, SIZE, 0.0, rate * 0.99) is None
    more = stamps + [1.39 + 0.01 * call for call in range(1, 100)]
    assert followed(more, SIZE, 0.0, rate * 0.99) == pytest.approx(1.0)
    assert followed(more, SIZE, 0.0, SIZE / 0.05 / 1e9 * 0.99) == 0.0
    assert followed([], SIZE, 0.0, 1.0) is None


def test_a_change_of_rate_is_judged_by_its_own_sum() -> None:
    goals = (Goal("follow_s", 1.0, SIZE, mbit=200), Goal("follow_s", 1.0, SIZE, mbit=1000))
    line = [sum(nics) * 1e6 / 8 * LINE_SHARE for nics in ((1000, 200), (1000, 1000))]
    stamps = [0.0]
    while stamps[-1] < 4:
        rate = line[0] if stamps[-1] < 2 or stamps[-1] > 3 else line[1]
        stamps.append(stamps[-1] + SIZE / rate)
    both = Scene("shift", "here", 2, ("ringcomm",), goals, hosts=2, nics=(1000, 1000), kind="shift")
    first, second = verdicts.judge_shift(both, SIZE, stamps, [0.5, 2.0])
    assert (first.verdict, first.value) == ("met", pytest.approx(0.0, abs=0.02))
    assert second.verdict == "met"
    assert verdicts.judge_shift(both, SIZE, stamps, [0.5, 3.0])[1].verdict == "short"
    assert [row.verdict for row in verdicts.judge_shift(both, SIZE, [], [])] == []


def test_an_idle_rank() -> None:
    (idle,) = [scene for scene in SCENES if scene.kind == "idle"]
    rows = verdicts.judge_idle(idle, {"ringcomm": 0.0005, "gloo": 0.005})
    assert [row.verdict for row in rows] == ["met", "not measured"]
    assert rows[0].peers == {"gloo": pytest.approx(10)}


# --- all of it ---


PLOT = ("--plot", "{folder}/out.png") if importlib.util.find_spec("matplotlib") else ()


@pytest.mark.slow
@pytest.mark.beside(
    "{python}",
    small_scenes.__file__,
    "--all",
    "--quick",
    "--minutes",
    "12",
    "--libraries",
    "ringcomm,gloo",
    "--json",
    "{folder}/out.json",
    "--markdown",
    "{folder}/out.markdown",
    *PLOT,
)
def test_small_scenes(beside: Done) -> None:
    """A sweep and an idle communicator, through every output."""
    pytest.importorskip("ringcomm")
    pytest.importorskip("torch")
    assert beside.code == 0, beside.output
    told = json.loads((beside.folder / "out.json").read_text())
    assert [row["verdict"].partition(":")[0] for row in told["findings"]] == [
        "met",
        "met",
        "short",
        "met",
        "met",
        "not measured",
    ], beside.output
    assert all(row["peers"]["gloo"] > 0 for row in told["findings"][:3])
    assert told["findings"][3]["peers"]["gloo bf16"] > 0
    assert (beside.folder / "out.markdown").read_text().count("| met |") == 4
    if PLOT:
        assert (beside.folder / "out-loopback.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.netns
def test_a_rate_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ringcomm")
    reason = netlab.why_unavailable()
    if reason:
        pytest.skip(reason)
    monkeypatch.setattr(all_scenes, "LEAD_S", 0.5)
    monkeypatch.setattr(all_scenes, "AFTER_S", 1.0)
    notes: list[str] = []
    goals = (Goal("follow_s", 9.0, 100_000, mbit=50),)
    outcome = all_scenes.run(
        [Scene("shift", "s", 2, ("ringcomm",), goals, hosts=2, nics=(100, 100), kind="shift")],
        all_scenes.Settings(("ringcomm",), Path(), timeout=300),
        notes.append,
    )
    assert outcome.stamps["s"], notes
    assert len(outcome.findings) == 1
    assert outcome.changes["s"][0] < outcome.stamps["s"][-1]
