"""DDP in all its modes, FSDP2, ZeroRedundancyOptimizer and DTensor on backend "ringcomm": the same
weights after some steps as on gloo."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path

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
SHARDED = [] if before(2, 6) else ["fully_shard"]  # which asks for a GPU before PyTorch 2.6
ON_TWO_RANKS = [
    name for name in parallel.TRAININGS if name not in ("hosts", "dtensor", "fully_shard")
]


def check(nursery: Nursery, folder: Path, names: list[str], world: int, exact: bool) -> None:
    """Ranks train alike on both backends: to the bit, or within what the order of sums does."""
    with Job(nursery, world, LOOPBACK) as job:
        job.start(parallel.trainings, folder=str(folder), names=names)
        job.expect_all("trained")
        job.finish(quietly=False)
    for name, rank in itertools.product(names, range(world)):
        ours, theirs = (
            torch.load(folder / f"{name}-{backend}-{rank}.pt") for backend in ("ringcomm", "gloo")
        )
        if exact:
            assert torch.equal(ours, theirs), (name, (ours - theirs).abs().max())
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=name)


def test_two_ranks_are_gloos_to_the_bit(torch_nursery: Nursery, tmp_path: Path) -> None:
    """With "join", too, where the others divide by as many ranks as are left, which C++ asks a Work
    that Python dropped."""
    check(torch_nursery, tmp_path, [*ON_TWO_RANKS, *SHARDED], 2, exact=True)


def test_three_ranks(torch_nursery: Nursery, tmp_path: Path) -> None:
    check(torch_nursery, tmp_path, ["plain", *SHARDED], 3, exact=False)


def test_dtensor_on_a_mesh(torch_nursery: Nursery, tmp_path: Path) -> None:
    check(torch_nursery, tmp_path, ["dtensor"], 4, exact=True)


def test_ddp_on_two_hosts_of_two_ranks(torch_nursery: Nursery, tmp_path: Path) -> None:
    """By HierarchicalState, gloo inside the hosts, beside plain DDP on gloo."""
    check(torch_nursery, tmp_path, ["hosts"], 4, exact=False)
    first, *others = (torch.load(tmp_path / f"hosts-ringcomm-{rank}.pt") for rank in range(4))
    assert all(torch.equal(one[:-WEIGHTLESS], first[:-WEIGHTLESS]) for one in others)


@pytest.mark.skipif(
    sys.version_info >= (3, 13) and before(2, 6),
    reason="there is no torch.compile for this Python",
)
@pytest.mark.skipif(
    before(2, 5),
    reason="torch.compile of 2.4 takes no hook that is a method, nor a group in "
    "all_gather_into_tensor",
)
def test_compiled(torch_nursery: Nursery, tmp_path: Path) -> None:
    with Job(torch_nursery, 2, LOOPBACK) as job:
        job.start(parallel.compiled, folder=str(tmp_path))
        for what in ("collectives", "plain", "norm", "static_graph", "hook"):
            job.expect_all(what)
        job.finish(quietly=False)
