"""Where peers.py runs its jobs: the loopback of one host, or the hosts of a netlab.

Invariants: every job of a site meets the same network with the same congestion control, which is
pinned in the site's own namespaces; without root there are none, and the machine's default stays.
When run() returns, no process of its job is left.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.cluster import NetLab
from lab.job import Job, exit_name
from lab.wiring import why_unavailable

_DEFAULT = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_ERROR = re.compile(r"^(?:\[rank\d+\]: )?\S*Error: .*", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        code: the worst exit code of its ranks.
        output: all that they wrote, rank by rank.
    """

    code: int
    output: str

    def reason(self) -> str:
        """In one line, why it failed: the last thing that a rank said, else the exit code."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("sweep: ")] or lines[-1:]
        name = exit_name(self.code)
        return f"{said[-1].removeprefix('sweep: ')[:160]} ({name})" if said else name

    def records(self) -> list[dict[str, Any]]:
        """The JSON objects that the ranks wrote, one on a line.

        Raises:
            RuntimeError: the job failed; the text is a rank's first line on an error of Python's,
                else reason().
        """
        if self.code:
            error = _ERROR.search(self.output)
            raise RuntimeError(error[0] if error else self.reason())
        return [json.loads(line) for line in self.output.splitlines() if line[:1] == "{"]


class Site:
    """A network with ranks on it; use it as a context manager.

    Args:
        hosts: hosts of the netlab; 0: one host's loopback.
        ranks: how many in all, spread evenly over the hosts.
        nics: rate of each NIC of a host in Mbit/s (netlab only).
        one_subnet: all NICs on one switch and in one subnet (netlab only).
        sysctls: further kernel settings of every host (netlab only).
        slowest: the least rate that ``slow`` will set; 0: rates never fall (netlab only).
        name: for tables; "loopback" or "netlab" unless given.

    Attributes:
        rates: Mbit/s of each port by its name, the fastest first; 0: not shaped, so the fastest.
        interfaces: the ports that a job may use, the fastest first: a library that takes one port
            takes the first.
        congestion: the congestion control that every side uses.
        pinned: whether it was set for this run, and is not just the machine's default.
    """

    def __init__(
        self,
        hosts: int,
        ranks: int,
        nics: Sequence[float] = (),
        *,
        one_subnet: bool = False,
        sysctls: Mapping[str, str] | None = None,
        slowest: float = 0,
        name: str = "",
    ) -> None:
        self.hosts, self.world = max(1, hosts), ranks
        self.ranks_per_host = ranks // self.hosts
        self.loopback = hosts == 0
        self.name = name or ("loopback" if self.loopback else "netlab")
        self.congestion, self.pinned = "", True
        self._nics = [0.0] if self.loopback else list(nics)
        name_of = "lo" if self.loopback else "eth{}"
        named = {name_of.format(nic): mbit for nic, mbit in enumerate(self._nics)}
        self.rates = dict(sorted(named.items(), key=lambda port: -(port[1] or math.inf)))
        self.interfaces = list(self.rates)
        self._one_subnet = one_subnet
        self._sysctls = sysctls
        self._slowest = slowest
        self._lab: NetLab | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Site:
        if self.loopback and why_unavailable() is not None:
            self.congestion, self.pinned = _DEFAULT.read_text().strip(), False
            return self
        self._lab = NetLab(
            self.hosts,
            self._nics,
            one_subnet=self._one_subnet,
            sysctls=self._sysctls,
            slowest=self._slowest,
        )
        self._lab.__enter__()
        self._scratch = tempfile.TemporaryDirectory(prefix="peers-")
        self.congestion = self._lab.congestion
        return self

    def __exit__(self, *error: object) -> None:
        if self._lab is not None:
            self._lab.close()
        if self._scratch is not None:
            self._scratch.cleanup()

    def describe(self) -> str:
        """The site in one line."""
        ports = ", ".join(
            "loopback" if self.loopback else f"{mbit:g} Mbit/s" if mbit else "unshaped"
            for mbit in self._nics
        )
        how = "on every side" if self.pinned else "by default (pinning it for all needs root)"
        many = f"{self.hosts} host{'s' if self.hosts > 1 else ''}"
        net = " in one subnet" if self._one_subnet else ""
        return f"{self.world} ranks on {many}, {ports}{net}; {self.congestion} {how}"

    @property
    def lab(self) -> NetLab:
        """The hosts and their ports (netlab only)."""
        assert self._lab is not None
        return self._lab

    def start(self, argv: Sequence[str], env: Mapping[str, str]) -> Job:
        """Start one process per rank, in torchrun's environment; end it with finish()."""
        env = {**env, **self._environment()}
        if self._lab is not None:
            return self._lab.start(argv, self.ranks_per_host, env, quiet=True)
        return Job([self._start_here(argv, rank, env) for rank in range(self.world)], True)

    def run(self, argv: Sequence[str], env: Mapping[str, str], timeout: float) -> Ended:
        """Run one process per rank, in torchrun's environment, to the end."""
        return finish(self.start(argv, env), timeout)

    def run_mpi(
        self,
        argv: Callable[[Sequence[str], str], list[str]],
        env: Mapping[str, str],
        timeout: float,
    ) -> Ended:
        """Run one launcher, which starts the ranks, to the end.

        ``argv(addresses, agent)`` is its command line; ``agent`` stands in for ssh, to reach the
        hosts at those addresses, of which there are none on the loopback.
        """
        env = {**env, "RINGCOMM_INTERFACES": ",".join(self.interfaces), "OMP_NUM_THREADS": "1"}
        if self._lab is None:
            launcher = _popen(argv([], ""), env)
        else:
            several = range(self.hosts) if not self.loopback else ()
            command = argv([self._lab.address(host) for host in several], str(self._agent()))
            launcher = self._lab.run(
                0,
                command,
                env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        return finish(Job([launcher], True), timeout)

    def _environment(self) -> dict[str, str]:
        env = {
            "PEERS_TOKEN": secrets.token_hex(16),
            "OMP_NUM_THREADS": "1",
            "RINGCOMM_INTERFACES": ",".join(self.interfaces),
            "RINGCOMM_CONGESTION": self.congestion,
        }
        if self.loopback:
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        return env

    def _start_here(
        self, argv: Sequence[str], rank: int, env: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        world = str(self.world)
        return _popen(
            argv,
            {
                **env,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": world,
                "LOCAL_WORLD_SIZE": world,
            },
        )

    def _agent(self) -> Path:
        """A program that MPI launchers take for ssh: runs a command on the host of an address.

        It gives each host a name of its own, by which MPI tells that memory is not shared.
        """
        assert self._lab is not None
        assert self._scratch is not None
        path = Path(self._scratch.name, "agent")
        cases = "\n".join(
            f"    {self._lab.address(host)}) at={self._lab.namespace(host)};;"
            for host in range(self.hosts)
        )
        path.write_text(_AGENT.replace("CASES", cases))
        path.chmod(0o700)
        return path


_AGENT = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
case $host in
CASES
    *) echo "no host $host" >&2; exit 1;;
esac
exec ip netns exec "$at" unshare --uts sh -c \\
    'echo "$1" > /proc/sys/kernel/hostname; shift; eval "$*"' sh "$host" "$@"
"""


def _popen(argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        list(argv),
        env={**os.environ, **env},
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(job: Job, timeout: float) -> Ended:
    """Wait for a job; end it after ``timeout`` seconds."""
    code = job.wait(timeout)
    return Ended(code, "".join(job.output(rank) for rank in range(len(job.ranks))))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
