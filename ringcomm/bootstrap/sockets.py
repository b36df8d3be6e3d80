"""Set-up of ringcomm's sockets, and advice where the host's settings are in the way.

Invariants: every socket is close-on-exec and non-blocking; an option that the kernel refuses is
left out, never an error; nothing here waits.
"""

from __future__ import annotations

import contextlib
import ipaddress
import select
import socket
import sys
from collections.abc import Sequence

from . import netlink
from .interfaces import Interface
from .netlink import Address
from .system import read_number

BACKLOG = 1024  # capped by net.core.somaxconn
_LAST_ACK = 56  # tcp_info's tcpi_last_ack_recv, milliseconds


def family(address: str) -> socket.AddressFamily:
    """Address family of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def show(address: str, port: int) -> str:
    """Formats host:port, IPv6 in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def place(address: str, port: int, scope: int = 0) -> tuple[str | int, ...]:
    """Makes a socket address. scope: index of the interface that a link-local IPv6 is used on,
    unless the address names it, as fe80::1%eth0."""
    address, _, name = address.partition("%")
    scope = socket.if_nametoindex(name) if name else scope
    return (address, port, 0, scope) if ":" in address else (address, port)


def listen(
    address: str, port: int = 0, scope: int = 0, congestion: Sequence[str] = ()
) -> socket.socket:
    """Opens a listening socket on exactly this numeric address; port 0: any free one. The sockets
    that it accepts have its congestion control.

    Raises OSError.
    """
    sock = socket.socket(family(address), socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        set_congestion(sock, congestion)
        sock.bind(place(address, port, scope))
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def peer_of(sock: socket.socket) -> str:
    """Returns the address of the other end, or a phrase if the connection has ended."""
    try:
        return show(*sock.getpeername()[:2])
    except OSError:
        return "a connection that has ended"


def tune(sock: socket.socket) -> None:
    """Disables Nagle's delay."""
    sock.setblocking(False)
    with contextlib.suppress(OSError):  # if the connection has ended
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def set_congestion(sock: socket.socket, names: Sequence[str]) -> None:
    """Sets the first congestion control that the kernel permits. Call it before the socket connects
    or listens: the pace that another one has found for a connection would stay."""
    for name in names:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
            return


def end_when_silent(sock: socket.socket, peer_timeout: float) -> None:
    """Has the kernel end a connection on which no packet, not even an acknowledgement, arrives for
    a third of peer_timeout, give or take a second. A third, because if one direction alone is dead,
    the end that still receives notices only once the other end has given up."""
    seconds = peer_timeout / 3
    _ask_for_life(sock, max(1, round(seconds / 4)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))


def keep_alive(sock: socket.socket, on: bool) -> None:
    """Turns keepalives on, each second, so that silence() shows a dead peer; or off."""
    if on:
        _ask_for_life(sock, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, on)


def _ask_for_life(sock: socket.socket, every: int) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)


def silence(sock: socket.socket) -> float:
    """Seconds since the last acknowledgement arrived."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK + 4)
    return int.from_bytes(info[_LAST_ACK:], sys.byteorder) / 1000


def has_hung_up(sock: socket.socket, events: int = select.POLLRDHUP) -> bool:
    """True if a hang-up, an error or one of these events is pending."""
    poll = select.poll()
    poll.register(sock, events)
    return bool(poll.poll(0))


def bind_to_device(sock: socket.socket, name: str) -> bool:
    """Keeps sock's traffic on one interface; False where the kernel does not permit it."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name.encode() + b"\0")
    except OSError:
        return False
    return True


def is_link_local(sock: socket.socket) -> bool:
    """True if a connected socket's own address is a link-local IPv6, which only its port has."""
    address = str(sock.getsockname()[0]).split("%")[0]
    return ":" in address and ipaddress.ip_address(address).is_link_local


def may_bind_to_device(name: str) -> bool:
    """True if the kernel permits bind_to_device(); before 5.7 it takes CAP_NET_RAW."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        return bind_to_device(sock, name)


def routing_advice(interface: Interface, address: Address, destination: Address) -> str:
    """Returns commands that make packets from this port's address leave by this port if their
    socket is bound to no device; empty if they do already."""
    if netlink.route(address.ip, destination.ip) == interface.index:
        return ""
    ip = "ip -6" if address.version == 6 else "ip"
    table = 1000 + interface.index
    return (
        f"{ip} route add {address.network} dev {interface.name} src {address.ip} table {table}; "
        f"{ip} rule add from {address.ip} table {table}"
    )


def shared_subnet(interface: Interface, others: Sequence[Interface]) -> bool:
    """True if another interface has an address in one of this interface's subnets."""
    ours = [address.network for address in interface.usable]
    return any(
        mine.version == theirs.version and mine.overlaps(theirs)
        for other in others
        if other.index != interface.index
        for theirs in (address.network for address in other.usable)
        for mine in ours
    )


def sysctl_advice(interfaces: Sequence[Interface]) -> list[str]:
    """Returns the sysctl lines that keep the traffic of ports in one subnet on their own ports.

    The kernel answers ARP for any of its addresses on any port, so without them both ports'
    traffic arrives on one. Empty if no two ports share a subnet or all is set.
    """
    lines = [
        line
        for interface in interfaces
        if not interface.loopback and shared_subnet(interface, interfaces)
        for line in _missing(interface.name)
    ]
    return list(dict.fromkeys(lines))


def _missing(name: str) -> list[str]:
    """Returns the sysctl lines that keep a port's traffic on it, without those in force."""
    wanted = {
        "arp_ignore=1": _sysctl("arp_ignore", name) >= 1,
        "arp_announce=2": _sysctl("arp_announce", name) >= 2,
        "rp_filter=2": _sysctl("rp_filter", name) != 1,
    }
    return [f"net.ipv4.conf.{name}.{line}" for line, holds in wanted.items() if not holds]


def device_binding_works(interface: Interface, others: Sequence[Interface]) -> bool:
    """False where packets for a device-bound socket would arrive by another port.

    Among ports that share a subnet, a kernel with its default settings answers ARP for one port's
    address on the others too and puts it into requests that it sends there. A packet that then
    arrives on the wrong port finds no socket, and the kernel resets the connection. A strict
    rp_filter drops packets that arrive on a port that the routing table would not answer by.
    """
    return not shared_subnet(interface, others) or not _missing(interface.name)


def needs_link_local(interface: Interface, others: Sequence[Interface]) -> bool:
    """True if the port shares a subnet with another one and binding to the device does not keep
    its sockets' traffic on it."""
    return shared_subnet(interface, others) and not (
        device_binding_works(interface, others) and may_bind_to_device(interface.name)
    )


def keep_on_port(sock: socket.socket, interface: Interface, others: Sequence[Interface]) -> None:
    """Binds a connected socket to its port, if the port shares a subnet and binding works.

    An accepted socket, too, answers through the routing table, which sends everything for a
    subnet that two ports share through one of them.
    """
    if shared_subnet(interface, others) and device_binding_works(interface, others):
        bind_to_device(sock, interface.name)


def _sysctl(setting: str, name: str) -> int:
    """Returns the value in force: the larger of the interface's and that of "all"."""
    base = "/proc/sys/net/ipv4/conf"
    return max(0, *(read_number(f"{base}/{where}/{setting}", 0) for where in (name, "all")))
