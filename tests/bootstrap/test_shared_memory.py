"""The last two rounds of a bring-up: who gets memory of the host, and what is in the way of it.

Ranks are threads with a rendezvous of their own, so hosts are what the test says they are.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from bringup_world import Outcome, join_world, meshes, run_ranks
from patience import PATIENCE

from ringcomm.bootstrap import shared_memory
from ringcomm.config import Config
from ringcomm.errors import BootstrapError

pytestmark = pytest.mark.usefixtures("no_leaked_fds")

Forge = Callable[[int, int, bytes], bytes]


class Exchange:
    """What the ranks' threads tell each other; forge(rank, round, blob) may change it."""

    def __init__(self, world_size: int, forge: Forge | None = None) -> None:
        self._blobs: list[list[bytes]] = [[b""] * world_size for _ in range(2)]
        self._barrier = threading.Barrier(world_size)
        self._forge = forge or (lambda rank, number, blob: blob)
        self.rounds = 0

    def of(self, rank: int) -> Any:
        return _Side(self, rank)

    def allgather(self, rank: int, number: int, blob: bytes) -> list[bytes]:
        self._blobs[number][rank] = self._forge(rank, number, blob)
        self._barrier.wait(PATIENCE)
        self.rounds = max(self.rounds, number + 1)
        return list(self._blobs[number])


class _Side:
    def __init__(self, whole: Exchange, rank: int) -> None:
        self._whole, self._rank, self._number = whole, rank, 0

    def allgather(self, blob: bytes, deadline: float) -> list[bytes]:
        self._number += 1
        return self._whole.allgather(self._rank, self._number - 1, blob)


def share(
    hosts: Sequence[int],
    *,
    willing: Callable[[int], bool] = lambda rank: True,
    forge: Forge | None = None,
) -> tuple[dict[int, Outcome], Exchange]:
    """share() on all ranks, of which each is on the host with this number."""
    exchange = Exchange(len(hosts), forge)

    def call(rank: int) -> int | None:
        return shared_memory.share(exchange.of(rank), 1e9, rank, hosts, willing(rank))

    return run_ranks(call, range(len(hosts))), exchange


def values(outcomes: dict[int, Outcome]) -> list[int | None]:
    for outcome in outcomes.values():
        if outcome.error is not None:
            raise outcome.error
    return [outcomes[rank].value for rank in sorted(outcomes)]


def check_groups(found: Sequence[int | None], groups: Sequence[Sequence[int]]) -> None:
    """The ranks of each group have the same empty file, and no other has it; closes them."""
    files = []
    for group in groups:
        mine = [found[rank] for rank in group]
        stats = [os.fstat(one) for one in mine if one is not None]
        assert len(stats) == len(mine)
        assert len({(s.st_dev, s.st_ino) for s in stats}) == 1
        assert stats[0].st_size == 0
        assert not any(os.get_inheritable(one) for one in mine if one is not None)
        files.append(stats[0].st_ino)
    assert len(set(files)) == len(groups)
    for one in found:
        if one is not None:
            os.close(one)


@pytest.mark.parametrize(
    ("hosts", "groups"),
    [
        ([0, 0], [[0, 1]]),
        ([0] * 8, [list(range(8))]),
        ([0, 0, 1, 1], [[0, 1], [2, 3]]),
        ([0, 1, 0, 1, 0, 1], [[0, 2, 4], [1, 3, 5]]),
    ],
)
def test_each_host_has_its_own(
    hosts: list[int], groups: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    found = values(share(hosts)[0])
    assert [one is not None for one in found] == [hosts.count(number) > 1 for number in hosts]
    check_groups(found, groups)
    assert not caplog.records


@pytest.mark.parametrize("hosts", [[0, 1, 2], [0, 1, 1], [0, 0, 0, 1, 1], [0] * 65])
def test_hosts_with_a_rank_each_or_different_numbers_say_nothing(hosts: list[int]) -> None:
    outcomes, exchange = share(hosts)
    assert values(outcomes) == [None] * len(hosts)
    assert exchange.rounds == 0


@pytest.mark.parametrize("unwilling", [0, 1, 3])
def test_an_unwilling_rank(unwilling: int, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody shares, on any host, and nobody is warned of what was asked for."""
    assert values(share([0, 0, 1, 1], willing=lambda r: r != unwilling)[0]) == [None] * 4
    assert not caplog.records


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "share no memory" in r.getMessage()]


def test_proc_refuses(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One rank of each host says why."""
    real = os.open

    def refuse(path: Any, *args: Any, **more: Any) -> int:
        if str(path).startswith("/proc/"):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **more)

    monkeypatch.setattr(os, "open", refuse)
    assert values(share([0, 0, 0, 1, 1, 1])[0]) == [None] * 6
    said = warnings(caplog)
    assert len(said) == 2
    assert all("rank 1 cannot open that of process" in text for text in said)
    assert all("Permission denied" in text for text in said)


@pytest.mark.parametrize("what", ["memfd_create", "readlink"])
def test_no_file_to_be_had(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No memfd, or no /proc: the bring-up goes on without."""

    def fail(*_: Any) -> Any:
        raise FileNotFoundError(2, "No such file or directory")

    with monkeypatch.context() as patch:
        patch.setattr(os, what, fail)
        assert values(share([0, 0, 0])[0]) == [None] * 3
    (text,) = warnings(caplog)
    assert "rank 0 could not get any from its first rank" in text


def test_a_rank_without_room(port: int) -> None:
    """A limit of one process on the size of any file, as batch systems set it."""
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [child.communicate(timeout=PATIENCE) for child in children]
    assert [out for out, _ in said] == ["0 4.0\n"] * 2, said
    assert len(said[0][1].splitlines()) == 1
    assert "rank 1 has no room for 3 MiB: File too large" in said[0][1]
    assert said[1][1] == ""


PROGRAM = """
import os, resource
import numpy, ringcomm
if os.environ["RANK"] == "1":
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 19, resource.RLIM_INFINITY))
comm = ringcomm.init()
total = comm.allreduce(numpy.full(4, 2.0))
print(comm.stats()["shared_bytes"], total[0])
"""


def test_more_ranks_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_memory, "MOST_RANKS", 3)
    assert values(share([0] * 4)[0]) == [None] * 4
    assert not caplog.records


# ---- what others say ----


def forged(**fields: Any) -> Forge:
    """Rank 0 says this of its file instead."""
    import json

    def forge(rank: int, number: int, blob: bytes) -> bytes:
        said = json.loads(blob)
        if rank == 0 and number == 0:
            said.update(fields)
        return json.dumps(said).encode()

    return forge


def test_a_number_that_is_another_file(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing else is opened, as opening does things to some files, nor kept."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"precious")
        file.flush()
        for fields in ({"fd": file.fileno()}, {"fd": file.fileno(), "name": file.name}):
            caplog.clear()
            assert values(share([0, 0], forge=forged(**fields))[0]) == [None, None]
            (text,) = warnings(caplog)
            assert f"rank 1 finds another file than that of process {os.getpid()}" in text
        file.seek(0)
        assert file.read() == b"precious"


def test_a_process_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    """As a process number of another container may be."""
    assert values(share([0, 0], forge=forged(pid=2**22 + 1))[0]) == [None, None]
    assert "No such file" in warnings(caplog)[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"willing": 2},
        {"willing": "yes"},
        {"willing": True},
        {"pid": -1},
        {"pid": 2**31 + 1},
        {"fd": -1},
        {"fd": 1.5},
        {"name": 7},
        {"name": "\x1b[2J"},
        {"name": "x" * 3000},
    ],
)
def test_malformed_handles(fields: dict[str, Any]) -> None:
    outcomes, _ = share([0, 0, 1, 1], forge=forged(**fields))
    for outcome in outcomes.values():
        assert isinstance(outcome.error, BootstrapError)
        assert "rank 0" in str(outcome.error)


@pytest.mark.parametrize("blob", [b"", b"[]", b"{", b'{"trouble":1}', b"{}", b"\xff"])
def test_malformed_answers(blob: bytes) -> None:
    """In the round in which the files are open already: they are closed again."""
    outcomes, _ = share([0, 0], forge=lambda r, n, b: blob if (r, n) == (1, 1) else b)
    for outcome in outcomes.values():
        assert isinstance(outcome.error, BootstrapError)
        assert "rank 1" in str(outcome.error)


# ---- as part of a bring-up ----


def test_bring_up(port: int) -> None:
    made = meshes(join_world(3, port))
    check_groups([mesh.shared[0] for mesh in made], [[0, 1, 2]])
    for mesh in made:
        mesh.shared.clear()
        mesh.close()


def test_bring_up_with_an_unwilling_rank(port: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "ringcomm")
    configs = {1: Config(shared_memory=False)}
    for mesh in meshes(join_world(3, port, configs=configs)):
        assert mesh.shared == []
        mesh.close()
    assert not warnings(caplog)
