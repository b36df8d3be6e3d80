"""A sample of PyTorch's own distributed tests on backend "ringcomm", beside the other tests
(beside.py); `make test-torch` runs all.
"""

from __future__ import annotations

import importlib.util
import re

import pytest
from beside import Done

if not (importlib.util.find_spec("torch") and importlib.util.find_spec("expecttest")):
    pytest.skip(
        "torch, or expecttest, which its tests need, is not installed", allow_module_level=True
    )

pytestmark = pytest.mark.torch

SAMPLE = (
    "all_reduce_sum",
    "all_gather_coalesced",
    "all_to_all_single_unequal",
    "send_recv_with_tag",
    "send_recv_any_source",
    "gather_object",
    "new_subgroups_by_enumeration_neg",
    "reduce_max",
    "ddp_join_model_equivalence",
    "barrier_full_group",
)


LIFTED = ("reduce_scatter_v_cuda", "all_reduce_sum_cuda_async", "broadcast_cuda")
"""Of those that ask for a GPU or NCCL, and need neither."""


@pytest.mark.beside(
    "{python}",
    "tests/torch_suite.py",
    "run",
    "ringcomm",
    "--as-gloo",
    "--lifted",
    "--match",
    ",".join(LIFTED),
)
def test_a_sample_without_gates(beside: Done) -> None:
    assert beside.code == 0, beside.output
    (passed,) = re.findall(r"^(\d+) ok, 0 failed", beside.output, re.MULTILINE)
    assert int(passed) >= len(LIFTED), beside.output


@pytest.mark.beside(
    "{python}", "tests/torch_suite.py", "run", "ringcomm", "--match", ",".join(SAMPLE)
)
def test_a_sample(beside: Done) -> None:
    assert beside.code == 0, beside.output
    (passed,) = re.findall(r"^(\d+) ok, 0 failed", beside.output, re.MULTILINE)
    assert int(passed) >= len(SAMPLE), beside.output
