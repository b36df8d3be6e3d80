"""Without a secret: which user's process is at the other end of a connection of this host.

Where nobody was given a secret, the job's name is all that a rank can prove, and anybody can know
that. But both ends of a connection over the loopback are sockets of one kernel, which knows whose
they are, and tells everyone (sock_diag, or /proc/net/tcp). It needs no file that ranks would have
to find and somebody to remove, so it serves processes in containers that share the network but
no folder, too.

Invariants: fail closed: where the kernel does not tell, nobody is let in; a user that has no number
in our user namespace is nobody's equal; nothing that the other end sends plays a part.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from . import netlink
from .netlink import TcpSocket
from .system import OUT_OF_RESOURCES, describe
from .terms import Key, Outcome, RefusedError, other_user

_ESTABLISHED = 1


def vetting(key: Key, sock: socket.socket) -> Callable[[], RefusedError | None] | None:
    """Handshake's vet for this connection; None if whoever holds the key may come."""
    return (lambda: refusal(sock)) if key.same_user else None


def refusal(sock: socket.socket) -> RefusedError | None:
    """Why the other end of a connected TCP socket is not believed to be this user's; or None."""
    try:
        here, there = sock.getsockname()[:2], sock.getpeername()[:2]
        ours = os.fstat(sock.fileno()).st_uid
    except OSError:
        return _gone()
    try:
        found = netlink.tcp_socket(local=there, remote=here)
    except OSError as error:
        if error.errno in OUT_OF_RESOURCES:
            return RefusedError(describe(error), outcome=Outcome.CLOSED)
        return other_user("this system does not tell whose process is at the other end")
    # One that no process holds has no inode, and its user number means nothing.
    if found is None or found.state != _ESTABLISHED or not found.inode:
        return _gone()
    if found.uid != ours:
        return other_user(f"the other end belongs to user {found.uid}, not to user {ours}")
    if not _is_known(found):
        return other_user(
            f"both ends belong to user {ours}, which in this user namespace stands for everyone "
            "whom it has no number for (unshare --map-current-user gives one)"
        )
    return None


def _gone() -> RefusedError:
    return RefusedError("closed by the other end", outcome=Outcome.CLOSED)


def _is_known(found: TcpSocket) -> bool:
    """False for the number that stands for all users that a user namespace does not know."""
    return found.uid != _read_number("/proc/sys/kernel/overflowuid", 65534) or _knows_everyone()


def _knows_everyone() -> bool:
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            return file.read().split() == ["0", "0", "4294967295"]
    except OSError:
        return False


def _read_number(path: str, default: int) -> int:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return default
