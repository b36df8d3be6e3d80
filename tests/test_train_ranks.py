"""The reference trainer on two ranks, over gloo to see what it does by itself, and over ringcomm:
beside one process, with few bits, and what both refuse. Ranks have imported PyTorch already, and
are in torchrun's environment.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

if not all(map(importlib.util.find_spec, ("torch", "sklearn"))):
    pytest.skip("torch or scikit-learn is not installed", allow_module_level=True)

import torch
from faults import resuming
from faults.job import Job, Nursery
from run_log import events

from ringcomm.train import launcher
from ringcomm.train.command_line import parse
from ringcomm.train.distributed import World
from ringcomm.train.run import train

pytestmark = pytest.mark.torch

TORCHRUN = {"GLOO_SOCKET_IFNAME": "lo", "RINGCOMM_INTERFACES": "lo", "TORCHELASTIC_RUN_ID": "test"}


def two_ranks(nursery: Nursery, *arguments: str) -> None:
    """The trainer on two ranks of this host, as torchrun starts them."""
    with Job(nursery, 2, TORCHRUN) as job:
        job.start(resuming.run, arguments=arguments)
        for rank in range(2):
            over = job.expect(rank, "over")
            assert over["kind"] is None, over
        job.finish(quietly=False)


COMPARED = ["--steps", "20", "--accumulate", "2"]


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
    """The same loss curve up to the order of summation and rounding."""
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
    two_ranks(torch_nursery, *arguments)
    (two,), curve = events(log, "report"), [e["loss"] for e in events(log, "step")]
    one, expected = one_process
    assert (two["world_size"], two["backend"], two["hook"]) == (2, backend, hook)
    assert two["compression"] == compression
    assert curve == pytest.approx(expected, rel=tolerance)
    assert two["held_out"]["loss"] == pytest.approx(one["held_out"]["loss"], rel=tolerance)
    assert curve[-1] < curve[0] - 0.05

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
    ("arguments", "codec"),
    [
        (["--method", "momentum"], "onebit"),
        (["--method", "sparse"], "density 0.05"),
        (["--method", "stale", "--compression", "int4"], "int4"),
        (["--method", "outer", "--every", "7"], "int4"),
    ],
)
def test_methods_learn_and_tell_what_they_send(
    arguments: list[str], codec: str, torch_nursery: Nursery, tmp_path: Path
) -> None:
    """The last checkpoint has all that they have learnt, with which both ranks go on."""
    log, folder = tmp_path / "log.jsonl", str(tmp_path / "kept")
    steps = ["--steps", "30", "--checkpoint-every", "20"]
    common = [*arguments, *steps, "--log-file", str(log), "--checkpoint", folder]
    two_ranks(torch_nursery, *common)
    (whole,), curve = events(log, "report"), [e["loss"] for e in events(log, "step")]
    assert whole["method"] == arguments[1]
    assert whole["hook"] == (arguments[1] == "stale")
    assert whole["compression"] == codec
    assert max(curve[-5:]) < curve[0]
    assert 0 < whole["sent_bytes_per_step"] < whole["parameters"] * 4 / 4
    assert whole["exposed_s"] > 0
    two_ranks(torch_nursery, *common, "--resume")
    again = events(log, "report")[1]
    assert again["held_out"]["loss"] == pytest.approx(whole["held_out"]["loss"], rel=1e-6)


@pytest.mark.slow
def test_what_all_ranks_refuse_is_said_once(torch_nursery: Nursery) -> None:
    with Job(torch_nursery, 2, TORCHRUN) as job:
        job.start(resuming.command, arguments=["--backend", "gloo", "--no-hook", "--batch", "63"])
        assert [job.wait_exit(rank).code for rank in range(2)] == [2, 2], job.story()
        printed = job.printed(0) + job.printed(1)
        assert printed.count("give a multiple of 2 (62, 64)") == 1, printed
