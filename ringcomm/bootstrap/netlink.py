"""Asks the kernel for links, addresses, routes and the owner of a TCP socket, over netlink.

Only this file of the package knows netlink; in the core csrc/net/ports.c reads the socket that
``subscribe`` opens. Where netlink has no TCP sockets, /proc is read. It asks the network namespace
that the process is in, where /sys may still show another one. Invariants: nothing is changed, no
privilege is needed, and attributes that a newer kernel adds are skipped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Generator, Iterator

from ..errors import BootstrapError
from .system import describe

Address = ipaddress.IPv4Interface | ipaddress.IPv6Interface
"""An address with its prefix length."""

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_NETLINK_ROUTE, _NETLINK_SOCK_DIAG = 0, 4
_SOCK_DIAG_BY_FAMILY = 20
_RTM_NEWLINK, _RTM_GETLINK, _RTM_NEWADDR, _RTM_GETADDR = 16, 18, 20, 22
_RTM_NEWROUTE, _RTM_GETROUTE = 24, 26
_NLM_F_REQUEST, _NLM_F_DUMP = 0x1, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_INFO_KIND = 3, 18, 1
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS = 1, 2, 8
_RTA_DST, _RTA_SRC, _RTA_OIF = 1, 2, 4
_GROUPS = 0x1 | 0x10 | 0x100  # RTMGRP_LINK, RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR
_TYPE_MASK = 0x3FFF  # the two bits above mark nesting and byte order

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_LINK = struct.Struct("=BxHiII")  # family, hardware type, index, flags, change mask
_ADDR = struct.Struct("=BBBBi")  # family, prefix length, flags, scope, index
_ROUTE = struct.Struct("=BBB9x")  # family, bits of the destination, bits of the source
_ATTRIBUTE = struct.Struct("=HH")
_SOCKET_ID = struct.Struct("!HH16s16s")  # ports and addresses, from the socket's own side
_DIAG = struct.Struct("=BBxxI")  # family, protocol, states
_DIAG_ANSWER = struct.Struct("=BBxx48xIIIII")  # family, state; timer, queues, user, inode
_NO_COOKIE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # any link, any cookie
_PATIENCE = 5.0


@dataclasses.dataclass(frozen=True)
class Link:
    """A network interface as the kernel lists it."""

    index: int
    name: str
    flags: int
    """Flags, IFF_* bits."""
    kind: str
    """Driver kind of a software device ("veth", "bridge", "bond", ...); empty for hardware."""


@dataclasses.dataclass(frozen=True)
class LinkAddress:
    """An address of a link."""

    index: int
    address: Address
    flags: int
    """Flags, IFA_F_* bits."""


@dataclasses.dataclass(frozen=True)
class TcpSocket:
    """A TCP socket of this network namespace."""

    state: int
    """TCP state; 1 is TCP_ESTABLISHED."""
    uid: int
    """User that owns the socket, as this process's user namespace numbers users."""
    inode: int
    """Inode of the socket; 0: no process holds it."""


def links() -> Iterator[Link]:
    """Yields every interface of this network namespace, in the kernel's order."""
    for body in _dump(_RTM_GETLINK, _RTM_NEWLINK):
        _family, _hardware, index, flags, _change = _LINK.unpack_from(body)
        attributes = _attributes(body[_LINK.size :])
        info = _attributes(attributes.get(_IFLA_LINKINFO, b""))
        name, kind = _text(attributes.get(_IFLA_IFNAME)), _text(info.get(_IFLA_INFO_KIND))
        yield Link(index, name, flags, kind)


def addresses() -> Iterator[LinkAddress]:
    """Yields every IPv4 and IPv6 address of this network namespace, in the kernel's order."""
    for body in _dump(_RTM_GETADDR, _RTM_NEWADDR):
        family, prefix, short_flags, _scope, index = _ADDR.unpack_from(body)
        attributes = _attributes(body[_ADDR.size :])
        # On a point-to-point link IFA_ADDRESS is the far end, IFA_LOCAL ours.
        packed = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS, b"")
        flags = int.from_bytes(attributes.get(_IFA_FLAGS, b""), sys.byteorder) or short_flags
        if (family, len(packed)) in ((socket.AF_INET, 4), (socket.AF_INET6, 16)):
            yield LinkAddress(index, ipaddress.ip_interface((packed, prefix)), flags)


def route(source: IPAddress, destination: IPAddress) -> int | None:
    """Returns the index of the link that the routing table chooses for this source and
    destination; None if there is no such route."""
    family = socket.AF_INET if source.version == 4 else socket.AF_INET6
    bits = source.max_prefixlen
    body = _ROUTE.pack(family, bits, bits)
    for kind, address in ((_RTA_DST, destination), (_RTA_SRC, source)):
        body += _ATTRIBUTE.pack(_ATTRIBUTE.size + bits // 8, kind) + address.packed
    try:
        answer = next(_ask(_RTM_GETROUTE, 0, body, _RTM_NEWROUTE))
    except OSError:
        return None
    index = _attributes(answer[_ROUTE.size :]).get(_RTA_OIF)
    return int.from_bytes(index, sys.byteorder) if index else None


def tcp_socket(local: tuple[str, int], remote: tuple[str, int]) -> TcpSocket | None:
    """Returns the socket with these numeric addresses; None if there is none. Raises OSError
    where the kernel does not tell."""
    with contextlib.suppress(OSError):  # a kernel without sock_diag
        found = _tcp_socket_by_diag(local, remote)
        if found is not None:
            return found
    return _tcp_socket_by_proc(local, remote)  # a kernel without tcp_diag finds none above


def _tcp_socket_by_diag(local: tuple[str, int], remote: tuple[str, int]) -> TcpSocket | None:
    ours, theirs = (ipaddress.ip_address(address) for address, _ in (local, remote))
    family = socket.AF_INET if ours.version == 4 else socket.AF_INET6
    ends = _SOCKET_ID.pack(
        local[1], remote[1], ours.packed.ljust(16, b"\0"), theirs.packed.ljust(16, b"\0")
    )
    body = _DIAG.pack(family, socket.IPPROTO_TCP, 0xFFFFFFFF) + ends + _NO_COOKIE
    answers = _ask(_SOCK_DIAG_BY_FAMILY, 0, body, _SOCK_DIAG_BY_FAMILY, _NETLINK_SOCK_DIAG)
    try:
        answer = next(answers)
    except FileNotFoundError:
        return None
    finally:
        answers.close()
    if answer[4 : 4 + _SOCKET_ID.size] != ends:  # a listener, found as there is no such connection
        return None
    _family, state, _expires, _read, _write, uid, inode = _DIAG_ANSWER.unpack_from(answer)
    return TcpSocket(state, uid, inode)


def _tcp_socket_by_proc(local: tuple[str, int], remote: tuple[str, int]) -> TcpSocket | None:
    name = "tcp6" if ":" in local[0] else "tcp"
    wanted = [_proc_place(*local), _proc_place(*remote)]
    with open(f"/proc/thread-self/net/{name}", encoding="ascii") as file:
        for line in file:
            fields = line.split()
            if fields[1:3] == wanted:
                return TcpSocket(int(fields[3], 16), int(fields[7]), int(fields[9]))
    return None


def _proc_place(address: str, port: int) -> str:
    words = struct.iter_unpack("=I", ipaddress.ip_address(address).packed)
    return "".join(f"{word:08X}" for (word,) in words) + f":{port:04X}"


def subscribe() -> socket.socket | None:
    """Opens a socket on which the kernel reports every later change of this network namespace's
    links and addresses; None where it does not, as in some sandboxes."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as until_bound:
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_ROUTE)
        until_bound.enter_context(sock)
        sock.bind((0, _GROUPS))
        sock.setblocking(False)
        until_bound.pop_all()
        return sock
    return None


def _dump(request: int, answer: int) -> Iterator[bytes]:
    """Yields the bodies of all messages that answer one dump request."""
    body = struct.pack("=B19x", socket.AF_UNSPEC)
    try:
        yield from _ask(request, _NLM_F_DUMP, body, answer)
    except OSError as error:
        raise BootstrapError(
            f"the kernel does not tell of its network: {describe(error)}"
        ) from error


def _ask(
    request: int, flags: int, body: bytes, answer: int, protocol: int = _NETLINK_ROUTE
) -> Generator[bytes, None, None]:
    """Sends a request and yields the bodies of the answers. Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as sock:
        sock.settimeout(_PATIENCE)
        sock.bind((0, 0))
        size = _HEADER.size + len(body)
        sock.send(_HEADER.pack(size, request, _NLM_F_REQUEST | flags, 1, 0) + body)
        while True:
            for kind, message in _parts(sock.recv(1 << 18), _HEADER):
                if kind == _NLMSG_DONE:
                    return
                if kind == _NLMSG_ERROR:
                    code = -struct.unpack_from("=i", message)[0]
                    raise OSError(code, os.strerror(code))
                if kind == answer:
                    yield message


def _attributes(data: bytes) -> dict[int, bytes]:
    return {kind & _TYPE_MASK: value for kind, value in _parts(data, _ATTRIBUTE)}


def _parts(data: bytes, head: struct.Struct) -> Iterator[tuple[int, bytes]]:
    """Yields kind and body of the messages or attributes, each behind a head that begins with the
    length of both and the kind."""
    while len(data) >= head.size:
        length, kind, *_ = head.unpack_from(data)
        if not head.size <= length <= len(data):
            return
        yield kind, data[head.size : length]
        data = data[(length + 3) & ~3 :]


def _text(value: bytes | None) -> str:
    return (value or b"").split(b"\0")[0].decode("utf-8", "replace")
