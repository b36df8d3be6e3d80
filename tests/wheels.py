"""The wheel, built as a user builds it, from a copy of the sources. As a script: into a folder.

It is built without isolation, with the setuptools and cffi of the test environment, so the tests
need no package index; the script's by a compiler that does not optimize, for that takes most of the
time, and the installation that is under test has shown that it can.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def build_wheel(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-build-isolation",
        "--no-deps",
        "--disable-pip-version-check",
        "-w",
        str(folder),
        ".",
    ]
    return subprocess.run(
        command, cwd=source_copy(folder), capture_output=True, text=True, env={**os.environ, **env}
    )


def source_copy(folder: Path) -> Path:
    """The tracked and untracked sources, without what was built from them."""
    copy = folder / "source"
    copy.mkdir()
    names = [
        "setup.py",
        "build_ffi.py",
        "pyproject.toml",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "Makefile",
    ]
    names += [str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.[ch]")]
    names += [str(p.relative_to(ROOT)) for p in (ROOT / "ringcomm").rglob("*.py")]
    names += ["ringcomm/py.typed", "ringcomm/functions.pyi", "ringcomm/kernels.ptx"]
    for name in names:
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    return copy


def hasty_compiler(folder: Path) -> Path:
    """The compiler, which does not optimize whatever it is told."""
    path = folder / "hasty-cc"
    compiler = os.environ.get("CC", "gcc")
    path.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0 -U_FORTIFY_SOURCE\n')
    path.chmod(0o755)
    return path


if __name__ == "__main__":
    into = Path(sys.argv[1])
    done = build_wheel(into, CC=str(hasty_compiler(into)))
    print(done.stdout + done.stderr)
    sys.exit(done.returncode)
