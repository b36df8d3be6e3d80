"""The faults of tests/mutants: each applies to the tree, and names tests that there are. Whether
they are found is what `make mutants` shows."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import mutants
import pytest

ROOT = mutants.ROOT
LEAST = 30

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def test_there_are_enough() -> None:
    known = mutants.mutants()
    assert len(known) >= LEAST
    assert {path.suffix for path in mutants.FOLDER.iterdir()} == {".patch", ".sh"}
    for one in known:
        assert one.tests or one.c_tests, one.name
        assert one.fault.endswith("."), one.name


@needs_git
def test_each_applies() -> None:
    wrong = [
        one.name
        for one in mutants.mutants()
        if subprocess.run(["git", "apply", "--check", str(one.path)], cwd=ROOT).returncode
    ]
    assert not wrong, f"make these again for the tree as it is: {wrong}"


def test_each_names_tests_that_there_are() -> None:
    for one in mutants.mutants():
        for name, *_ in one.c_tests:
            file = f"test_{name.removeprefix('NAMES=')}.c"
            assert (ROOT / "tests" / "c" / file).is_file(), one.name
        for node in one.tests:
            file, _, test = node.partition("::")
            text = (ROOT / file).read_text(encoding="utf-8")
            called = re.escape(test.partition("[")[0])
            assert not test or re.search(rf"^def {called}\(", text, re.MULTILINE), one.name


THING = "def double(x: int) -> int:\n    return 2 * x\n"
TESTS = "from thing import double\n\n\ndef test_one() -> None:\n    assert double(1) == 2\n"
HEAD = "Doubles wrongly.\n\ntests: test_thing.py::test_{}\n\n"
PATCH = """--- a/thing.py
+++ b/thing.py
@@ -1,2 +1,2 @@
 def double(x: int) -> int:
-    return {}
+    return {}
"""


@needs_git
@pytest.mark.parametrize(
    ("before", "after", "test", "outcome"),
    [
        ("2 * x", "3 * x", "one", "found"),
        ("2 * x", "x + 1", "one", "LIVES"),
        ("3 * x", "2 * x", "one", "ERROR"),
        ("2 * x", "3 * x", "two", "ERROR"),
    ],
)
def test_what_becomes_of_a_fault(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    after: str,
    test: str,
    outcome: str,
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take time to import
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / "thing.py").write_text(THING)
    (folder / "test_thing.py").write_text(TESTS)
    patch = tmp_path / "wrong.patch"
    patch.write_text(HEAD.format(test) + PATCH.format(before, after))
    mutant = mutants.read(patch)
    assert (mutant.name, mutant.fault) == ("wrong", "Doubles wrongly.")
    assert mutants.tried(mutants.Tree(folder), mutant)[0] == outcome
    assert (folder / "thing.py").read_text() == THING
