"""What gpu_check.py needs built: ringcomm in place, the core's kernels for comparison, the fakes.

A compiler, Python's headers, numpy and cffi are enough: neither setuptools nor pip is asked, and
nothing is fetched. Invariant: what is up to date is not built again.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "ringcomm" / "_core.abi3.so"
NEEDED = ("numpy", "cffi", "_cffi_backend")


class BuildError(Exception):
    """Something cannot be built; says what is missing."""


def missing() -> list[str]:
    """Modules that this Python lacks and ringcomm needs."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def compiler() -> list[str]:
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if not found:
        raise BuildError("there is no C compiler (gcc)")
    return found.split()


def make_core(folder: Path) -> str:
    """Builds ringcomm._core where its sources are newer; says what was done."""
    sources = [*(ROOT / "csrc").rglob("*.[ch]"), ROOT / "build_ffi.py"]
    if CORE.exists() and CORE.stat().st_mtime >= max(p.stat().st_mtime for p in sources):
        return "ringcomm's core is up to date"
    sys.path.insert(0, str(ROOT))
    import build_ffi

    generated = folder / "_core.c"
    build_ffi.ffi.emit_c_code(str(generated))
    flags = [
        *build_ffi.compile_args(),
        "-fPIC",
        f'-DRINGCOMM_VERSION="{build_ffi.version()}"',
        f"-I{ROOT}",
        f"-I{sysconfig.get_paths()['include']}",
    ]
    try:
        _compile_core(folder, generated, flags)
    except BuildError as error:
        if CORE.exists():
            return f"ringcomm's core is OLD and was not built again: {error}"
        raise
    return "built ringcomm's core"


def _compile_core(folder: Path, generated: Path, flags: list[str]) -> None:
    """All files at once, then in place of what was there."""
    import build_ffi

    objects = folder / "core"
    objects.mkdir(exist_ok=True)

    def compiled(number: int, source: Path) -> str:
        target = objects / f"{number}.o"
        run([*compiler(), *flags, "-c", str(source), "-o", str(target)])
        return str(target)

    files = [generated, *(ROOT / name for name in build_ffi.sources())]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        made = list(pool.map(compiled, range(len(files)), files))
    fresh = folder / CORE.name
    run(
        [*compiler(), "-shared", *made, "-pthread", "-ldl", "-Wl,-z,relro,-z,now", "-o", str(fresh)]
    )
    shutil.copyfile(fresh, CORE.with_suffix(".new"))
    CORE.with_suffix(".new").replace(CORE)


def make_metadata(folder: Path) -> None:
    """What an installation would say of ringcomm, for a Python that has none of it."""
    import build_ffi

    about = folder / f"ringcomm-{build_ffi.version()}.dist-info"
    about.mkdir(exist_ok=True)
    lines = f"Metadata-Version: 2.1\nName: ringcomm\nVersion: {build_ffi.version()}\n"
    (about / "METADATA").write_text(lines, encoding="utf-8")


def make_reference(folder: Path, optimise: str) -> Path:
    """The core's scalar kernels as a library with the functions of tests/cuda/core.c."""
    csrc, target = ROOT / "csrc", folder / "reference.so"
    sources = [
        csrc / "kernels" / "scalar.c",
        *sorted((csrc / "codec").glob("*.c")),
        csrc / "base" / "copy.c",
        ROOT / "tests" / "cuda" / "core.c",
    ]
    run(
        [
            *compiler(),
            "-std=gnu11",
            optimise,
            "-ffp-contract=off",
            "-fno-math-errno",
            "-fPIC",
            "-shared",
            *map(str, sources),
            "-lm",
            "-o",
            str(target),
        ]
    )
    return target


def make_fakes(folder: Path) -> dict[str, str]:
    """The fake driver and the emulated kernels, as the environment that names them; what the
    environment names already is taken."""
    sys.path.insert(0, str(ROOT / "tests" / "cuda"))
    import emulation
    import fake

    names = {"RINGCOMM_LIBCUDA": "libfakecuda.so", "FAKE_CUDA_KERNELS": "libkernels.so"}
    builders = {"RINGCOMM_LIBCUDA": fake.build, "FAKE_CUDA_KERNELS": emulation.build}
    found = {name: os.environ.get(name, "") for name in names}
    wanted = [name for name in names if not found[name]]
    try:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            made = pool.map(lambda name: builders[name](folder / names[name]), wanted)
            found |= dict(zip(wanted, map(str, made), strict=True))
    except (OSError, RuntimeError) as error:
        raise BuildError(f"the fake driver does not build: {error}") from None
    return found


def run(command: list[str]) -> None:
    """A command that must succeed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error}") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise BuildError(f"{command[0]} fails: {said[0]}")
