"""Files of csrc that touch no OS, compiled by themselves and called through their own headers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cffi import FFI
from patience import PATIENCE

CSRC = Path(__file__).resolve().parent.parent / "csrc"


def plain_declarations(header: str) -> str:
    """A header without comments, inline functions, linkage blocks and preprocessor lines, save
    integer macros."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    text = re.sub(r"^static inline .*?^\}", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.DOTALL)
    return re.sub(r"^#(?!define \w+ \d+ *$).*$", "", text, flags=re.MULTILINE)


def declared(*headers: str) -> FFI:
    """What these headers of csrc declare."""
    ffi = FFI()
    for name in headers:
        ffi.cdef(plain_declarations((CSRC / name).read_text()))
    return ffi


def library(ffi: FFI, sources: list[str], folder: Path) -> Any:
    """These files of csrc, as a library in a folder. Skips without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build it with")
    flags = ["-std=gnu11", "-O1", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra"]
    target = folder / "library.so"
    command = [compiler, *flags, "-Werror", "-shared", "-fPIC", "-o", str(target)]
    subprocess.run(
        [*command, *(str(CSRC / name) for name in sources), "-lm"], check=True, timeout=PATIENCE
    )
    return ffi.dlopen(str(target))
