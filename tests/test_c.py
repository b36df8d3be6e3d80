"""The C tests: built and run through tests/c/Makefile, plain and under each sanitizer, beside the
other tests (beside.py)."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from beside import Done
from test_layers import C_FILES, own_includes

ROOT = Path(__file__).resolve().parent.parent
C_TESTS = ROOT / "tests" / "c"
COMPILER = "aarch64-linux-gnu-gcc"
ARM = (f"CC={COMPILER}", "LDFLAGS=-static")
EMULATOR = shutil.which("qemu-aarch64-static")
PROBE = "#include <pthread.h>\nint main(void) { return 0; }\n"


def run(command: list[str], **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=C_TESTS,
        env={**os.environ, **settings},
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=900,
    )


def require_sanitizer(sanitizer: str, folder: Path) -> None:
    """Skips unless the compiler has this runtime and it starts on this kernel."""
    source, program = folder / "probe.c", folder / "probe"
    source.write_text(PROBE, encoding="ascii")
    compiler = os.environ.get("CC", "gcc")
    built = run([compiler, f"-fsanitize={sanitizer}", str(source), "-o", str(program), "-pthread"])
    if built.returncode:
        pytest.skip(f"{compiler} has no runtime for -fsanitize={sanitizer}: {built.stdout[-200:]}")
    started = run(["./run.sh", str(write_program(folder, "probe_run", f"{program} && {DONE}"))])
    if started.returncode:
        pytest.skip(f"-fsanitize={sanitizer} does not run here: {started.stdout[-200:]}")


DONE = "echo 1 passed, 0 failed"


def write_program(folder: Path, name: str, line: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{line}\n", encoding="ascii")
    path.chmod(0o755)
    return path


def what_failed(output: str) -> str:
    """The sections of the programs that failed, or the end if none has been run."""
    sections = [
        part
        for part in output.split("== ")[1:]
        if ", 0 failed" not in part or "ended with status" in part
    ]
    return "== ".join(sections)[-8000:] or output[-8000:]


def suite(*words: str) -> pytest.MarkDecorator:
    """What make shall do there. It waits for who else builds there: .ci/run."""
    make = ["make", "--no-print-directory", "-C", str(C_TESTS), f"-j{min(os.cpu_count() or 1, 8)}"]
    slow = "TEST_TIMEOUT=600"  # on a busy machine, where all else goes first
    return pytest.mark.beside("env", slow, "flock", str(C_TESTS), *make, *words, lane="c")


def require(*tools: str) -> None:
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sanitizer", "least"),
    [
        pytest.param(sanitizer, least, marks=suite(f"SANITIZER={sanitizer}", "run"))
        for sanitizer, least in (("", 30), ("address,undefined", 400), ("thread", 200))
    ],
)
def test_c(sanitizer: str, least: int, beside: Done, tmp_path: Path) -> None:
    require("make", "flock")
    if sanitizer:
        require_sanitizer(sanitizer, tmp_path)
    assert beside.code == 0, what_failed(beside.output)
    passed, failed = beside.output.splitlines()[-1].split(", ")
    assert int(passed.split()[0]) >= least
    assert failed == "0 failed"


@pytest.mark.slow
@suite(*ARM, *((f"RUNNER={EMULATOR}", "run") if EMULATOR else ("all",)))
def test_another_architecture(beside: Done) -> None:
    """ARM: the whole core compiles without a warning, and in an emulator the NEON kernels have the
    bits of the portable ones, and the CRC those of its definition."""
    require("make", "flock", COMPILER)
    assert beside.code == 0, beside.output[-8000:]
    if EMULATOR is None:
        pytest.skip("compiled; qemu-aarch64-static is not installed, so nothing was run")


@pytest.mark.parametrize(
    ("line", "summary"),
    [
        (DONE, "3 passed, 0 failed"),
        ("echo 0 passed, 1 failed; exit 1", "2 passed, 1 failed"),
        ("echo 4 passed, 0 failed; exit 66", "6 passed, 1 failed"),
        ("kill -SEGV $$", "2 passed, 1 failed"),
        ("echo says nothing of tests", "2 passed, 1 failed"),
        ("sleep 30", "2 passed, 1 failed"),
    ],
)
def test_runner_counts_what_fails(line: str, summary: str, tmp_path: Path) -> None:
    """A failure in any way is one, and the programs after it still run."""
    first = write_program(tmp_path, "first", DONE)
    middle = write_program(tmp_path, "middle", line)
    limit = "2" if line.startswith("sleep") else "60"
    ran = run(["./run.sh", str(first), str(middle), str(first)], TEST_TIMEOUT=limit)
    assert ran.stdout.splitlines()[-1] == summary
    assert (ran.returncode == 0) == summary.endswith(" 0 failed")
    assert ran.stdout.count("== first") == 2


PURE = {"base", "codec", "kernels", "sparse"}
KERNEL_SETS = {"scalar", "avx2", "avx512", "neon", "crc32c_wide"}
"""They share the test of their table, as do the methods of the checksum."""


def test_every_c_file_has_its_test() -> None:
    """Arithmetic is tested file by file, in a test of its name. Of all other folders (plan/ among
    them, whose tests run every schedule), and of the files in csrc itself, some test includes each
    header that the rest of csrc uses: what is behind it is tested through it."""
    tests = sorted(C_TESTS.glob("*.[ch]"))
    named = {path.stem.removeprefix("test_") for path in tests}
    used, included = set[Path](), {one for path in tests for one in own_includes(path)}
    for path in C_FILES:
        if path.parent.name in PURE:
            own = {path.stem, f"{path.parent.name}_{path.stem}"}
            assert path.suffix == ".h" or own & (named | KERNEL_SETS), f"{path} has no test"
        used |= {one for one in own_includes(path) if one.parent != path.parent}
    faces = {one for one in used if one.parent.name not in PURE | {"include"}}
    assert len(faces) >= 5
    assert faces <= included, f"without a test: {sorted(map(str, faces - included))}"


@pytest.mark.parametrize("name", ["sparse/optimizer.c", "base/crc32c.c", "kernels/avx2.c"])
@pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels/avx2.c is for x86-64")
def test_compilers_keep_prefetches(name: str) -> None:
    """gcc leaves out the calls of a function that does nothing else."""
    compiler = os.environ.get("CC", "gcc")
    source = str(ROOT / "csrc" / name)
    built = run([compiler, "-std=gnu11", "-O3", "-fno-math-errno", "-S", "-o", "-", source])
    assert built.returncode == 0, built.stdout
    assert re.search(r"^\s+prefetch", built.stdout, re.MULTILINE)
