"""The CUDA driver's loader and the fake driver, where tests/c (driver, device, fake_cuda) cannot.

The prototypes are compared with CUDA's own header where there is one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from patience import PATIENCE

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "cuda"))

import fake  # noqa: E402

DRIVER = ROOT / "csrc" / "cuda" / "driver.h"

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


# ---- the fake ----


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which(os.environ.get("CC", "gcc")) is None:
        pytest.skip("there is no C compiler")
    return fake.build(tmp_path_factory.mktemp("fake") / "libcuda.so.1")


def ask(library: Path, program: str, *arguments: str, **settings: str) -> str:
    """What a program of its own prints, that has the fake as `cuda`."""
    head = f"import ctypes\ncuda = ctypes.CDLL({str(library)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", head + program, *arguments],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


COUNT = """
count = ctypes.c_int(-1)
print(cuda.cuDeviceGetCount(ctypes.byref(count)), cuda.cuInit(0),
      cuda.cuDeviceGetCount(ctypes.byref(count)), cuda.cuDeviceGetCount(ctypes.byref(count)),
      count.value)
"""


def test_the_environment_sets_up_the_fake(library: Path) -> None:
    assert ask(library, COUNT).split() == ["3", "0", "0", "0", "1"]
    set_up = ask(
        library, COUNT, FAKE_CUDA_DEVICES="3", FAKE_CUDA_FAIL="cuDeviceGetCount:2:999,cuInit:2:1"
    )
    assert set_up.split() == ["3", "0", "0", "999", "3"]
    assert ask(library, COUNT, FAKE_CUDA_INIT="100").split() == ["3", "100", "3", "3", "-1"]


# ---- the packaged kernels on the fake ----

LAUNCH = """
import re, sys
from pathlib import Path
import numpy as np

def ok(result):
    assert result == 0, result

def launch(name, *arguments):
    function = ctypes.c_void_p()
    ok(cuda.cuModuleGetFunction(ctypes.byref(function), module, name))
    places = (ctypes.c_void_p * 24)(*map(ctypes.addressof, arguments))
    ok(cuda.cuLaunchKernel(function, 2, 1, 1, 64, 1, 1, 0, None, places, None))

def memory(nbytes):
    at = ctypes.c_uint64()
    ok(cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(nbytes)))
    return at

def misuse():
    cuda.fake_cuda_misuse.restype = ctypes.c_char_p
    return cuda.fake_cuda_misuse()

ptx = Path(sys.argv[1]).read_bytes()
context, module = ctypes.c_void_p(), ctypes.c_void_p()
ok(cuda.cuInit(0))
ok(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
ok(cuda.cuCtxSetCurrent(context))
ok(cuda.cuModuleLoadDataEx(ctypes.byref(module), ptx, 0, None, None))

# With nothing to do, as when a device is opened.
names = re.findall(rb"\\.entry (\\w+)", ptx)
assert len(names) >= 13
for name in names:
    launch(name, *[ctypes.c_uint64(0)] * 24)
ok(cuda.cuStreamSynchronize(None))

# To its end and no further.
values = np.linspace(-3, 3, 1001, dtype=np.float32)
src, wire = memory(values.nbytes), memory(2 * values.size)
ok(cuda.fake_cuda_write(src, values.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(4004)))
launch(b"ringcomm_pack_bf16", wire, src, ctypes.c_float(1), ctypes.c_uint64(values.size))
ok(cuda.cuStreamSynchronize(None))
got, bits = np.empty(values.size, np.uint16), values.view(np.uint32)
ok(cuda.fake_cuda_read(got.ctypes.data_as(ctypes.c_void_p), wire, ctypes.c_size_t(2002)))
assert (got == (bits + 0x7fff + (bits >> 16 & 1)) >> 16).all()
ok(cuda.cuMemFree_v2(src))
assert misuse() is None
src = memory(2048)
launch(b"ringcomm_pack_bf16", wire, src, ctypes.c_float(1), ctypes.c_uint64(values.size + 1))
ok(cuda.cuMemFree_v2(wire))
print(misuse().decode())
"""


def test_the_packaged_kernels_run_on_the_fake(library: Path, gpu_kernels: Path) -> None:
    ptx = ROOT / "ringcomm" / "kernels.ptx"
    said = ask(library, LAUNCH, str(ptx), FAKE_CUDA_KERNELS=str(gpu_kernels))
    assert "written past the end of the 2002 bytes" in said
