"""Builds ringcomm._core: the C core, through cffi, with a C compiler and the Python headers alone.

Metadata is in pyproject.toml; only what is code is here. A missing compiler or header ends the
build with a sentence that says what to install. Where there is an nvcc, the GPU's kernels are
assembled as well, from the PTX that the package has; without one a GPU's driver does that when it
is first used.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_ext import build_ext


def _missing(compiler: list[str]) -> str | None:
    """What this machine lacks to build a C extension, as a sentence; None if nothing."""
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.c"
        include = sysconfig.get_paths()["include"]
        version = sysconfig.get_python_version()
        for code, sentence in (
            (
                "#include <stdlib.h>\nint main(void) { return 0; }\n",
                f"ringcomm needs a C compiler, and '{compiler[0]}' cannot compile. Install one, on "
                "Debian or Ubuntu with: apt install gcc libc6-dev",
            ),
            (
                "#include <Python.h>\nint main(void) { return 0; }\n",
                f"ringcomm needs the headers of this Python, and {include}/Python.h cannot be used."
                f" Install them, on Debian or Ubuntu with: apt install python{version}-dev",
            ),
        ):
            probe.write_text(code)
            command = [*compiler, "-I", include, "-c", str(probe), "-o", f"{folder}/probe.o"]
            try:
                done = subprocess.run(command, capture_output=True, text=True)
            except OSError:
                return sentence
            if done.returncode != 0:
                return sentence
    return None


def _nvcc() -> str | None:
    """That of the variable NVCC, which may be empty for none, of the PATH, or of CUDA_HOME."""
    if "NVCC" in os.environ:
        return os.environ["NVCC"] or None
    return shutil.which("nvcc") or shutil.which(
        str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc"))
    )


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError((done.stderr or done.stdout or "no message").splitlines()[0])
    return done.stdout


def assemble(ptx: Path, folder: Path) -> str:
    """Puts machine code of the kernels into the folder, in a file that is named after its source,
    for the first GPU of each family that nvcc knows: the others of the family run it, too. Says
    what came of it; nothing here is needed."""
    digest = hashlib.sha256(ptx.read_bytes()).hexdigest()[:16]
    target, part = folder / f"kernels-{digest}.fatbin", folder / f"kernels-{digest}.part"
    for old in set(folder.glob("kernels-*.fatbin")) - {target}:
        old.unlink()
    nvcc = _nvcc()
    if nvcc is None or target.exists():
        return ""
    try:
        known = sorted(
            int(name.removeprefix("sm_")) for name in _run(nvcc, "--list-gpu-code").split()
        )
        first = {number // 10: number for number in reversed(known)}.values()
        codes = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in first]
        _run(nvcc, "--fatbin", str(ptx), "-o", str(part), *codes)
        part.replace(target)
    except (OSError, ValueError) as error:
        part.unlink(missing_ok=True)
        return f"{nvcc} does not assemble the kernels, which a GPU's driver will do: {error}"
    return f"kernels assembled for sm_{', sm_'.join(map(str, sorted(first)))}"


class BuildExt(build_ext):
    """build_ext that finds out first whether it can work, and says at the end what it built."""

    def build_extensions(self) -> None:
        self._remove_stale()
        sentence = _missing(list(self.compiler.compiler_so))
        if sentence is not None:
            sys.exit(f"\nerror: {sentence}\n")
        # setuptools names no parallel compile; a few files take most of the time.
        super().build_extensions()
        package = Path(__file__).resolve().parent / "ringcomm"
        said = assemble(package / "kernels.ptx", Path(self.get_ext_fullpath("ringcomm._")).parent)
        if said:
            print(said)

    def copy_extensions_to_source(self) -> None:
        """Of a build in place, which goes to a folder of its own first."""
        super().copy_extensions_to_source()
        package = Path(__file__).resolve().parent / "ringcomm"
        for old in package.glob("kernels-*.fatbin"):
            old.unlink()
        for made in Path(self.build_lib, "ringcomm").glob("kernels-*.fatbin"):
            shutil.copy2(made, package)

    def _remove_stale(self) -> None:
        """An object left from a build with other flags must not be packed."""
        for extension in self.extensions:
            if self.force:
                Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)


options: dict[str, Any] = {}
if not sysconfig.get_config_var("Py_GIL_DISABLED"):
    options = {"bdist_wheel": {"py_limited_api": "cp310"}}

setup(cffi_modules=["build_ffi.py:ffi"], cmdclass={"build_ext": BuildExt}, options=options)
