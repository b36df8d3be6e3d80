"""Where a member listens for the others, and where one that was started again looks for them.

The ports follow from the job's name and the rank, so that who knows a host and no port finds the
members there. Invariants: nothing listens off loopback without a secret; a taken port is no error.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from ..bootstrap.interfaces import choose, is_loopback
from ..bootstrap.launch import derived_ports
from ..bootstrap.meeting import resolve
from ..bootstrap.secret import Secret, check_exposed
from ..bootstrap.sockets import listen
from ..config import Config
from ..errors import ConfigError
from .messages import Address

_TRIED = 2
"""Ports of each rank."""


def ports_of(job: str, rank: int) -> list[int]:
    """Where a rank of a job listens, if nobody else does."""
    return list(derived_ports(f"{job} membership {rank}")[:_TRIED])


def listen_on(
    addresses: Sequence[str], job: str, rank: int, secret: Secret | None, insecure: bool
) -> list[socket.socket]:
    """Listeners on these addresses, all at one port if one of the rank's own is free. Raises
    ConfigError, OSError."""
    check_exposed(addresses, secret, insecure)
    for port in ports_of(job, rank):
        listeners: list[socket.socket] = []
        try:
            for address in addresses:
                listeners.append(listen(address, port))
            return listeners
        except OSError as error:
            for listener in listeners:
                listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
    return [listen(address) for address in addresses]


def own_addresses(config: Config, contacts: Sequence[str]) -> list[str]:
    """Of a rank that has no communicator yet: those of its ports, as the bring-up chooses them."""
    chosen = choose(config.interfaces, all(map(is_loopback, contacts)))
    return [str(address.ip) for interface in chosen for address in interface.usable]


def contacts(hosts: Sequence[str]) -> list[str]:
    """The hosts' numeric addresses; those that have none now are left out. Raises ConfigError where
    that is all of them."""
    found: list[str] = []
    for host in hosts:
        try:
            found += resolve(host)
        except OSError:
            continue
    if not found:
        raise ConfigError(
            f"rejoin=True, and no host is known to ask ({', '.join(hosts) or 'none was given'}): "
            "give hosts=, names or addresses of hosts on which members run"
        )
    return list(dict.fromkeys(found))


def candidates(addresses: Sequence[str], job: str, rank: int) -> list[Address]:
    """Where a rank may listen."""
    return [(address, port) for address in addresses for port in ports_of(job, rank)]
