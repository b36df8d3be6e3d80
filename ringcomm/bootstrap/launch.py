"""Rank, world size and meeting point of this process: one answer from many launchers.

Sources, first match wins: explicit arguments; torchrun and plain RANK/WORLD_SIZE; Open MPI; MPICH
and Intel MPI; Slurm; PMI_RANK and PMI_SIZE alone; a world of one. The order in detect() is the
order of trust: torchrun inside Slurm is torchrun, mpirun inside Slurm is mpirun.

Invariants: nothing is resolved, connected or listened on here; a value that is given but cannot
work is a ConfigError naming the variable, never a guess; every rank of a job computes the same
``job`` and the same ``master_ports``; a launcher's reader returns None if its variables are not
set.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import urllib.parse
from collections.abc import Mapping, Sequence

from ..errors import ConfigError

Env = Mapping[str, str]

LOOPBACK = "127.0.0.1"
CANDIDATES = 8
"""Ports tried, in order, where no exact port was asked for."""

_DERIVED_PORTS = range(20000, 32768)  # below the ports that kernels hand out to clients
_MEETING_POINT = (
    "set MASTER_ADDR to the address of rank 0's host and MASTER_PORT to a free port on it, or "
    'pass init_method="tcp://host:port"'
)


@dataclasses.dataclass(frozen=True)
class Identity:
    """This process's place in the job."""

    rank: int
    world_size: int
    local_rank: int | None = None
    """Number of this rank on its host as the launcher counts it; None: not given."""
    local_world_size: int | None = None
    master_addr: str = ""
    """Name or address at which rank 0 listens for our own rendezvous; empty without one."""
    master_ports: tuple[int, ...] = ()
    """Ports of the rendezvous in order of preference; a single one is used or the join fails."""
    launcher: str = ""
    """explicit, torchrun, env (plain RANK), mpirun (Open MPI), mpiexec, srun, or none."""
    job: str = ""
    """Name of the job, equal on all its ranks; other jobs differ if the launcher names them."""

    @property
    def one_host(self) -> bool:
        """True only if the launcher says that all ranks share a host."""
        return self.local_world_size == self.world_size

    @property
    def master_port(self) -> int:
        """The preferred rendezvous port; 0 in a world of one."""
        return self.master_ports[0] if self.master_ports else 0


def identify(
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
    env: Env | None = None,
) -> Identity:
    """Returns the Identity of this process.

    Args:
        rank, world_size: both or neither; they override the environment.
        init_method: ``"tcp://host:port"`` (IPv6 in brackets) for rank 0's address, ``"env://"``
            to require a launcher's environment, None to use one if it is set.
        env: the environment to read; os.environ if None.

    Raises ConfigError for values that are incomplete, inconsistent or not numbers.
    """
    env = os.environ if env is None else env
    if (rank is None) != (world_size is None):
        missing = "world_size" if world_size is None else "rank"
        raise ConfigError(f"{missing} is missing: give both rank and world_size, or neither")
    address = _parse_init_method(init_method)
    if rank is not None and world_size is not None:
        launched = Identity(rank, world_size, launcher="explicit")
    else:
        found = detect(env)
        if found is None and init_method is not None:
            raise ConfigError(
                f"init_method={init_method!r} but no launcher's environment was found: set RANK, "
                "WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or pass rank and world_size"
            )
        launched = found or Identity(0, 1, launcher="none")
    _check(launched)
    ports: tuple[int, ...] = ()
    if launched.world_size == 1:
        addr, job = "", launched.job or launched.launcher
    elif address is not None:
        addr, ports, job = address[0], address[1:], f"{launched.job or 'tcp'}:{address[1]}"
    else:
        addr, ports, job = _meeting_point(launched, env)
    return dataclasses.replace(launched, master_addr=addr, master_ports=ports, job=job)


def placed(rank: int, world_size: int) -> Identity:
    """Returns the Identity of a rank that meets the others over a torch Store, at no address.
    Raises ConfigError."""
    identity = Identity(rank, world_size, launcher="explicit", job="store")
    _check(identity)
    return identity


def _check(launched: Identity) -> None:
    rank, world = launched.rank, launched.world_size
    for name, value in (("rank", rank), ("world_size", world)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name}={value!r}: give a whole number")
    if world < 1:
        raise ConfigError(f"world_size={world} ({launched.launcher}): give 1 or more")
    if not 0 <= rank < world:
        raise ConfigError(
            f"rank={rank} does not fit world_size={world} ({launched.launcher}): ranks go from 0 "
            f"to {world - 1}"
        )


def _parse_init_method(init_method: str | None) -> tuple[str, int] | None:
    if init_method is None or init_method == "env://":
        return None
    try:
        url = urllib.parse.urlsplit(init_method if isinstance(init_method, str) else "")
        host, port = url.hostname, url.port
    except ValueError:
        url, host, port = urllib.parse.urlsplit(""), None, None
    if url.scheme != "tcp" or not host or not port or url.path or url.query or url.username:
        raise ConfigError(
            f'init_method={init_method!r}: give "tcp://host:port" (IPv6 as "tcp://[::1]:29500") '
            'or "env://"'
        )
    return host, port


def _meeting_point(launched: Identity, env: Env) -> tuple[str, tuple[int, ...], str]:
    """Returns address and ports of the rendezvous, from MASTER_* or from the launcher, and the name
    of the job."""
    addr = env.get("MASTER_ADDR", "").strip()
    port = integer(env, "MASTER_PORT")
    if port is not None and not 1 <= port <= 65535:
        raise ConfigError(f"MASTER_PORT={port}: give a port from 1 to 65535")

    if launched.launcher in ("env", "torchrun", "explicit") and (not addr or port is None):
        raise ConfigError(
            f"world_size={launched.world_size} but MASTER_ADDR and MASTER_PORT are not both "
            f"set: {_MEETING_POINT}"
        )
    if launched.one_host and (not addr or launched.launcher == "torchrun"):
        addr = LOOPBACK
    addr = addr or launched.master_addr
    if not addr:
        raise ConfigError(
            f"{launched.launcher} started {launched.world_size} ranks that are not all known to "
            f"be on one host, and MASTER_ADDR is not set: {_MEETING_POINT}"
        )

    job = launched.job or "tcp"
    if port is None:
        return addr, derived_ports(job), job
    job = f"{job}:{port}"
    # torchrun's agent already listens on MASTER_PORT.
    first = port + 1 if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else port
    ports = tuple(range(first, min(first + CANDIDATES, 65536)))
    return addr, ports or derived_ports(job), job


def derived_ports(job: str) -> tuple[int, ...]:
    """Derives rendezvous ports from the job's name, the same on all ranks, if none was given."""
    ports: list[int] = []
    counter = 0
    while len(ports) < CANDIDATES:
        digest = hashlib.sha256(f"ringcomm port {counter} {job}".encode()).digest()
        port = _DERIVED_PORTS[int.from_bytes(digest[:8], "big") % len(_DERIVED_PORTS)]
        if port not in ports:
            ports.append(port)
        counter += 1
    return tuple(ports)


# -- the launchers' variables --


def detect(env: Env) -> Identity | None:
    """Returns what the first launcher says whose variables are in env, or None. master_addr is the
    first host, or empty, and so is a job that it does not name. Raises ConfigError for variables
    that are incomplete or not numbers."""
    for reader in (_torchrun, _open_mpi, _hydra, _slurm, _pmi):
        found = reader(env)
        if found is not None:
            return found
    for one, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if _is_set(env, one):
            raise ConfigError(f"{one} is set but {other} is not: set both, or neither")
    return None


def _is_set(env: Env, name: str) -> bool:
    return bool(env.get(name, "").strip())


def integer(env: Env, name: str) -> int | None:
    """Reads a variable as a number of 0 or more; None if it is not set or empty."""
    if not _is_set(env, name):
        return None
    text = env[name].strip()
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


def _torchrun(env: Env) -> Identity | None:
    if not (_is_set(env, "RANK") and _is_set(env, "WORLD_SIZE")):
        return None
    pair = _pair(env, "RANK", "WORLD_SIZE")
    assert pair is not None
    run = env.get("TORCHELASTIC_RUN_ID")
    job = f"torchrun:{run}:{env.get('TORCHELASTIC_RESTART_COUNT', '0')}" if run else ""
    return Identity(
        *pair,
        local_rank=integer(env, "LOCAL_RANK"),
        local_world_size=integer(env, "LOCAL_WORLD_SIZE"),
        launcher="torchrun" if run else "env",
        job=job,
    )


def _open_mpi(env: Env) -> Identity | None:
    # 5.x and late 4.x name the job in PMIX_NAMESPACE, older ones in an MCA variable.
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "")
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return _mpi(env, "mpirun", [f"OMPI_COMM_WORLD_{name}" for name in names], job)


def _hydra(env: Env) -> Identity | None:
    """Reads the variables of mpiexec of MPICH and Intel MPI; PMI_RANK alone may also be srun's."""
    return _pmi(env) if _is_set(env, "MPI_LOCALRANKID") else None


def _pmi(env: Env) -> Identity | None:
    """Reads the variables of PMI, as _hydra does; alone they count after Slurm, which may set
    them."""
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return _mpi(env, "mpiexec", names, env.get("PMI_JOBID", ""))


def _mpi(env: Env, launcher: str, names: Sequence[str], job: str) -> Identity | None:
    """Reads the variables with rank, size, local rank and local size. A job without an id that runs
    on one host is named after the launcher's process, which all its ranks see."""
    rank, size, local_rank, local_size = names
    pair = _pair(env, rank, size)
    if pair is None:
        return None
    local = integer(env, local_rank), integer(env, local_size)
    launched = Identity(*pair, *local, launcher=launcher)
    if not job and launched.one_host:
        job = _parent_launcher()
    return dataclasses.replace(launched, job=f"{launcher}:{job}")


def _slurm(env: Env) -> Identity | None:
    # A batch script has SLURM_PROCID and SLURM_NTASKS too; only srun's tasks have a step.
    if not _is_set(env, "SLURM_STEP_ID") or integer(env, "SLURM_PROCID") is None:
        return None
    has_step = _is_set(env, "SLURM_STEP_NUM_TASKS")
    pair = _pair(env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS" if has_step else "SLURM_NTASKS")
    assert pair is not None
    nodes = integer(env, "SLURM_STEP_NUM_NODES") or integer(env, "SLURM_NNODES")
    has_nodes = _is_set(env, "SLURM_STEP_NODELIST")
    nodelist = env.get("SLURM_STEP_NODELIST" if has_nodes else "SLURM_NODELIST", "").strip()
    return Identity(
        *pair,
        local_rank=integer(env, "SLURM_LOCALID"),
        local_world_size=pair[1] if nodes == 1 else None,
        master_addr=first_host(nodelist),
        launcher="srun",
        job=f"srun:{env.get('SLURM_JOB_ID', '')}.{env['SLURM_STEP_ID']}",
    )


def first_host(nodelist: str) -> str:
    """Returns the first host of a Slurm node list such as ``gpu[03-07,11],big1``, or "".

    Raises ConfigError if the list cannot be read.
    """
    match = re.match(r"((?:[^,\[\]\s]|\[[^\[\]\s]+\])*)(?:,|$)", nodelist)
    if match is None:
        raise ConfigError(f"the Slurm node list {nodelist!r} cannot be read: set MASTER_ADDR")
    return re.sub(r"\[([^\]]+)\]", lambda m: re.split("[-,]", m[1])[0], match[1])


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
