"""Checks, in a job without a secret, that the other end of a loopback connection is this user's.

Without a secret a rank can prove only the job's name, which anybody can know. But both ends of a
connection over the loopback are sockets of one kernel, which tells everyone their owners
(sock_diag, or /proc/net/tcp). This needs no file that ranks would have to find and somebody to
remove, so it serves processes in containers that share the network but no folder, too.

Invariants: fail closed: where the kernel does not tell the owner, the connection is refused; a user
without a number in our user namespace equals nobody; no byte that the other end sends matters.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from . import netlink
from .handshake_params import Key, Outcome, RefusedError, closed, other_user
from .system import OUT_OF_RESOURCES, describe, read_number

_ESTABLISHED = 1


def vetting(key: Key, sock: socket.socket) -> Callable[[], RefusedError | None] | None:
    """Returns the handshake's vet for this connection; None if the key alone admits a process."""
    return (lambda: refusal(sock)) if key.same_user else None


def refusal(sock: socket.socket) -> RefusedError | None:
    """Returns the reason to refuse the other end of a connected TCP socket; None if it is this
    user's."""
    try:
        here, there = sock.getsockname()[:2], sock.getpeername()[:2]
        ours = os.fstat(sock.fileno()).st_uid
    except OSError:
        return closed()
    try:
        found = netlink.tcp_socket(local=there, remote=here)
    except OSError as error:
        if error.errno in OUT_OF_RESOURCES:
            return RefusedError(describe(error), outcome=Outcome.CLOSED)
        return other_user("this system does not tell whose process is at the other end")
    # A socket that no process holds has no inode, and its user number means nothing.
    if found is None or found.state != _ESTABLISHED or not found.inode:
        return closed()
    if found.uid != ours:
        return other_user(f"the other end belongs to user {found.uid}, not to user {ours}")
    # This number stands for all users whom this user namespace does not know.
    if found.uid == read_number("/proc/sys/kernel/overflowuid", 65534) and not _knows_everyone():
        return other_user(
            f"both ends belong to user {ours}, which in this user namespace stands for everyone "
            "whom it has no number for (unshare --map-current-user gives one)"
        )
    return None


def _knows_everyone() -> bool:
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            return file.read().split() == ["0", "0", "4294967295"]
    except OSError:
        return False
