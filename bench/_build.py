"""C programs of the bench, built for a run."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path


def build(source: Path, folder: Path, options: Sequence[str], others: Sequence[Path] = ()) -> Path:
    """A C file, with others, as a program in the folder; ``options`` come before the files.

    Raises OSError with a sentence where there is no compiler or it does not build.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        raise OSError(f"{source.name} needs a C compiler (gcc)")
    target = folder / source.stem
    files = map(str, (source, *others))
    done = subprocess.run([*compiler.split(), *options, *files, "-lm", "-o", str(target)],
                          capture_output=True, text=True, check=False)  # fmt: skip
    if done.returncode:
        raise OSError(f"{source.name} does not build: {done.stderr.strip().splitlines()[0]}")
    return target
