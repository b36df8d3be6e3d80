"""The thread in which an OuterStep works at a delayed round, and what it leaves to the caller's."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from outer_training import net, train, weights
from patience import PATIENCE, until
from ranks import World, run_ranks
from torch import nn

from ringcomm import Communicator, Config, PeerLostError
from ringcomm.torch import OuterStep
from ringcomm.torch.outer import Nesterov
from ringcomm.torch.outer.blocks import Block
from ringcomm.torch.outer.round import Round
from ringcomm.torch.outer.rounds import Rounds
from ringcomm.torch.outer.wires import DenseWires
from ringcomm.torch.sync.bucket import tiles
from ringcomm.torch.worker import Worker

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]

DELAYED: dict[str, Any] = {"every": 4, "delay": 2}
THREAD = "ringcomm outer step"


class Held(Nesterov):
    """The mean, once it may go on."""

    def __init__(self) -> None:
        super().__init__(1.0, 0.0)
        self.may_go_on, self.threads = threading.Event(), set[int]()
        self.may_go_on.set()
        self.has_begun = threading.Event()

    def step(self, anchor: torch.Tensor, mean: torch.Tensor, memory: Any) -> None:
        self.threads.add(threading.get_ident())
        self.has_begun.set()
        assert self.may_go_on.wait(PATIENCE)
        super().step(anchor, mean, memory)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05)


def test_attached_anew_while_a_round_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind an exception: that round goes on by its own communicator, however late it comes."""
    may_go_on, prepare = threading.Event(), Round.prepare

    def prepare_late(one: Round) -> None:
        if one.is_delayed:
            assert may_go_on.wait(PATIENCE)
        prepare(one)

    monkeypatch.setattr(Round, "prepare", prepare_late)

    def rank(comm: Communicator) -> torch.Tensor:
        model = net()
        optimizer = sgd(model)
        outer = OuterStep(model, optimizer, compression=None, comm=comm, **DELAYED)
        with contextlib.suppress(ZeroDivisionError), outer:
            train(model, optimizer, comm.rank, range(4))
            raise ZeroDivisionError
        with outer:
            may_go_on.set()
            train(model, optimizer, comm.rank, range(4, 13))
        return weights(model)

    first, second = run_ranks(2, rank)
    assert torch.equal(first, second)


def test_a_delayed_round_is_not_the_training_threads_work() -> None:
    """It trains on while the other thread is in the outer rule; the anchor in use stays."""

    def rank(comm: Communicator) -> None:
        model, rule = net(), Held()
        optimizer = sgd(model)
        outer = OuterStep(model, optimizer, outer=rule, compression=None, comm=comm, **DELAYED)
        with outer:
            train(model, optimizer, comm.rank, range(3))
            rule.may_go_on.clear()
            train(model, optimizer, comm.rank, range(3, 4))
            assert rule.has_begun.wait(PATIENCE)
            train(model, optimizer, comm.rank, range(4, 5))
            with outer.anchor():
                assert torch.equal(weights(model), weights(net()))
            assert outer.rounds == 0
            rule.may_go_on.set()
            train(model, optimizer, comm.rank, range(5, 6))
            assert outer.rounds == 1
            assert rule.threads.isdisjoint({threading.get_ident()})

    run_ranks(2, rank)


def test_the_callers_own_collectives_may_come_in_between() -> None:
    """At any time, and at other times on each rank: rounds have a communicator of their own."""

    def rank(comm: Communicator) -> torch.Tensor:
        model = net()
        optimizer = sgd(model)
        with OuterStep(model, optimizer, comm=comm, **DELAYED) as outer:
            for step in range(16):
                train(model, optimizer, comm.rank, [step])
                if (step + comm.rank) % 3:
                    time.sleep(0.001)
                assert comm.allreduce(torch.tensor([step])).item() == step * comm.world_size
            assert outer.rounds == 3
        return weights(model)

    first, second, third = run_ranks(3, rank)
    assert torch.equal(first, second)
    assert torch.equal(first, third)


class Broken(Nesterov):
    def step(self, anchor: torch.Tensor, mean: torch.Tensor, memory: Any) -> None:
        raise MemoryError("as if there was none left")


def train_until_it_fails(outer: OuterStep) -> None:
    """With no round due any more: by ticks alone."""
    give_up = time.monotonic() + PATIENCE
    while time.monotonic() < give_up:
        outer.tick()
        time.sleep(0.01)


def test_what_fails_in_the_thread_is_raised_by_the_next_tick() -> None:
    """Before the result is due; once, and the model can be let go of."""

    def rank(comm: Communicator) -> None:
        model = net()
        outer = OuterStep(model, None, every=1_000_000, delay=900_000, outer=Broken(), comm=comm)
        outer.attach()
        outer._rounds.iteration = 999_999
        with pytest.raises(MemoryError, match="none left"):
            train_until_it_fails(outer)
        assert outer.iteration < 1_500_000
        outer.detach()

    run_ranks(2, rank)


def test_a_peer_that_is_lost_is_known_at_the_next_tick() -> None:
    """And not when the result is due."""

    def rank(comm: Communicator) -> None:
        model = net()
        outer = OuterStep(model, None, every=1_000_000, delay=900_000, compression=None, comm=comm)
        outer.attach()
        if comm.rank:
            comm.barrier()
            outer._disconnect()
            return
        outer._rounds.iteration = 999_999
        outer.tick()
        comm.barrier()
        with pytest.raises(PeerLostError):
            train_until_it_fails(outer)
        outer._disconnect()

    with World(2, config=Config(timeout=10 * PATIENCE)) as world:
        world.run(rank)


def interrupted(outer: OuterStep) -> None:
    with outer:
        for _ in range(4):
            outer.tick()
        raise KeyboardInterrupt


def is_there(name: str) -> bool:
    return name in {thread.name for thread in threading.enumerate()}


def test_an_exception_in_training_waits_for_nobody() -> None:
    """A round that has not ended goes on behind it, and tells whoever asks how it ends."""

    def rank(comm: Communicator) -> None:
        outer = OuterStep(net(), None, comm=comm, **DELAYED)
        if comm.rank:
            outer.attach()
            comm.barrier()
            outer._disconnect()
            return
        with pytest.raises(KeyboardInterrupt):
            interrupted(outer)
        assert is_there(THREAD)
        comm.barrier()
        with pytest.raises(PeerLostError):
            outer.state_dict()
        assert until(lambda: not is_there(THREAD)), "the thread outlives its round"

    with World(2, config=Config(timeout=10 * PATIENCE)) as world:
        world.run(rank)


def test_an_interrupt_of_the_waiting_for_a_round_ends_the_waiting() -> None:
    """Then leaving waits no longer, either."""

    class Interrupted:
        def __init__(self, job: Any) -> None:
            self.done = job.done

        def result(self) -> None:
            raise KeyboardInterrupt

    def rank(comm: Communicator) -> None:
        outer = OuterStep(net(), None, comm=comm, **DELAYED)
        if comm.rank:
            outer.attach()
            comm.barrier()
            outer._disconnect()
            return
        outer.attach()
        for _ in range(4):
            outer.tick()
        outer._rounds._job = Interrupted(outer._rounds._job)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            outer._rounds.wait_for_round()
        outer._disconnect()
        assert is_there(THREAD)
        comm.barrier()
        assert until(lambda: not is_there(THREAD)), "the thread outlives its round"

    with World(2, config=Config(timeout=10 * PATIENCE)) as world:
        world.run(rank)


def test_an_interrupted_end_closes_the_communicator() -> None:
    def interrupted(patience: float | None) -> None:
        raise KeyboardInterrupt

    idle: Any = SimpleNamespace(current=None, _cut=None, _worker=SimpleNamespace(close=interrupted))
    with Communicator.create() as comm:
        with pytest.raises(KeyboardInterrupt):
            Rounds.stop(idle, comm)
        assert comm.is_closed


def test_jobs_of_a_worker_run_in_their_order() -> None:
    worker, seen = Worker("a test"), list[int]()

    def fail() -> None:
        raise ValueError("this job")

    futures = [worker.submit(lambda at=at: seen.append(at)) for at in range(5)]
    broken = worker.submit(fail)
    after = worker.submit(lambda: seen.append(5))
    after.result(PATIENCE)
    assert seen == list(range(6))
    assert all(future.done() for future in futures)
    with pytest.raises(ValueError, match="this job"):
        broken.result()
    worker.close()
    worker.close()
    worker.submit(lambda: seen.append(6)).result(PATIENCE)
    worker.close()
    assert seen == list(range(7))


def test_a_worker_whose_thread_did_not_start_starts_it_with_the_next_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    worker = Worker("a test")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            worker.submit(lambda: None)
    worker.submit(lambda: None).result(PATIENCE)
    worker.close()


def test_in_pieces_no_bit_is_another() -> None:
    local, at_send, anchor = (torch.randn(600_007) for _ in range(3))
    assert len(list(tiles(local, anchor))) > 1
    wanted = (local - at_send) + anchor
    block = Block("a block", [("weight", local)], Nesterov(), DenseWires(None, None))
    block.anchor = anchor
    block.rebase(at_send)
    assert torch.equal(local, wanted)


def test_a_large_fragment_moves_as_a_small_one_does() -> None:
    """The rule in pieces, beside the one in which nothing goes on meanwhile."""

    def rank(comm: Communicator) -> list[torch.Tensor]:
        ends = []
        for delay in (0, 1):
            model = nn.ParameterList([nn.Parameter(torch.zeros(200_003))])
            noise = torch.randn(200_003, generator=torch.Generator().manual_seed(comm.rank))
            with OuterStep(model, None, every=2, delay=delay, comm=comm) as one:
                for step in range(6):
                    with torch.no_grad():  # never between a send and its application
                        model[0].add_(noise, alpha=float(step % 2))
                    one.tick()
            ends.append(model[0].detach())
        return ends

    for at_once, later in run_ranks(2, rank):
        torch.testing.assert_close(at_once, later, rtol=1e-5, atol=1e-5)
