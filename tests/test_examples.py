"""Examples run by the commands in their heads, and print what their heads say.

One whose framework, launcher or rights this machine lacks is skipped, with that reason. The sbatch
script meets stand-ins for sbatch and srun, which set the variables of Slurm.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import itertools
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from faults.job import clean_environment
from patience import PATIENCE, SILENCE
from ports import free_port

from ringcomm.bootstrap.launch import identify

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))

import netlab  # noqa: E402

EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*"))
PROGRAMS = [path for path in EXAMPLES if path.suffix == ".py"]
(SLURM,) = (path for path in EXAMPLES if path.suffix == ".sh")

#: Patience on a busy machine; Open MPI as root, and with fewer cores than ranks.
VARIABLES = {
    "RINGCOMM_CONNECT_TIMEOUT": str(SILENCE),
    "RINGCOMM_PEER_TIMEOUT": str(SILENCE),
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
SBATCH = """#!/bin/bash
asked() { sed -n "s/^#SBATCH --$1=//p" "$script"; }
script=$1
export SLURM_NNODES=$(asked nodes) SLURM_NODELIST=localhost,other SLURM_PROCID=0
export SLURM_NTASKS=$((SLURM_NNODES * $(asked ntasks-per-node)))
exec bash "$script"
"""
SRUN = """#!/bin/bash
export SLURM_STEP_ID=0 SLURM_LOCALID=0 SLURM_STEP_NODELIST=$SLURM_NODELIST
export SLURM_STEP_NUM_NODES=$SLURM_NNODES SLURM_STEP_NUM_TASKS=$SLURM_NTASKS
code=0
for ((rank = 0; rank < SLURM_NTASKS; rank++)); do
    SLURM_PROCID=$rank bash -c 'env >"$0"; exec "$@"' "${0%/*}/rank$rank" "$@" &
done
for rank in $(jobs -p); do wait "$rank" || code=$?; done
exit "$code"
"""


@dataclasses.dataclass(frozen=True)
class Head:
    """Command, lines of output, and causes of failure, as an example's head gives them."""

    command: str
    output: list[str]
    causes: list[str]


def head_of(example: Path) -> Head:
    text = example.read_text(encoding="utf-8")
    if example.suffix == ".py":
        head = ast.get_docstring(ast.parse(text)) or ""
    else:
        comment = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
        head = "\n".join(line[2:] for line in comment)
    parts = re.fullmatch(
        r".+\n\nCommand[^\n]*:\n\n(.+)\n\nExpected output[^\n]*:\n\n(.+)\n\nIf it fails:\n\n(.+)",
        head,
        re.DOTALL,
    )
    assert parts is not None, f"{example.name}: its head lacks a part"
    command, output, causes = map(textwrap.dedent, parts.groups())
    return Head(command, output.splitlines(), re.findall(r"^- ", causes, re.MULTILINE))


def imports(example: Path) -> set[str]:
    """Names of the packages that an example imports."""
    names = set()
    for node in ast.walk(ast.parse(example.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


def environment() -> dict[str, str]:
    """Variables of a shell in which this Python's environment is activated."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**clean_environment(), **VARIABLES, "PATH": path, "MASTER_PORT": str(free_port())}


def require(example: Path, command: str) -> None:
    """Skips the test if this machine cannot run the example."""
    for name in sorted(imports(example)):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    launcher = command.split()[0]
    if shutil.which(launcher, path=environment()["PATH"]) is None:
        pytest.skip(f"there is no {launcher}")
    if "netlab.py" in command and (reason := netlab.why_unavailable()):
        pytest.skip(reason)
    if "fully_shard" in example.read_text(encoding="utf-8"):
        from torch_versions import before

        if before(2, 6):
            pytest.skip("PyTorch has no torch.distributed.fsdp.fully_shard before 2.6")


def check(head: Head, variables: dict[str, str]) -> None:
    """Runs the command in the project's folder, and compares what it prints to stdout."""
    job = subprocess.Popen(
        head.command,
        shell=True,
        cwd=ROOT,
        env=variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        printed, errors = job.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGTERM)  # on which launchers end their ranks
        printed, errors = job.communicate(timeout=PATIENCE)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 0, f"exit code {job.returncode}\n{printed}\n{errors}"
    assert printed.splitlines() == head.output, errors


def marks(example: Path) -> list[pytest.MarkDecorator]:
    """Marks by what an example needs."""
    command = head_of(example).command
    needs = {
        "torch": command.startswith("torchrun") or "torch" in imports(example),
        "mpi": command.startswith("mpirun"),
        "netns": "netlab.py" in command,
    }
    return [getattr(pytest.mark, name) for name in needs if needs[name]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "example", [pytest.param(path, marks=marks(path), id=path.stem) for path in PROGRAMS]
)
def test_a_program_prints_what_its_head_says(example: Path) -> None:
    head = head_of(example)
    require(example, head.command)
    check(head, environment())


def test_the_sbatch_script_starts_ranks_that_find_each_other(tmp_path: Path) -> None:
    for name, text in (("sbatch", SBATCH), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    key = tmp_path / "key"
    variables = environment()
    del variables["MASTER_PORT"]
    variables["PATH"] = f"{tmp_path}{os.pathsep}{variables['PATH']}"
    job = {"SLURM_JOB_ID": str(free_port()), "RINGCOMM_INTERFACES": "lo"}
    check(head_of(SLURM), {**variables, **job, "RINGCOMM_SECRET_FILE": str(key)})
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    for rank in range(2):
        lines = (tmp_path / f"rank{rank}").read_text().splitlines()
        given = dict(line.split("=", 1) for line in lines if "=" in line)
        assert given["RINGCOMM_SECRET_FILE"] == str(key)
        found = identify(env=given)
        assert (found.launcher, found.rank, found.world_size) == ("srun", rank, 2)
        assert found.master_addr == "localhost"


def test_each_is_short_numbered_and_in_the_table() -> None:
    assert [path.name[:2] for path in EXAMPLES] == [f"{number:02}" for number in range(1, 14)]
    table = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(.+?)`", table, re.MULTILINE) == [path.name for path in EXAMPLES]
    for path in EXAMPLES:
        assert 20 <= len(path.read_text(encoding="utf-8").splitlines()) <= 60, path.name
        assert 1 <= len(head_of(path).causes) <= 3, path.name
