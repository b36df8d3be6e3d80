"""Summary of a job that has begun, for rank 0's log: ranks by host, ports and settings."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from .bootstrap.join import Joined
from .bootstrap.mesh import LaneSocket, Mesh
from .config import DEFAULT, Config, compression_from_env

_TCP_CONGESTION = 13  # TCP_CONGESTION in linux/tcp.h


def summary_of(joined: Joined, algorithms: str, kernel_set: str, group_codec: str | None) -> str:
    """Formats the summary, several lines. The mesh must still have its lanes.

    Args:
        group_codec: codec of the communicator's torch process group; None: it has no group.
    """
    mesh, config = joined.mesh, joined.config
    codec = compression_from_env() if group_codec is None else group_codec
    where = "a" if group_codec is None else "this"
    ranks = "1 rank" if mesh.world_size == 1 else f"{mesh.world_size} ranks"
    torch = "" if codec == "none" else f" ({codec} where {where} torch process group reduces)"
    return "\n  ".join(
        [
            f"{ranks}: {_hosts(mesh)}",
            *(
                f"rail {rail.index}: {rail.interface} {rail.address}{_rate(mesh, rail.index)}"
                for rail in mesh.rails
            ),
            f"shared memory: {'yes' if mesh.in_memory else 'no'}; algorithms: {algorithms}; "
            f"congestion control: {_congestion(mesh.lanes)}; kernels: {kernel_set}",
            f"compression: none but where a call names one{torch}",
            f"settings: {_chosen(config)}",
        ]
    )


def _hosts(mesh: Mesh) -> str:
    ranks_of: dict[int, list[int]] = {}
    for rank, number in enumerate(mesh.host_numbers):
        ranks_of.setdefault(number, []).append(rank)
    return ", ".join(f"{_listed(ranks)} on {mesh.hosts[ranks[0]]}" for ranks in ranks_of.values())


def _listed(ranks: Sequence[int]) -> str:
    """Formats ranks: "0-3" for consecutive ones, else "0 2 4"."""
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return " ".join(map(str, ranks))


def _rate(mesh: Mesh, rail: int) -> str:
    """Formats the rail's speed: the sum of its lanes to a peer, for the slowest peer."""
    to_peer: dict[int, float] = {}
    for lane in mesh.lanes:
        if lane.rail == rail and not lane.why_not:
            to_peer[lane.peer] = to_peer.get(lane.peer, 0.0) + lane.bytes_per_s
    slowest = min(to_peer.values(), default=0.0)
    return f", {slowest * 8 / 1e6:.0f} Mbit/s" if slowest else ", of unknown speed"


def _congestion(lanes: Sequence[LaneSocket]) -> str:
    made = [lane for lane in lanes if not lane.why_not]
    if not made:
        return "none needed"
    with socket.socket(fileno=os.dup(made[0].fd)) as lane:
        name = lane.getsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, 16)
    return name.split(b"\0")[0].decode("ascii", "replace")


def _chosen(config: Config) -> str:
    chosen = [
        f"{name}={config.shown(name)} ({source})"
        for name, source in config.sources().items()
        if source != DEFAULT
    ]
    return ", ".join(chosen) or "the defaults"
