"""Makes ringcomm/kernels.ptx, the text that a GPU's driver loads, from csrc/cuda/kernels.cu.

Needs no GPU and no toolkit, but NVIDIA's run-time compiler of CUDA 12.0 in this Python: later ones
write a PTX that drivers before theirs refuse. 12.0's is taken by drivers from 525 on, and by every
GPU from compute capability 6.0 on.

    pip install nvidia-cuda-nvrtc-cu12==12.0.140
    python tools/make_ptx.py            (--check: only compares)

The first line of the file says which sources it was made from, and a test compares.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "csrc" / "cuda" / "kernels.cu"
PARTS = (ROOT / "csrc" / "cuda" / "blocks.cuh",)
PTX = ROOT / "ringcomm" / "kernels.ptx"
RELEASE = (12, 0)
INSTALL = "pip install nvidia-cuda-nvrtc-cu12==12.0.140"
OPTIONS = (
    "--gpu-architecture=compute_60",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
)
#: What the compiler adds of its own and nothing refers to.
UNUSED = re.compile(r"^\.global .*nv6target.*\n", re.MULTILINE)


class MissingError(Exception):
    """There is no such compiler here."""


def sources() -> dict[str, bytes]:
    """The files, by the names that they have for each other; first the one that has the others."""
    return {path.name: path.read_bytes() for path in (SOURCE, *PARTS)}


def head(texts: dict[str, bytes]) -> str:
    """The first line of what is made from these sources."""
    digest = hashlib.sha256(b"".join(texts.values())).hexdigest()
    return f"// {' + '.join(texts)}, sha256 {digest}\n"


def compiler() -> ctypes.CDLL:
    """NVRTC of the right release, from the packages of this Python.

    Raises:
        MissingError: there is none, or only others.
    """
    found = importlib.util.find_spec("nvidia.cuda_nvrtc") if _has("nvidia") else None
    places = list(found.submodule_search_locations or ()) if found is not None else []
    for place in places:
        for path in Path(place).glob("lib/libnvrtc.so.12"):
            nvrtc = ctypes.CDLL(str(path))
            major, minor = ctypes.c_int(), ctypes.c_int()
            nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
            if (major.value, minor.value) == RELEASE:
                return nvrtc
    raise MissingError(f"NVRTC of CUDA 12.0 is not installed in this Python: {INSTALL}")


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _text(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    return text.value.decode("ascii")


def make(texts: dict[str, bytes]) -> str:
    """The PTX of sources as `sources` gives them, with its head.

    Raises:
        MissingError: there is no compiler.
        ValueError: they do not compile, or not without a warning.
    """
    nvrtc = compiler()
    program = ctypes.c_void_p()
    (name, text), *parts = texts.items()
    strings = ctypes.c_char_p * len(parts)
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program),
        text,
        name.encode(),
        len(parts),
        strings(*(part for _, part in parts)),
        strings(*(part.encode() for part, _ in parts)),
    )
    options = (ctypes.c_char_p * len(OPTIONS))(*(option.encode() for option in OPTIONS))
    failed = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options)
    log = _text(nvrtc, "ProgramLog", program).strip()
    if failed or log:
        raise ValueError(log)
    return head(texts) + UNUSED.sub("", _text(nvrtc, "PTX", program)).rstrip() + "\n"


def main() -> int:
    """Writes the file, or with --check compares; returns 1 after a word on what is wrong."""
    try:
        made = make(sources())
    except (MissingError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if "--check" in sys.argv[1:]:
        if PTX.read_text(encoding="ascii") == made:
            return 0
        print(f"error: {PTX.relative_to(ROOT)} is another: run tools/make_ptx.py", file=sys.stderr)
        return 1
    PTX.write_text(made, encoding="ascii")
    print(f"{PTX.relative_to(ROOT)}: {len(made)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
