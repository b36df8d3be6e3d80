"""One step of staleness under DistributedDataParallel: gradients and weights beside those that each
rank computes by itself."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

from faults import training
from faults.job import Job, Nursery

pytestmark = pytest.mark.torch

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "RINGCOMM_INTERFACES": "lo"}


@pytest.mark.parametrize(
    ("mode", "local"),
    [("plain", 2), ("no_sync", 0), ("gradient_as_bucket_view", 0)],
)
def test_the_means_come_a_step_late_and_all_come(
    torch_nursery: Nursery, mode: str, local: int
) -> None:
    with Job(torch_nursery, 4 if local else 2, LOOPBACK) as job:
        job.start(training.stale, mode=mode, local=local)
        for event in job.expect_all("stale"):
            assert event["equal"], "the ranks' weights differ"
            assert event["late"] <= 2**-20, event
            assert event["total"] <= 2**-20, event
            assert event["back"], "the model does not hold its own weights between steps"
        job.finish(quietly=False)


def test_a_ddp_that_looks_for_unused_parameters_is_refused(torch_nursery: Nursery) -> None:
    """It would drop means of the step before. In the first backward, on all ranks."""
    with Job(torch_nursery, 2, LOOPBACK) as job:
        job.start(training.refuses_stale)
        for event in job.expect_all("refused"):
            assert "pace='stale1' under DistributedDataParallel(find_unused_par" in event["text"]
            assert "leave find_unused_parameters out" in event["text"]
        job.finish(quietly=False)
