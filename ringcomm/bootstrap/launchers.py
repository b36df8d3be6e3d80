"""Reads each launcher's environment variables into one Launched record.

Each reader returns None if its launcher's variables are not set, and raises ConfigError if they
are incomplete or not numbers. The order in detect() is the order of trust: torchrun
inside Slurm is torchrun, mpirun inside Slurm is mpirun.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping

from ..errors import ConfigError

Env = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Launched:
    """Rank and job of this process as one launcher gives them."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    job: str = ""
    """Name of the job, equal on all ranks; empty: the launcher does not name its jobs."""
    nodes: int | None = None
    first_host: str = ""

    @property
    def one_host(self) -> bool:
        """True only if the launcher says that all ranks share a host."""
        return self.nodes == 1 or self.local_world_size == self.world_size


def detect(env: Env) -> Launched | None:
    """Returns the record of the first launcher whose variables are in env, or None."""
    for reader in (_torchrun, _open_mpi, _hydra, _slurm, _pmi):
        found = reader(env)
        if found is not None:
            return found
    for one, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if env.get(one):
            raise ConfigError(f"{one} is set but {other} is not: set both, or neither")
    return None


def integer(env: Env, name: str) -> int | None:
    """Reads a variable as a number of 0 or more; None if it is not set or empty."""
    text = env.get(name, "").strip()
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise ConfigError(f"{name}={text!r} is not a whole number of 0 or more: set it to one")
    return int(text)


def _pair(env: Env, rank: str, size: str) -> tuple[int, int] | None:
    """Reads rank and size; None if rank is not set. Raises ConfigError if only size is not set."""
    first, second = integer(env, rank), integer(env, size)
    if first is None:
        return None
    if second is None:
        raise ConfigError(f"{rank} is set but {size} is not: set both, or neither")
    return first, second


def _torchrun(env: Env) -> Launched | None:
    if not (env.get("RANK") and env.get("WORLD_SIZE")):
        return None
    pair = _pair(env, "RANK", "WORLD_SIZE")
    assert pair is not None
    run = env.get("TORCHELASTIC_RUN_ID")
    job = f"torchrun:{run}:{env.get('TORCHELASTIC_RESTART_COUNT', '0')}" if run else ""
    return Launched(
        "torchrun" if run else "env",
        *pair,
        local_rank=integer(env, "LOCAL_RANK"),
        local_world_size=integer(env, "LOCAL_WORLD_SIZE"),
        job=job,
    )


def _open_mpi(env: Env) -> Launched | None:
    pair = _pair(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if pair is None:
        return None
    # 5.x and late 4.x name the job in PMIX_NAMESPACE, older ones in an MCA variable.
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "")
    launched = Launched(
        "mpirun",
        *pair,
        local_rank=integer(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_world_size=integer(env, "OMPI_COMM_WORLD_LOCAL_SIZE"),
    )
    return _named(launched, job)


def _hydra(env: Env) -> Launched | None:
    """Reads the variables of mpiexec of MPICH and Intel MPI; PMI_RANK alone may also be srun's."""
    return _pmi(env) if "MPI_LOCALRANKID" in env else None


def _pmi(env: Env) -> Launched | None:
    pair = _pair(env, "PMI_RANK", "PMI_SIZE")
    if pair is None:
        return None
    launched = Launched(
        "mpiexec",
        *pair,
        local_rank=integer(env, "MPI_LOCALRANKID"),
        local_world_size=integer(env, "MPI_LOCALNRANKS"),
    )
    return _named(launched, env.get("PMI_JOBID", ""))


def _slurm(env: Env) -> Launched | None:
    # A batch script has SLURM_PROCID and SLURM_NTASKS too; only srun's tasks have a step.
    if "SLURM_STEP_ID" not in env or integer(env, "SLURM_PROCID") is None:
        return None
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    pair = _pair(env, "SLURM_PROCID", size)
    assert pair is not None
    nodes = integer(env, "SLURM_STEP_NUM_NODES") or integer(env, "SLURM_NNODES")
    nodelist = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", "")
    return Launched(
        "srun",
        *pair,
        local_rank=integer(env, "SLURM_LOCALID"),
        local_world_size=pair[1] if nodes == 1 else None,
        job=f"srun:{env.get('SLURM_JOB_ID', '')}.{env['SLURM_STEP_ID']}",
        nodes=nodes,
        first_host=first_host(nodelist),
    )


def first_host(nodelist: str) -> str:
    """Returns the first host of a Slurm node list such as ``gpu[03-07,11],big1``, or "".

    Raises ConfigError if the list cannot be read.
    """
    match = re.match(r"((?:[^,\[\]\s]|\[[^\[\]\s]+\])*)(?:,|$)", nodelist)
    if match is None:
        raise ConfigError(f"the Slurm node list {nodelist!r} cannot be read: set MASTER_ADDR")
    return re.sub(r"\[([^\]]+)\]", lambda m: re.split("[-,]", m[1])[0], match[1])


def _named(launched: Launched, job: str) -> Launched:
    """Returns launched with the name of its job. A job without an id that runs on one host is
    named after the launcher's process, which all its ranks see."""
    if not job and launched.one_host:
        job = _parent_launcher()
    return dataclasses.replace(launched, job=f"{launched.launcher}:{job}")


def _parent_launcher() -> str:
    """Identifies the launcher process above this one, or returns "" if there is none.

    Pid and start time of the nearest ancestor that starts MPI ranks: equal on all ranks of one
    host, and different in another job, even through wrapper scripts.
    """
    pid = os.getppid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                stat = file.read()
        except OSError:
            return ""
        name = stat[stat.find("(") + 1 : stat.rfind(")")]
        fields = stat[stat.rfind(")") + 2 :].split()
        if name.startswith(("hydra", "mpiexec", "mpirun", "orted", "prte", "pmi_proxy")):
            return f"{pid}.{fields[19]}"
        pid = int(fields[1])
    return ""
