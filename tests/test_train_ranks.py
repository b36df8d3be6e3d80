"""The reference trainer on two ranks, over gloo to see what it does by itself, and over ringcomm:
beside one process, with few bits, and what both refuse.

One run is by torchrun; the others take ranks that have imported PyTorch already, in torchrun's
environment.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE

if not all(map(importlib.util.find_spec, ("torch", "sklearn"))):
    pytest.skip("torch or scikit-learn is not installed", allow_module_level=True)

import torch
from faults import resuming
from faults.job import Job, Nursery
from run_log import events

from ringcomm.train import launcher
from ringcomm.train.distributed import World
from ringcomm.train.loop import train
from ringcomm.train.options import parse

pytestmark = pytest.mark.torch

TORCHRUN = {"GLOO_SOCKET_IFNAME": "lo", "RINGCOMM_INTERFACES": "lo", "TORCHELASTIC_RUN_ID": "test"}


def torchrun(*arguments: str) -> None:
    """The trainer on two ranks of this host."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "ringcomm.train",
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-2000:]


def two_ranks(nursery: Nursery, *arguments: str) -> None:
    """The same, without the start of three processes."""
    with Job(nursery, 2, TORCHRUN) as job:
        job.start(resuming.run, arguments=arguments)
        for rank in range(2):
            over = job.expect(rank, "over")
            assert over["kind"] is None, over
        job.finish(quietly=False)


EPOCHS_4 = ["--steps", "88"]
COMPARED = [*EPOCHS_4, "--accumulate", "2"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[float]]:
    """Report and loss curve of the run that two ranks must match."""
    log, threads = tmp_path_factory.mktemp("one") / "log.jsonl", torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "default_threads", lambda: 1)
        report = train(parse([*COMPARED, "--log-file", str(log)]), World())
    torch.set_num_threads(threads)
    return report, [e["loss"] for e in events(log, "step")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "hook", "compression", "tolerance", "wire_ratio"),
    [
        ("gloo", False, "none", 1e-3, 1.0),
        ("gloo", True, "none", 1e-3, 1.0),
        ("ringcomm", False, "bf16", 0.02, 0.5),
        ("ringcomm", True, "bf16", 0.02, 0.5),
    ],
)
def test_two_ranks_match_one_process(
    backend: str,
    hook: bool,
    compression: str,
    tolerance: float,
    wire_ratio: float,
    one_process: tuple[dict[str, Any], list[float]],
    torch_nursery: Nursery,
    tmp_path: Path,
) -> None:
    """The same loss curve up to the order of summation and rounding, and so the same accuracy."""
    log = tmp_path / "log.jsonl"
    arguments = [
        "--backend",
        backend,
        *([] if hook else ["--no-hook"]),
        "--compression",
        compression,
        *COMPARED,
        "--bucket-mb",
        "0.1",
        "--log-file",
        str(log),
    ]
    if (backend, hook) == ("ringcomm", True):
        torchrun(*arguments)
    else:
        two_ranks(torch_nursery, *arguments)
    (two,), curve = events(log, "report"), [e["loss"] for e in events(log, "step")]
    one, expected = one_process
    assert (two["world_size"], two["backend"], two["hook"]) == (2, backend, hook)
    assert two["compression"] == compression
    assert curve[:20] == pytest.approx(expected[:20], rel=tolerance)
    assert one["held_out"]["accuracy"] > 0.8
    assert abs(two["held_out"]["accuracy"] - one["held_out"]["accuracy"]) <= 0.03

    computing = two["step_s"] - two["input_s"]
    assert computing > 0
    if not hook:
        assert "exposed_s" not in two, "who counts it?"
        return
    assert two["gradient_bytes_per_step"] == 4 * two["parameters"]
    assert two["sent_bytes_per_step"] == wire_ratio * two["gradient_bytes_per_step"]
    assert two["wire_bytes_per_step"] * two["shared_bytes_per_step"] == 0  # one or the other
    assert two["buckets_per_step"] > 1
    assert two["exposed_s"] > 0
    assert 0 < two["hidden_s"] < two["compute_s"]
    assert two["compute_s"] + two["exposed_s"] == pytest.approx(computing)
    assert two["scaling_efficiency"] == pytest.approx(two["compute_s"] / computing)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "codec", "least"),
    [
        (["--method", "momentum"], "onebit", 0.5),
        (["--method", "sparse"], "density 0.015625", 0.3),
        (["--method", "stale", "--compression", "int4"], "int4", 0.5),
        (["--method", "outer", "--every", "5"], "int4", 0.5),
    ],
)
def test_methods_learn_and_tell_what_they_send(
    arguments: list[str], codec: str, least: float, torch_nursery: Nursery, tmp_path: Path
) -> None:
    """Also over a checkpoint, which both ranks go on from."""
    log, folder = tmp_path / "log.jsonl", str(tmp_path / "kept")
    common = [*arguments, *EPOCHS_4, "--log-file", str(log), "--checkpoint", folder]
    two_ranks(torch_nursery, *common, "--checkpoint-every", "40")
    (whole,) = events(log, "report")
    assert whole["method"] == arguments[1]
    assert whole["hook"] == (arguments[1] == "stale")
    assert whole["compression"] == codec
    assert whole["held_out"]["accuracy"] > least
    assert 0 < whole["sent_bytes_per_step"] < whole["parameters"] * 4 / 4
    assert whole["exposed_s"] > 0
    two_ranks(torch_nursery, *common, "--resume")
    again = events(log, "report")[1]
    assert again["held_out"]["accuracy"] == pytest.approx(whole["held_out"]["accuracy"], abs=0.05)


@pytest.mark.slow
def test_few_bits_learn_and_keep_what_is_left(torch_nursery: Nursery, tmp_path: Path) -> None:
    """One bit with error feedback, and a checkpoint of it."""
    log = tmp_path / "log.jsonl"
    two_ranks(
        torch_nursery,
        "--compression",
        "onebit",
        "--steps",
        "30",
        "--bucket-mb",
        "0.1",
        "--checkpoint",
        str(tmp_path),
        "--log-file",
        str(log),
    )
    (two,), curve = events(log, "report"), [e["loss"] for e in events(log, "step")]
    assert min(curve[-5:]) < curve[0]
    assert 0 < two["sent_bytes_per_step"] < 0.25 * two["gradient_bytes_per_step"]
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    kept = state["method"]["feedback"]["tensors"]
    assert set(kept) < set(state["model"])
    assert all(part["worker"].any() for part in kept.values())


@pytest.mark.slow
def test_what_all_ranks_refuse_is_said_once(torch_nursery: Nursery) -> None:
    with Job(torch_nursery, 2, TORCHRUN) as job:
        job.start(resuming.command, arguments=["--backend", "gloo", "--no-hook", "--batch", "63"])
        assert [job.wait_exit(rank).code for rank in range(2)] == [2, 2], job.story()
        printed = job.printed(0) + job.printed(1)
        assert printed.count("give a multiple of 2 (62, 64)") == 1, printed
