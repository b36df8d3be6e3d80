"""The emulated cluster itself: hosts, cables, jobs and faults. netlab.py is its command.

         host 0            host 1           a namespace per host
      eth0    eth1      eth0    eth1        10.77.0.<host+1>, 10.78.0.<host+1>
       |       |         |       |          veth pairs with tbf on both ends
     h0n0    h0n1      h1n0    h1n1         ports in the switch namespace
       '---br0-|---------'       |          a bridge per NIC index
               '------br1--------'

Invariants: all that a lab makes lies in its own namespaces and one temporary directory, and is
removed on the way out: at the end, on an error, on SIGINT, SIGTERM and SIGHUP.
"""

from __future__ import annotations

import atexit
import itertools
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from lab.job import Job
from lab.wiring import (
    Cable,
    NetLabError,
    add_bridge,
    add_namespace,
    del_namespaces,
    namespace_prefix,
    set_congestion,
    set_sysctls,
    why_unavailable,
)

MAX_HOSTS = 16
MAX_NICS = 8
MASTER_PORT = 29500
FIRST_NET = 77  # NIC k is in 10.(77+k).0.0/24

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_serial = itertools.count()


def _ipv6(wanted: bool) -> dict[str, str]:
    """Settings of a namespace: its ports' addresses are of use at once, not after a second or two;
    or there are none, and no neighbour discovery in the measurements."""
    if not os.path.exists("/proc/sys/net/ipv6"):
        return {}
    if wanted:
        return {"net.ipv6.conf.default.accept_dad": "0"}
    return {f"net.ipv6.conf.{which}.disable_ipv6": "1" for which in ("all", "default")}


class NetLab:
    """A cluster of ``hosts`` hosts with ``len(nics)`` NICs each; use it as a context manager.

    Args:
        hosts: 1 to 16.
        nics: rate of each NIC in Mbit/s, 0 for unshaped. NIC k of host h is eth<k> with address
            10.(77+k).0.(h+1)/24, on switch k.
        one_subnet: put all NICs on one switch and in one subnet instead, with addresses
            10.77.k.(h+1)/16. The kernel's defaults are kept, under which both NICs answer for
            each other's addresses, and each has a link-local IPv6; elsewhere IPv6 is off.
        mtu: in bytes, on every cable.
        congestion: "cubic" or "reno" on every host, or "" for cubic where the kernel allows it in
            a namespace, else reno. After entering, the attribute names the one in force.
        sysctls: further kernel settings for every host, e.g. {"net.ipv4.conf.all.arp_ignore": "1"}.
        slowest: the least rate in Mbit/s that ``slow`` will set a cable to; 0: rates never fall.

    Raises NetLabError with one sentence where the lab cannot be built.
    """

    def __init__(
        self,
        hosts: int,
        nics: Sequence[float],
        *,
        one_subnet: bool = False,
        mtu: int = 1500,
        congestion: str = "",
        sysctls: Mapping[str, str] | None = None,
        slowest: float = 0,
    ) -> None:
        _check_shape(hosts, nics, mtu, congestion)
        self.hosts = hosts
        self.nics = tuple(nics)
        self.one_subnet = one_subnet
        self.mtu = mtu
        self.congestion = congestion
        self._sysctls = dict(sysctls or {})
        self._slowest = min(slowest, *(rate for rate in nics if rate)) if slowest else 0.0
        self._prefix = f"{namespace_prefix()}{next(_serial)}-"
        self._namespaces: list[str] = []
        self._cables: dict[tuple[int, int], Cable] = {}
        self._jobs: list[Job] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._folder: Path | None = None
        self._old_handlers: dict[int, object] = {}

    # --- building and removing ---

    def __enter__(self) -> NetLab:
        reason = why_unavailable()
        if reason:
            raise NetLabError(reason)
        atexit.register(self.close)
        self._catch_signals()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _build(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=self._prefix))
        self._add_namespace("switch", _ipv6(False))
        for bridge in ["br0"] if self.one_subnet else [f"br{k}" for k in range(len(self.nics))]:
            add_bridge(self.switch, bridge, self.mtu)
        settings = {
            **_ipv6(self.one_subnet),
            "net.ipv4.tcp_no_metrics_save": "1",  # a connection must not learn from the last run
            "net.ipv4.conf.all.rp_filter": "0",
            "net.ipv4.conf.default.rp_filter": "0",
            **self._sysctls,
        }
        for host in range(self.hosts):
            self._add_namespace(f"h{host}", settings)
            choices = [self.congestion] if self.congestion else ["cubic", "reno"]
            self.congestion = set_congestion(self.namespace(host), choices)
            for nic in range(len(self.nics)):
                cable = self._plan_cable(host, nic)
                cable.add()
                self._cables[host, nic] = cable

    def _add_namespace(self, name: str, settings: Mapping[str, str]) -> None:
        full = self._prefix + name
        self._namespaces.append(full)
        add_namespace(full)
        set_sysctls(full, settings)

    def _plan_cable(self, host: int, nic: int) -> Cable:
        return Cable(
            namespace=self.namespace(host),
            device=f"eth{nic}",
            address=(
                f"10.77.{nic}.{host + 1}/16"
                if self.one_subnet
                else f"10.{FIRST_NET + nic}.0.{host + 1}/24"
            ),
            switch=self.switch,
            port=f"h{host}n{nic}",
            bridge="br0" if self.one_subnet else f"br{nic}",
            mbit=self.nics[nic],
            mtu=self.mtu,
            slowest=self._slowest,
        )

    def close(self) -> None:
        """End every process of the lab and remove all that it made. Twice is no error."""
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *_SIGNALS))
        try:
            for job in self._jobs:
                job.stop()
            del_namespaces(self._namespaces)
            for process in self._processes:
                process.wait()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            self._namespaces, self._jobs, self._processes = [], [], []
            self._cables, self._folder = {}, None
            atexit.unregister(self.close)
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            self._old_handlers = {}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)

    def _catch_signals(self) -> None:
        """Turn a signal that would end the process unheard into SystemExit, so that we clean up."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                self._old_handlers[number] = signal.signal(number, _leave)

    # --- names ---

    @property
    def switch(self) -> str:
        """Name of the namespace that holds the switches."""
        return self._prefix + "switch"

    def namespace(self, host: int) -> str:
        """Name of a host's network namespace."""
        if not 0 <= host < self.hosts:
            raise NetLabError(f"host {host}: this lab has hosts 0 to {self.hosts - 1}")
        return f"{self._prefix}h{host}"

    def address(self, host: int, nic: int = 0) -> str:
        """IPv4 address of a host's NIC."""
        return self._cable(host, nic).address.partition("/")[0]

    def _cable(self, host: int, nic: int) -> Cable:
        self.namespace(host)
        if not 0 <= nic < len(self.nics):
            raise NetLabError(f"NIC {nic}: hosts of this lab have NICs 0 to {len(self.nics) - 1}")
        if (host, nic) not in self._cables:
            raise NetLabError("the lab is closed, or was not entered")
        return self._cables[host, nic]

    # --- running ---

    def run(
        self,
        host: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        **options: object,
    ) -> subprocess.Popen[str]:
        """Start a program on a host, in text mode; ``options`` go to subprocess.Popen.

        ``env`` is added to this process's environment. The process ends with the lab at the
        latest.
        """
        if not self._namespaces:
            raise NetLabError("the lab is closed, or was not entered")
        process: subprocess.Popen[str] = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(host), *argv],
            env={**os.environ, **(env or {})},
            text=True,
            errors="replace",
            **options,  # type: ignore[call-overload]
        )
        self._processes.append(process)
        return process

    def start(
        self,
        argv: Sequence[str],
        ranks_per_host: int = 1,
        env: Mapping[str, str] | None = None,
        *,
        quiet: bool = False,
    ) -> Job:
        """Start one rank of a job per place, hosts first filled first, and return the Job.

        Rank 0 writes to this process's own output, the others to its stderr, each line headed by
        the rank. With ``quiet`` nothing is shown and ``Job.output(rank)`` has it all.
        """
        if ranks_per_host < 1:
            raise NetLabError(f"ranks_per_host={ranks_per_host}: give 1 or more")
        world = self.hosts * ranks_per_host
        shared = self._job_environment(world, ranks_per_host)
        ranks: list[subprocess.Popen[str]] = []
        for rank in range(world):
            piped = quiet or rank > 0
            ranks.append(
                self.run(
                    rank // ranks_per_host,
                    argv,
                    {
                        **shared,
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank % ranks_per_host),
                        "GROUP_RANK": str(rank // ranks_per_host),
                        **(env or {}),
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if piped else None,
                    stderr=subprocess.STDOUT if piped else None,
                )
            )
        job = Job(ranks, quiet)
        self._jobs.append(job)
        return job

    def launch(
        self,
        argv: Sequence[str],
        ranks_per_host: int = 1,
        env: Mapping[str, str] | None = None,
        *,
        quiet: bool = False,
        timeout: float | None = None,
    ) -> int:
        """start() and wait(): run a job to its end and return its worst exit code."""
        return self.start(argv, ranks_per_host, env, quiet=quiet).wait(timeout)

    def _job_environment(self, world: int, ranks_per_host: int) -> dict[str, str]:
        if self._folder is None:
            raise NetLabError("the lab is closed, or was not entered")
        secret = self._folder / f"secret{len(self._jobs)}"
        with open(os.open(secret, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        threads = max(1, (os.cpu_count() or 1) // world)
        return {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            "PYTHONUNBUFFERED": "1",
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(ranks_per_host),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(MASTER_PORT),
            "RINGCOMM_INTERFACES": ",".join(f"eth{nic}" for nic in range(len(self.nics))),
            "RINGCOMM_SECRET_FILE": str(secret),
        }

    # --- faults ---

    def cut(self, host: int, nic: int) -> None:
        """The host's own end goes down (as `ip link set eth0 down`): it loses its routes at once,
        and sending fails with ENETUNREACH."""
        self._cable(host, nic).set_device("down")

    def unplug(self, host: int, nic: int) -> None:
        """The switch's end goes down: the host's port stays configured but loses its carrier, as
        when the plug is pulled. Packets are dropped; other hosts see nothing but silence."""
        self._cable(host, nic).set_port("down")

    def blackhole(self, host: int, nic: int) -> None:
        """Both directions are silently dropped in the switch; the carrier stays up everywhere."""
        self._cable(host, nic).set_forwarding(False)

    def flush(self, host: int, nic: int) -> None:
        """The host's port loses its address (as `ip addr flush dev eth0`); the link stays up."""
        self._cable(host, nic).set_address(False)

    def mute(self, host: int, nic: int, to: int) -> None:
        """What the host sends to host ``to`` by this port is lost; all else arrives, also what
        that host sends back."""
        self._cable(host, nic).misdirect(self.address(to, nic))

    def slow(self, host: int, nic: int, mbit: float, *, loses_queue: bool = False) -> None:
        """Change the rate of both directions to ``mbit`` Mbit/s; 0: unshaped. A shaped
        cable that loses its queue, as one whose ends agree on another rate does, may go below the
        lab's slowest."""
        if mbit < 0:
            raise NetLabError(f"a rate of {mbit} Mbit/s: give 0 (unshaped) or more")
        self._cable(host, nic).shape(mbit, loses_queue=loses_queue)

    def is_up(self, host: int, nic: int) -> bool:
        """Whether a restored cable's ends are up, as far as their kernel knows by now."""
        return self._cable(host, nic).is_up()

    def restore(self, host: int, nic: int) -> None:
        """Undo every fault of this cable: link, address, carrier, forwarding, its first rate."""
        cable = self._cable(host, nic)
        cable.set_forwarding(True)
        cable.set_port("up")
        cable.set_device("up")
        cable.set_address(True)
        cable.direct()
        cable.shape(cable.mbit)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _check_shape(hosts: int, nics: Sequence[float], mtu: int, congestion: str) -> None:
    if not 1 <= hosts <= MAX_HOSTS:
        raise NetLabError(f"hosts={hosts}: give 1 to {MAX_HOSTS}")
    if not 1 <= len(nics) <= MAX_NICS:
        raise NetLabError(f"{len(nics)} NICs: give 1 to {MAX_NICS}")
    for mbit in nics:
        if mbit != 0 and not 1 <= mbit <= 100_000:
            raise NetLabError(f"a NIC of {mbit} Mbit/s: give 1 to 100000, or 0 for unshaped")
    if not 576 <= mtu <= 65535:
        raise NetLabError(f"mtu={mtu}: give 576 to 65535")
    if congestion not in ("", "cubic", "reno"):
        raise NetLabError(f"congestion={congestion!r}: give cubic or reno")
