"""Rank, world size and meeting point of this process: one answer from many launchers.

Sources, first match wins: explicit arguments; torchrun and plain RANK/WORLD_SIZE; Open MPI;
MPICH and Intel MPI; Slurm; a world of one. launchers.py knows their variables, this file turns
what they say into one Identity.

Invariants: nothing is resolved, connected or listened on here; a value that is given but cannot
work is a ConfigError naming the variable, never a guess; every rank of a job computes the same
``job`` and the same ``master_ports``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import urllib.parse
from collections.abc import Mapping

from ..errors import ConfigError
from .launchers import Launched, detect, integer

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
    job: str = ""
    """Name of the job, equal on all its ranks; other jobs differ if the launcher names them."""

    @property
    def master_port(self) -> int:
        """The preferred rendezvous port; 0 in a world of one."""
        return self.master_ports[0] if self.master_ports else 0


def identify(
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
    env: Mapping[str, str] | None = None,
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
        launched = Launched("explicit", rank, world_size)
    else:
        found = detect(env)
        if found is None and init_method is not None:
            raise ConfigError(
                f"init_method={init_method!r} but no launcher's environment was found: set RANK, "
                "WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or pass rank and world_size"
            )
        launched = found or Launched("none", 0, 1)
    _check(launched)
    if launched.world_size == 1:
        return _identity(launched, "", (), launched.job or launched.launcher)
    if address is not None:
        job = f"{launched.job or 'tcp'}:{address[1]}"
        return _identity(launched, address[0], (address[1],), job)
    return _meeting_point(launched, env)


def placed(rank: int, world_size: int) -> Identity:
    """Returns the Identity of a rank that meets the others over a torch Store, at no address.
    Raises ConfigError."""
    launched = Launched("explicit", rank, world_size)
    _check(launched)
    return _identity(launched, "", (), "store")


def _identity(launched: Launched, addr: str, ports: tuple[int, ...], job: str) -> Identity:
    return Identity(
        rank=launched.rank,
        world_size=launched.world_size,
        local_rank=launched.local_rank,
        local_world_size=launched.local_world_size,
        master_addr=addr,
        master_ports=ports,
        launcher=launched.launcher,
        job=job,
    )


def _check(launched: Launched) -> None:
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
    url = urllib.parse.urlsplit(init_method)
    try:
        host, port = url.hostname, url.port
    except ValueError:
        host = port = None
    if url.scheme != "tcp" or not host or not port or url.path or url.query or url.username:
        raise ConfigError(
            f'init_method={init_method!r}: give "tcp://host:port" (IPv6 as "tcp://[::1]:29500") '
            'or "env://"'
        )
    return host, port


def _meeting_point(launched: Launched, env: Mapping[str, str]) -> Identity:
    """Returns the identity with the rendezvous address, from MASTER_* or from the launcher."""
    addr = env.get("MASTER_ADDR", "").strip()
    port = integer(env, "MASTER_PORT")
    if port is not None and not 1 <= port <= 65535:
        raise ConfigError(f"MASTER_PORT={port}: give a port from 1 to 65535")

    if launched.launcher in ("env", "torchrun", "explicit"):
        if not addr or port is None:
            raise ConfigError(
                f"world_size={launched.world_size} but MASTER_ADDR and MASTER_PORT are not both "
                f"set: {_MEETING_POINT}"
            )
        if launched.launcher == "torchrun" and launched.one_host:
            addr = LOOPBACK
    elif not addr and launched.one_host:
        addr = LOOPBACK
    elif not addr:
        addr = launched.first_host
    if not addr:
        raise ConfigError(
            f"{launched.launcher} started {launched.world_size} ranks that are not all known to "
            f"be on one host, and MASTER_ADDR is not set: {_MEETING_POINT}"
        )

    job = launched.job or "tcp"
    if port is None:
        return _identity(launched, addr, derived_ports(job), job)
    job = f"{job}:{port}"
    # torchrun's agent already listens on MASTER_PORT.
    first = port + 1 if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else port
    ports = tuple(range(first, min(first + CANDIDATES, 65536)))
    return _identity(launched, addr, ports or derived_ports(job), job)


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
