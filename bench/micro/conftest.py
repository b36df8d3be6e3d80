"""What the micro-benchmarks share: the inner functions of the core, and a table in GB/s and ns.

    pytest bench/                             all of them
    pytest bench/ -k crc                      some

The functions are not exported by the extension, so face.c and the files it calls are built by gcc
for the run, with the flags of the extension.

Invariants: every figure is the median of pytest-benchmark's rounds. A copy of as many bytes is
measured in the same run, so that machines can be compared by the ratio.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import build_ffi  # noqa: E402

NEAR, FAR = 256 << 10, 64 << 20  # bytes: a segment, which stays in a cache, and more than any holds
WHICH = (
    "bf16 encode",
    "bf16 decode",
    "bf16 decode+add+encode",
    "fp16 encode",
    "fp16 decode",
    "fp16 decode+add+encode",
    "f32 add",
    "copy",
)  # as in face.c


@dataclasses.dataclass(frozen=True)
class Figure:
    """One line of the table: seconds of one call, and the bytes that it handles."""

    name: str
    seconds: float
    bytes: int


_figures: list[Figure] = []


@pytest.fixture(scope="session")
def face(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """face.c with the core's files that it calls, built and loaded; in haste if none is timed."""
    compiler = os.environ.get("CC") or shutil.which("gcc")
    if not compiler:
        pytest.skip("the inner functions are built by gcc, which is not installed")
    target = tmp_path_factory.mktemp("face") / "face.so"
    sources = [Path(__file__).with_name("face.c"), ROOT / "csrc/net/frame.c"]
    for folder in ("base", "kernels", "plan"):
        sources += sorted((ROOT / "csrc" / folder).glob("*.c"))
    command = [
        *compiler.split(),
        *build_ffi.compile_args(),
        *(["-O1"] if request.config.option.benchmark_disable else []),
        "-D_GNU_SOURCE",
        "-fPIC",
        "-shared",
        "-o",
        str(target),
        *map(str, sources),
        "-pthread",
        "-lm",
    ]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-4000:]
    library = ctypes.CDLL(str(target))
    library.face_set.restype = ctypes.c_char_p
    for name in ("face_plan_init", "face_plan_walk"):
        getattr(library, name).restype = ctypes.c_uint64
    return library


@pytest.fixture
def measure(benchmark: Any) -> Callable[..., Any]:
    """measure(name, call, repeats=1, bytes=0): time call(), which does its work ``repeats`` times,
    and put one line in the table. Returns what call() does."""

    def run(name: str, call: Callable[[], Any], repeats: int = 1, bytes: int = 0) -> Any:
        result = benchmark(call)
        if benchmark.stats is not None:  # None with --benchmark-disable
            seconds = benchmark.stats.stats.median / repeats
            benchmark.extra_info |= {"bytes": bytes, "seconds": seconds}
            _figures.append(Figure(name, seconds, bytes))
        return result

    return run


def pages(size: int) -> np.ndarray:
    """``size`` bytes of small floats that start at a page, and have been touched."""
    whole = np.ones(size // 4 + 1024, np.float32)
    skip = -whole.ctypes.data % 4096 // 4
    return whole[skip : skip + size // 4]


@pytest.fixture(scope="session", autouse=True)
def no_launcher() -> Iterator[None]:
    """Takes away what would make a benchmark a rank of something else."""
    single = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name in single or name.startswith(("RINGCOMM_", "OMPI_", "PMI", "SLURM_")):
                patch.delenv(name)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Half a second for each is enough for a median."""
    for item in items:
        item.add_marker(pytest.mark.benchmark(max_time=0.4, min_rounds=5, warmup=False))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The table: rates of what handles bytes, beside the copy of as many; times of the rest."""
    if not _figures:
        return
    copies = {one.bytes: one.seconds for one in _figures if one.name.startswith("copy")}
    terminalreporter.section("rates and times")
    for one in _figures:
        rate = f"{one.bytes / one.seconds / 1e9:9.2f} GB/s" if one.bytes else ""
        copy = copies.get(one.bytes)
        ratio = f"{copy / one.seconds:7.2f} x copy" if copy else ""
        terminalreporter.write_line(
            f"{one.name:48} {one.seconds * 1e9:14.1f} ns {rate:>14} {ratio:>14}"
        )
