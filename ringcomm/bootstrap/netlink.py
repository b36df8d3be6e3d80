"""The kernel's own list of links and addresses, and by which link it routes, over netlink.

Only this file knows netlink. It asks the network namespace that the process is in, where /sys may
still show another one. Invariants: nothing is changed, no privilege is needed, and attributes
that a newer kernel adds are skipped.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator

from ..errors import BootstrapError

Address = ipaddress.IPv4Interface | ipaddress.IPv6Interface
"""An address with its prefix length."""

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_NETLINK_ROUTE = 0
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
_PATIENCE = 5.0


@dataclasses.dataclass(frozen=True)
class Link:
    """A network interface as the kernel lists it."""

    index: int
    name: str
    flags: int
    """IFF_* bits."""
    kind: str
    """Driver kind of a software device ("veth", "bridge", "bond", ...); empty for hardware."""


@dataclasses.dataclass(frozen=True)
class LinkAddress:
    """An address of a link."""

    index: int
    address: Address
    flags: int
    """IFA_F_* bits."""


def links() -> list[Link]:
    """Every interface of this network namespace, in the kernel's order."""
    found = []
    for body in _dump(_RTM_GETLINK, _RTM_NEWLINK):
        _family, _hardware, index, flags, _change = _LINK.unpack_from(body)
        attributes = dict(_attributes(body[_LINK.size :]))
        info = dict(_attributes(attributes.get(_IFLA_LINKINFO, b"")))
        name, kind = _text(attributes.get(_IFLA_IFNAME)), _text(info.get(_IFLA_INFO_KIND))
        found.append(Link(index, name, flags, kind))
    return found


def addresses() -> list[LinkAddress]:
    """Every IPv4 and IPv6 address of this network namespace, in the kernel's order."""
    found = []
    for body in _dump(_RTM_GETADDR, _RTM_NEWADDR):
        family, prefix, short_flags, _scope, index = _ADDR.unpack_from(body)
        attributes = dict(_attributes(body[_ADDR.size :]))
        # On a point-to-point link IFA_ADDRESS is the far end, IFA_LOCAL ours.
        packed = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS, b"")
        flags = int.from_bytes(attributes.get(_IFA_FLAGS, b""), sys.byteorder) or short_flags
        address: Address
        if family == socket.AF_INET and len(packed) == 4:
            address = ipaddress.IPv4Interface((packed, prefix))
        elif family == socket.AF_INET6 and len(packed) == 16:
            address = ipaddress.IPv6Interface((packed, prefix))
        else:
            continue
        found.append(LinkAddress(index, address, flags))
    return found


def route(source: IPAddress, destination: IPAddress) -> int | None:
    """Index of the link by which packets with this source leave for this destination, if they are
    bound to no link; None if there is no such route."""
    family = socket.AF_INET if source.version == 4 else socket.AF_INET6
    bits = source.max_prefixlen
    body = _ROUTE.pack(family, bits, bits)
    for kind, address in ((_RTA_DST, destination), (_RTA_SRC, source)):
        body += _ATTRIBUTE.pack(_ATTRIBUTE.size + bits // 8, kind) + address.packed
    try:
        answer = next(_ask(_RTM_GETROUTE, 0, body, _RTM_NEWROUTE))
    except BootstrapError:
        return None
    index = dict(_attributes(answer[_ROUTE.size :])).get(_RTA_OIF)
    return int.from_bytes(index, sys.byteorder) if index else None


def subscribe() -> socket.socket | None:
    """A socket to which the kernel tells every change of the links and addresses of this network
    namespace from now on; None where it does not, as in some sandboxes."""
    try:
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_ROUTE)
    except OSError:
        return None
    try:
        sock.bind((0, _GROUPS))
        sock.setblocking(False)
    except OSError:
        sock.close()
        return None
    return sock


def _dump(request: int, answer: int) -> Iterator[bytes]:
    """The bodies of all messages that answer one dump request."""
    return _ask(request, _NLM_F_DUMP, struct.pack("=B19x", socket.AF_UNSPEC), answer)


def _ask(request: int, flags: int, body: bytes, answer: int) -> Iterator[bytes]:
    """The bodies of the messages that answer a request. Raises BootstrapError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_ROUTE) as sock:
        sock.settimeout(_PATIENCE)
        sock.bind((0, 0))
        size = _HEADER.size + len(body)
        sock.send(_HEADER.pack(size, request, _NLM_F_REQUEST | flags, 1, 0) + body)
        while True:
            for kind, message in _messages(sock.recv(1 << 18)):
                if kind == _NLMSG_DONE:
                    return
                if kind == _NLMSG_ERROR:
                    code = -struct.unpack_from("=i", message)[0]
                    raise BootstrapError(
                        f"the kernel does not tell of its network: {os.strerror(code)}"
                    )
                if kind == answer:
                    yield message


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _HEADER.size:
        length, kind, _flags, _sequence, _port = _HEADER.unpack_from(data)
        if not _HEADER.size <= length <= len(data):
            return
        yield kind, data[_HEADER.size : length]
        data = data[(length + 3) & ~3 :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        if not _ATTRIBUTE.size <= length <= len(data):
            return
        yield kind & _TYPE_MASK, data[_ATTRIBUTE.size : length]
        data = data[(length + 3) & ~3 :]


def _text(value: bytes | None) -> str:
    return (value or b"").split(b"\0")[0].decode("utf-8", "replace")
