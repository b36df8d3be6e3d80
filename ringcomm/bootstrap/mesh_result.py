"""Result of a bring-up: the mesh of all ranks, ready to be handed to the core.

Invariants: plain data; the holder of a Mesh owns the file descriptors in it.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any


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
    """A connected, authenticated, non-blocking, close-on-exec TCP socket to a peer; or where a lane
    could not be made, a Unix socket whose other end is closed."""

    peer: int
    rail: int
    lane: int
    """Number of the connection on its rail."""
    fd: int
    """Descriptor of the socket, to be closed by the lane's new owner."""
    bytes_per_s: float
    """Speed as probed, else that of the slower of the two ports; 0.0: not known."""
    here: str = ""
    """Port, address and host of this end, for errors."""
    there: str = ""
    """Port, address and host of the other end."""
    port: int = 0
    """Index of the local interface that the lane depends on; 0 if it depends on none."""
    why_not: str = ""
    """Why it could not be made; empty if it was."""


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Connections between all ranks, as one rank sees them."""

    rank: int
    world_size: int
    hosts: list[str]
    """Host name of each rank."""
    host_numbers: list[int]
    """Number of each rank's host; ranks with equal numbers share it and its network namespace."""
    rails: list[RailInfo]
    lanes: list[LaneSocket]
    """Lanes by peer, rail and lane; both ends have the same."""
    local_rank: int
    local_world_size: int
    ranks_on_machine: int
    """Number of ranks on this machine's cores, in any container or network namespace."""
    shared: list[int] = dataclasses.field(default_factory=list)
    """Descriptor of a file in memory that all ranks of this host have opened, as the ranks of
    every other host have opened theirs; empty if there is none, or once it is handed on."""
    in_memory: bool = False
    """True if the ranks of each host share a file in memory."""
    watch: list[int] = dataclasses.field(default_factory=list)
    """Descriptor of a netlink socket that reports changes of this host's ports
    (netlink.subscribe); empty if no lane leaves the host, if the system has no such socket, or
    once it is handed on."""
    link_mbit: int = 0
    """Nominal speed of the links between hosts, the same on all ranks; 0: not known, or no such
    links."""
    recovers: bool = False
    """True on all ranks if a lane that is lost ends nothing, and is made anew."""
    keeping: list[Any] = dataclasses.field(default_factory=list)
    """What makes lost lanes anew, a keeper.Keeping with listening sockets; empty if nothing does,
    or once it is handed on."""

    @property
    def single_host(self) -> bool:
        """True if all ranks share one host."""
        return len(set(self.host_numbers)) == 1

    def close(self) -> None:
        """Closes every descriptor; for use before they are handed on."""
        for lane in self.lanes:
            os.close(lane.fd)
        for other in (*self.shared, *self.watch):
            os.close(other)
        for keeping in self.keeping:
            keeping.close()
        for descriptors in (self.lanes, self.shared, self.watch, self.keeping):
            descriptors.clear()
