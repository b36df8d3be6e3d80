"""Optimizers of ringcomm.torch.optim in processes of their own, with torch.distributed."""

from __future__ import annotations

import importlib.util
import warnings

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from faults.job import Job, Nursery
from faults.rank import Rank
from optim_steps import THRESHOLD, Net, flat, mean_gradients, set_gradients
from torch.nn.parallel import DistributedDataParallel

import ringcomm.torch
from ringcomm import ConfigError
from ringcomm.torch import attach, sparse
from ringcomm.torch.optim import SGD, Lion

pytestmark = pytest.mark.torch
LOOPBACK = {"RINGCOMM_INTERFACES": "lo", "GLOO_SOCKET_IFNAME": "lo"}


def in_a_group(forked: Rank) -> None:
    """No warning of silence, and what plain torch gets from the mean gradients."""
    warnings.simplefilter("error")
    dist.init_process_group("ringcomm")
    rank = forked.number
    model, expected = Net(seed=rank), Net(seed=0)
    optimizer = SGD(model.parameters(), 0.1, compression="none", threshold=THRESHOLD)
    assert optimizer.comm is dist.group.WORLD.comm
    plain = torch.optim.SGD(expected.parameters(), 0.1, 0.9)
    for step in range(5):
        set_gradients(model, rank, step)
        optimizer.step()
        mean_gradients(expected, 2, step)
        plain.step()
    assert torch.allclose(flat(model), flat(expected), atol=1e-5)
    beside_ddp(rank)
    forked.emit("right")
    dist.destroy_process_group()


def beside_ddp(rank: int) -> None:
    """A reducer that is live is refused; one that is not, or of other parameters, is let be."""
    wrapped, other = DistributedDataParallel(Net()), DistributedDataParallel(Net())
    optimizer = Lion(wrapped.parameters(), 0.1, threshold=THRESHOLD)
    set_gradients(wrapped.module, rank, 0)
    with pytest.raises(ConfigError, match=r"ringcomm.torch.attach\(model, optimizer\)"):
        optimizer.step()
    wrapped.require_backward_grad_sync = False
    optimizer.step()
    assert other.require_backward_grad_sync
    with sparse.SGD(other.parameters(), 0.1, overlap=False) as ours:
        assert attach(other, ours) is ours
        set_gradients(other.module, rank, 0)
        ours.step()


def test_in_a_process_group(torch_nursery: Nursery) -> None:
    with Job(torch_nursery, 2, LOOPBACK) as job:
        job.start(in_a_group)
        job.expect_all("right")
        job.finish(quietly=False)


def test_without_a_communicator_it_says_what_to_do() -> None:
    with pytest.raises(ringcomm.NotInitializedError):
        SGD(Net().parameters())
