"""Connects all ranks, given this rank's identity and an Exchange of bytes with the others.

    round 1  greet    host and settings of each rank                 -> differences are errors
    round 2  offer    which ports each rank listens on               -> rails are paired
             connect  the higher rank dials the lower one, every lane authenticated
    round 3  commit   which lanes each rank made                     -> both ends keep the same
    4 and 5  share    the memory of hosts with several ranks         -> all have it, or none

Invariants: either every rank gets a Mesh in which both ends of each lane agree that it exists and
each pair of ranks has at least one, or every rank raises, with the same table; no socket outlives
a failure; a world of one opens none; after connect() nothing listens but
Mesh.keeping.
"""

from __future__ import annotations

import importlib.metadata
import secrets
import socket
import time

from ..config import Config
from ..errors import ConfigError
from .bringup import Bringup
from .launch import Identity
from .mesh_result import LaneSocket, Mesh, RailInfo
from .rendezvous import Exchange, open_tcp
from .secret import Secret
from .settings_exchange import Greeting, check_settings, exchange_round, host_key, machine_key
from .system import require_descriptors

__all__ = ["ROUNDS", "LaneSocket", "Mesh", "RailInfo", "connect", "join"]

ROUNDS = 5
"""Most allgathers that a bring-up makes."""


def join(
    identity: Identity,
    config: Config,
    secret: Secret | None,
    exchange: Exchange | None = None,
    epoch: int = 0,
) -> Mesh:
    """Calls connect() over the given exchange, or over our own rendezvous, and closes it.

    Raises the errors of connect() and rendezvous.open_tcp().
    """
    deadline = time.monotonic() + config.connect_timeout
    if exchange is None and identity.world_size > 1:
        if identity.rank == 0:  # other ranks check in round 2 and can report there
            world = identity.world_size
            require_descriptors(world, f"the rendezvous of {world} ranks")
        exchange = open_tcp(identity, config, secret, deadline)
    try:
        return connect(identity, exchange, config, secret, epoch, deadline)
    finally:
        if exchange is not None:
            exchange.close()


def connect(
    identity: Identity,
    exchange: Exchange | None,
    config: Config,
    secret: Secret | None,
    epoch: int = 0,
    deadline: float | None = None,
) -> Mesh:
    """Joins all ranks of identity's world.

    Args:
        exchange: may be None in a world of one.
        epoch: number of this bring-up of the communicator; part of every handshake.
        deadline: time.monotonic() by which all ranks must be joined; connect_timeout from now if
            None. The earliest of all ranks counts.

    Raises ConfigError for settings that cannot work or differ between ranks, BootstrapError with
    a table of the tried addresses if not all ranks could be joined.
    """
    if identity.world_size == 1:
        return Mesh(0, 1, [socket.gethostname()], [0], [], [], identity.local_rank or 0, 1, 1)
    if exchange is None:
        raise ConfigError("a world of more than one rank needs an exchange")
    if deadline is None:
        deadline = time.monotonic() + config.connect_timeout
    greetings = _greet(exchange, config, deadline)
    bringup = Bringup(identity, config, secret, epoch, greetings)
    try:
        return bringup.run(exchange, deadline)
    finally:
        bringup.close()


def _greet(exchange: Exchange, config: Config, deadline: float) -> list[Greeting]:
    greetings = exchange_round(
        exchange, deadline, lambda: _greeting(config).to_fields(), Greeting.from_record
    )
    check_settings(greetings)
    return greetings


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
