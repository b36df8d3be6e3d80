"""Makes a started communicator of the core from a mesh of connected sockets.

Invariant: at any time every descriptor of the mesh is either the core's or still in the mesh,
for the caller to close.
"""

from __future__ import annotations

import os
from typing import Any

from ..bootstrap.mesh import Mesh
from ..config import ALGORITHMS, Config
from .native import check, ffi, lib

_SPIN_US = 50  # two scheduler delays, which a spin saves
_OVERSUBSCRIBED_SPIN_US = 500  # several turns of the other ranks on the same core
_SEGMENT = 256 << 10
_ONE_HOST_SEGMENT = 1 << 20
# bytes per second that one thread carries each way: docs/decisions/42-second-sending-thread.md
_ONE_THREAD = 1.5e9


def open_handle(mesh: Mesh, config: Config, epoch: int, engine: Any) -> Any:
    """Makes and starts an rc_comm of that engine. Raises RingcommError."""
    cores = len(os.sched_getaffinity(0))
    oversubscribed = mesh.ranks_on_machine > cores
    spin_us = _OVERSUBSCRIBED_SPIN_US if oversubscribed else _SPIN_US
    segment_bytes = _ONE_HOST_SEGMENT if mesh.single_host else _SEGMENT
    settings = {
        "size": ffi.sizeof("rc_comm_config"),
        "rank": mesh.rank,
        "world_size": mesh.world_size,
        "epoch": epoch,
        "segment_bytes": config.segment_bytes or segment_bytes,
        "one_host": mesh.single_host,
        "heartbeat_ms": int(config.heartbeat * 1000),
        "peer_timeout_ms": int(config.peer_timeout * 1000),
        "algorithm": ALGORITHMS[config.algorithm],
        "link_mbit": mesh.link_mbit,
        "recovers": mesh.recovers,
        "oversubscribed": oversubscribed,
        "threads": config.threads or choose_threads(mesh, cores),
        "spin_us": spin_us if config.spin_us < 0 else config.spin_us,
    }
    out = ffi.new("rc_comm **")
    result = lib.rc_comm_create(out, engine, ffi.new("rc_comm_config *", settings))
    check(result, "cannot open the communicator: ")
    try:
        while mesh.lanes:
            lane = mesh.lanes.pop(0)  # from here on the core closes its descriptor
            result = lib.rc_comm_add_lane(out[0], lane.peer, lane.rail, lane.fd, lane.bytes_per_s)
            check(result, "cannot add a lane to the communicator: ")
            ends = (lane.here.encode(), lane.there.encode())
            lib.rc_comm_name_rail(out[0], lane.peer, lane.rail, lane.port, *ends)
        while mesh.watch:
            result = lib.rc_comm_watch_ports(out[0], mesh.watch.pop())
            check(result, "cannot watch the ports of the communicator: ")
        while mesh.shared:
            result = lib.rc_comm_share(out[0], mesh.host_numbers, mesh.shared.pop())
            check(result, "cannot share memory in the communicator: ")
        check(lib.rc_comm_start(out[0]), "cannot start the communicator: ")
    except BaseException:
        lib.rc_comm_free(out[0])
        raise
    return out[0]


def choose_threads(mesh: Mesh, cores: int) -> int:
    """Returns 2 if the ports, as far as their speed is known, outrun one thread, and each rank on
    this machine can have two of its cores; else 1. The ranks of a host share its ports."""
    to_peer: dict[int, float] = {}
    for lane in mesh.lanes:
        to_peer[lane.peer] = to_peer.get(lane.peer, 0.0) + lane.bytes_per_s
    fastest = max(to_peer.values(), default=0.0) / mesh.local_world_size
    return 2 if fastest > _ONE_THREAD and cores >= 2 * mesh.ranks_on_machine else 1
