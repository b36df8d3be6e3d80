"""Worlds that come up: every rank gets the lanes that every other rank has."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
from bringup_world import join_world, meshes
from patience import PATIENCE, PROMPT

from ringcomm.bootstrap import mesh as mesh_module
from ringcomm.bootstrap.launch import identify
from ringcomm.config import Config
from ringcomm.errors import BootstrapError

pytestmark = pytest.mark.usefixtures("no_leaked_fds")


def take(mesh: mesh_module.Mesh) -> dict[tuple[int, int, int], socket.socket]:
    """The lanes as sockets, by peer, rail and lane; what else there is is closed."""
    taken = {}
    while mesh.lanes:
        lane = mesh.lanes.pop()
        taken[lane.peer, lane.rail, lane.lane] = socket.socket(fileno=lane.fd)
    mesh.close()
    return taken


@pytest.mark.parametrize(
    ("world_size", "lanes", "rails"),
    [(1, 1, 1), (1, 3, 2), (2, 1, 2), (2, 2, 1), (3, 3, 1), (3, 1, 1), (3, 2, 2), (8, 1, 2)],
)
def test_every_lane_reaches_its_other_end(
    world_size: int, lanes: int, rails: int, port: int
) -> None:
    found = meshes(join_world(world_size, port, lanes=lanes, interfaces=("lo",) * rails))
    ends = [take(mesh) for mesh in found]
    for rank, mine in enumerate(ends):
        peers = [peer for peer in range(world_size) if peer != rank]
        assert sorted(mine) == [
            (peer, rail, lane) for peer in peers for rail in range(rails) for lane in range(lanes)
        ]
        for (peer, rail, lane), sock in mine.items():
            sock.send(f"{rank} {peer} {rail} {lane}".encode())
    for rank, mine in enumerate(ends):
        for (peer, rail, lane), sock in mine.items():
            sock.setblocking(True)
            assert sock.recv(100) == f"{peer} {rank} {rail} {lane}".encode()
    for mine in ends:
        for sock in mine.values():
            sock.close()


def test_what_the_mesh_says(port: int) -> None:
    found = meshes(join_world(3, port, interfaces=("lo", "lo")))
    for rank, mesh in enumerate(found):
        assert (mesh.rank, mesh.world_size) == (rank, 3)
        assert (mesh.local_rank, mesh.local_world_size) == (rank, 3)
        assert mesh.hosts == [socket.gethostname()] * 3
        assert mesh.single_host
        assert [(r.index, r.interface, r.address) for r in mesh.rails] == [
            (0, "lo", "127.0.0.1"),
            (1, "lo", "127.0.0.1"),
        ]
        assert all(lane.bytes_per_s == 0.0 for lane in mesh.lanes)
        mesh.close()
        assert mesh.lanes == []


def test_how_sockets_are_set_up(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The congestion control is set before they connect or listen."""
    late, set_option = list[Any](), socket.socket.setsockopt

    def setsockopt(sock: socket.socket, level: int, option: int, *value: Any) -> None:
        if (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION):
            with contextlib.suppress(OSError):
                late.append(sock.getpeername())
            assert not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        set_option(sock, level, option, *value)

    monkeypatch.setattr(socket.socket, "setsockopt", setsockopt)
    for mesh in meshes(join_world(2, port, congestion=("no such thing", "reno"))):
        ((_, sock),) = take(mesh).items()
        with sock:
            assert fcntl.fcntl(sock, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
            assert fcntl.fcntl(sock, fcntl.F_GETFL) & os.O_NONBLOCK
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert name.split(b"\0")[0] == b"reno"
            assert {end[0] for end in (sock.getsockname(), sock.getpeername())} == {"127.0.0.1"}
    assert not late


def test_world_of_one_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", None)
    mesh = mesh_module.join(identify(env={}), Config(), None)
    assert (mesh.rank, mesh.world_size, mesh.lanes, mesh.rails) == (0, 1, [], [])
    assert mesh.single_host


def test_more_than_one_meet_at_the_rendezvous(port: int) -> None:
    identity = identify(0, 2, f"tcp://127.0.0.1:{port}", env={})
    with pytest.raises(BootstrapError, match=f"only 1 of 2 ranks met at 127.0.0.1:{port}"):
        mesh_module.join(identity, Config(connect_timeout=0.1), None)


def test_sixteen_ranks_come_up(port: int) -> None:
    for mesh in meshes(join_world(16, port, lanes=2)):
        assert len(mesh.lanes) == 30
        mesh.close()


PROGRAM = """
from ringcomm.bootstrap import mesh
from ringcomm.bootstrap.launch import identify
from ringcomm.config import Config
print("here", flush=True)
mesh.join(identify(), Config(), None)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_interrupt_while_waiting_for_a_rank(rank: int, port: int) -> None:
    env = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "here\n"
        time.sleep(0.5)
        child.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, complaint = child.communicate(timeout=PATIENCE)
        assert time.monotonic() - began < PROMPT
    assert "KeyboardInterrupt" in complaint
