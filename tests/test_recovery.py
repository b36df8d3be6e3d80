"""Lanes that are lost and made anew, over two rails of the loopback."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from patience import until
from ranks import World

from ringcomm import BootstrapError, Config
from ringcomm.bootstrap import keeper, status
from ringcomm.bootstrap.keeper import Losses, Pace
from ringcomm.bootstrap.lanes import LaneId
from ringcomm.bootstrap.loop import READ, Loop
from ringcomm.communicator import Communicator
from ringcomm.tools import jobs


def _drop(comm: Communicator, chance: random.Random) -> None:
    """Has a rank give up one of its lanes, as it would one that has broken."""
    assert comm._keeper is not None
    peer = chance.choice([rank for rank in range(comm.world_size) if rank != comm.rank])
    comm._keeper._core.drop(LaneId(peer, chance.randrange(2), 0))


def _made(comm: Communicator) -> int:
    lanes = comm.stats()["lanes"]
    return -1 if any(lane["is_lost"] for lane in lanes) else sum(lane["made"] for lane in lanes)


@pytest.mark.parametrize("n", [2, 3])
def test_sums_stay_exact_while_lanes_come_and_go(n: int) -> None:
    def body(comm: Communicator) -> int:
        chance = random.Random(comm.rank)
        for step in range(120):
            count = (7, 5000, 300_000)[step % 3]
            x = np.full(count, comm.rank + step, np.float32)
            work = comm.allreduce(x, async_op=True)
            if step % 4 == comm.rank:
                _drop(comm, chance)
            work.wait()
            assert (x == n * step + n * (n - 1) // 2).all(), step
        until(lambda: _made(comm) >= 0)
        return _made(comm)

    config = Config(timeout=30.0)
    with World(n, rails=2, bring_up="tcp", config=config) as world:
        assert min(world.run(body)) > 2 * (n - 1)


def test_a_lost_lane_is_named_once_and_its_return_too(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level("INFO", "ringcomm")

    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            assert comm._keeper is not None
            comm._keeper._core.drop(LaneId(0, 1, 0))
        until(lambda: _made(comm) > 2)
        until(lambda: sum(" is back" in record.getMessage() for record in caplog.records) == 2)

    config = Config(timeout=30.0, timeline=str(tmp_path / "trace.json"))
    with World(2, rails=2, bring_up="tcp", config=config) as world:
        world.run(body)
    (trace,) = tmp_path.iterdir()
    events = json.loads(trace.read_text())
    shown = [event for event in events if event["name"].startswith("lost: rail 1 to rank ")]
    assert sorted(event["ph"] for event in shown) == ["b", "b", "e", "e"]  # both ranks are here
    lost = [record for record in caplog.records if "1 of 2 lanes are left" in record.getMessage()]
    assert [record.levelname for record in lost] == ["WARNING"] * 2
    for record in lost:
        assert re.match("rail 1 between .* broke: |rank . has given up rail 1", record.getMessage())


def test_who_has_failed_listens_no_more() -> None:
    config = Config(timeout=30.0)
    with World(2, rails=2, bring_up="tcp", config=config) as world:
        keepers = [comm._keeper for comm in world.comms]
        world.comms[0].abort("drawn")
        assert until(lambda: not any(keeper and keeper._thread.is_alive() for keeper in keepers))


def test_lanes_of_a_silent_peer_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have lost them, and has none by which to tell."""
    config = Config(timeout=30.0)
    with World(2, rails=2, bring_up="tcp", config=config) as world:
        keeper = world.comms[1]._keeper
        assert keeper is not None
        silent = Losses(set(), {LaneId(0, 0, 0), LaneId(0, 1, 0)})
        monkeypatch.setattr(keeper._core, "losses", lambda: silent)
        assert until(lambda: all(_made(comm) >= 4 for comm in world.comms))
        monkeypatch.undo()
        world.run(lambda comm: comm.barrier())


def test_who_accepts_gives_up_no_lane_before_it_has_the_mark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer may find that the lane is well again."""
    config = Config(timeout=30.0)
    with World(2, rails=2, bring_up="tcp", config=config) as world:
        keeper, tries = world.comms[1]._keeper, []
        assert keeper is not None
        silent = Losses(set(), {LaneId(0, 0, 0)})
        monkeypatch.setattr(keeper._core, "losses", lambda: silent)
        monkeypatch.setattr(keeper._core, "drop", tries.append)  # and so no mark
        assert until(lambda: len(tries) > 2)
        monkeypatch.undo()
        world.run(lambda comm: comm.barrier())
        assert [_made(comm) for comm in world.comms] == [2, 2]


def test_no_lane_is_tried_again_and_again_at_once() -> None:
    lane, pace = LaneId(0, 0, 0), Pace()

    def waits(now: float, is_alone: bool) -> float:
        began = now
        while not pace.begin(lane, now, is_alone):
            now += 0.125
        return now - began

    assert [waits(float(now), False) for now in (1, 1, 1.5, 2.5)] == [0, 0.5, 1, 2]
    assert [waits(4.5, False), waits(8.5, False), waits(16.5, False)] == [4, 8, 16]
    assert [waits(32.5, False), waits(62.5, True)] == [30, 1]
    pace.made(lane, 70.0)
    assert waits(71.5, False) == 22  # it was open for too short a time
    pace.made(lane, 100.0)
    assert [waits(103.0, False), waits(103.0, False)] == [0, 0.5]


def test_a_running_job_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown() -> str:
        assert jobs.main() == 0
        text = capsys.readouterr().out
        return "".join(re.findall(rf"process {os.getpid()}: .*\n(?:  .*\n)*", text))

    config = Config(timeout=30.0)
    with World(2, rails=2, bring_up="tcp", config=config) as world:
        text = shown()
        for rank in range(2):
            assert f": rank {rank} of 2, all 2 lanes open" in text
            assert f"rail 1 to rank {rank} (lo 127.0.0.1" in text
        monkeypatch.setattr(Pace, "begin", lambda *_: False)  # so it stays lost
        world.run(lambda comm: comm.rank == 0 or _drop(comm, random.Random(0)))
        assert until(lambda: shown().count("1 of 2 lanes lost") == 2)
        assert "lost: rank 0 has given up rail " in shown()
        keeper, answers = world.comms[0]._keeper, []
        assert keeper is not None
        assert keeper._status is not None
        monkeypatch.setattr(status, "_user_of", lambda _: os.geteuid() + 1)  # a stranger asks
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(keeper._status._sock.getsockname())
            answers.append(stranger.recv(1))
        assert answers == [b""]


def test_who_cannot_keep_lanes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not so who cannot listen for `ringcomm jobs`, which the job does not need."""

    def cannot(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(keeper, "StatusSocket", cannot)
    with World(2, rails=2, bring_up="tcp") as world:
        world.run(Communicator.barrier)
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name == "ringcomm lanes":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_others)
        with pytest.raises(BootstrapError, match="can't start new thread"):
            World(2, rails=2, bring_up="tcp")
    monkeypatch.setattr(socket, "socketpair", cannot)
    with pytest.raises(BootstrapError, match="too many"):
        World(2, rails=2, bring_up="tcp")


def test_off_nothing_is_kept() -> None:
    with World(2, rails=2, bring_up="tcp", config=Config(recovery="off")) as world:
        assert [comm._keeper for comm in world.comms] == [None, None]


def test_what_the_program_has_closed_is_not_closed_again(tmp_path: Path) -> None:
    """Its number may be another file's: that of a watched socket, and that of the loop."""
    loop, (ours, theirs) = Loop(), socket.socketpair()
    loop.watch(ours, READ, lambda: None)
    numbers = [ours.fileno(), loop.fileno()]
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    for number in numbers:
        os.dup2(file, number)
    loop.disown_closed()
    loop.forget(ours)
    ours.close()
    loop.close()
    del loop
    for number in numbers:
        assert os.path.samestat(os.fstat(number), os.fstat(file))
        os.close(number)
    os.close(file)
    theirs.close()
