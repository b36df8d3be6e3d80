"""tools/compare.py: what it finds between results, and one scene of this working copy."""

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
)  # fmt: skip
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
