"""Backend "ringcomm" of torch.distributed: its collectives beside gloo's, works and futures,
groups, options, errors and ends."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

from beside import Done
from faults import asynchrony, groups
from faults.job import Job, Nursery
from faults.rank import Rank
from patience import PATIENCE, PROMPT
from ports import free_port
from torch_versions import before

from ringcomm import ConfigError

pytestmark = pytest.mark.torch

Role = Callable[[Rank], None]
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "RINGCOMM_INTERFACES": "lo"}


@pytest.fixture(scope="module")
def nursery(torch_nursery: Nursery) -> Nursery:
    return torch_nursery


def test_collectives_are_gloos(nursery: Nursery) -> None:
    with Job(nursery, 3, LOOPBACK) as job:
        job.start(groups.collectives)
        job.expect_all("equal")
        job.finish(quietly=False)


@pytest.mark.parametrize(
    ("role", "world"),
    [
        (groups.shapes, 3),
        (groups.messages, 3),
        (asynchrony.asynchronous, 3),
        pytest.param(
            asynchrony.promises,
            2,
            marks=pytest.mark.skipif(
                before(2, 5), reason="2.4 tells no group of ours that it is destroyed"
            ),
        ),
        (asynchrony.nested, 2),
        (groups.by_functions, 2),
    ],
)
def test_results_are_right(nursery: Nursery, role: Role, world: int) -> None:
    with Job(nursery, world, LOOPBACK) as job:
        job.start(role)
        if role is asynchrony.asynchronous:
            assert job.expect(1, "in flight")["kind"] == "CommTimeoutError"
        job.expect_all("right")
        job.finish(quietly=False)


class Over:
    """A part of a Work that is over."""

    def done(self) -> bool:
        return True

    def exception(self) -> None: ...


def test_what_a_work_has_left_to_do_may_end_with_its_group() -> None:
    """The last reference to a group goes with what its Work had left to do; the group waits for a
    thread that asks the Work whether it is over, and asks itself."""
    works = pytest.importorskip("ringcomm.torch.works")
    asked: list[bool] = []

    class Left:
        def __call__(self) -> None: ...
        def __del__(self) -> None:
            other = threading.Thread(target=work.is_completed, daemon=True)
            other.start()
            other.join(PATIENCE)
            asked.extend((not other.is_alive(), work.is_completed()))

    work = works.RingWork([Over()], [], Left())
    caller = threading.Thread(target=work.is_completed, daemon=True)
    caller.start()
    caller.join(2 * PATIENCE)
    assert asked == [True, True]


def test_a_signal_handler_may_ask_a_work_for_its_end_within_it() -> None:
    works = pytest.importorskip("ringcomm.torch.works")
    asked: list[object] = []

    def after() -> None:
        if not asked:
            asked.append("again")
            signal.raise_signal(signal.SIGUSR1)
        asked.append("done")

    work = works.RingWork([Over()], [], after)
    before = signal.signal(signal.SIGUSR1, lambda *_: asked.append(work.is_completed()))
    try:
        assert work.is_completed()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert asked == ["again", "done", True, "done"]


def test_many_groups_at_once(nursery: Nursery) -> None:
    with Job(nursery, 3, {**LOOPBACK, "AGAIN": str(free_port())}) as job:
        job.start(groups.many_groups)
        for event in job.expect_all("right"):
            assert event["backend"] == "ringcomm" or "cpu:ringcomm" in event["backend"]
        job.finish(quietly=False)


def test_what_torch_asks_of_a_group(nursery: Nursery) -> None:
    with Job(nursery, 2, {**LOOPBACK, "TORCH_DIST_NAN_CHECK": "1"}) as job:
        job.start(groups.of_today)
        for device in ("cpu", "cuda") if before(2, 14) else ():
            for event in job.expect_all("map"):
                assert event["kind"] == "ConfigError", event
                assert f"those on {device} to gloo" in event["text"]
        for _ in range(2):
            for event in job.expect_all("nan"):
                assert "RuntimeError" in event["kinds"], event
                told = "float32[2] has a NaN" if before(2, 14) else "NaN found in input tensor"
                assert told in event["text"]
        job.expect_all("right")
        job.finish(quietly=False)


def test_options(nursery: Nursery) -> None:
    with Job(nursery, 2, {**LOOPBACK, "RINGCOMM_LOG": "info"}) as job:
        job.start(groups.options)
        for name, item in (("bf16", 2), ("child", 2), ("plain", 4)):
            for event in job.expect_all(name):
                assert event["sent"] == pytest.approx(item * 100_000, rel=0.01), name
                rounded = event["first"] == 2.0
                assert rounded == (item == 2), event
        for event in job.expect_all("rails"):
            assert event["names"] == ["lo"]
        for event in job.expect_all("wrong"):
            assert event["kind"] == "ConfigError"
        job.finish(quietly=False)
        told = job.printed(0)
        assert "a call names one (bf16 where this torch process group reduces)\n" in told
        assert "  settings: interfaces=lo (argument), timeout=1800 (torch)" in told


def test_compression_from_the_environment(nursery: Nursery) -> None:
    with Job(nursery, 2, {**LOOPBACK, "RINGCOMM_COMPRESSION": "int3"}) as job:
        job.start(groups.profiled)
        for rank in range(2):
            assert job.wait_exit(rank).code == 1
            assert "compression='int3' is unknown" in job.printed(rank)


def test_options_are_checked() -> None:
    kind = pytest.importorskip("ringcomm.torch").Options
    wrong: list[dict[str, Any]] = [
        {"compression": 3},
        {"compression": "onebit"},
        {"lanes": 99},
        {"timeout": 3.0},
        {"colour": "red"},
    ]
    for arguments in wrong:
        with pytest.raises(ConfigError):
            kind(**arguments)
    assert kind().compression is None
    assert kind("fp16", lanes=2).config.lanes == 2


@pytest.mark.parametrize("reads", [True, False])
def test_staging(reads: bool) -> None:
    """What stands for a tensor on a GPU; a tensor of the CPU takes the same way here."""
    torch = pytest.importorskip("torch")
    staged = pytest.importorskip("ringcomm.torch.tensors").staged
    tensor = torch.arange(12.0).reshape(3, 4).t()
    found = staged(tensor, writable=True, reads=reads)
    host = np.ctypeslib.as_array((ctypes.c_float * 12).from_address(found.address))
    assert found.address != tensor.data_ptr()
    if reads:
        assert host.tolist() == tensor.reshape(-1).tolist()
    host[:] = np.arange(12) * 2
    found.finish()
    assert tensor.reshape(-1).tolist() == [2.0 * k for k in range(12)]
    assert staged(tensor, writable=False).finish is None


@pytest.mark.parametrize("backend", ["ringcomm", "gloo"])
def test_without_its_scheme_under_another_launcher(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist = pytest.importorskip("torch.distributed")
    pytest.importorskip("ringcomm.torch")
    torchs_own = "RANK expected, but not set"
    with pytest.raises(ValueError, match=f"{torchs_own}$"):
        dist.init_process_group(backend)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.raises(ValueError, match=f"{torchs_own}$"):  # half given
        dist.init_process_group(backend)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    with pytest.raises(ValueError, match=f'{torchs_own}. mpirun .* init_method="ringcomm://"'):
        dist.init_process_group(backend)
    dist.init_process_group(backend, init_method="ringcomm://")
    dist.destroy_process_group()


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    dist = pytest.importorskip("torch.distributed")
    pytest.importorskip("ringcomm.torch")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        sizes = dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), "2")
        ranks = dict.fromkeys(("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), "0")
        for name, value in {**sizes, **ranks, "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(RuntimeError, match=f"port {port} .* is taken: set MASTER_PORT"):
            dist.init_process_group("ringcomm", init_method="ringcomm://")


def test_under_another_launcher(nursery: Nursery) -> None:
    """mpirun's variables, without mpirun: torch's env:// would not know them."""
    with Job(nursery, 2, {**LOOPBACK, "PMIX_NAMESPACE": f"test{os.getpid()}"}) as job:
        job.start(groups.launched)
        job.expect_all("right")
        job.finish(quietly=False)


@pytest.mark.beside(
    *("env", *(f"{name}={value}" for name, value in LOOPBACK.items()), "{python}"),
    *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    *("tests/faults/launched.py", "--group"),
)
def test_under_torchrun(beside: Done) -> None:
    """Whose agent keeps the store."""
    assert beside.code == 0, beside.output
    printed = [json.loads(line) for line in beside.output.splitlines() if line.startswith("{")]
    assert sorted((one["rank"], one["values"]) for one in printed) == [(0, [3.0]), (1, [3.0])]


ENTRY_POINTS = "torch.distributed.backends"


def test_the_entry_point_registers_once() -> None:
    """By the lines of pyproject.toml, which older releases of torch do not read."""
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    section = text.split(f'[project.entry-points."{ENTRY_POINTS}"]')[1].split("\n[")[0]
    found = re.search('^ringcomm = "(.*)"$', section, re.MULTILINE)
    assert found is not None
    code = (
        "import sys, torch.distributed as dist; from importlib.metadata import EntryPoint\n"
        "assert 'ringcomm' not in {*dist.Backend.backend_list, *sys.modules}\n"
        f"register = EntryPoint('ringcomm', '{found[1]}', '{ENTRY_POINTS}').load()\n"
        "register(), register()\n"
        "print(dist.Backend.backend_list.count('ringcomm'), dist.Backend.RINGCOMM)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "1 ringcomm\n", done.stderr


@pytest.mark.skipif(
    not importlib.metadata.entry_points(group=ENTRY_POINTS, name="ringcomm"),
    reason="ringcomm is not installed, or from before it had an entry point: pip install it",
)
@pytest.mark.skipif(before(2, 14), reason="backends are found by their names from PyTorch 2.14 on")
def test_a_program_may_name_the_backend_alone(tmp_path: Path) -> None:
    """And does not import ringcomm where it names another."""
    (tmp_path / "program.py").write_text(
        "import sys, torch, torch.distributed as dist\n"
        "for backend in ('gloo', 'cpu:ringcomm', 'ringcomm'):\n"
        "    dist.init_process_group(backend)\n"
        "    assert ('ringcomm' in sys.modules) == ('ringcomm' in backend), backend\n"
        "    x = torch.ones(3)\n"
        "    dist.all_reduce(x)\n"
        "    assert x.tolist() == [2.0, 2.0, 2.0]\n"
        "    dist.destroy_process_group()\n"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node=2", "program.py"),
        ],
        cwd=tmp_path,
        env={**os.environ, **LOOPBACK},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_bad_input_is_refused(nursery: Nursery) -> None:
    kinds = {
        "sparse": "TypeError",
        "op": "TypeError",
        "dtype": "TypeError",
        "list": "ValueError",
        "size": "ValueError",
        "part": "ValueError",
        "splits": "ValueError",
        "rows": "ValueError",
        "tag": "ValueError",
        "expanded": "TypeError",
    }
    with Job(nursery, 2, LOOPBACK) as job:
        job.start(groups.refused)
        for name, kind in kinds.items():
            for event in job.expect_all(name):
                assert kind in event["kinds"], (name, event)
        for event in job.expect_all("fine"):
            assert event["first"] == 2.0
        job.finish(quietly=False)


def test_ranks_that_differ(nursery: Nursery) -> None:
    with Job(nursery, 2, LOOPBACK) as job:
        job.start(groups.differ)
        for event in job.expect_all("mismatch"):
            assert event["kind"] == "MismatchError"
            assert "RuntimeError" in event["kinds"]
            assert "allreduce(f32[5]" in event["text"]
            assert "broadcast(f32[5]" in event["text"]
        for event in job.expect_all("again"):
            assert event["kind"] == "MismatchError"
        job.finish(quietly=False)


def test_shapes_are_compared_in_detail(nursery: Nursery) -> None:
    with Job(nursery, 2, {**LOOPBACK, "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}) as job:
        job.start(groups.shapes_differ)
        for event in job.expect_all("shapes"):
            assert event["kind"] == "MismatchError", event
            assert "float32[3, 2]" in event["text"]
            assert "float32[2, 3]" in event["text"]
        for event in job.expect_all("fine"):
            assert event["first"] == 4.0
        job.finish(quietly=False)


def test_timeouts_and_the_end(nursery: Nursery) -> None:
    with Job(nursery, 2, {**LOOPBACK, "WHOLE_EXIT": "1"}) as job:
        job.start(groups.timeouts)
        late = job.expect(0, "late")
        assert late["kind"] == "CommTimeoutError"
        assert "rank 1 has not called it" in late["text"]
        assert 1.1 < late["took"] < 1.2 + PROMPT
        assert 0.15 < job.expect(0, "shortened")["took"] < 0.2 + PROMPT
        monitored = job.expect(0, "monitored")
        assert monitored["text"].startswith("Rank 1 failed to pass monitoredBarrier")
        for event in job.expect_all("destroyed"):
            assert event["took"] < PROMPT
        assert "allreduce(f32[3]) #0 failed on rank 0" in job.expect(0, "future")["text"]
        assert job.expect(0, "work")["kind"] in ("AbortedError", "PeerLostError")
        used = job.expect(0, "used")  # torch closes groups itself from some release on
        assert used["kind"] in ("NotInitializedError", "AbortedError", "PeerLostError")
        job.finish(quietly=False)


def test_a_rank_that_dies(nursery: Nursery) -> None:
    with Job(nursery, 3, LOOPBACK) as job:
        job.start(groups.lost)
        job.expect_all("ready")
        since = job.go(1)
        for rank in (0, 2):
            event = job.expect(rank, "failed")
            assert event["kind"] == "PeerLostError", event
            assert event["rank"] == 1
            assert event["at"] - since < PROMPT
            assert job.expect(rank, "again")["kind"] == "PeerLostError"
        job.finish([0, 2], quietly=False)


def test_a_rank_that_dies_while_others_are_in_a_backward(nursery: Nursery) -> None:
    with Job(nursery, 2, LOOPBACK) as job:
        job.start(groups.lost_in_backward)
        failed, error = job.expect(0, "failed"), job.expect(0, "error")
        assert failed["kind"] == "RuntimeError"
        assert "rank 1 is lost" in failed["text"]
        assert (error["kind"], error["rank"]) == ("PeerLostError", 1)
        job.finish([0], quietly=False)


def test_ranges_of_the_profiler(nursery: Nursery) -> None:
    with Job(nursery, 2, LOOPBACK) as job:
        job.start(groups.profiled)
        for event in job.expect_all("ranges"):
            assert event["names"] == [
                "ringcomm:all_gather",
                "ringcomm:all_reduce",
                "ringcomm:barrier",
            ]
        job.finish(quietly=False)
