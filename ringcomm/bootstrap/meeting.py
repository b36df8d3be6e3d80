"""Address of the rendezvous: resolves rank 0's name and opens its listeners.

Invariants: rank 0 listens on the master address only, never on all addresses; an address that is
not this host's, or a port that is taken, is a ConfigError that says so at once; nothing that
others can reach is listened on without a secret.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import time

from ..config import Config
from ..errors import ConfigError
from .dialer import Target
from .interfaces import choose, is_loopback, list_interfaces
from .launch import Identity
from .secret import Secret, check_exposed
from .sockets import listen, show
from .system import describe

_IN_USE_PATIENCE = 1.0  # seconds for an exact port to become free
_IN_USE_PAUSE = 0.1
_NUMERIC = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV


def resolve(host: str) -> list[str]:
    """Returns the numeric addresses of host, in the resolver's order; a link-local one with its
    interface, as fe80::1%eth0. Raises OSError (gaierror)."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(socket.getnameinfo(entry[4], _NUMERIC)[0] for entry in found))


def open_listeners(
    identity: Identity, config: Config, secret: Secret | None
) -> tuple[list[socket.socket], list[Target]]:
    """Opens rank 0's listeners, all on the first of identity.master_ports that is free. Returns
    them and the targets of the ports before it, which another process has: no listeners and all
    targets, if it has all ports.

    Raises ConfigError.
    """
    addresses = _addresses_to_listen_on(identity, config, secret)
    check_exposed(addresses, secret, config.insecure)
    give_up = time.monotonic() + (_IN_USE_PATIENCE if len(identity.master_ports) == 1 else 0.0)
    while True:
        for port in identity.master_ports:
            listeners = _listen_all(addresses, port, identity)
            if listeners:
                there = [
                    socket.getnameinfo(listener.getsockname(), _NUMERIC)[0]
                    for listener in listeners
                ]
                taken = identity.master_ports[: identity.master_ports.index(port)]
                return listeners, [Target(address, p) for p in taken for address in there]
        if time.monotonic() >= give_up:
            return [], [Target(address, p) for p in identity.master_ports for address in addresses]
        time.sleep(_IN_USE_PAUSE)


def ports_in_use(identity: Identity) -> ConfigError:
    """Makes the error for a rank 0 that cannot listen at any of its ports."""
    ports = ", ".join(map(str, identity.master_ports))
    return ConfigError(
        f"port {ports} on {identity.master_addr} is in use: choose another (MASTER_PORT, or "
        f"init_method), or see who has it with `ss -ltnp 'sport = :{identity.master_port}'`"
    )


def _addresses_to_listen_on(identity: Identity, config: Config, secret: Secret | None) -> list[str]:
    host = identity.master_addr
    try:
        addresses = resolve(host)
    except OSError as error:
        raise ConfigError(
            f"the address of rank 0's host, {host}, cannot be resolved ({describe(error)}): set "
            "MASTER_ADDR to its number"
        ) from None
    # Many distributions give the host's own name 127.0.1.1, while other hosts resolve it to a
    # real address. Without a secret the job can only be on one host.
    by_name = host != "localhost" and not _is_numeric(host)
    if by_name and all(map(is_loopback, addresses)) and (secret or config.insecure):
        ports = choose(config.interfaces, single_host=False)
        addresses += [str(address.ip) for port in ports for address in port.usable]
    return addresses


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _listen_all(addresses: list[str], port: int, identity: Identity) -> list[socket.socket]:
    """Listens on every address that is this host's; on none if the port is taken on one of them.

    Raises ConfigError if no address is this host's.
    """
    listeners: list[socket.socket] = []
    with contextlib.ExitStack() as unless_all:
        for address in addresses:
            try:
                listeners.append(unless_all.enter_context(listen(address, port)))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return []
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise ConfigError(
                        f"rank 0 cannot listen on {show(address, port)}: {describe(error)}"
                    ) from None
        unless_all.pop_all()
    if not listeners:
        present = "; ".join(i.describe() for i in list_interfaces() if i.addresses)
        raise ConfigError(
            f"MASTER_ADDR={identity.master_addr} ({', '.join(addresses)}) is no address of this "
            f"host ({socket.gethostname()}), on which rank 0 runs. It has: {present}"
        )
    return listeners
