"""What a bring-up results in: the mesh of all ranks, ready to be handed to the core.

Invariants: plain data; the file descriptors in it belong to whoever holds the Mesh.
"""

from __future__ import annotations

import dataclasses
import os


@dataclasses.dataclass(frozen=True)
class RailInfo:
    """A rail as this rank uses it."""

    index: int
    interface: str
    address: str
    mbit_per_s: int
    """Speed of this rank's port; 0: not known."""


@dataclasses.dataclass(frozen=True)
class LaneSocket:
    """A connected, authenticated, non-blocking, close-on-exec TCP socket to a peer."""

    peer: int
    rail: int
    lane: int
    """Number of the connection on its rail."""
    fd: int
    """Detached: whoever takes the lane closes it."""
    bytes_per_s: float
    """Speed as probed, or else that of the slower of the two ports; 0.0: not known."""
    here: str = ""
    """Port, address and host of this end, for errors."""
    there: str = ""
    """Of the other."""
    port: int = 0
    """Index of the network interface here, if the lane ends with it; else 0."""


@dataclasses.dataclass(frozen=True)
class Mesh:
    """All ranks, joined."""

    rank: int
    world_size: int
    hosts: list[str]
    """Host name of each rank."""
    host_numbers: list[int]
    """Ranks with equal numbers share a host (and its network namespace)."""
    rails: list[RailInfo]
    lanes: list[LaneSocket]
    """By peer, rail and lane; the same lanes at both ends."""
    local_rank: int
    local_world_size: int
    ranks_on_machine: int
    """Ranks that share this machine's cores, in whichever container or network namespace."""
    shared: list[int] = dataclasses.field(default_factory=list)
    """Descriptor of a file in memory that all ranks of this host have opened, and those of every
    other host one of their own; empty if they have not, or once it is handed on."""
    in_memory: bool = False
    """There is such a file."""
    watch: list[int] = dataclasses.field(default_factory=list)
    """Descriptor of a netlink socket that tells of the ports of this host (netlink.subscribe);
    empty if no lane leaves the host, if there is none, or once it is handed on."""
    link_mbit: int = 0
    """Nominal speed of the links between hosts, the same on all ranks; 0: not known, or no such
    links."""

    @property
    def single_host(self) -> bool:
        """All ranks share one host."""
        return len(set(self.host_numbers)) == 1

    def close(self) -> None:
        """Closes every descriptor; for use before they are handed on."""
        for lane in self.lanes:
            os.close(lane.fd)
        for other in (*self.shared, *self.watch):
            os.close(other)
        for descriptors in (self.lanes, self.shared, self.watch):
            descriptors.clear()
