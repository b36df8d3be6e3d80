"""Bring-up across hosts: each rank a thread in a network namespace of its own.

Namespaces are joined by bridges, one per rail, in a namespace of the switch. Needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from bringup_world import Outcome, meshes, run_ranks
from patience import PATIENCE, PROMPT, until

from ringcomm.bootstrap import hub, hub_client, lanes, meeting, mesh, probe
from ringcomm.bootstrap.dialer import Dial, Target
from ringcomm.bootstrap.handshake_params import Role
from ringcomm.bootstrap.interfaces import list_interfaces
from ringcomm.bootstrap.join_failure import JoinError
from ringcomm.bootstrap.launch import Identity
from ringcomm.bootstrap.loop import Loop
from ringcomm.bootstrap.secret import Secret
from ringcomm.config import Config
from ringcomm.errors import ConfigError

pytestmark = [
    pytest.mark.netns,
    pytest.mark.usefixtures("no_leaked_fds"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]

SECRET = Secret(b"k" * 32)
PORT = 29500
BLOCK_LINK_LOCAL = "ip -6 rule add to fe80::/10 priority 0 prohibit"
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class Lab:
    """Hosts h0, h1, ... and a switch; removed at the end."""

    def __init__(self) -> None:
        self._prefix = f"rcb{os.getpid()}"
        self.hosts: list[str] = []
        self._bridges: set[int] = set()
        self._switch = self._namespace("sw")

    def _namespace(self, name: str) -> str:
        full = f"{self._prefix}{name}"
        self.ip(f"netns add {full}")
        self.ip(f"-n {full} link set lo up")
        return full

    @staticmethod
    def ip(command: str) -> None:
        subprocess.run(["ip", *command.split()], check=True)

    @staticmethod
    def batch(namespace: str, *commands: str) -> None:
        """Commands of ip in one process."""
        text = "\n".join(commands)
        subprocess.run(["ip", "-n", namespace, "-batch", "-"], input=text, text=True, check=True)

    def host(self, *ports: tuple[int, str], link_local: bool = False) -> None:
        """A host with eth0, eth1, ... each given as (bridge, address/prefix); with link-local
        addresses as well, as the kernel makes them by default, or without."""
        number = len(self.hosts)
        name = self._namespace(f"h{number}")
        self.hosts.append(name)
        pairs, cables, addresses = [], [], []
        for index, (bridge, address) in enumerate(ports):
            far = self.far_end(number, index)
            if bridge not in self._bridges:
                self._bridges.add(bridge)
                cables += [f"link add br{bridge} type bridge", f"link set br{bridge} up"]
            pairs.append(f"link add eth{index} type veth peer name {far} netns {self._switch}")
            cables.append(f"link set {far} master br{bridge} up")
            if not link_local:
                addresses.append(f"link set eth{index} addrgenmode none")
            nodad = " nodad" if ":" in address else ""
            addresses += [
                f"link set eth{index} up",
                f"addr add {address} dev eth{index}{nodad}",
            ]
        self.batch(name, *pairs)
        self.batch(self._switch, *cables)
        if link_local:  # at once, not after a second in which nobody may have the same
            dads = [f"net.ipv6.conf.eth{index}.accept_dad=0" for index in range(len(ports))]
            self.inside(number, f"sysctl -qw {' '.join(dads)}")
        self.batch(name, *addresses)

    @staticmethod
    def far_end(host: int, index: int) -> str:
        return f"h{host}e{index}"

    def blackhole(self, host: int, index: int) -> None:
        """What the host sends and should get through this port vanishes; its carrier stays."""
        self.ip(f"-n {self._switch} link set {self.far_end(host, index)} nomaster")

    def unblackhole(self, host: int, index: int) -> None:
        """The port is on its switch again."""
        far = self.far_end(host, index)
        self.ip(f"-n {self._switch} link set {far} master br{index}")

    def unplug(self, host: int, index: int) -> None:
        """The port has no carrier any more."""
        self.ip(f"-n {self._switch} link set {self.far_end(host, index)} down")

    def plug(self, host: int, index: int) -> None:
        """The port that was unplugged has its carrier again."""
        self.ip(f"-n {self._switch} link set {self.far_end(host, index)} up")

    def has_carrier(self, host: int, index: int) -> bool:
        """Whether the kernel has noticed that it has, which may take it a second."""
        command = ["ip", "-n", self.hosts[host], "link", "show", f"eth{index}"]
        return "LOWER_UP" in subprocess.check_output(command, text=True)

    def shape(self, host: int, index: int, rate: str) -> None:
        """Both directions of a port, to what tc calls the rate."""
        places = ((self.hosts[host], f"eth{index}"), (self._switch, self.far_end(host, index)))
        for namespace, device in places:
            self.ip(
                f"netns exec {namespace} tc qdisc add dev {device} root tbf rate {rate} "
                "burst 131072 latency 20ms"
            )

    def inside(self, host: int, command: str) -> None:
        self.ip(f"netns exec {self.hosts[host]} {command}")

    @contextlib.contextmanager
    def enter(self, host: int) -> Iterator[None]:
        """The calling thread is on that host."""
        with open("/proc/thread-self/ns/net") as home:
            with open(f"/run/netns/{self.hosts[host]}") as there:
                assert _libc.setns(there.fileno(), _CLONE_NEWNET) == 0
            try:
                yield
            finally:
                assert _libc.setns(home.fileno(), _CLONE_NEWNET) == 0

    def close(self) -> None:
        for name in [*self.hosts, self._switch]:
            self.ip(f"netns del {name}")

    def join(
        self,
        master: str,
        *,
        ranks: list[int] | None = None,
        secret: Secret | None = SECRET,
        by_rank: dict[int, dict[str, Any]] | None = None,
        **settings: Any,
    ) -> dict[int, Outcome]:
        """One rank per host (all, if ranks is None). by_rank: settings of some ranks only."""
        world = len(self.hosts)
        settings.setdefault("connect_timeout", 30.0)

        def call(rank: int) -> mesh.Mesh:
            with self.enter(rank):
                me = Identity(rank, world, None, None, master, (PORT,), "env", "job")
                own = (by_rank or {}).get(rank, {})
                return mesh.join(me, Config(**{**settings, **own}), secret)

        return run_ranks(call, ranks if ranks is not None else range(world))


@pytest.fixture
def lab() -> Iterator[Lab]:
    try:
        built = Lab()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("cannot make network namespaces here")
    try:
        yield built
    finally:
        built.close()


def ends(lane: mesh.LaneSocket) -> tuple[str, str]:
    """Local and remote address of a lane."""
    with contextlib.closing(second(lane.fd)) as sock:
        return sock.getsockname()[0], sock.getpeername()[0]


def second(fd: int) -> Any:
    """A second object for a lane's socket."""
    return socket.socket(fileno=os.dup(fd))


def addresses(made: mesh.Mesh) -> set[tuple[int, int, str, str]]:
    """(peer, rail, local address, remote address) of every lane."""
    found = {(lane.peer, lane.rail, *ends(lane)) for lane in made.lanes}
    made.close()
    return found


def test_two_rails_cabled_crosswise(lab: Lab) -> None:
    lab.host((0, "10.7.0.1/24"), (1, "10.8.0.1/24"))
    lab.host((1, "10.8.0.2/24"), (0, "10.7.0.2/24"))
    lab.host((0, "10.7.0.3/24"))
    found = meshes(lab.join("10.7.0.1", lanes=2))
    assert all(not made.single_host and made.local_rank == 0 for made in found)
    assert [[r.interface for r in made.rails] for made in found] == [
        ["eth0", "eth1"],
        ["eth1", "eth0"],
        ["eth0"],
    ]
    assert addresses(found[0]) == {
        (1, 0, "10.7.0.1", "10.7.0.2"),
        (1, 1, "10.8.0.1", "10.8.0.2"),
        (2, 0, "10.7.0.1", "10.7.0.3"),
    }
    assert addresses(found[1]) == {
        (0, 0, "10.7.0.2", "10.7.0.1"),
        (0, 1, "10.8.0.2", "10.8.0.1"),
        (2, 0, "10.7.0.2", "10.7.0.3"),
    }
    found[2].close()


@pytest.mark.parametrize("on", [True, False])
def test_rails_are_probed(lab: Lab, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between hosts with more than one; the connections for it are gone afterwards."""
    monkeypatch.setattr(probe, "LIMIT_S", PROMPT)  # a busy machine answers late
    lab.host((0, "10.7.0.1/24"), (1, "10.8.0.1/24"))
    lab.host((0, "10.7.0.2/24"), (1, "10.8.0.2/24"))
    lab.host((0, "10.7.0.3/24"))
    found = meshes(lab.join("10.7.0.1", probe=on, lanes=2))
    for made in found[:2]:
        rates = {(l.peer, l.rail): l.bytes_per_s for l in made.lanes}  # noqa: E741
        assert {pair for pair, rate in rates.items() if rate > 0.0} <= {
            (1 - made.rank, 0),
            (1 - made.rank, 1),
            (2, 0),
        }
        assert (rates[1 - made.rank, 0] > 0.0) is (made.rank == 0 and on)
    assert not any(lane.bytes_per_s for lane in found[2].lanes)
    for made in found:
        made.close()


@pytest.mark.parametrize("how", ["down", "interfaces"])
def test_a_port_that_one_host_lacks(lab: Lab, how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Every lane comes up, over half of the ports: each host says so, once."""
    caplog.set_level(logging.WARNING, "ringcomm")
    lab.host((0, "10.7.0.1/24"), (1, "10.8.0.1/24"))
    lab.host((0, "10.7.0.2/24"), (1, "10.8.0.2/24"))
    settings = {}
    if how == "down":
        lab.ip(f"-n {lab.hosts[1]} link set eth1 down")
    else:
        settings = {1: {"interfaces": ("eth0",)}}
    for made in meshes(lab.join("10.7.0.1", by_rank=settings)):
        made.close()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    for text in said:
        assert "(rank 1) has no port for rail 1 (eth1 10.8.0.0/24 of host" in text
        assert "1 of 2 ports, 50% of the bandwidth" in text


def test_version_6_only(lab: Lab) -> None:
    lab.host((0, "fd07::1/64"), (1, "fd08::1/64"))
    lab.host((0, "fd07::2/64"), (1, "fd08::2/64"))
    found = meshes(lab.join("fd07::1"))
    assert addresses(found[0]) == {
        (1, 0, "fd07::1", "fd07::2"),
        (1, 1, "fd08::1", "fd08::2"),
    }
    found[1].close()


def test_blackholed_rail_is_left_out(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lanes, "RAIL_GRACE", 1.0)
    caplog.set_level(logging.WARNING, "ringcomm")
    lab.host((0, "10.7.0.1/24"), (1, "10.8.0.1/24"))
    lab.host((0, "10.7.0.2/24"), (1, "10.8.0.2/24"))
    lab.blackhole(1, 1)
    began = time.monotonic()
    found = meshes(lab.join("10.7.0.1", recovery="off"))
    assert time.monotonic() - began < lanes.RAIL_GRACE + PROMPT
    for made in found:
        assert [(lane.peer, lane.rail) for lane in made.lanes] == [(1 - made.rank, 0)]
        made.close()
    text = [r.getMessage() for r in caplog.records if "rail 1 (eth1)" in r.getMessage()]
    assert len(text) == 2
    assert all("no answer at 10.8.0.1:" in t or "no route" in t for t in text)


def test_lane_that_goes_dark_while_others_are_awaited(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was made, and is left out as if it never had been."""
    caplog.set_level(logging.WARNING, "ringcomm")
    for host in (1, 2, 3):
        lab.host((0, f"10.7.0.{host}/24"), (1, f"10.8.0.{host}/24"))
    lab.blackhole(2, 1)
    keep = lanes.LaneMaker._keep

    def keep_and_blackhole(self: lanes.LaneMaker, lane: lanes.LaneId, made: socket.socket) -> None:
        keep(self, lane, made)
        if (self.plan.rank, lane) == (1, (0, 1, 0)):  # the end that dials, so both have it
            lab.blackhole(1, 1)

    monkeypatch.setattr(lanes.LaneMaker, "_keep", keep_and_blackhole)
    for made in meshes(lab.join("10.7.0.1", probe=False, recovery="off")):
        assert {lane.rail for lane in made.lanes} == {0}
        made.close()
    assert sum("rail 1 (eth1)" in record.getMessage() for record in caplog.records) == 6


def test_host_that_is_out_of_reach(lab: Lab) -> None:
    """Ranks that meet at rank 0, but of which two cannot reach each other."""
    lab.host((0, "10.7.0.1/24"), (1, "10.8.0.1/24"))
    lab.host((0, "10.7.0.2/24"), (2, "10.9.0.2/24"))
    lab.host((1, "10.8.0.3/24"), (3, "10.9.0.3/24"))
    for host, route in ((1, "10.8.0.0/24 via 10.7.0.1"), (2, "10.7.0.0/24 via 10.8.0.1")):
        lab.ip(f"-n {lab.hosts[host]} route add {route}")
    outcomes = lab.join("10.7.0.1", connect_timeout=2.5)
    for outcome in outcomes.values():
        assert isinstance(outcome.error, JoinError)
        assert {(row.rank, row.seen_from) for row in outcome.error.rows} == {(1, 2)}
        assert 1.5 < outcome.seconds < 2.5 + PROMPT


def test_rendezvous_that_goes_dark(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has come, and whose port to the rendezvous dies while others are awaited: both
    ends know soon after peer_timeout."""
    for host in (1, 2, 3):
        lab.host((0, f"10.7.0.{host}/24"))
    welcome = hub.Hub._welcome

    def welcome_and_blackhole(self: hub.Hub, *arguments: Any) -> None:
        welcome(self, *arguments)
        lab.blackhole(1, 0)

    monkeypatch.setattr(hub.Hub, "_welcome", welcome_and_blackhole)
    outcomes = lab.join(
        "10.7.0.1", ranks=[0, 1], connect_timeout=50.0, peer_timeout=1.5, heartbeat=0.3
    )
    for rank, outcome in outcomes.items():
        assert isinstance(outcome.error, JoinError)
        assert (outcome.error.rank, outcome.seconds < 30.0) == (1 - rank, True), outcome


def test_two_ports_in_one_subnet(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "ringcomm")
    for host in (1, 2):
        lab.host((0, f"10.7.0.{host}/24"), (0, f"10.7.0.{host + 10}/24"))
    found = meshes(lab.join("10.7.0.1"))
    sockets = [{l.rail: second(l.fd) for l in made.lanes} for made in found]  # noqa: E741
    assert addresses(found[0]) == {
        (1, 0, "10.7.0.1", "10.7.0.2"),
        (1, 1, "10.7.0.11", "10.7.0.12"),
    }
    found[1].close()
    for host in (0, 1):  # each learns anew where the other's addresses are, as after some minutes
        lab.inside(host, "ip neigh flush all")
    for rail in (0, 1):  # by whichever port, but it arrives
        with sockets[0][rail] as here, sockets[1][rail] as there:
            push(here, there, 1 << 20)
            push(there, here, 1 << 20)
    advice = [r.getMessage() for r in caplog.records if "sysctl -w" in r.getMessage()]
    assert len(advice) == 2
    for setting in ("arp_ignore=1", "arp_announce=2"):
        assert f"net.ipv4.conf.eth1.{setting}" in advice[0]


@pytest.fixture
def no_device_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a kernel before 5.7 without CAP_NET_RAW."""
    allowed = socket.socket.setsockopt

    def setsockopt(sock: socket.socket, level: int, option: int, *value: Any) -> None:
        if (level, option) == (socket.SOL_SOCKET, socket.SO_BINDTODEVICE):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        allowed(sock, level, option, *value)

    monkeypatch.setattr(socket.socket, "setsockopt", setsockopt)


def in_one_subnet(lab: Lab, *, link_local: tuple[bool, bool] = (True, True)) -> None:
    for host in (1, 2):
        ports = (0, f"10.7.0.{host}/24"), (0, f"10.7.0.{host + 10}/24")
        lab.host(*ports, link_local=link_local[host - 1])
        with lab.enter(host - 1):  # the kernel makes them once it has noticed the carriers
            assert until(lambda to=2 * link_local[host - 1]: count_link_local() == to)


def count_link_local() -> int:
    return sum(port.link_local is not None for port in list_interfaces())


@pytest.mark.usefixtures("no_device_binding")
def test_one_subnet_by_link_local_addresses(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """No setting, no rule, no privilege: each lane's traffic stays on its own port."""
    caplog.set_level(logging.WARNING, "ringcomm")
    in_one_subnet(lab)
    found = meshes(lab.join("10.7.0.1"))
    assert not caplog.records
    for made in found:
        assert [lane.rail for lane in made.lanes] == [0, 1]
        assert all(end.startswith("fe80:") for lane in made.lanes for end in ends(lane))
    assert [rail.address for rail in found[0].rails] == ["10.7.0.1", "10.7.0.11"]
    for host in (0, 1):
        lab.inside(host, "ip neigh flush all")
    each_rail_keeps_to_its_port(lab, found)


@pytest.mark.parametrize("case", ["none", "one side's", "blocked"])
def test_one_subnet_where_link_local_addresses_fail(
    lab: Lab, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    """The lanes go by the addresses given, and what helps these is said."""
    caplog.set_level(logging.WARNING, "ringcomm")
    in_one_subnet(lab, link_local=(case != "none", case == "blocked"))
    if case == "blocked":
        lab.inside(1, BLOCK_LINK_LOCAL)
    found = meshes(lab.join("10.7.0.1"))
    assert addresses(found[0]) == {
        (1, 0, "10.7.0.1", "10.7.0.2"),
        (1, 1, "10.7.0.11", "10.7.0.12"),
    }
    found[1].close()
    advice = [r.getMessage() for r in caplog.records if "sysctl -w" in r.getMessage()]
    assert len(advice) == 2


@pytest.mark.parametrize("is_blocked", [False, True])
def test_a_lost_lane_is_tried_by_the_way_it_was_made(lab: Lab, is_blocked: bool) -> None:
    """Another way may lead over another port, on which it would stay."""
    in_one_subnet(lab)
    if is_blocked:
        lab.inside(1, BLOCK_LINK_LOCAL)
    found = meshes(lab.join("10.7.0.1"))
    plan = found[1].keeping[0].plan
    for made in found:
        made.close()
    with contextlib.closing(Loop()) as loop, lab.enter(1):
        for lane in plan.targets:
            dial, ways = plan.dial(loop, Role.LANE_ANEW, lane, socket.socket.close), {}

            def has_tried(dial: Dial = dial, ways: dict[int, Target] = ways) -> bool:
                ways[dial._tries] = dial.way
                return len(ways) == 5

            assert loop.run(has_tried, time.monotonic() + PATIENCE)
            dial.stop()
            assert {"%" in ways[number].address for number in (1, 2, 3, 4)} == {not is_blocked}


def test_one_subnet_with_the_settings(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """As advised: each lane's traffic stays on its own port, in both directions."""
    caplog.set_level(logging.WARNING, "ringcomm")
    for host in (1, 2):
        lab.host((0, f"10.7.0.{host}/24"), (0, f"10.7.0.{host + 10}/24"))
        for setting in ("arp_ignore=1", "arp_announce=2", "rp_filter=2"):
            lab.inside(host - 1, f"sysctl -qw net.ipv4.conf.all.{setting}")
    found = meshes(lab.join("10.7.0.1"))
    assert not caplog.records
    each_rail_keeps_to_its_port(lab, found)


@pytest.mark.parametrize("by", ["link-local addresses", "settings"])
def test_a_named_port_beside_another_of_its_subnet(lab: Lab, by: str) -> None:
    """The other one carries nothing."""
    in_one_subnet(lab, link_local=(by != "settings",) * 2)
    if by == "settings":
        for host in (0, 1):
            lab.inside(host, "sysctl -qw net.ipv4.conf.all.arp_ignore=1")
            lab.inside(host, "sysctl -qw net.ipv4.conf.all.arp_announce=2")
    found = meshes(lab.join("10.7.0.1", interfaces=("eth1",)))
    here, there = (second(made.lanes[0].fd) for made in found)
    with here, there:
        for sender, receiver, host in ((here, there, 0), (there, here, 1)):
            before = sent_bytes(lab, host)
            push(sender, receiver, 1 << 20)
            eth0, eth1 = (b - a for a, b in zip(before, sent_bytes(lab, host), strict=True))
            assert eth0 < 1 << 16 < 1 << 20 < eth1
    for made in found:
        made.close()


@pytest.mark.usefixtures("no_device_binding")
@pytest.mark.parametrize("version", [4, 6])
def test_one_subnet_without_device_binding(
    lab: Lab, caplog: pytest.LogCaptureFixture, version: int
) -> None:
    """One line names the commands; after these each lane is on its own port."""
    caplog.set_level(logging.WARNING, "ringcomm")
    net, bits = ("10.7.0.", 24) if version == 4 else ("fd07::", 64)
    for host in (1, 2):
        ports = (0, f"{net}{host}/{bits}"), (0, f"{net}{host + 10}/{bits}")
        lab.host(*ports, link_local=version == 6)
        for setting in ("arp_ignore=1", "arp_announce=2", "rp_filter=2"):
            lab.inside(host - 1, f"sysctl -qw net.ipv4.conf.all.{setting}")
    if version == 6:  # where there are such addresses, they would do
        lab.inside(1, BLOCK_LINK_LOCAL)
    for made in meshes(lab.join(f"{net}1")):
        assert {lane.rail for lane in made.lanes} == {0, 1}
        made.close()
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 2
    assert all("SO_BINDTODEVICE" in line and "eth1 through another" in line for line in lines)
    for host, line in enumerate(sorted(lines)):
        for command in line.split("as root run: ")[1].split("; "):
            lab.inside(host, command)
    caplog.clear()
    found = meshes(lab.join(f"{net}1"))
    assert not caplog.records
    each_rail_keeps_to_its_port(lab, found)


def each_rail_keeps_to_its_port(lab: Lab, found: list[mesh.Mesh]) -> None:
    sockets = [{l.rail: second(l.fd) for l in made.lanes} for made in found]  # noqa: E741
    for made in found:
        made.close()
    try:
        for sender in (0, 1):
            before = sent_bytes(lab, sender)
            for rail in (0, 1):
                push(sockets[sender][rail], sockets[1 - sender][rail], 1 << 20)
            after = sent_bytes(lab, sender)
            assert all(b - a > 1 << 20 for a, b in zip(before, after, strict=True))
    finally:
        for pair in sockets:
            for sock in pair.values():
                sock.close()


def push(sender: Any, receiver: Any, size: int) -> None:
    receiver.settimeout(PATIENCE)
    sender.settimeout(PATIENCE)
    unsent = unread = size
    while unread:  # to the last byte: what is still queued has not been counted by the port
        unsent -= sender.send(bytes(min(unsent, 65536))) if unsent else 0
        unread -= len(receiver.recv(1 << 20))


def sent_bytes(lab: Lab, host: int) -> list[int]:
    """Of eth0 and eth1."""
    with lab.enter(host), open("/proc/thread-self/net/dev") as file:
        lines = dict(line.strip().split(":") for line in file if ":" in line)
    return [int(lines[name].split()[8]) for name in ("eth0", "eth1")]


def test_without_a_secret(lab: Lab) -> None:
    lab.host((0, "10.7.0.1/24"))
    lab.host((0, "10.7.0.2/24"))
    for outcome in lab.join("10.7.0.1", secret=None).values():
        assert isinstance(outcome.error, ConfigError)
        assert "python -m ringcomm keygen FILE" in str(outcome.error)
        assert outcome.seconds < PROMPT


def test_insecure(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    lab.host((0, "10.7.0.1/24"))
    lab.host((0, "10.7.0.2/24"))
    for made in meshes(lab.join("10.7.0.1", secret=None, insecure=True)):
        made.close()
    assert any("insecure: anyone" in r.getMessage() for r in caplog.records)


def test_rank_0_out_of_reach(lab: Lab) -> None:
    lab.host((0, "10.7.0.1/24"))
    lab.host((0, "10.7.0.2/24"))
    lab.blackhole(1, 0)
    outcome = lab.join("10.7.0.1", ranks=[1], connect_timeout=1.0)[1]
    assert isinstance(outcome.error, JoinError)
    row = outcome.error.rows[0]
    assert (row.rank, row.address) == (0, f"10.7.0.1:{PORT}")
    assert row.state in ("no answer", "no route to host")
    assert outcome.seconds < 1.0 + PROMPT


def test_several_ranks_on_each_host(lab: Lab) -> None:
    lab.host((0, "10.7.0.1/24"))
    lab.host((0, "10.7.0.2/24"))

    def call(rank: int) -> mesh.Mesh:
        with lab.enter(rank // 2):
            me = Identity(rank, 4, None, None, "10.7.0.1", (PORT,), "env", "job")
            return mesh.join(me, Config(connect_timeout=30.0), SECRET)

    found = meshes(run_ranks(call, range(4)))
    for rank, made in enumerate(found):
        assert made.host_numbers == [0, 0, 1, 1]
        assert (made.local_rank, made.local_world_size) == (rank % 2, 2)
        assert sorted(lane.peer for lane in made.lanes) == [r for r in range(4) if r != rank]
        made.close()


def test_own_name_on_the_loopback(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts: rank 0's host calls itself 127.0.1.1, the others know better."""
    monkeypatch.setattr(meeting, "resolve", lambda host: ["127.0.1.1"])
    monkeypatch.setattr(hub_client, "resolve", lambda host: ["10.7.0.1"])
    lab.host((0, "10.7.0.1/24"))
    lab.host((0, "10.7.0.2/24"))
    for made in meshes(lab.join("node0")):
        made.close()


def test_only_ranks_of_one_host_share_memory(lab: Lab) -> None:
    """Two hosts of two ranks, on one machine: each has its own memory."""
    for host in (1, 2):
        lab.host((0, f"10.7.0.{host}/24"))

    def call(rank: int) -> mesh.Mesh:
        with lab.enter(rank // 2):
            me = Identity(rank, 4, None, None, "10.7.0.1", (PORT,), "env", "job")
            return mesh.join(me, Config(connect_timeout=30.0), SECRET)

    found = meshes(run_ranks(call, range(4)))
    files = []
    for made in found:
        (memory,) = made.shared
        files.append(os.fstat(memory).st_ino)
        made.close()
    assert files[0] == files[1] != files[2] == files[3]
    for made in meshes(lab.join("10.7.0.1")):  # one rank each
        assert made.shared == []
        made.close()
