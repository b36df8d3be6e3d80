"""The network ports of this host, and the choice of those to use.

Invariants: nothing is derived from the host's name (it often resolves to 127.0.1.1); an interface
that is chosen has at least one address that peers can use; the loopback is never chosen for a job
that spans hosts unless it was named.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Sequence

from ..errors import ConfigError
from . import netlink
from .netlink import Address
from .system import read_number

_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
_IFA_TEMPORARY = 0x01
_UNUSABLE = 0x40 | 0x08 | 0x20  # IFA_F_TENTATIVE, IFA_F_DADFAILED, IFA_F_DEPRECATED

# Devices for traffic of containers and virtual machines, or with a slow way to other hosts.
_VIRTUAL_NAMES = ("docker", "br-", "virbr", "cni", "flannel", "veth", "cali", "lxc", "podman")
_VIRTUAL_KINDS = frozenset(
    ("bridge", "dummy", "gre", "ip6tnl", "ipip", "sit", "tun", "vxlan", "wireguard", "ifb", "vrf")
)


@dataclasses.dataclass(frozen=True)
class Interface:
    """A network port."""

    name: str
    index: int
    kind: str
    """Kind: "loopback", "ethernet", or the kernel's name for a software device ("veth", ...)."""
    up: bool
    running: bool
    """True if a cable is plugged in, as far as the driver knows."""
    loopback: bool
    virtual: bool
    """True for a container, virtual machine or tunnel device, used only if there is no other."""
    mbit_per_s: int | None
    """Speed of a hardware port; None where it is unknown (or invented, as by veth)."""
    addresses: tuple[Address, ...]
    """Addresses, IPv4 first, then IPv6, link-local ones last in each; none that is tentative or
    deprecated."""

    @property
    def usable(self) -> tuple[Address, ...]:
        """Addresses to give to peers, at most one per family. Link-local IPv4 counts only if
        there is no other; link-local IPv6 never, as it needs each peer's own scope."""
        picked: dict[int, Address] = {}
        for address in self.addresses:
            if address.is_link_local and (address.version == 6 or not self.only_link_local):
                continue
            picked.setdefault(address.version, address)
        return tuple(picked.values())

    @property
    def link_local(self) -> Address | None:
        """Link-local IPv6 address of the port, or None. Packets to such an address leave only by
        the port that is named with it, and only the port that has the address answers."""
        local = (a for a in self.addresses if a.version == 6 and a.is_link_local)
        return next(local, None)

    @property
    def only_link_local(self) -> bool:
        """True if all its addresses are link-local, that is, none was assigned on purpose."""
        return all(address.is_link_local for address in self.addresses)

    def describe(self) -> str:
        """Returns one line with name, state, speed and addresses."""
        state = "up" if self.up and self.running else "no carrier" if self.up else "down"
        speed = f", {self.mbit_per_s} Mbit/s" if self.mbit_per_s else ""
        where = ", ".join(str(address) for address in self.addresses) or "no address"
        return f"{self.name} ({self.kind}, {state}{speed}): {where}"


def list_interfaces() -> list[Interface]:
    """Lists all network ports of this network namespace, in the kernel's order."""
    return [_interface(link, addresses) for link, addresses in _links_with_addresses()]


def addresses_by_name() -> dict[str, list[Address]]:
    """Returns the addresses of each network port, as ``list_interfaces`` orders them. Asks no
    driver, which may take long while its port is in trouble."""
    return {link.name: addresses for link, addresses in _links_with_addresses()}


def _links_with_addresses() -> list[tuple[netlink.Link, list[Address]]]:
    by_link: dict[int, list[Address]] = {}
    for entry in sorted(  # IPv4 first, then what lasts longest
        netlink.addresses(),
        key=lambda one: (
            one.address.version == 6,
            one.address.is_link_local,
            one.address.version == 6 and bool(one.flags & _IFA_TEMPORARY),
        ),
    ):
        if not entry.flags & _UNUSABLE:
            by_link.setdefault(entry.index, []).append(entry.address)
    return [(link, by_link.get(link.index, [])) for link in netlink.links()]


def _interface(link: netlink.Link, addresses: Sequence[Address]) -> Interface:
    loopback = bool(link.flags & _IFF_LOOPBACK)
    return Interface(
        name=link.name,
        index=link.index,
        kind="loopback" if loopback else link.kind or "ethernet",
        up=bool(link.flags & _IFF_UP),
        running=loopback or bool(link.flags & _IFF_RUNNING),
        loopback=loopback,
        virtual=link.kind in _VIRTUAL_KINDS or link.name.startswith(_VIRTUAL_NAMES),
        mbit_per_s=None if loopback or link.kind == "veth" else _speed(link),
        addresses=tuple(addresses),
    )


def _speed(link: netlink.Link) -> int | None:
    """Returns Mbit/s as the driver reports them; None if it does not, or if /sys is another
    namespace's."""
    base = f"/sys/class/net/{link.name}/"
    if read_number(base + "ifindex", 0) != link.index:
        return None
    speed = read_number(base + "speed", 0)
    return speed if speed > 0 else None


def choose(
    names: Sequence[str], single_host: bool, interfaces: Sequence[Interface] | None = None
) -> list[Interface]:
    """Returns the ports to use, in rail order.

    Args:
        names: ports asked for; one may stand twice (two rails). Empty: on a single host the
            loopback, else every real port that is up, in the kernel's order.
        single_host: all ranks share this host.
        interfaces: the host's ports; list_interfaces() if None.

    Raises ConfigError, listing the host's ports, if a named port does not exist, is down or has no
    address, or if nothing is left.
    """
    present = list_interfaces() if interfaces is None else list(interfaces)
    if names:
        return [_named(name, present) for name in names]
    ready = [i for i in present if i.up and i.running and i.usable]
    if single_host:
        chosen = [i for i in ready if i.loopback][:1]
    else:
        outside = [i for i in ready if not i.loopback and not i.only_link_local]
        chosen = [i for i in outside if not i.virtual] or outside
    if not chosen:
        wanted = "loopback interface" if single_host else "network port"
        raise ConfigError(f"no {wanted} is up and has an address. {_ports_of_host(present)}")
    return chosen


def _named(name: str, present: Sequence[Interface]) -> Interface:
    for interface in present:
        if interface.name != name:
            continue
        if not interface.up:
            reason = f"is down: run `ip link set {name} up`"
        elif not interface.running:
            reason = "has no carrier: is the cable plugged in?"
        elif not interface.usable:
            reason = "has no address that another host can use: give it one"
        else:
            return interface
        raise ConfigError(f"interface {name} {reason}. {_ports_of_host(present)}")
    raise ConfigError(f"there is no interface {name!r}. {_ports_of_host(present)}")


def _ports_of_host(present: Sequence[Interface]) -> str:
    return "This host has: " + "; ".join(i.describe() for i in present)


def is_loopback(address: str) -> bool:
    """True for a numeric address that only this host can reach."""
    return ipaddress.ip_address(address).is_loopback
