"""tools/compare.py: what it finds between results, and what it runs and counts, of this tree."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import compare

HERE = compare.Tree("here", compare.ROOT, compare.ROOT)
WORLD = compare.World(2, memory=True)
ONE = np.linspace(-1, 1, 7, dtype=np.float32)


def off_by(amount: float) -> np.ndarray:
    """ONE with its last element larger."""
    other = ONE.copy()
    other[-1] += np.float32(amount)
    return other


def raised(text: str) -> np.ndarray:
    return np.array(text)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ([ONE, ONE], [ONE, ONE], ""),
        ([ONE, ONE], [ONE, off_by(0.5)], "1 of 14 elements unlike, by up to 0.5"),
        ([ONE], [ONE[1:]], "7 and 6 elements"),
        ([ONE], [ONE * np.float32("nan")], "7 of 7 elements unlike, by up to nan"),
        ([ONE * np.float32(0)], [ONE * np.float32(-0.0)], "7 of 7 elements unlike, by up to 0"),
        ([ONE], [raised("ConfigError: no")], "NEW raises ConfigError: no"),
        ([raised("a")], [raised("b")], "OLD: a; NEW: b"),
        ([raised("a")], [raised("a")], ""),
    ],
)
def test_a_difference_is_told(old: list[np.ndarray], new: list[np.ndarray], said: str) -> None:
    assert compare.difference(old, new) == said


def test_scenes_of_one_commit_alone_are_named() -> None:
    verdict, apart = compare.compare_bits({WORLD: {"a": [ONE], "b": [ONE]}}, {WORLD: {"a": [ONE]}})
    assert verdict.differ == 1
    assert verdict.lines[-1] == "b, 2 memory: in OLD only"
    assert not apart[WORLD]


def test_a_scene_is_repeated_to_the_bit_and_a_change_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scenes = ["allreduce int4 with feedback", "allreduce onebit"]
    kept = compare.steps_of(HERE, WORLD, scenes)
    assert [len(kept[name]) for name in scenes] == [2, 2]
    assert [one.size for one in kept[scenes[0]]] == [1 + 1009 + 40_013] * 2
    command = [".", ".", "--parts", "bits", "--worlds", "2", "--scenes", *scenes]
    results = [kept, compare.steps_of(HERE, WORLD, scenes)] * 2
    monkeypatch.setattr(compare, "steps_of", lambda tree, world, patterns: results.pop(0))
    assert compare.main(command) == 0
    assert "bits: nothing differs" in capsys.readouterr().out

    changed = {**kept, scenes[1]: [kept[scenes[1]][0] + np.float32(0.25), kept[scenes[1]][1]]}
    results += [kept, kept, kept, changed, kept]
    assert compare.main(command) == 1
    said = capsys.readouterr().out
    assert "bits: 1 differs" in said
    assert "allreduce onebit, 2 memory: " in said
    assert "41023 of 82046 elements unlike, by up to 0.25" in said
    assert "differs from itself" not in said


def test_what_cannot_be_compared_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([".", "no-such-commit"]) == 2
    assert "no-such-commit" in capsys.readouterr().err


def test_a_changed_golden_frame_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = tmp_path / "tests" / "golden"
    golden.mkdir(parents=True)
    for path in (compare.ROOT / "tests" / "golden").glob("*.hex"):
        text = path.read_text()
        if path.name == "barrier.hex":
            text = text.replace("52 43", "52 44", 1)
        (golden / path.name).write_text("# a remark\n" + text)
    monkeypatch.setattr(compare, "encodes", lambda tree: "")
    verdict = compare.part_frames(HERE, compare.Tree("there", tmp_path, tmp_path))
    assert verdict.lines[-1] == "barrier.hex: the bytes differ"
    assert verdict.differ == 1


# ---- counts ----


def test_strace_is_read_by_sections() -> None:
    log = """\
7 read(3, "x", 1) = 1
7 access("/ringcomm-compare/nothing", F_OK) = -1 ENOENT (No such file or directory)
8 sendmsg(5, {msg_name=NULL}, MSG_NOSIGNAL) = 48
7 futex(0x5581, FUTEX_WAIT_PRIVATE, 0, NULL <unfinished ...>
8 madvise(0x7f, 4096, MADV_DONTNEED) = 0
7 <... futex resumed>) = 0
7 access("/ringcomm-compare/barrier", F_OK) = -1 ENOENT (No such file or directory)
8 +++ exited with 0 +++
"""
    assert compare.sections_of_log(iter(log.splitlines())) == {
        "nothing": [{"transfers": 1, "waits": 0, "others": 0}],
        "barrier": [{"transfers": 1, "waits": 1, "others": 1}],
    }


def test_callgrind_is_read_by_objects_and_callees_are_not_counted_twice() -> None:
    dump = """\
desc: Trigger: Client Request: 4 KiB none
positions: line
events: Ir
summary: 119

ob=(1) /site/ringcomm/_core.so
fl=(1) a.c
fn=(1) send
16 10
+1 5
cob=(2) /lib/libc.so
cfn=(2) memcpy
calls=3 20
* 100
-2 4

ob=(2)
fn=(2)
20 100
"""
    section, found = compare.instructions_of(dump.splitlines())
    assert section == "4 KiB none"
    assert found == {"/site/ringcomm/_core.so": 19, "/lib/libc.so": 100}


@pytest.mark.parametrize(
    ("olds", "news", "more"),
    [
        ([10, 10], [11], True),
        ([10, 10], [10.4], False),
        ([10, 12], [13], False),
        ([10, 10], [11, 10.2], False),
        ([1000, 1000], [1009], False),
        ([10, 10], [2], False),
    ],
)
def test_more_is_what_exceeds_the_noise(olds: list[float], news: list[float], more: bool) -> None:
    assert compare.has_more("transfers", olds, news) is more


def test_calls_are_counted_and_one_more_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "COUNTERS", {"bytes": compare.COUNTERS["bytes"]})
    monkeypatch.setitem(compare.ROUNDS, "bytes", 1)
    kept = compare.count(HERE, False, "bytes")
    assert 2 << 20 <= kept["1 MiB none"]["sent"] < 2.01 * (1 << 20)
    assert 1 << 20 <= kept["1 MiB bf16"]["received"] < 1.01 * (1 << 20)

    one_more = {**kept["barrier"], "sent": kept["barrier"]["sent"] + 128}
    extra = {**kept, "barrier": one_more}
    for new, status in ((kept, 0), (extra, 1)):
        runs = [kept, new, kept] * 2 * compare.TRIES
        monkeypatch.setattr(compare, "count", lambda *_, runs=runs: runs.pop(0))
        assert compare.main([".", ".", "--parts", "counts"]) == status
        assert ("MORE" in capsys.readouterr().out) == bool(status)


def test_what_cannot_be_counted_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare.shutil, "which", lambda name: None)
    verdict = compare.part_counts(HERE, HERE, "instructions", True)
    assert verdict.differ == 1
    assert verdict.lines == ["instructions, memory: NOT COUNTED: valgrind is not installed"]
