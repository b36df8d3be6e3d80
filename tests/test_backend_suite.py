"""A sample of PyTorch's own distributed tests on backend "ringcomm"; `make test-torch` runs all."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

if not (importlib.util.find_spec("torch") and importlib.util.find_spec("expecttest")):
    pytest.skip("torch, or expecttest, which its tests need, is not installed",
                allow_module_level=True)  # fmt: skip

from faults.job import clean_environment

pytestmark = pytest.mark.torch

SAMPLE = (
    "all_reduce_sum", "all_gather_coalesced", "all_to_all_single_unequal", "send_recv_with_tag",
    "send_recv_any_source", "gather_object", "new_subgroups_by_enumeration_neg", "reduce_max",
    "ddp_join_model_equivalence", "barrier_full_group",
)  # fmt: skip


def test_a_sample() -> None:
    suite = Path(__file__).with_name("torch_suite.py")
    done = subprocess.run(
        [sys.executable, str(suite), "run", "ringcomm", "--match", ",".join(SAMPLE)],
        env=clean_environment(), capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    last = done.stdout.splitlines()[-1] if done.stdout else ""
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(last.split()[0]) >= len(SAMPLE), last
