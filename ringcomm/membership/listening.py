"""Addresses at which members listen, and at which a restarted rank looks for them.

The ports follow from the job's name and the rank, so a rank that knows only a host finds the
members there. Invariants: nothing listens off loopback without a secret; a taken port is no error.
"""

from __future__ import annotations

import contextlib
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

_TRIED = 2
"""Number of ports that a rank tries."""


def ports_of(job: str, rank: int) -> list[int]:
    """Returns the ports on one of which a rank of a job listens, if they are free."""
    return list(derived_ports(f"{job} membership {rank}")[:_TRIED])


def listen_on(
    addresses: Sequence[str], job: str, rank: int, secret: Secret | None, insecure: bool
) -> list[socket.socket]:
    """Listens on these addresses, at one of the rank's own ports if one is free, else at any.
    Raises ConfigError, OSError."""
    check_exposed(addresses, secret, insecure)
    for port in (*ports_of(job, rank), 0):
        try:
            with contextlib.ExitStack() as opened:
                listeners = [opened.enter_context(listen(address, port)) for address in addresses]
                opened.pop_all()
                return listeners
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == 0:
                raise
    raise AssertionError("any port is taken, or refused with an error")


def own_addresses(config: Config, contacts: Sequence[str]) -> list[str]:
    """Returns the addresses of the ports that the bring-up would choose, for a rank that has no
    communicator yet."""
    chosen = choose(config.interfaces, all(map(is_loopback, contacts)))
    return [str(address.ip) for interface in chosen for address in interface.usable]


def contacts(hosts: Sequence[str]) -> list[str]:
    """Resolves the hosts, leaving out those that cannot be resolved now. Raises ConfigError if none
    can."""
    found: list[str] = []
    for host in hosts:
        with contextlib.suppress(OSError):
            found += resolve(host)
    if not found:
        raise ConfigError(
            f"rejoin=True, and no host is known to ask ({', '.join(hosts) or 'none was given'}): "
            "give hosts=, names or addresses of hosts on which members run"
        )
    return list(dict.fromkeys(found))
