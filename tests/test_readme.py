"""Every block of Python in the README and in the pages of readme.BLOCKS runs as it is printed.
(Those of Lightning, Accelerate and transformers: test_frameworks.py; of JAX: test_jax.py.)"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults.job import Job, Nursery
from readme import BLOCKS, blocks, code

import ringcomm

RUN_ELSEWHERE = {"lightning", "on_fit_start", "accelerate", "transformers", "jax"}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "RINGCOMM_INTERFACES": "lo"}
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


@pytest.mark.parametrize("page", BLOCKS)
def test_every_block_is_known(page: str) -> None:
    """So that none is printed which no test runs."""
    assert sorted(code(name) for name in BLOCKS[page]) == sorted(blocks(page))


def run(
    nursery: Nursery, name: str, event: str, ranks: int = 2, **settings: Any
) -> list[dict[str, Any]]:
    from faults import recipes

    env = {**LOOPBACK, "LOCAL_WORLD_SIZE": "2"}
    with Job(nursery, ranks, env) as job:
        job.start(getattr(recipes, name), **settings)
        told = job.expect_all(event)
        job.finish(quietly=False)
    return told


@needs_torch
@pytest.mark.torch
def test_numpy(torch_nursery: Nursery) -> None:
    for event in run(torch_nursery, "numpy", "numpy"):
        assert event["x"] == [4.0, 4.0]  # 1 on each of two; their mean; once more added


@needs_torch
@pytest.mark.torch
def test_feedback(torch_nursery: Nursery) -> None:
    for event in run(torch_nursery, "feedback", "feedback"):
        assert 1e-2 < event["lacks"] < 1.0
        assert event["unkept"] < 1e-5


@needs_torch
@pytest.mark.torch
def test_backend(torch_nursery: Nursery) -> None:
    for event in run(torch_nursery, "backend", "backend"):
        assert (event["name"], event["x"]) == ("ringcomm", [2.0, 2.0, 2.0])


@needs_torch
@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "ranks", "error"), [("hook", 2, 2**-7), ("hierarchical", 4, 0.02)]
)
def test_hooks(torch_nursery: Nursery, name: str, ranks: int, error: float) -> None:
    for event in run(torch_nursery, name, "gradients", ranks):
        assert event["equal"]
        assert 0 < event["error"] < error


@needs_torch
@pytest.mark.torch
def test_methods(torch_nursery: Nursery) -> None:
    first, second = run(torch_nursery, "methods", "trained")
    assert first["weights"] == second["weights"]
    assert first["untrained"] not in first["weights"]


@needs_torch
@pytest.mark.torch
def test_checkpoints(torch_nursery: Nursery, tmp_path: Path) -> None:
    """Saved by two ranks, and loaded by two and three."""
    for event in run(torch_nursery, "checkpoints", "saved", folder=str(tmp_path)):
        assert event["gathered"], "a restart from the gathered state leaves ranks apart"
        assert event["own"], "a restart from a rank's own state is not the same to the bit"
        assert event["scaler"]
        assert event["optimizers"], "AdamW to OneBitAdam and back"
        assert event["later"], "a layer that is trained later"
        assert event["outer"], "OuterStep begins elsewhere than at its anchor"
    for event in run(torch_nursery, "checkpoints_elsewhere", "loaded", 3, folder=str(tmp_path)):
        assert event == {**event, "gathered": True, "optimizers": True, "outer": True}


@needs_torch
@pytest.mark.torch
def test_losing_a_rank(torch_nursery: Nursery, tmp_path: Path) -> None:
    """One of three is killed and started again, and all end with the same weights."""
    from faults import recipes

    with Job(torch_nursery, 3, {**LOOPBACK, "HOSTS": "localhost"}) as job:
        for rank in range(3):
            hold = 70 if rank == 2 else -1
            job.start(recipes.losing, ranks=[rank], folder=str(tmp_path), hold=hold)
        job.expect(2, "holds")
        job.signal(2, signal.SIGKILL)
        job.wait_exit(2)
        job.expect(0, "went on")  # without rank 2, which may else be back before its round
        job.start(recipes.losing, ranks=[2], folder=str(tmp_path), again=True)
        assert job.expect(2, "back")["iteration"] >= 60
        job.go(0)
        ends = [job.expect(rank, "trained") for rank in range(3)]
        assert len({end["weights"] for end in ends}) == 1, ends
        told = [(end["left"], end["joined"]) for end in ends]  # by load others may be late, too
        assert all(2 in left and 2 in joined for left, joined in told[:2]), told


def test_the_launch_that_losing_a_rank_needs(tmp_path: Path) -> None:
    """It starts the program again when it has failed, three times at most, until one goes well."""
    (command,) = blocks("docs/LOSING_A_RANK.md", "sh")
    for name, body in {
        "sleep": "",
        "python": 'echo "$RANK of $WORLD_SIZE: $*"\n[ -e good ] || ! touch good',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1 of 3: train.py", "1 of 3: train.py --again"]


def test_gpu(gpu: Any) -> None:
    ringcomm.init()
    try:
        side = gpu.stream()
        x, y = (gpu.array(np.ones(1000, np.float32), gpu.stream()) for _ in range(2))
        z = gpu.array(np.ones(1000, np.float32), side)
        exec(code("gpu"), {"ringcomm": ringcomm, "x": x, "y": y, "z": z, "side": side})
        for one in (x, y, z):
            assert (one.read() == 1).all()
    finally:
        ringcomm.shutdown()
