"""An emulated cluster on one Linux box: a network namespace per host, shaped cables, faults.

    python bench/netlab.py --hosts 4 --nics 1000,1000 -- python bench/sweep.py --sizes 4:64M

         host 0            host 1           a namespace per host
      eth0    eth1      eth0    eth1        10.77.0.<host+1>, 10.78.0.<host+1>
       |       |         |       |          veth pairs with tbf on both ends
     h0n0    h0n1      h1n0    h1n1         ports in the switch namespace
       '---br0-|---------'       |          a bridge per NIC index
               '------br1--------'

Every rank of a job finds torchrun's environment, the ports in RINGCOMM_INTERFACES and a fresh
secret in RINGCOMM_SECRET_FILE. Cables can be cut, unplugged, silently dropped and slowed while the
job runs. Needs root, iproute2 and nothing else; no address of the machine itself is touched.

Invariants: all that a lab makes lies in its own namespaces and one temporary directory, and is
removed on the way out: at the end, on an error, on SIGINT, SIGTERM and SIGHUP. What a killed lab
left behind, `--clean` removes.
"""

from __future__ import annotations

import argparse
import atexit
import itertools
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from _job import Job, exit_name
from _wiring import (
    Cable,
    NetLabError,
    add_bridge,
    add_namespace,
    del_namespaces,
    is_leftover,
    list_namespaces,
    namespace_prefix,
    set_congestion,
    set_sysctls,
    why_unavailable,
)

__all__ = ["Job", "NetLab", "NetLabError", "why_unavailable"]

MAX_HOSTS = 16
MAX_NICS = 8
MASTER_PORT = 29500
FAULTS = ("cut", "unplug", "blackhole", "slow", "restore")

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_serial = itertools.count()


class NetLab:
    """A cluster of ``hosts`` hosts with ``len(nics)`` NICs each; use it as a context manager.

    Args:
        hosts: 1 to 16.
        nics: rate of each NIC in Mbit/s, 0 for unshaped. NIC k of host h is eth<k> with address
            10.(77+k).0.(h+1)/24, on switch k.
        one_subnet: put all NICs on one switch and in one subnet instead, with addresses
            10.77.k.(h+1)/16. The kernel's defaults are kept, under which both NICs answer for
            each other's addresses.
        mtu: in bytes, on every cable.
        congestion: "cubic" or "reno" on every host, or "" for cubic where the kernel allows it in
            a namespace, else reno. After entering, the attribute names the one in force.
        sysctls: further kernel settings for every host, e.g. {"net.ipv4.conf.all.arp_ignore": "1"}.

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
    ) -> None:
        _check_shape(hosts, nics, mtu, congestion)
        self.hosts = hosts
        self.nics = tuple(nics)
        self.one_subnet = one_subnet
        self.mtu = mtu
        self.congestion = congestion
        self._sysctls = dict(sysctls or {})
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
        self._add_namespace("switch", {})
        for bridge in ["br0"] if self.one_subnet else [f"br{k}" for k in range(len(self.nics))]:
            add_bridge(self.switch, bridge, self.mtu)
        settings = {
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
        if os.path.exists("/proc/sys/net/ipv6"):  # no neighbour discovery in the measurements
            set_sysctls(full, {"net.ipv6.conf.all.disable_ipv6": "1",
                               "net.ipv6.conf.default.disable_ipv6": "1"})
        set_sysctls(full, settings)

    def _plan_cable(self, host: int, nic: int) -> Cable:
        return Cable(
            namespace=self.namespace(host),
            device=f"eth{nic}",
            address=(f"10.77.{nic}.{host + 1}/16" if self.one_subnet
                     else f"10.{77 + nic}.0.{host + 1}/24"),
            switch=self.switch,
            port=f"h{host}n{nic}",
            bridge="br0" if self.one_subnet else f"br{nic}",
            mbit=self.nics[nic],
            mtu=self.mtu,
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
                    {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank % ranks_per_host),
                     "GROUP_RANK": str(rank // ranks_per_host), **(env or {})},
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

    def slow(self, host: int, nic: int, mbit: float) -> None:
        """Change the rate of both directions to ``mbit`` Mbit/s; 0: unshaped."""
        if mbit < 0:
            raise NetLabError(f"a rate of {mbit} Mbit/s: give 0 (unshaped) or more")
        self._cable(host, nic).shape(mbit)

    def restore(self, host: int, nic: int) -> None:
        """Undo every fault of this cable: link, carrier, forwarding and its first rate."""
        cable = self._cable(host, nic)
        cable.set_forwarding(True)
        cable.set_port("up")
        cable.set_device("up")
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


# --- the command ---


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="netlab.py",
        usage="%(prog)s --hosts N --nics MBIT[,MBIT...] [options] -- COMMAND [ARGUMENT...]",
        description="Run a job on an emulated cluster: a namespace per host, shaped cables.",
        epilog="COMMAND runs once per rank; `python` stands for the Python that runs netlab.",
    )
    parser.add_argument("--hosts", type=int, default=2, help=f"2 unless given, up to {MAX_HOSTS}")
    parser.add_argument("--nics", default="1000", metavar="MBIT[,MBIT...]",
                        help="rate of each NIC of a host in Mbit/s; 0: unshaped; 1000 unless given")
    parser.add_argument("--ranks-per-host", type=int, default=1, metavar="N")
    parser.add_argument("--one-subnet", action="store_true",
                        help="all NICs on one switch and in one subnet")
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--cc", default="", metavar="NAME",
                        help="congestion control: cubic or reno; cubic, if allowed, unless given")
    parser.add_argument("--sysctl", action="append", default=[], metavar="KEY=VALUE",
                        help="kernel setting for every host; may be given several times")
    parser.add_argument("--fault", action="append", default=[], metavar="SECONDS:KIND:HOST:NIC",
                        help=f"break a cable that long after the start: {', '.join(FAULTS)} "
                        "(slow takes :MBIT at the end); may be given several times")
    parser.add_argument("--timeout", type=float, metavar="S", help="end the job after S seconds")
    parser.add_argument("--shell", type=int, metavar="HOST",
                        help="open a shell on this host instead of running a command")
    parser.add_argument("--clean", action="store_true",
                        help="remove what labs that were killed left behind, and exit")
    argv = list(argv)
    at = argv.index("--") if "--" in argv else len(argv)
    options, command = parser.parse_args(argv[:at]), argv[at + 1 :]
    if not options.clean and bool(command) == (options.shell is not None):
        parser.error("give a command after `--`, or --shell HOST")
    return options, command


def _parse_nics(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise NetLabError(f"--nics {text}: give numbers, as in 1000,100") from None


def _parse_sysctls(texts: Sequence[str]) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise NetLabError(f"--sysctl {text}: give KEY=VALUE")
    return dict(text.split("=", 1) for text in texts)


def _parse_fault(text: str) -> tuple[float, str, list[float]]:
    """(seconds, kind, [host, nic, mbit?]) of one --fault."""
    try:
        after, kind, *numbers = text.split(":")
        if kind not in FAULTS or len(numbers) != (3 if kind == "slow" else 2):
            raise ValueError
        host, nic = int(numbers[0]), int(numbers[1])
        return float(after), kind, [host, nic, *(float(mbit) for mbit in numbers[2:])]
    except ValueError:
        raise NetLabError(
            f"--fault {text}: give SECONDS:KIND:HOST:NIC with KIND one of {', '.join(FAULTS)}, "
            "and the rate after slow, as in 3:slow:0:1:100"
        ) from None


def _play_faults(lab: NetLab, job: Job, faults: list[tuple[float, str, list[float]]]) -> None:
    began = time.monotonic()
    for after, kind, numbers in sorted(faults):
        while time.monotonic() - began < after:
            if all(rank.poll() is not None for rank in job.ranks):
                return
            time.sleep(0.01)
        try:
            getattr(lab, kind)(*numbers)
        except NetLabError as error:  # the lab may be on its way out
            print(f"netlab: {kind}: {error}", file=sys.stderr)
            return
        named = f"{after:g} s: {kind} host {numbers[0]} eth{numbers[1]}"
        print(f"netlab: {named}{f' to {numbers[2]:g} Mbit/s' if numbers[2:] else ''}",
              file=sys.stderr)


def _describe(lab: NetLab, ranks_per_host: int) -> str:
    nics = ", ".join(f"eth{k} {mbit:g} Mbit/s" if mbit else f"eth{k} unshaped"
                     for k, mbit in enumerate(lab.nics))
    return (f"netlab: {lab.hosts} hosts x {ranks_per_host} ranks; {nics}"
            f"{' in one subnet' if lab.one_subnet else ''}; {lab.congestion}; MTU {lab.mtu}")


def _run(options: argparse.Namespace, command: list[str]) -> int:
    faults = [_parse_fault(text) for text in options.fault]
    lab = NetLab(
        options.hosts,
        _parse_nics(options.nics),
        one_subnet=options.one_subnet,
        mtu=options.mtu,
        congestion=options.cc,
        sysctls=_parse_sysctls(options.sysctl),
    )
    for _, _, (host, nic, *_) in faults:
        lab.namespace(int(host))
        if not 0 <= nic < len(lab.nics):
            raise NetLabError(f"--fault names NIC {nic}: hosts have NICs 0 to {len(lab.nics) - 1}")
    with lab:
        print(_describe(lab, options.ranks_per_host), file=sys.stderr)
        if options.shell is not None:
            signal.signal(signal.SIGINT, lambda number, frame: None)  # Ctrl-C is the shell's
            return lab.run(options.shell, [os.environ.get("SHELL", "/bin/sh")]).wait()
        if command[0] in ("python", "python3"):
            command[0] = sys.executable
        job = lab.start(command, options.ranks_per_host)
        threading.Thread(target=_play_faults, args=(lab, job, faults), daemon=True).start()
        code = job.wait(options.timeout)
        if code:
            print(f"netlab: `{shlex.join(command)}` ended with {exit_name(code)}", file=sys.stderr)
        return code


def clean() -> int:
    """Remove what labs whose process was killed left behind; the number of namespaces removed."""
    reason = why_unavailable()
    if reason:
        raise NetLabError(reason)
    leftovers = [name for name in list_namespaces() if is_leftover(name)]
    del_namespaces(leftovers)
    for folder in Path(tempfile.gettempdir()).glob("netlab-*"):
        if is_leftover(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
    return len(leftovers)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options, command = _parse(sys.argv[1:] if argv is None else argv)
    try:
        if options.clean:
            print(f"netlab: {clean()} namespaces removed")
            return 0
        return _run(options, command)
    except NetLabError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
