"""What all tests share: a clean environment, and a check that a test leaves nothing open.

Invariants: no variable of a launcher or of ringcomm that happens to be set where the tests are run
reaches a test, but RINGCOMM_KERNEL_SET; tests that wait for what runs beside the others come last,
and of these those whose commands take longest.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Ranks are threads here, and more than there are cores: a team of threads for each only spins.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import pytest
from beside import APART, Beside, Done
from faults.job import Nursery, clean_environment, nursery_of
from patience import until

from ringcomm import Config
from ringcomm.core import native

sys.path.insert(0, str(Path(__file__).resolve().parent / "cuda"))
_LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "MPI_", "SLURM_", "TORCHELASTIC_")
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


# ---- what runs beside the tests ----

collect_ignore = list(APART)  # which pytest heeds for files that are not named


def _turn(item: pytest.Item) -> int:
    mark = item.get_closest_marker("beside")
    return 0 if mark is None else 2 if mark.kwargs.get("lane") else 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("torch") is None:
        for item in items:
            if item.get_closest_marker("torch"):
                item.add_marker(pytest.mark.skip(reason="PyTorch is not installed"))
    items.sort(key=_turn)
    for item in items:
        if item.get_closest_marker("beside") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(3600))  # the commands wait for each other


def pytest_collection_finish() -> None:
    gc.freeze()  # collections in tests shall not go through all that the tests have imported


@pytest.fixture(scope="session", autouse=True)
def commands_beside(
    request: pytest.FixtureRequest, unlaunched: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Beside | None]:
    """Starts what the chosen tests name, when the first test begins; see beside.py."""
    marks = [item.get_closest_marker("beside") for item in request.session.items]
    lanes: dict[str, list[tuple[str, ...]]] = {}
    for mark in filter(None, marks):
        lanes.setdefault(mark.kwargs.get("lane", ""), []).append(mark.args)
    if not lanes:
        yield None
        return
    with Beside(lanes.values(), tmp_path_factory.mktemp("beside"), clean_environment()) as running:
        yield running


@pytest.fixture
def beside(request: pytest.FixtureRequest, commands_beside: Beside) -> Done:
    """How the command of this test's mark ended; waits for that."""
    return commands_beside.result(request.node.get_closest_marker("beside").args)


# ---- a clean environment ----


@pytest.fixture(scope="session", autouse=True)
def unlaunched() -> Iterator[None]:
    """Takes away what would make a test a rank of something else, choose its algorithms, or have
    some hundred programs compile the same modules. Only RINGCOMM_KERNEL_SET stays: results are the
    same by all sets, and so must the suite's be."""
    settings = {"RINGCOMM_" + field.name.upper() for field in dataclasses.fields(Config)}
    unwanted = {"RINGCOMM_SECRET", "PYTHONDONTWRITEBYTECODE", *_TORCHRUN, *settings}
    unwanted.remove("RINGCOMM_KERNEL_SET")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name in unwanted or name.startswith(_LAUNCHERS):
                patch.delenv(name)
        yield


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """A shell starts what it puts in the background with SIGINT ignored, and programs inherit that;
    tests of Ctrl-C, and the ranks that they start, must hear it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Of ranks that do without PyTorch, for files that have no other fixture of this name."""
    with nursery_of("numpy", "ringcomm") as made:
        yield made


@pytest.fixture(scope="session")
def torch_nursery() -> Iterator[Nursery]:
    """Of ranks with PyTorch, which takes seconds to import: once for all files that need it."""
    data = ["sklearn.datasets"] if importlib.util.find_spec("sklearn") else []
    ranks = [
        f"faults.{name}"
        for name in ("groups", "outer", "parallel", "recipes", "resuming", "silence", "training")
    ]
    with nursery_of(*ranks, *data) as made:
        yield made


def _open_fds() -> dict[str, str]:
    """Sockets, event loops and wake-ups of this process, by descriptor."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the descriptor of the listing itself
            continue
        if target.startswith(("socket:", "anon_inode:")):
            found[fd] = target
    return found


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails a test that leaves a socket open or an engine running."""
    before, engines = _open_fds(), set(native._shared)
    yield

    def left() -> tuple[set[tuple[str, str]], int]:
        return set(_open_fds().items()) - set(before.items()), len(set(native._shared) - engines)

    if not until(lambda: not any(left())):
        pytest.fail("left open: {}; engines running: {}".format(*left()))


# ---- a GPU that is none ----


@pytest.fixture(scope="session")
def gpu_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake CUDA driver."""
    import fake

    if shutil.which("gcc") is None:
        pytest.skip("there is no compiler")
    return fake.build(tmp_path_factory.mktemp("cuda") / "libfakecuda.so", ["-O1"])


@pytest.fixture(scope="session")
def gpu_kernels() -> Path:
    """What the fake driver runs of csrc/cuda/kernels.cu."""
    import emulation

    return emulation.copy("driver")


@pytest.fixture
def gpu(gpu_library: Path, gpu_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two GPUs (tests/cuda/gpu.py). What the library makes on them must be gone after the test."""
    from gpu import Gpu

    monkeypatch.setenv("RINGCOMM_LIBCUDA", str(gpu_library))
    monkeypatch.setenv("FAKE_CUDA_KERNELS", str(gpu_kernels))
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    made = Gpu(gpu_library)
    yield made
    assert made.misuse() is None
    assert made.leaks("pinned", "events", "modules") == 0
    made.reset()
