"""Connects all ranks, given this rank's identity and an Exchange of bytes with the others.

    round 1  greet    host and settings of each rank                 -> differences are errors
    round 2  offer    which ports each rank listens on               -> rails are paired
             connect  the higher rank dials the lower one, every lane authenticated
    round 3  commit   which lanes each rank made                     -> both ends keep the same
    4 and 5  share    the memory of hosts with several ranks         -> all have it, or none

Invariants: either every rank gets a Mesh in which both ends of each lane agree that it exists and
each pair of ranks has at least one, or every rank raises, with the same table; no socket outlives
a failure; a world of one opens none; after join() nothing listens but Mesh.keeping.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import secrets
import socket
import time

from ..config import Config
from .bringup import Bringup
from .launch import Identity
from .mesh_result import LaneSocket, Mesh, RailInfo
from .rendezvous import Exchange, open_tcp
from .secret import Secret
from .settings_exchange import Greeting, check_settings, exchange_round, host_key, machine_key
from .system import require_descriptors

__all__ = ["ROUNDS", "LaneSocket", "Mesh", "RailInfo", "join"]

ROUNDS = 5
"""Most allgathers that a bring-up makes."""


def join(
    identity: Identity,
    config: Config,
    secret: Secret | None,
    exchange: Exchange | None = None,
    epoch: int = 0,
) -> Mesh:
    """Joins all ranks of identity's world, over the given exchange or our own rendezvous, and
    closes that.

    Args:
        epoch: number of this bring-up of the communicator; part of every handshake.

    All ranks must be joined within connect_timeout; the earliest deadline of all ranks counts.
    Raises ConfigError for settings that cannot work or differ between ranks, BootstrapError with
    a table of the tried addresses if not all ranks could be joined, and the errors of
    rendezvous.open_tcp().
    """
    deadline = time.monotonic() + config.connect_timeout
    world = identity.world_size
    if world == 1:
        if exchange is not None:
            exchange.close()
        return Mesh(0, 1, [socket.gethostname()], [0], [], [], identity.local_rank or 0, 1, 1)
    if exchange is None:
        if identity.rank == 0:  # other ranks check in round 2 and can report there
            require_descriptors(world, f"the rendezvous of {world} ranks")
        exchange = open_tcp(identity, config, secret, deadline)
    with contextlib.closing(exchange):
        greetings = exchange_round(
            exchange, deadline, lambda: _greeting(config).to_fields(), Greeting.from_record
        )
        check_settings(greetings)
        return Bringup(identity, config, secret, epoch, greetings).run(exchange, deadline)


def _greeting(config: Config) -> Greeting:
    return Greeting(
        host=socket.gethostname(),
        host_key=host_key(),
        machine_key=machine_key(),
        session=secrets.token_hex(16),
        settings={"the version of ringcomm": _version(), **config.shared_fields()},
    )


def _version() -> str:
    try:
        return importlib.metadata.version("ringcomm")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
