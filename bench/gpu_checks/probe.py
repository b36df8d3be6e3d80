"""Step of gpu_check.py: what the machine has."""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from lab.wiring import why_unavailable

from gpu_checks.driver import ENGINES, L2_BYTES, MAJOR, MINOR, PTX, SM_COUNT, Driver, DriverError
from gpu_checks.report import tell

COPY_BYTES = 256 << 20
REPEATS = 8


def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["CUDA_CACHE_PATH"] = cache  # the first load compiles, the second finds it
        try:
            driver = Driver()
        except DriverError as error:
            tell("driver", "wrong", why=f"{error}; without a GPU: --fake")
            return
        tell("driver", "ok", f"CUDA {driver.version() / 1000:.1f}", why=_kernel_driver())
        major, minor = driver.attribute(MAJOR), driver.attribute(MINOR)
        about = (
            f"{driver.name()}, capability {major}.{minor}, {driver.attribute(SM_COUNT)} SMs, "
            f"{driver.memory_bytes() / 1e9:.0f} GB, L2 {driver.attribute(L2_BYTES) / 1e6:.0f} "
            f"MB, {driver.attribute(ENGINES)} copy engines"
        )
        tell("device", "ok", about)
        _kernels(driver)
    _ringcomm()
    if options.fake:
        tell("copies", "skipped", why="fake driver")
    else:
        _copies(driver)
    _packages()
    why = why_unavailable()
    tell("namespaces and tbf", "skipped" if why else "ok", why=why or "veth is tried by links")
    mps = shutil.which("nvidia-cuda-mps-control")
    tell("MPS", "ok" if mps else "skipped", why=mps or "there is no nvidia-cuda-mps-control")


def _kernel_driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        found = re.search(r"\b(\d{3}\.[\d.]+)", text)
        return f"driver {found[1]}" if found else ""
    except OSError:
        return ""


def _kernels(driver: Driver) -> None:
    image = PTX.read_bytes() + b"\0"
    try:
        cold, warm = driver.load(image), driver.load(image)
    except DriverError as error:
        tell("PTX", "wrong", why=str(error))
        return
    tell("PTX", "ok", f"{cold * 1e3:.0f} ms to load, {warm * 1e3:.0f} ms again")


def _ringcomm() -> None:
    import ringcomm

    why = ringcomm.cuda.why_not()
    count = ringcomm.cuda.device_count()
    tell("ringcomm.cuda", "wrong" if why else "ok", f"{count} GPUs", why=why or "")


def copy_rates(driver: Driver, nbytes: int = COPY_BYTES) -> tuple[float, float, float]:
    """Bytes per second of pinned copies to the host, to the GPU, and within it (read and
    written)."""
    host, here, there = driver.pinned(nbytes), driver.alloc(nbytes), driver.alloc(nbytes)
    ctypes.memset(host, 1, nbytes)
    rates = []
    for way, to, source in (("HtoD", here, host), ("DtoH", host, here), ("DtoD", there, here)):
        driver.copy(way, to, source, nbytes)
        driver.wait()
        began = time.perf_counter()
        for _ in range(REPEATS):
            driver.copy(way, to, source, nbytes)
        driver.wait()
        rates.append(REPEATS * nbytes / (time.perf_counter() - began))
    for address in (here, there):
        driver.free(address)
    driver.call("cuMemFreeHost", ctypes.c_void_p(host))
    return rates[1], rates[0], 2 * rates[2]


def _copies(driver: Driver) -> None:
    names = ("pinned copy to the host", "pinned copy to the GPU", "device copy, read and written")
    for name, rate in zip(names, copy_rates(driver), strict=True):
        tell(name, "ok", f"{rate / 1e9:.1f} GB/s")


def _packages() -> None:
    """Versions, without loading what is large."""
    from importlib import metadata

    found = []
    for name in ("numpy", "torch", "cupy-cuda13x", "cupy-cuda12x", "cffi"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    nvcc = shutil.which("nvcc")
    if nvcc:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
        release = re.search(r"release ([\d.]+)", said.stdout)
        found.append(f"nvcc {release[1] if release else '?'}")
    here = ", ".join(found) + f"; Python {platform.python_version()}"
    lacks = "" if importlib.util.find_spec("torch") else "no torch: no gloo, NCCL and DDP"
    tell("software", "ok", here, why=lacks)
