"""DDP in all its modes, FSDP2, ZeroRedundancyOptimizer and DTensor on backend "ringcomm": the same
weights after fifty steps as on gloo."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from faults import parallel
from faults.job import Job, Nursery
from torch_versions import before

pytestmark = pytest.mark.torch

WEIGHTLESS = 2 * parallel.WIDTH + 1
"""Of what a rank keeps, at the end: the buffers, which are its own."""
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "RINGCOMM_INTERFACES": "lo"}


@pytest.fixture(scope="module")
def nursery(torch_nursery: Nursery) -> Nursery:
    return torch_nursery


def run(
    nursery: Nursery, world: int, function: Callable[..., None], folder: Path, **arguments: Any
) -> dict[str, list[torch.Tensor]]:
    """Runs it on both backends; what each rank kept."""
    kept = {}
    for backend in ("gloo", "ringcomm"):
        with Job(nursery, world, LOOPBACK) as job:
            job.start(function, backend=backend, folder=str(folder), **arguments)
            job.expect_all("trained")
            job.finish(quietly=False)
        kept[backend] = [torch.load(folder / f"{backend}-{r}.pt") for r in range(world)]
    return kept


def check(kept: dict[str, list[torch.Tensor]], exact: bool) -> None:
    """Alike on both backends: to the bit, or within what the order of float32 sums does."""
    for ours, theirs in zip(kept["ringcomm"], kept["gloo"], strict=True):
        if exact:
            assert torch.equal(ours, theirs), (ours - theirs).abs().max()
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "mode",
    [
        "plain",
        "no_sync",
        "find_unused_parameters",
        "static_graph",
        "gradient_as_bucket_view",
        "join",
        "zero",
    ],
)
def test_ddp_on_two_ranks_is_gloos_to_the_bit(nursery: Nursery, tmp_path: Path, mode: str) -> None:
    check(run(nursery, 2, parallel.ddp, tmp_path, mode=mode), exact=True)


def test_a_rank_that_has_fewer_batches(nursery: Nursery, tmp_path: Path) -> None:
    """The others divide by as many ranks as are left, which C++ asks a Work that Python dropped."""
    check(run(nursery, 2, parallel.joined, tmp_path), exact=True)


def test_power_sgd(nursery: Nursery, tmp_path: Path) -> None:
    check(run(nursery, 2, parallel.low_rank, tmp_path), exact=True)


@pytest.mark.skipif(
    sys.version_info >= (3, 13) and before(2, 6),
    reason="there is no torch.compile for this Python",
)
@pytest.mark.skipif(before(2, 5), reason="torch.compile of 2.4 takes no hook that is a method")
def test_compiled(nursery: Nursery) -> None:
    with Job(nursery, 2, LOOPBACK) as job:
        job.start(parallel.compiled)
        for mode in ("plain", "norm", "static_graph", "hook"):
            job.expect_all(mode)
        job.finish(quietly=False)


def test_ddp_on_three_ranks(nursery: Nursery, tmp_path: Path) -> None:
    check(run(nursery, 3, parallel.ddp, tmp_path, mode="plain"), exact=False)


def test_ddp_on_two_hosts_of_two_ranks(nursery: Nursery, tmp_path: Path) -> None:
    """By HierarchicalState, gloo inside the hosts, beside plain DDP on gloo."""
    kept = run(nursery, 4, parallel.ddp, tmp_path, mode="hosts")
    check(kept, exact=False)
    assert all(
        torch.equal(a[:-WEIGHTLESS], kept["ringcomm"][0][:-WEIGHTLESS]) for a in kept["ringcomm"]
    )


@pytest.mark.skipif(before(2, 6), reason="fully_shard asks for a GPU before PyTorch 2.6")
@pytest.mark.parametrize("world", [2, 3])
def test_fully_shard(nursery: Nursery, tmp_path: Path, world: int) -> None:
    check(run(nursery, world, parallel.sharded, tmp_path), exact=world == 2)


def test_dtensor_on_a_mesh(nursery: Nursery, tmp_path: Path) -> None:
    check(run(nursery, 4, parallel.tensors, tmp_path), exact=True)
