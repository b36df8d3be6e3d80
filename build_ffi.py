"""The cffi builder of ringcomm._core: public headers, compiled and declared from the same text.

The declarations are the part of each header in csrc/include between its two marker lines; gcc
checks them against the sources, so the two cannot drift apart.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent
HEADERS = ("ringcomm.h", "ringcomm_sparse.h")  # a later one uses what an earlier one declares


def declarations(header: str) -> str:
    """The header's declarations as cffi takes them: no comments, integer macros left open."""
    body = header.split("/* -- begin declarations -- */")[1]
    body = body.split("/* -- end declarations -- */")[0]
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
    return re.sub(r"^#define (RC_\w+) \d+$", r"#define \1 ...", body, flags=re.MULTILINE)


def sources() -> list[str]:
    """All C files of the core, relative to the project, in a stable order."""
    files = (ROOT / "csrc").rglob("*.c")
    return sorted(str(path.relative_to(ROOT)) for path in files)


def version() -> str:
    """The version, from its one place."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "([^"]+)"$', text, flags=re.MULTILINE)
    if found is None:
        raise RuntimeError("pyproject.toml has no version line")
    return found.group(1)


def compile_args() -> list[str]:
    """Flags for every file. No fast math and no contraction: results are equal bit for bit. What
    comes from the network is checked before it is used; where that should fail, the C library and
    the stack's guards end the process; they add 2 % to the instructions of a small call."""
    args = [
        "-std=gnu11",
        "-O3",
        "-ffp-contract=off",
        "-fvisibility=hidden",
        "-fno-math-errno",
        "-Wall",
        "-Wextra",
        "-fstack-protector-strong",
        "-U_FORTIFY_SOURCE",
        "-D_FORTIFY_SOURCE=2",
    ]
    if os.environ.get("RINGCOMM_WERROR") == "1":
        args += ["-Wconversion", "-Werror"]
    return args


ffi = FFI()
for name in HEADERS:
    header = ROOT / "csrc" / "include" / name
    ffi.cdef(declarations(header.read_text(encoding="utf-8")))
ffi.set_source(
    "ringcomm._core",
    "\n".join(f'#include "csrc/include/{name}"' for name in HEADERS),
    sources=sources(),
    depends=[str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc").rglob("*.h"))],
    include_dirs=["."],
    define_macros=[("RINGCOMM_VERSION", f'"{version()}"')],
    extra_compile_args=compile_args(),
    extra_link_args=["-pthread", "-ldl", "-Wl,-z,relro,-z,now"],
    py_limited_api=True,
)
