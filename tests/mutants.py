"""Plants known faults, one at a time, and runs the tests that must find them: `make mutants`.

    python tests/mutants.py [NAME ...]       some of them; without names, all

Each file of tests/mutants is a patch of csrc or ringcomm. Its head has one sentence on the fault,
and the tests, a line each: a pytest node id; or a C test as its file, with SANITIZER=address behind
it where that is what finds the fault.

    A segment's checksum is not compared.

    tests: tests/c/test_frame.c
    tests: tests/test_wire.py::test_a_damaged_frame

    --- a/csrc/net/frame.c
    ...

A fault is found when the tests fail, crash or take too long; where the simulation (tests/sim) finds
it, in how many seeds is said. It is planted in a copy of the tree, build/mutants, which is kept for
the next time. The tests that are named must pass there before; a patch that does not apply or
compile is an error, as is one whose tests are not to be had.

Ends with 1 unless all are found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "mutants"
TREE = ROOT / "build" / "mutants"
LIMIT_S = 180.0
PATIENCE_S = "10"  # of tests, most of which fail here; as much as a machine that is idle takes
C_TEST = "tests/c/test_"
#: How pytest ends when it has not run a test: usage, none collected.
NOT_RUN = (4, 5)


class MutantError(Exception):
    """A mutant that says nothing: the text is why."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A patch of tests/mutants.

    Attributes:
        fault: what is wrong with the code under it.
        tests: node ids of pytest.
        c_tests: C tests as arguments of tests/c/Makefile: NAMES=..., and a SANITIZER=... or none.
    """

    path: Path
    fault: str
    tests: tuple[str, ...]
    c_tests: tuple[tuple[str, ...], ...]

    @property
    def name(self) -> str:
        return self.path.stem


def read(path: Path) -> Mutant:
    """Raises MutantError for a file without a fault, tests or changes."""
    head, separator, _ = path.read_text(encoding="utf-8").partition("\n--- a/")
    words = [line.partition("tests: ") for line in head.splitlines()]
    named = [test.strip() for before, mark, test in words if mark and not before]
    fault = " ".join(before.strip() for before, mark, _ in words if before and not mark)
    if not (separator and named and fault):
        raise MutantError("give a sentence on the fault, tests, and a patch that 'git diff' made")
    c_tests = []
    for file, *how in (one.split() for one in named if C_TEST in one):
        c_tests.append((f"NAMES={file.removeprefix(C_TEST).removesuffix('.c')}", *how))
    return Mutant(path, fault, tuple(one for one in named if C_TEST not in one), tuple(c_tests))


def mutants(names: Sequence[str] = ()) -> list[Mutant]:
    """Those of tests/mutants, or some. Raises MutantError for a name that there is not."""
    paths = {path.stem: path for path in sorted(FOLDER.glob("*.patch"))}
    unknown = sorted(set(names) - set(paths))
    if unknown:
        raise MutantError(f"there is no {', '.join(unknown)} in {FOLDER}")
    return [read(paths[name]) for name in names or paths]


class Tree:
    """A copy of the tree, with what is built in it.

    Args:
        folder: where it is, or is going to be.
        limit: seconds that the tests of a mutant may take.
    """

    def __init__(self, folder: Path, limit: float = LIMIT_S) -> None:
        self._folder, self._limit = folder, limit
        self._env = {
            "TESTS_PATIENCE": PATIENCE_S,
            **os.environ,
            "PYTHONPATH": str(folder),
            "PYTEST_ADDOPTS": "",
            "PYTHONDONTWRITEBYTECODE": "1",  # which knows a module by its second and its size
            "GIT_CEILING_DIRECTORIES": str(folder.parent),
        }

    def update(self, root: Path) -> None:
        """Makes its sources those of ``root``. Files that are as before keep their times, so that
        only the others are compiled."""
        listed = subprocess.run(
            ["git", "ls-files", "-coz", "--exclude-standard"],
            cwd=root,
            check=True,
            capture_output=True,
        )
        found = os.fsdecode(listed.stdout).split("\0")
        names = {name for name in found if (root / name).is_file()}
        for path in self._sources():
            if str(path.relative_to(self._folder)) not in names:
                path.unlink()
        for name in names:
            source, target = root / name, self._folder / name
            if not target.exists() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)

    def _sources(self) -> list[Path]:
        """Its code, without what was built."""
        built = self._folder / "build"
        return sorted(
            path
            for path in self._folder.rglob("*.*")
            if path.suffix in (".c", ".h", ".py") and built not in path.parents
        )

    @contextlib.contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """With the fault in it. Raises MutantError if the patch does not apply."""
        self._apply(mutant)
        try:
            yield
        finally:
            self._apply(mutant, "-R")

    def _apply(self, mutant: Mutant, *options: str) -> None:
        done = subprocess.run(
            ["git", "apply", *options, str(mutant.path)],
            cwd=self._folder,
            env=self._env,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise MutantError(f"does not apply: {done.stderr.strip()}")

    def fails(self, tests: Sequence[str], c_tests: Sequence[Sequence[str]]) -> str:
        """How one of the tests fails; "" if all pass. Raises MutantError where they cannot run."""
        ends = time.monotonic() + self._limit
        for arguments in c_tests:
            make = ["make", "-s", "-j", str(os.cpu_count()), "-C", "tests/c", *arguments]
            if self._run(make, None):
                raise MutantError(f"does not compile: {' '.join(make)} in {self._folder}")
            code = self._run([*make, "run"], ends)
            if code:
                return "is too slow" if code is None else "fails"
        if tests:
            self._build()
            code = self._run(
                [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests], ends
            )
            if code in NOT_RUN:
                raise MutantError("pytest does not find its tests")
            if code != 0:
                how = "is too slow" if code is None else "crashes" if code < 0 else "fails"
                return how + self._seeds()
        return ""

    def _seeds(self) -> str:
        """How many seeds the simulation took, if that is the test which failed."""
        log = (self._folder / "log.txt").read_text(errors="replace")
        seeds = re.findall(r"[1-9]\d* of (\d+) seeds failed", log)
        return f" in {seeds[-1]} seeds" if seeds else ""

    def _build(self) -> None:
        """Builds the core in place where csrc is not what it was built from."""
        core = self._folder / "csrc"
        sources = [path for path in self._sources() if core in path.parents]
        if not sources:
            return
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
        built = self._folder / "build" / "built-from"
        if built.exists() and built.read_text() == digest:
            return
        built.unlink(missing_ok=True)
        compiler = f"sh {self._folder}/tests/mutants/cc.sh"
        done = subprocess.run(
            [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"],
            cwd=self._folder,
            env={**self._env, "CC": compiler, "NVCC": ""},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise MutantError(f"does not compile:\n{done.stdout}{done.stderr}")
        built.write_text(digest)

    def _run(self, command: Sequence[str], ends: float | None) -> int | None:
        """Its exit status; None if it had to be ended. What it says goes to log.txt."""
        with (self._folder / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                return process.wait(None if ends is None else max(1.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                return None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def tried(tree: Tree, mutant: Mutant) -> tuple[str, str]:
    """ "found", "LIVES" or "ERROR", and more on it."""
    try:
        with tree.planted(mutant):
            how = tree.fails(mutant.tests, mutant.c_tests)
    except MutantError as error:
        return "ERROR", str(error)
    return ("found", how) if how else ("LIVES", mutant.fault)


def main(names: Sequence[str]) -> int:
    began = time.monotonic()
    chosen = mutants(names)
    tree = Tree(TREE)
    tree.update(ROOT)
    tests = sorted({test for one in chosen for test in one.tests})
    c_tests = sorted({test for one in chosen for test in one.c_tests})
    print(f"{len(tests) + len(c_tests)} tests without a fault, in {TREE}", flush=True)
    if Tree(TREE, 1800.0).fails(tests, c_tests):
        print((TREE / "log.txt").read_text(errors="replace"))
        print("error: tests fail without a fault")
        return 1
    counts = {"found": 0, "LIVES": 0, "ERROR": 0}
    for mutant in chosen:
        start = time.monotonic()
        outcome, more = tried(tree, mutant)
        counts[outcome] += 1
        print(f"{outcome} {mutant.name} ({time.monotonic() - start:.0f} s): {more}", flush=True)
    print(f"{counts['found']} of {len(chosen)} found in {time.monotonic() - began:.0f} s")
    return int(counts["found"] < len(chosen))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except MutantError as error:
        sys.exit(f"error: {error}")
