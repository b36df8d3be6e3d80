"""Whose process is at the other end of a connection: what the kernel says."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest
from patience import PROMPT, until

from ringcomm.bootstrap import netlink, same_user
from ringcomm.bootstrap.handshake_params import Key, Outcome, job_hash
from ringcomm.bootstrap.netlink import TcpSocket
from ringcomm.bootstrap.system import read_number

pytestmark = pytest.mark.usefixtures("no_leaked_fds")

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@contextlib.contextmanager
def connection(host: str = "127.0.0.1") -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends, the accepted one second."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip("this machine's loopback has no IPv6")
    with listener, socket.create_connection(listener.getsockname()[:2]) as ours:
        theirs, _ = listener.accept()
        with theirs:
            yield ours, theirs


@contextlib.contextmanager
def as_user(uid: int) -> Iterator[None]:
    """Sockets made here are this user's."""
    before = os.geteuid()
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_our_own(host: str) -> None:
    with connection(host) as ends:
        for end in ends:
            assert same_user.refusal(end) is None


WAYS = [netlink._tcp_socket_by_diag, netlink._tcp_socket_by_proc]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_each_way_to_ask(way: Callable[..., TcpSocket | None], host: str) -> None:
    with connection(host) as (ours, theirs):
        for end in (ours, theirs):
            local, remote = end.getsockname()[:2], end.getpeername()[:2]
            status = os.fstat(end.fileno())
            assert way(local, remote) == TcpSocket(1, status.st_uid, status.st_ino)
        local, remote = ours.getsockname()[:2], ours.getpeername()[:2]
        assert way(local, (remote[0], 1)) is None
        assert way((remote[0], remote[1]), ("127.0.0.1" if host[0] == "1" else "::1", 1)) is None


@AS_ROOT
@pytest.mark.parametrize("way", WAYS)
def test_another_users(monkeypatch: pytest.MonkeyPatch, way: Callable[..., object]) -> None:
    monkeypatch.setattr(netlink, "tcp_socket", way)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with as_user(65533):
            sock = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        with sock, theirs:
            refusal = same_user.refusal(theirs)
            assert refusal is not None
            assert refusal.outcome == Outcome.OTHER_USER
            assert "belongs to user 65533, not to user 0" in str(refusal)
            refusal = same_user.refusal(sock)
            assert refusal is not None
            assert "belongs to user 0, not to user 65533" in str(refusal)


def test_one_that_its_process_has_closed() -> None:
    """The kernel shows it on, as some user's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        with theirs:
            sock.close()
            refusal = same_user.refusal(theirs)
            assert refusal is not None
            assert refusal.outcome == Outcome.CLOSED


def test_one_that_nobody_has_accepted() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as sock,
    ):
        refusal = same_user.refusal(sock)
        assert refusal is not None
        assert refusal.outcome == Outcome.CLOSED


def test_one_that_was_reset() -> None:
    with connection() as (ours, theirs):
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        ours.close()
        assert until(lambda: _is_reset(theirs))
        refusal = same_user.refusal(theirs)
        assert refusal is not None
        assert refusal.outcome == Outcome.CLOSED


def _is_reset(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return True
    return False


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(**_ends: object) -> None:
        raise PermissionError

    monkeypatch.setattr(netlink, "tcp_socket", silent)
    with connection() as (ours, _):
        refusal = same_user.refusal(ours)
        assert refusal is not None
        assert refusal.outcome == Outcome.OTHER_USER
        assert "does not tell" in str(refusal)


def test_a_lack_of_descriptors_is_no_other_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def poor(**_ends: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(netlink, "tcp_socket", poor)
    with connection() as (ours, _):
        refusal = same_user.refusal(ours)
        assert refusal is not None
        assert "ulimit -n" in str(refusal)
        assert "secret" not in str(refusal)


def test_the_number_that_stands_for_unknown_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a user namespace every user that it does not know has it."""
    overflow = read_number("/proc/sys/kernel/overflowuid", 0)
    monkeypatch.setattr(netlink, "tcp_socket", lambda **_: TcpSocket(1, overflow, 7))
    monkeypatch.setattr(os, "fstat", lambda _: os.stat_result((0,) * 4 + (overflow,) + (0,) * 5))
    with connection() as (ours, _):
        monkeypatch.setattr(same_user, "_knows_everyone", lambda: True)
        assert same_user.refusal(ours) is None
        monkeypatch.setattr(same_user, "_knows_everyone", lambda: False)
        refusal = same_user.refusal(ours)
        assert refusal is not None
        assert refusal.outcome == Outcome.OTHER_USER
        assert f"both ends belong to user {overflow}, which in this user namespace" in str(refusal)
        assert "unshare --map-current-user" in str(refusal)
        assert "RINGCOMM_SECRET_FILE" in str(refusal)


def test_who_is_asked() -> None:
    from ringcomm.bootstrap.secret import Secret

    job = job_hash("job")
    with connection() as (ours, _):
        assert same_user.vetting(Key.derive(None, job), ours) is not None
        assert same_user.vetting(Key.derive(None, job, insecure=True), ours) is None
        assert same_user.vetting(Key.derive(Secret(b"k" * 32), job), ours) is None


def test_it_costs_little() -> None:
    """Each lane is asked about twice; a world of 64 ranks on one host has 4,032."""
    with connection() as (ours, _):
        began = time.perf_counter()
        for _ in range(100):
            same_user.refusal(ours)
        assert time.perf_counter() - began < PROMPT
