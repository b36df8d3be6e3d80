"""Pairs the network ports of ranks into rails: pure functions over addresses.

A rail is a network that ranks have a port on. Rails are numbered by first appearance, going
through the ranks in order and each rank's ports in order, so rank 0's order is the canonical one:

    rank 0   eth0 10.0.0.1/24 -> rail 0    eth1 10.1.0.1/24 -> rail 1
    rank 1   eth0 10.1.0.2/24 -> rail 1    eth1 10.0.0.2/24 -> rail 0     (cabled the other way)
    rank 2   eth0 10.0.0.3/24 -> rail 0                                   (one port only)

Two ports of one rank in one subnet are two rails; the same port named twice is, too. Two ranks are
joined on every rail that both have; ranks that share none (each host in a subnet of its own, behind
routers) are paired port by port in their own order.

Invariants: every rank computes the same from the same input; each pair of ranks gets at least one
rail or a ConfigError that names both; a port serves at most one rail.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ..errors import ConfigError
from .netlink import Address


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """An address that a rank listens on."""

    address: Address
    port: int


@dataclasses.dataclass(frozen=True)
class Port:
    """A network port of a rank, as announced to the others."""

    name: str
    mbit_per_s: int
    """Speed of the port; 0: not known."""
    endpoints: tuple[Endpoint, ...]
    link_local: Endpoint | None = None
    """Link-local endpoint, for a port that shares a subnet with another port of its rank."""


@dataclasses.dataclass(frozen=True)
class Pairing:
    """One rail between two ranks, as one of them sees it."""

    rail: int
    ours: int
    """Index of our port."""
    theirs: int
    """Index of the peer's port."""


def number(ports_by_rank: Sequence[Sequence[Port]]) -> list[list[int]]:
    """Returns the rail number of every port of every rank."""
    rails: list[list[Address]] = []  # addresses of all ranks on each rail
    numbered = []
    for ports in ports_by_rank:
        taken: list[int] = []
        for port in ports:
            fitting = (
                r
                for r, seen in enumerate(rails)
                if r not in taken
                and any(_same_subnet(e.address, one) for e in port.endpoints for one in seen)
            )
            rail = next(fitting, len(rails))
            if rail == len(rails):
                rails.append([])
            rails[rail] += [endpoint.address for endpoint in port.endpoints]
            taken.append(rail)
        numbered.append(taken)
    return numbered


def pair_all(ports_by_rank: Sequence[Sequence[Port]]) -> list[dict[int, list[Pairing]]]:
    """Returns, for each rank, the rails to each of its peers, in rail order.

    Raises ConfigError, the same on all ranks, if two ranks cannot be joined.
    """
    rails = number(ports_by_rank)
    pairings: list[dict[int, list[Pairing]]] = [{} for _ in ports_by_rank]
    for low in range(len(ports_by_rank)):
        for high in range(low + 1, len(ports_by_rank)):
            shared = _pair(ports_by_rank, rails, low, high)
            pairings[low][high] = shared
            pairings[high][low] = [Pairing(p.rail, p.theirs, p.ours) for p in shared]
    return pairings


def _pair(
    ports_by_rank: Sequence[Sequence[Port]], rails: Sequence[Sequence[int]], low: int, high: int
) -> list[Pairing]:
    ours, theirs = ports_by_rank[low], ports_by_rank[high]
    common = [
        Pairing(rail, rails[low].index(rail), rails[high].index(rail))
        for rail in sorted(set(rails[low]) & set(rails[high]))
    ]
    by_order = [Pairing(i, i, i) for i in range(min(len(ours), len(theirs)))]
    for candidates in (common, by_order):
        joined = [p for p in candidates if meet(ours[p.ours], theirs[p.theirs])]
        if joined:
            return joined
    raise ConfigError(
        f"ranks {low} and {high} have no network in common, not even a version of IP: "
        f"{_addresses(ours)} and {_addresses(theirs)}. Name their interfaces"
    )


def slowest(
    ports_by_rank: Sequence[Sequence[Port]],
    pairings: Sequence[Mapping[int, Sequence[Pairing]]],
    host_numbers: Sequence[int],
) -> int:
    """Returns the least over all pairs of hosts of the fastest rail's nominal speed, in Mbit/s.
    0: the speed between two hosts is not known, or there is one host."""
    return min(
        (
            max(
                min(ports_by_rank[low][p.ours].mbit_per_s, ports_by_rank[high][p.theirs].mbit_per_s)
                for p in rails
            )
            for low, peers in enumerate(pairings)
            for high, rails in peers.items()
            if low < high and host_numbers[low] != host_numbers[high]
        ),
        default=0,
    )


def meet(ours: Port, theirs: Port) -> tuple[Endpoint, Endpoint] | None:
    """Returns the two addresses to connect: in one subnet if possible, else of one IP version;
    None if there are none."""
    pairs = [
        (mine, other)
        for mine in ours.endpoints
        for other in theirs.endpoints
        if mine.address.version == other.address.version
    ]
    near = [p for p in pairs if _same_subnet(p[0].address, p[1].address)]
    return next(iter(near or pairs), None)


def meet_on_link(ours: Port, theirs: Port) -> tuple[Endpoint, Endpoint] | None:
    """Returns the two link-local addresses to connect, if both ports have one and share a subnet;
    else None."""
    found = meet(ours, theirs)
    if found is None or ours.link_local is None or theirs.link_local is None:
        return None
    may = _same_subnet(found[0].address, found[1].address)
    return (ours.link_local, theirs.link_local) if may else None


def _same_subnet(a: Address, b: Address) -> bool:
    return a.version == b.version and (a.ip in b.network or b.ip in a.network)


def _addresses(ports: Sequence[Port]) -> str:
    return ", ".join(str(e.address.ip) for port in ports for e in port.endpoints)
