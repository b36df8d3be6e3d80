"""RINGCOMM_TIMELINE: a file per rank that is a complete Chrome trace at every moment."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults.job import clean_environment
from ports import free_port
from ranks import World, run_processes, start_process

import ringcomm
from ringcomm import Config, ConfigError
from ringcomm.core import timeline

pytestmark = pytest.mark.usefixtures("nothing_left")


def events_of(path: Path) -> list[dict[str, Any]]:
    """Of a file that is JSON as it is."""
    told: list[dict[str, Any]] = json.loads(path.read_text())
    return told


def named(events: Sequence[dict[str, Any]], phase: str, name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == phase and event["name"].startswith(name)]


def spans(events: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """(begin, end) of every span of that name, each of which must have both."""
    begins = {event["id"]: event["ts"] for event in named(events, "b", name)}
    ends = {event["id"]: event["ts"] for event in named(events, "e", name)}
    assert begins.keys() == ends.keys()
    return [(begins[number], ends[number]) for number in begins]


TWO_RANKS = """
    import numpy as np, ringcomm
    comm = ringcomm.init()
    x = np.ones(100000, dtype=np.float32)
    ringcomm.allreduce(x)                                    # which else has no Work
    ringcomm.allreduce(x + 1, async_op=True)                 # which nobody waits for
    ringcomm.allreduce(x, compression="bf16")
    part = comm.split(0)
    part.broadcast(x)
    sent = comm.stats()["payload_bytes"]
    ringcomm.shutdown()
    print(sent)
"""


@pytest.mark.parametrize("shared", [False, True])
def test_each_rank_tells_of_all_its_works(tmp_path: Path, shared: bool) -> None:
    env = {
        "RINGCOMM_TIMELINE": str(tmp_path / "trace.json"),
        "RINGCOMM_INTERFACES": "lo,lo",
        "RINGCOMM_SHARED_MEMORY": str(int(shared)),
    }
    for rank, process in enumerate(run_processes(2, TWO_RANKS, env=env)):
        payload = int(process.stdout)
        events = events_of(tmp_path / f"trace.{rank}.json")
        assert {event["pid"] for event in events} == {rank}
        whole = spans(events, "allreduce(f32[100000])")
        waiting = spans(events, "waiting")
        moving = spans(events, "in shared memory" if shared else "on the wire")
        assert len(whole) == 3
        assert len(spans(events, "broadcast(f32[100000])")) == 1
        assert 3 * len(waiting) == len(named(events, "b", "")) == len(named(events, "e", ""))
        assert len(moving) >= 3 + shared  # by a broadcast, which a receiver puts nothing into
        for (called, ended), (begun, started) in zip(whole, waiting, strict=False):
            assert called == begun <= started < ended
        over = [event for event in named(events, "e", "") if "args" in event]
        over.sort(key=lambda event: (event["cat"], event["args"]["seq"]))
        ends = [event["args"] for event in over]
        mine = ends[:3]
        sent = [one["shared_bytes"] if shared else one["sent_bytes"] for one in mine]
        assert sent == [400000, 400000, 200000]
        assert sum(one["sent_bytes"] + one["shared_bytes"] for one in ends) >= payload
        told = [sum(one["rails"][f"{number} lo"] for one in mine) for number in range(2)]
        assert sum(told) == 0 if shared else 0 < sum(told) - sum(sent) < 2000  # a few headers


def test_a_signal_handler_may_close_while_an_event_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has to tell follows the event."""
    write = os.pwrite

    def interrupted(*arguments: Any) -> int:
        monkeypatch.setattr(os, "pwrite", write)
        signal.raise_signal(signal.SIGUSR1)
        return write(*arguments)

    with World(1, config=Config(timeline=f"{tmp_path}/{{rank}}.trace")) as world:
        comm = world.comms[0]
        before = signal.signal(signal.SIGUSR1, lambda *_: comm.close())
        try:
            monkeypatch.setattr(os, "pwrite", interrupted)
            comm.allreduce(np.ones(5), async_op=True).wait()
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert len(spans(events_of(tmp_path / "0.trace"), "allreduce(f64[5])")) == 1


def test_a_rank_that_is_killed_leaves_what_was_in_flight(tmp_path: Path) -> None:
    code = """
        import numpy as np, ringcomm, time
        comm = ringcomm.init()
        ringcomm.barrier()
        if comm.rank == 0:
            hangs = ringcomm.allreduce(np.ones(5, np.float32), async_op=True)
            print("hangs", flush=True)
            hangs.wait()
        time.sleep(60)  # rank 1 does not call it; rank 0 is killed first
    """
    env = {
        "RINGCOMM_TIMELINE": f"{tmp_path}/r{{rank}}.trace",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [start_process(code, {**env, "RANK": str(rank)}) for rank in range(2)]
    try:
        assert ranks[0].stdout is not None
        assert ranks[0].stdout.readline() == "hangs\n"
    finally:
        for process in ranks:
            process.send_signal(signal.SIGKILL)
            process.communicate()
    events = events_of(tmp_path / "r0.trace")
    assert len(spans(events, "barrier")) == 1
    assert len(named(events, "b", "allreduce(f32[5])")) == 1
    assert not named(events, "e", "allreduce(f32[5])")


def test_a_failure_is_told(tmp_path: Path) -> None:
    setting = str(tmp_path / "trace.json")
    with World(2, config=Config(timeline=setting)) as world:
        work = world.comms[0].allreduce(np.ones(3), async_op=True)
        world.comms[0].abort("enough of it")
        with pytest.raises(ringcomm.AbortedError):
            work.wait()
    (end,) = named(events_of(tmp_path / "trace.0.json"), "e", "allreduce(f64[3])")
    assert end["args"]["error"].startswith("AbortedError: ")
    assert "enough of it" in end["args"]["error"]


def test_refused_calls_are_no_events(tmp_path: Path) -> None:
    with World(1, config=Config(timeline=str(tmp_path / "trace.json"))) as world:
        with pytest.raises(ringcomm.TensorError):
            world.comms[0].allreduce(np.ones(3), out=np.ones(4))
        with pytest.raises(ConfigError):
            world.comms[0].allreduce(np.ones(3, np.int8), "mean")
    assert {event["ph"] for event in events_of(tmp_path / "trace.0.json")} == {"M"}


def test_what_was_there_is_kept_once(tmp_path: Path) -> None:
    """The run before may have failed; a later communicator of this one goes on in the same file."""
    path = tmp_path / "trace.0.json"
    path.write_text("[]")
    config = Config(timeline=str(tmp_path / "trace.json"))
    for count in (1, 2):
        with World(1, config=config) as world:
            world.comms[0].barrier()
        assert len(spans(events_of(path), "barrier")) == count
    assert (tmp_path / "trace.0.json.old").read_text() == "[]"
    assert path.stat().st_mode & 0o777 == 0o644 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_it_ends_where_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timeline, "MOST_BYTES", 20000)
    path = tmp_path / "trace.0.json"
    with (
        caplog.at_level(logging.WARNING, "ringcomm"),
        World(1, config=Config(timeline=str(tmp_path / "trace.json"))) as world,
    ):
        for _ in range(100):
            world.comms[0].barrier()
    assert 15000 < path.stat().st_size <= 20000
    assert 10 < len(named(events_of(path), "e", "barrier")) < 100
    assert [record.message for record in caplog.records] == [
        f"the timeline {path} ends here: it has 0 MiB"
    ]


def test_a_disk_that_fails_costs_the_timeline_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with World(1, config=Config(timeline=str(tmp_path / "trace.json"))) as world:
        monkeypatch.setattr(os, "pwrite", full)
        with caplog.at_level(logging.WARNING, "ringcomm"):
            for _ in range(3):
                world.comms[0].barrier()
        monkeypatch.undo()
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.records[0].message


def test_what_does_not_fit_is_taken_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The system takes a part of the last event, as where a disk gets full."""
    path = tmp_path / "trace.0.json"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with World(1, config=Config(timeline=str(tmp_path / "trace.json"))) as world:
        world.comms[0].barrier()
        before = events_of(path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 40, limits[1]))
        try:
            with caplog.at_level(logging.WARNING, "ringcomm"):
                world.comms[0].barrier()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert events_of(path) == before
    assert [record.message for record in caplog.records] == [
        f"the timeline {path} ends here: File too large"
    ]


def test_a_link_in_its_place_is_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A later communicator opens the file again, in whose place somebody has put something."""
    config, path = Config(timeline=str(tmp_path / "trace.json")), tmp_path / "trace.0.json"
    with World(1, config=config) as world:
        world.comms[0].barrier()
    other = tmp_path / "precious"
    other.write_text("kept")
    path.unlink()
    path.symlink_to(other)
    with caplog.at_level(logging.WARNING, "ringcomm"), World(1, config=config) as world:
        world.comms[0].barrier()
    assert other.read_text() == "kept"
    assert f"{path} ends here: Too many levels of symbolic links" in caplog.text


def test_a_file_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no/such/trace.0.json cannot be written .*folder"):
        World(1, config=Config(timeline=str(tmp_path / "no" / "such" / "trace.json")))
    with pytest.raises(ConfigError, match="timeline="):
        Config(timeline=None)  # type: ignore[arg-type]


def test_none_without_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with World(1) as world:
        world.comms[0].barrier()
    assert not list(tmp_path.iterdir())
    assert "RINGCOMM_TIMELINE" not in clean_environment()


def test_where_the_rank_goes() -> None:
    assert timeline.path_of("/tmp/a.b/trace.json", 3) == "/tmp/a.b/trace.3.json"
    assert timeline.path_of("trace", 3) == "trace.3"
    assert timeline.path_of("{rank}/of-{rank}.json", 12) == "12/of-12.json"
