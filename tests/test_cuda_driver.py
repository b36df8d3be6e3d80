"""The prototypes of csrc/cuda/driver.h beside CUDA's own header, where there is one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

DRIVER = Path(__file__).resolve().parent.parent / "csrc" / "cuda" / "driver.h"

COMPARISON = """
#include <cuda.h>
#include "{driver}"
#define COMPARE(name, suffix, parameters)                                                     \\
    _Static_assert(__builtin_types_compatible_p(cu_result parameters, __typeof__(name)), #name);
CUDA_FUNCTIONS(COMPARE)
#define SAME(ours, theirs) _Static_assert((int)ours == (int)theirs, #ours)
{constants}
int main(void) {{ return 0; }}
"""

#: Ours, and CUDA's name for the same number.
CONSTANTS = {
    "CU_NON_BLOCKING": "CU_STREAM_NON_BLOCKING",
    "CU_BLOCKING_SYNC": "CU_EVENT_BLOCKING_SYNC",
    "CU_NO_TIMING": "CU_EVENT_DISABLE_TIMING",
    "CU_REGISTER_PORTABLE": "CU_MEMHOSTREGISTER_PORTABLE",
    "CU_REGISTER_DEVICEMAP": "CU_MEMHOSTREGISTER_DEVICEMAP",
    "CU_CAPTURE_RELAXED": "CU_STREAM_CAPTURE_MODE_RELAXED",
    "CU_MEMORY_HOST": "CU_MEMORYTYPE_HOST",
    "CU_MEMORY_DEVICE": "CU_MEMORYTYPE_DEVICE",
    "CU_JIT_ERROR_LOG": "CU_JIT_ERROR_LOG_BUFFER",
    "CU_JIT_ERROR_LOG_BYTES": "CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES",
    "CU_POINTER_CONTEXT": "CU_POINTER_ATTRIBUTE_CONTEXT",
    "CU_POINTER_MEMORY_TYPE": "CU_POINTER_ATTRIBUTE_MEMORY_TYPE",
    "CU_POINTER_IS_MANAGED": "CU_POINTER_ATTRIBUTE_IS_MANAGED",
    "CU_POINTER_ORDINAL": "CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL",
    "CU_DEVICE_ASYNC_ENGINES": "CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT",
    "CU_DEVICE_CAPABILITY_MAJOR": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
    "CU_DEVICE_CAPABILITY_MINOR": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
}


def declared() -> dict[str, int]:
    """The numbers that driver.h gives names to."""
    found = re.findall(r"^    (CU_\w+) = (\d+),?", DRIVER.read_text(), re.MULTILINE)
    return {name: int(value) for name, value in found}


def cuda_headers() -> Path | None:
    """A folder with cuda.h: of a toolkit, or of NVIDIA's packages for Python."""
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    folders = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        folders.append(Path(nvcc).resolve().parent.parent)
    folders += [*sorted(Path("/usr/local").glob("cuda*")), *sorted(packages.glob("*"))]
    return next((f / "include" for f in folders if (f / "include" / "cuda.h").is_file()), None)


def test_the_prototypes_and_numbers_are_those_of_cuda(tmp_path: Path) -> None:
    headers = cuda_headers()
    if headers is None:
        pytest.skip("there is no cuda.h here")
    numbers = declared()
    assert set(CONSTANTS) <= set(numbers)
    names = {ours: CONSTANTS.get(ours, ours.replace("CU_", "CUDA_ERROR_", 1)) for ours in numbers}
    names["CU_OK"] = "CUDA_SUCCESS"
    source = tmp_path / "compare.c"
    constants = "\n".join(f"SAME({ours}, {theirs});" for ours, theirs in names.items())
    source.write_text(COMPARISON.format(driver=DRIVER, constants=constants))
    compiler = os.environ.get("CC", "gcc")
    done = subprocess.run(
        [compiler, "-std=gnu11", "-fsyntax-only", "-I", str(headers), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_versions_of_symbols_are_those_of_cuda() -> None:
    headers = cuda_headers()
    if headers is None:
        pytest.skip("there is no cuda.h here")
    text = (headers / "cuda.h").read_text(errors="replace")
    ours = dict(re.findall(r"X\((cu\w+), (\w*),", DRIVER.read_text()))
    assert len(ours) > 40
    for name, suffix in ours.items():
        wanted = re.findall(rf"^ *#define {name}\s+(?:__CUDA_API_PTS[ZD]\()?(\w+)", text, re.M)
        assert name + suffix in {*wanted, *([] if wanted else [name])}, wanted
