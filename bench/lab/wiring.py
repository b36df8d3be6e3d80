"""The hardware of netlab: namespaces, switches and cables, made and broken with ip and tc.

Owns every call of ip(8) and tc(8). A host is a network namespace; a cable is a veth pair from a
host's port to a port of a bridge in the switch namespace, with a token bucket (tbf) on each end,
so that both directions are shaped.

Invariants: nothing is made outside the lab's own namespaces, so deleting these removes all of it.
A namespace's name holds the process that owns it and that process's start time: leftovers are told
from a running lab without a state file, also after the process number was given out again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

BURST_S = 1e-3  # of its rate passes a cable at once: docs/decisions/13-emulated-cables.md
ETHERNET_BYTES = 14  # header of a packet, which the shaper counts
GSO_BYTES = 1 << 16  # most that the kernel passes on as one packet, unless a port takes less
CABLES = 2  # one more wherever cables let bytes through in another way: rows of results tell
QUEUE_BYTES = 128 << 10  # of a cheap switch's port, beside what follows from the rate
NOBODY = "02:00:00:00:00:00"  # a station address that no port has
QUEUE_S = 20e-3  # of the rate; long enough for cubic to fill the link

_probes = itertools.count()  # labs may be built at once

_NAME = re.compile(r"netlab-(?P<pid>\d+)-(?P<start>\d+)-[\w-]+$")


class NetLabError(RuntimeError):
    """The lab cannot be built here, or a cable or host was named that does not exist."""


def sh(*argv: str, stdin: str | None = None) -> str:
    """Run a command, return its output. Raises NetLabError with what the command said."""
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NetLabError(f"`{argv[0]}` cannot be run: {error.strerror}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise NetLabError(f"`{' '.join(argv)}` failed: {said[0]}")
    return done.stdout


def why_unavailable() -> str | None:
    """None where a lab can be built, else one sentence that says what is missing."""
    if not sys.platform.startswith("linux"):
        return "netlab needs Linux (network namespaces)."
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"netlab needs the command `{tool}` (package iproute2)."
    if os.geteuid() != 0:
        return "netlab needs root, because it makes network namespaces: run it with sudo."
    probe = f"{namespace_prefix()}probe{next(_probes)}"
    try:
        sh("ip", "netns", "add", probe)
        sh("ip", "netns", "del", probe)
    except NetLabError as error:
        return f"netlab cannot make namespaces here (a container without the right to?): {error}"
    return None


# --- namespaces ---


def namespace_prefix() -> str:
    """Start of the names of all namespaces that this process makes."""
    return f"netlab-{os.getpid()}-{_start_time(os.getpid())}-"


def _start_time(pid: int) -> str | None:
    """Start of a process in clock ticks since boot; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]


def add_namespace(name: str) -> None:
    """Make a namespace with ``lo`` up."""
    sh("ip", "netns", "add", name)
    sh("ip", "-n", name, "link", "set", "lo", "up")


def set_sysctls(name: str, sysctls: Mapping[str, str]) -> None:
    """Write kernel settings inside a namespace. Raises NetLabError naming the one refused."""
    for key, value in sysctls.items():
        path = "/proc/sys/" + key.replace(".", "/")
        try:
            sh("ip", "netns", "exec", name, "sh", "-c", 'echo "$1" > "$2"', "sh", value, path)
        except NetLabError:
            raise NetLabError(f"this kernel does not take {key}={value}") from None


def set_congestion(name: str, choices: Sequence[str]) -> str:
    """Set a namespace's congestion control to the first choice that the kernel takes; return it.

    Outside its first namespace the kernel takes only those that it allows to every user.
    """
    for choice in choices:
        with contextlib.suppress(NetLabError):
            set_sysctls(name, {"net.ipv4.tcp_congestion_control": choice})
            return choice
    raise NetLabError(
        f"this kernel does not allow {choices[0]} in a namespace; allow it with "
        f'`sysctl -w net.ipv4.tcp_allowed_congestion_control="reno {choices[0]}"` or take reno'
    )


def del_namespaces(names: Iterable[str]) -> None:
    """End every process inside the namespaces, then delete them. Missing ones are no error."""
    names = list(names)
    for name in names:
        with contextlib.suppress(NetLabError):
            for pid in sh("ip", "netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
    for name in names:
        for _ in range(50):  # a process that is just exiting can still hold the mount
            with contextlib.suppress(NetLabError):
                sh("ip", "netns", "del", name)
            if not Path("/run/netns", name).exists():
                break
            time.sleep(0.02)


def list_namespaces(prefix: str = "netlab-") -> list[str]:
    """Names of the namespaces of netlab on this machine, this run's or another's."""
    lines = sh("ip", "netns", "list").splitlines()
    names = (line.split()[0] for line in lines if line.strip())
    return sorted(name for name in names if name.startswith(prefix) and _NAME.match(name))


def is_leftover(name: str) -> bool:
    """Whether a name was given by a lab whose process no longer runs."""
    match = _NAME.match(name)
    return match is not None and _start_time(int(match["pid"])) != match["start"]


# --- switches and cables ---


def burst_bytes(mbit: float, mtu: int) -> int:
    """What a cable of that rate lets through at once: BURST_S of the rate, or a packet where that
    is more. A larger packet of the kernel's (GSO) is cut into packets as it is queued."""
    return max(mtu + ETHERNET_BYTES, round(mbit * 1e6 / 8 * BURST_S))


def add_bridge(namespace: str, bridge: str, mtu: int) -> None:
    """A switch that learns addresses and forwards at once: no spanning tree, no snooping."""
    _batch(
        f"link add {bridge} mtu {mtu} type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
        f"link set {bridge} up",
        namespace=namespace,
    )


@dataclasses.dataclass
class Cable:
    """One NIC of one host, with its cable and switch port."""

    namespace: str
    device: str
    address: str
    """With the prefix length, as in 10.77.0.1/24."""
    switch: str
    """Namespace of the switch."""
    port: str
    bridge: str
    mbit: float
    """Rate in Mbit/s of layer 2 bytes, without preamble, FCS and gap; 0: unshaped."""
    mtu: int
    slowest: float
    """The least rate that any cable of the lab is ever set to; 0: none is set to a lower one."""
    _whole: int = dataclasses.field(default=0, init=False)
    """Bytes of the largest packet that may be queued uncut, as far as the rates so far let it."""

    def add(self) -> None:
        """Lay the cable: both ends up, shaped and addressed."""
        _batch(
            f"link add {self.device} mtu {self.mtu} netns {self.namespace}"
            f" type veth peer name {self.port} mtu {self.mtu} netns {self.switch}"
        )
        _batch(
            f"link set {self.port} master {self.bridge}",
            f"link set {self.port} up",
            namespace=self.switch,
        )
        _batch(
            f"addr add {self.address} dev {self.device}",
            f"link set {self.device} up",
            namespace=self.namespace,
        )
        if self.slowest and (most := burst_bytes(self.slowest, self.mtu)) < GSO_BYTES:
            # By the size alone TCP would still send two segments at once, its least.
            limits = (
                "gso_max_size",
                str(most),
                "gso_max_segs",
                str(most // (self.mtu + ETHERNET_BYTES)),
            )
            sh("ip", "-n", self.namespace, "link", "set", self.device, *limits)
        if self.mbit:
            self.shape(self.mbit)

    def shape(self, mbit: float, *, loses_queue: bool = False) -> None:
        """Set the rate of both directions, 0 for none. Queued packets may be lost, and all are if
        asked for; the bucket is full afterwards, which is worth burst_bytes()."""
        if mbit and not loses_queue:
            self._require_packets_to_fit(mbit)
        for namespace, device in ((self.namespace, self.device), (self.switch, self.port)):
            if loses_queue:
                sh("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
            if mbit:
                burst = burst_bytes(mbit, self.mtu)
                queue = QUEUE_BYTES + round(mbit * 1e6 / 8 * QUEUE_S)
                sh(
                    "tc",
                    "-n",
                    namespace,
                    "qdisc",
                    "replace",
                    "dev",
                    device,
                    "root",
                    "tbf",
                    "rate",
                    f"{round(mbit * 1e6)}bit",
                    "burst",
                    str(burst),
                    "limit",
                    str(queue),
                )
            elif "tbf" in sh("tc", "-n", namespace, "qdisc", "show", "dev", device):
                sh("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")

    def _require_packets_to_fit(self, mbit: float) -> None:
        """Raise NetLabError for a rate at which a packet that was queued uncut would never leave,
        and block the cable."""
        burst = burst_bytes(mbit, self.mtu)
        if burst < (burst_bytes(self.slowest, self.mtu) if self.slowest else self._whole):
            raise NetLabError(
                f"a rate of {mbit:g} Mbit/s is less than this lab's cables were made for: make it "
                f"with slowest={mbit:g}"
            )
        self._whole = burst

    def set_device(self, state: str) -> None:
        """Administrative state of the host's end: "up" or "down"."""
        sh("ip", "-n", self.namespace, "link", "set", self.device, state)

    def set_port(self, state: str) -> None:
        """Administrative state of the switch's end. "down" takes the carrier off the host's."""
        sh("ip", "-n", self.switch, "link", "set", self.port, state)

    def is_up(self) -> bool:
        """Whether the kernel holds both ends for usable; it may learn of it a moment later."""
        ends = ((self.namespace, self.device), (self.switch, self.port))
        return all(
            " UP " in sh("ip", "-n", namespace, "-br", "link", "show", device)
            for namespace, device in ends
        )

    def set_address(self, on: bool) -> None:
        """Give the host's end its address or take it away; the link stays up."""
        how = ("replace", self.address, "dev") if on else ("flush", "dev")
        sh("ip", "-n", self.namespace, "addr", *how, self.device)

    def misdirect(self, address: str) -> None:
        """What the host sends to this address goes to a station that does not exist."""
        sh(
            "ip",
            "-n",
            self.namespace,
            "neigh",
            "replace",
            address,
            "lladdr",
            NOBODY,
            "dev",
            self.device,
            "nud",
            "permanent",
        )

    def direct(self) -> None:
        """Undo misdirect(), for every address."""
        sh("ip", "-n", self.namespace, "neigh", "flush", "dev", self.device, "nud", "permanent")

    def set_forwarding(self, on: bool) -> None:
        """Join the port to its switch or take it out; the carrier stays up on both ends."""
        where = ("master", self.bridge) if on else ("nomaster",)
        sh("ip", "-n", self.switch, "link", "set", self.port, *where)


def _batch(*lines: str, namespace: str | None = None) -> None:
    within = ("-n", namespace) if namespace else ()
    try:
        sh("ip", *within, "-batch", "-", stdin="\n".join(lines) + "\n")
    except NetLabError as error:
        raise NetLabError(f"{error} (in: {'; '.join(lines)})") from None
