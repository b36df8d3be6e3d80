"""Builds the emulated kernels: csrc/cuda/kernels.cu for a CPU, as a library that launches by name.

Needs a C compiler that is gcc or takes its flags. tests/cuda/emulate.h says what the library exports.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
KERNELS = ROOT / "csrc" / "cuda" / "kernels.cu"
#: What these must be compiled with; the rest is taste. A misaligned access ends the process, as it
#: would end a context.
FLAGS = (
    "-std=gnu11", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing",
    "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error", "-U_FORTIFY_SOURCE", "-pthread",
    "-Wall", "-Wextra", "-Wconversion", "-Werror", "-Wno-unknown-pragmas",
)  # fmt: skip


def build(library: Path, sources: Sequence[Path] = (), flags: Sequence[str] = ()) -> Path:
    """Compiles the emulation, with more sources beside it, into a shared library, and returns it.

    Raises:
        OSError: there is no compiler.
        RuntimeError: it does not compile.
    """
    command = [os.environ.get("CC", "gcc"), *FLAGS, *flags, "-fPIC", "-shared", "-o", str(library),
               str(HERE / "emulate.c"), *map(str, sources), "-lm"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return library
