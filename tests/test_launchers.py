"""The same program under torchrun and mpirun.

A launcher that is not installed here is skipped, with that reason. What launchers put into the
environment is in bootstrap/test_launch.py, joining without one in test_joining.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.job import clean_environment
from patience import PATIENCE

PROGRAM = str(Path(__file__).parent / "faults" / "launched.py")
WORLD = 2  # each rank starts an interpreter


def torchrun() -> list[str]:
    """torchrun as a command line, which chooses the port of its rendezvous itself."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*run, "--nproc-per-node", str(WORLD)]


def mpirun() -> list[str]:
    """mpirun as a command line; the one beside this Python wins, as that is the wheel's."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        pytest.skip("no mpirun is installed")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
    flags = []
    if "Open MPI" in version.stdout:
        flags = ["--oversubscribe"] + (["--allow-run-as-root"] if os.geteuid() == 0 else [])
    return [found, *flags, "-n", str(WORLD), sys.executable]


@contextlib.contextmanager
def started(*commands: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """These commands, running; they are ended on the way out if they have not by then."""
    jobs = [
        subprocess.Popen(
            command,
            env=clean_environment(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for command in commands
    ]
    try:
        yield jobs
    finally:
        for job in jobs:
            if job.poll() is None:
                job.terminate()  # launchers end their ranks on it
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.communicate(timeout=PATIENCE)
            job.kill()
            job.communicate()


def check(job: subprocess.Popen[str], tag: int = 1, heavy: tuple[str, ...] = ()) -> None:
    """Every rank printed the right sum, and imported what it had to."""
    printed, errors = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, f"exit code {job.returncode}\n{printed}\n{errors}"
    lines = sorted((json.loads(line) for line in printed.splitlines()), key=lambda x: x["rank"])
    expected = [tag * WORLD * (WORLD + 1) / 2]
    assert lines == [
        {"rank": rank, "world": WORLD, "values": expected, "heavy": list(heavy)}
        for rank in range(WORLD)
    ], errors


@pytest.mark.torch
def test_torchrun() -> None:
    with started([*torchrun(), PROGRAM]) as (job,):
        check(job)


@pytest.mark.mpi
def test_mpirun_with_its_communicator() -> None:
    command = mpirun()
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    with started([*command, PROGRAM, "--mpi"]) as (job,):
        check(job, heavy=("mpi4py",))


@pytest.mark.mpi
def test_two_mpi_jobs_at_once() -> None:
    """Neither has a port to itself, as nobody chose one."""
    with started(*([*mpirun(), PROGRAM, "--tag", str(tag)] for tag in (1, 3))) as (first, second):
        check(first, tag=1)
        check(second, tag=3)
