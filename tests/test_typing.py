"""The package's types: what users write passes mypy --strict, and what they get wrong does not."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args

import pytest
from patience import PATIENCE
from ranks import World

import ringcomm
from ringcomm.calls import OPS
from ringcomm.codecs import CODECS
from ringcomm.config import ALGORITHMS

ROOT = Path(__file__).resolve().parent.parent

RIGHT = """
from typing import Any

import numpy as np

import ringcomm


def log(work: ringcomm.Work) -> None:
    print(work.name, work.seq, work.elapsed, work.done())


def typed(x: np.ndarray[Any, np.dtype[np.float32]], later: bool) -> ringcomm.Work | None:
    op: ringcomm.Op = "avg"
    codec: ringcomm.Compression = "int8"
    algorithm: ringcomm.Algorithm = "ring"
    half: float = float(ringcomm.allreduce(x, op, compression=codec).mean()) / 2
    ringcomm.recv(x, None, tag=3).sum()
    rows: list[float] = ringcomm.allgather(x).tolist()
    both = ringcomm.allreduce_many([x, x])
    both[0].sum()
    stats: ringcomm.Stats = ringcomm.default_communicator().stats()
    per_lane: float = stats["lanes"][0]["rtt_s"] + stats["rails"][0]["share"] + half + len(rows)
    print(per_lane, ringcomm.Config(algorithm=algorithm).sources()["lanes"])
    ringcomm.allreduce_many([x], async_op=True).wait(2.0)
    work = ringcomm.broadcast(x, async_op=later)
    return work if isinstance(work, ringcomm.Work) else ringcomm.barrier(async_op=True)


def train(x: Any) -> str | None:
    config = ringcomm.Config(interfaces=("eth0", "eth1"), lanes=2, timeout=30.0)
    comm: ringcomm.Communicator = ringcomm.init(0, 1, config=config, timeout=5.0)
    ringcomm.allreduce(x, "avg", compression="bf16", out=np.empty_like(x), timeout=1.0)
    ringcomm.broadcast(x, root=0, async_op=True).wait()
    feedback, store = ringcomm.ErrorFeedback(), ringcomm.FeedbackStore()
    ringcomm.allreduce(x, compression="onebit", feedback=feedback)
    ringcomm.reduce_scatter(x, compression="int8", feedback=False)
    ringcomm.allreduce_many([x, x], compression="int4", feedback=[store["a"], store["b"]])
    store.load_state_dict(store.state_dict(), strict=False)
    store.loss_scale = 2 * feedback.loss_scale
    left: float = float(abs(feedback.worker).max()) + feedback.owner_start
    print(left)
    with comm.split(color=0, key=comm.rank) or comm as part:
        part.allreduce(x, on_done=log, async_op=True)
        rows = part.allgather(x, out=None)
        sent: int = part.stats()["wire_bytes"]
        print(rows, sent, part.kernel_set, part.world_size + 1)
    try:
        comm.send(x, 1)
        comm.recv(x, src=1, timeout=2.5)
    except ringcomm.PeerLostError as error:
        lost: int | None = error.rank
        print(lost, error.elapsed)
        return error.host
    except (ConnectionError, TimeoutError):
        comm.abort("gone")
    ringcomm.barrier(comm=comm)
    ringcomm.shutdown()
    return comm.host_of(0)
"""

WRONG = [
    "ringcomm.allreduce(x, 3)",
    "ringcomm.allreduce(x, copression='bf16')",
    "ringcomm.allreduce(x, compression='bf61')",
    "ringcomm.allreduce(x, compression='topk:0.1')",
    "ringcomm.allreduce_many([x], compression='bf61')",
    "ringcomm.allgather(x, compression='bf61')",
    "ringcomm.init().reduce_scatter(x, compression='int4 ')",
    "ringcomm.allreduce(x, 'mean')",
    "ringcomm.reduce(x, 0, 'average')",
    "ringcomm.reduce(x, 'sum')",
    "ringcomm.Config(algorithm='tree')",
    "ringcomm.Config(lane=2)",
    "ringcomm.init(lanes=2)",
    "ringcomm.allreduce(x).wait()",
    "ringcomm.allreduce(x, async_op=True).append(1)",
    "ringcomm.init().broadcast(x, async_op=True)[0]",
    "ringcomm.barrier().wait()",
    "ringcomm.allreduce(x, comm=0)",
    "ringcomm.init().stats()['wire_byte']",
    "ringcomm.init().stats()['lanes'][0]['rate'].upper()",
    "ringcomm.allreduce(x, 'sum', 'bf16')",
    "ringcomm.allreduce(x, feedback=True)",
    "ringcomm.allreduce(x, feedback={})",
    "ringcomm.FeedbackStore()[0]",
    "ringcomm.ErrorFeedback().count + 1",
    "ringcomm.init('0')",
    "ringcomm.Config(lanes='2')",
    "ringcomm.Config().lanes = 3",
    "ringcomm.rank() + ''",
    "ringcomm.init().split(0).close()",
    "ringcomm.RingcommError('x', rnk=1)",
    "ringcomm.no_such_thing",
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mypy's, shared: the second run need not read numpy's types again."""
    return tmp_path_factory.mktemp("mypy")


def mypy(folder: Path, cache: Path, text: str) -> subprocess.CompletedProcess[str]:
    """mypy --strict over one file that imports ringcomm as installed."""
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    (folder / "example.py").write_text(text)
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--python-version",
            "3.10",
            "--config-file",
            str(ROOT / "pyproject.toml"),
            "--cache-dir",
            str(cache),
            "--no-error-summary",
            "example.py",
        ],
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_what_users_write_is_well_typed(tmp_path: Path, cache: Path) -> None:
    done = mypy(tmp_path, cache, RIGHT)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_what_users_get_wrong_is_found(tmp_path: Path, cache: Path) -> None:
    lines = ["import ringcomm", "x = bytearray(4)", *WRONG]
    done = mypy(tmp_path, cache, "\n".join(lines) + "\n")
    for number, code in enumerate(WRONG, start=3):
        assert f"example.py:{number}: error: " in done.stdout, f"{code}\n{done.stdout}{done.stderr}"
    for number in range(1, 3):
        assert f"example.py:{number}:" not in done.stdout


def test_the_names_that_types_have_are_those_that_work() -> None:
    assert get_args(ringcomm.Compression) == tuple(CODECS)
    assert get_args(ringcomm.Op) == tuple(OPS)
    assert get_args(ringcomm.Algorithm) == tuple(ALGORITHMS)


@pytest.mark.torch
def test_what_torch_has_takes_the_same_names() -> None:
    """By its annotations: torch's own types take mypy half a minute."""
    pytest.importorskip("torch")
    from ringcomm.torch import HierarchicalState, HookState, Options
    from ringcomm.torch.codec_policy import CodecPolicy

    names, more = ringcomm.Compression | None, Literal["auto"] | CodecPolicy
    assert Options.__init__.__annotations__["compression"] in ("Compression | None", names)
    for kind in (HierarchicalState, HookState):
        said = kind.__init__.__annotations__["compression"]
        assert said in ("Compression | Literal['auto'] | CodecPolicy | None", names | more), kind


@pytest.mark.torch
def test_what_callbacks_pass_on_is_what_outer_step_takes() -> None:
    pytest.importorskip("torch")
    from ringcomm.torch import OuterStep
    from ringcomm.torch.outer.settings import OuterSettings

    takes = dict(OuterStep.__init__.__annotations__)
    for name in ("model", "optimizer", "scaler", "return"):
        del takes[name]
    passed = OuterSettings.__annotations__
    assert takes == {name: one.__forward_arg__ for name, one in passed.items()}


def test_stats_have_the_keys_of_their_types() -> None:
    with World(2, lanes=2) as world:
        stats = world.comms[0].stats()
    assert list(stats) == list(ringcomm.Stats.__annotations__)
    assert list(stats["lanes"][0]) == list(ringcomm.LaneStats.__annotations__)
    assert list(stats["rails"][0]) == list(ringcomm.RailStats.__annotations__)


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "ringcomm" / "py.typed").is_file()
