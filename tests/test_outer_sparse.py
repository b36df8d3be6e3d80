"""The sparse outer step, against its formula written out with torch, and its bytes."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from outer_training import net, train, weights
from ranks import run_ranks
from torch import nn

from ringcomm import Communicator
from ringcomm.torch import OuterStep
from ringcomm.torch.outer import Sparse
from ringcomm.torch.outer.wires import SparseWire

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]

CHUNK = 4096


def moved(rank: int, step: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(count, generator=generator)


class Whole(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count))


class Reference:
    """e <- decay e + d; q = the k largest of each chunk of e, as bfloat16; e <- e - q."""

    def __init__(self, count: int, k: int, decay: float) -> None:
        self.e = torch.zeros(count)
        self.k, self.decay = k, decay

    def chosen(self, delta: torch.Tensor) -> torch.Tensor:
        self.e = self.decay * self.e + delta
        rows = self.e.view(-1, CHUNK)
        index = rows.abs().topk(self.k, dim=1).indices
        q = torch.zeros_like(rows).scatter(1, index, rows.gather(1, index)).bfloat16().float()
        self.e = self.e - q.flatten()
        return q.flatten()


@pytest.mark.parametrize(
    ("aggregate", "decay", "gamma"), [("mean", 0.95, 1.0), ("senders", 0.5, 0.65)]
)
def test_it_is_the_formula(aggregate: str, decay: float, gamma: float) -> None:
    """In the last round, too, in which rank 0 flushes, and sends what it has left."""
    n, count, density, rounds = 3, 2 * CHUNK, 1 / 64, 4

    def rank(comm: Communicator) -> torch.Tensor:
        model = Whole(count)
        rule = Sparse(density, decay, gamma, aggregate)
        outer = OuterStep(model, None, every=1, outer=rule, comm=comm)
        with outer:
            for step in range(rounds - (comm.rank == 0)):
                with torch.no_grad():
                    model.weight += moved(comm.rank, step, count)
                outer.tick()
        return model.weight.detach()

    anchor = torch.zeros(count)
    references = [Reference(count, CHUNK // 64, decay) for _ in range(n)]
    for step in range(rounds):
        flushes = step == rounds - 1
        deltas = [-moved(r, step, count) * (r > 0 or not flushes) for r in range(n)]
        q = torch.stack([references[r].chosen(deltas[r]) for r in range(n)])
        senders = (q != 0).sum(0).clamp(min=1) if aggregate == "senders" else n - flushes
        anchor -= gamma * q.sum(0) / senders
    for found in run_ranks(n, rank):
        torch.testing.assert_close(found, anchor, rtol=1e-5, atol=1e-5)


def test_of_all_elements_it_is_the_mean() -> None:
    def run(**way: Any) -> torch.Tensor:
        def rank(comm: Communicator) -> torch.Tensor:
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
            with OuterStep(model, optimizer, every=2, comm=comm, **way):
                train(model, optimizer, comm.rank, range(6))
            return weights(model)

        first, second = run_ranks(2, rank)
        assert torch.equal(first, second)
        found: torch.Tensor = first
        return found

    mean = run(outer="mean", compression=None)
    torch.testing.assert_close(run(outer=Sparse(1.0, 1.0)), mean, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize(("outer", "most"), [("sparse", 1 / 30), ("nesterov", 1 / 7)])
def test_bytes_of_a_round(outer: str, most: float) -> None:
    def rank(comm: Communicator) -> tuple[int, int]:
        model = Whole(64 * CHUNK)
        with OuterStep(model, None, every=1, outer=outer, comm=comm) as step:
            before = comm.stats()["payload_bytes"]
            with torch.no_grad():
                model.weight += moved(comm.rank, 0, model.weight.numel())
            step.tick()
            sent = comm.stats()["payload_bytes"] - before
        return sent, step.report().sent_bytes

    for sent, told in run_ranks(2, rank):
        assert 0.9 * told <= sent <= most * 4 * 64 * CHUNK


def test_what_an_owner_has_left_goes_on_with_those_that_remain() -> None:
    """Whichever range it owned: nothing of it is dropped with the ranks that are gone."""
    n, count = 6, 8 * CHUNK

    def rank(comm: Communicator) -> None:
        wire = SparseWire(Sparse(1 / 64, 1.0), count)
        for step in range(2):
            wire.submit(comm, moved(comm.rank, step, count), None).wait()
        exchange = wire.exchange_on(comm)
        assert exchange.exchange == "owner"
        start, owner = exchange._way.owner_residual()
        wanted = exchange.residual.copy()
        fewer = comm.split(0 if comm.rank else None)
        if fewer is not None:
            wanted[start : start + len(owner)] += owner * fewer.world_size
            assert (wire.exchange_on(fewer).residual == wanted).all()
            fewer.close()

    run_ranks(n, rank)
