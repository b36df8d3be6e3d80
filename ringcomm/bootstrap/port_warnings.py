"""Finds ports that carry nothing to some host, because that host has none on their network.

A port that was not found at the start (no carrier, another RINGCOMM_INTERFACES, an address in
another subnet) makes no lane fail: the job would run at a part of its speed without a warning.
Invariants: pure functions over the ports that all ranks have offered; one sentence for each host
that lacks a port, as seen from one host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from . import rails
from .rails import Pairing, Port


@dataclasses.dataclass(frozen=True)
class Offered:
    """Offers of all ranks in the second round of the bring-up, by rank."""

    ports: Sequence[Sequence[Port]]
    hosts: Sequence[str]
    host_numbers: Sequence[int]


def sentences(offered: Offered, rank: int, pairings: Mapping[int, Sequence[Pairing]]) -> list[str]:
    """Describes the ports that rank's host and each other host lack for each other, one sentence
    a host; empty if every port has its rail.

    Args:
        pairings: rank's rails, by peer. Only the first rank of each other host is compared,
            since the ranks of a host have the same ports.
    """
    numbers = offered.host_numbers
    numbered = rails.number(offered.ports)
    found = []
    for peer in range(len(offered.ports)):
        if numbers.index(numbers[peer]) != peer or numbers[peer] == numbers[rank]:
            continue
        joined = pairings[peer]
        lacks = [
            *_lacks(offered, numbered, peer, rank, {pairing.ours for pairing in joined}),
            *_lacks(offered, numbered, rank, peer, {pairing.theirs for pairing in joined}),
        ]
        if lacks:
            found.append(f"{'; '.join(lacks)}: {_bandwidth_used(offered, rank, peer, joined)}")
    return found


def _name(offered: Offered, rank: int) -> str:
    return f"{offered.hosts[rank]} (rank {rank})"


def _lacks(
    offered: Offered, numbered: Sequence[Sequence[int]], rank: int, other: int, paired: set[int]
) -> list[str]:
    """Says which of the other host's ports have no rail to rank's, if any."""
    ports = [
        f"rail {numbered[other][index]} ({port.name} "
        f"{', '.join(str(end.address.network) for end in port.endpoints)} of host "
        f"{_name(offered, other)})"
        for index, port in enumerate(offered.ports[other])
        if index not in paired
    ]
    return [f"host {_name(offered, rank)} has no port for {' and '.join(ports)}"] if ports else []


def _bandwidth_used(offered: Offered, rank: int, peer: int, joined: Sequence[Pairing]) -> str:
    """Says how many ports of the host with more bandwidth this job uses between the two hosts."""
    by_rank = {rank: [p.ours for p in joined], peer: [p.theirs for p in joined]}
    better = max(by_rank, key=lambda r: _speed(offered.ports[r]))
    ports = offered.ports[better]
    used = [ports[index] for index in by_rank[better]]
    part = _speed(used) / _speed(ports)
    return (
        f"this job uses {len(used)} of {len(ports)} ports, {part:.0%} of the bandwidth, between "
        "the two"
    )


def _speed(ports: Sequence[Port]) -> float:
    """Returns the sum of the ports' speeds; their number where not all are known."""
    speeds = [port.mbit_per_s for port in ports]
    return float(sum(speeds)) if all(speeds) else float(len(ports))
