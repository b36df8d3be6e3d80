"""Builds the fake CUDA driver, for tests without a GPU; fake_libcuda.h says what it does.

A program under test opens it where RINGCOMM_LIBCUDA says; a test may open the same file with ctypes
to look behind it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
FLAGS = (
    "-std=gnu11",
    "-O2",
    "-D_GNU_SOURCE",
    "-fvisibility=hidden",
    "-pthread",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Wextra",
    "-Wconversion",
    "-Werror",
)


def build(library: Path, flags: Sequence[str] = ()) -> Path:
    """Compiles the fake driver into a shared library, and returns it.

    Raises:
        OSError: there is no compiler.
        RuntimeError: it does not compile.
    """
    sources = sorted(map(str, HERE.glob("fake_*.c")))
    command = [os.environ.get("CC", "gcc"), *FLAGS, *flags, "-o", str(library), *sources, "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return library
