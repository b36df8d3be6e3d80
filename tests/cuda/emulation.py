"""Builds the emulated kernels: csrc/cuda/kernels.cu for a CPU, as a library that launches by name.

Needs a C compiler that is gcc or takes its flags. What the library exports is in emulate.h.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: Of everything whose bits count.
EXACT = ("-std=gnu11", "-O1", "-ffp-contract=off", "-fno-math-errno")
#: Of emulate.c, as tests/c/Makefile gives them, too. A misaligned access ends the process, as it
#: would end a context.
EMULATED = (f"@{HERE / 'emulate.flags'}",)


def compiled(library: Path, sources: Sequence[Path], flags: Sequence[str] = ()) -> Path:
    """A shared library of C files.

    Raises:
        OSError: there is no compiler.
        RuntimeError: it does not compile.
    """
    command = [
        os.environ.get("CC", "gcc"),
        *EXACT,
        *flags,
        "-fPIC",
        "-shared",
        "-o",
        str(library),
        *map(str, sources),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return library


def build(library: Path, sources: Sequence[Path] = (), flags: Sequence[str] = ()) -> Path:
    """The emulation, with more sources beside it; raises as `compiled` does."""
    return compiled(library, [HERE / "emulate.c", *sources], [*EMULATED, *flags])


@functools.cache
def folder() -> Path:
    """Where this process's tests keep what they build."""
    made = Path(tempfile.mkdtemp(prefix="ringcomm-test-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


@functools.cache
def _built() -> Path:
    return build(folder() / "emulated.so")


@functools.cache
def copy(user: str) -> Path:
    """The emulation alone, built once, as a library of this user's own: how it finds memory behind
    a device's address is set for all who load the same file."""
    return Path(shutil.copy(_built(), folder() / f"emulated-{user}.so"))
