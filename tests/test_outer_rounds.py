"""Rounds of OuterStep between ranks: fragments, delays, weights, ends, and ranks that differ."""

from __future__ import annotations

import importlib.util
import threading
import warnings
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from outer_training import net, train, weights
from patience import PATIENCE
from ranks import World, run_ranks
from torch import nn

from ringcomm import Communicator, MismatchError, PeerLostError, RingcommError
from ringcomm.torch import IdenticalDataWarning, OuterStep
from ringcomm.torch.outer.rounds import NoChange

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]


class Bag(nn.Module):
    """Parameters of any sizes, which nothing is computed with."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)


@given(
    sizes=st.lists(
        st.sampled_from([0, 1, 3, 63, 64, 65, 255, 257, 1000, 5001]), min_size=1, max_size=9
    ),
    fragments=st.integers(1, 4),
    codec=st.sampled_from([None, "bf16", "int8", "int4"]),
)
@settings(deadline=None, max_examples=6)
def test_every_element_is_averaged(sizes: list[int], fragments: int, codec: str | None) -> None:
    fragments = min(fragments, len(sizes))

    def rank(comm: Communicator) -> list[torch.Tensor]:
        model = Bag(sizes)
        outer = OuterStep(
            model, None, every=4, fragments=fragments, outer="mean", compression=codec, comm=comm
        )
        with outer:
            with torch.no_grad():
                for part in model.parts:
                    part.fill_(-1.0 if comm.rank else 3.0)  # constant: exact in each codec
            for _ in range(4):
                outer.tick()
        return [part.detach() for part in model.parts]

    for parts in run_ranks(2, rank):
        for part in parts:
            torch.testing.assert_close(part, torch.ones_like(part), rtol=0.02, atol=0)


def test_a_delayed_round_by_formula() -> None:
    every, delay, rate = 4, 2, 0.02

    def rank(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), rate)
        with OuterStep(
            model,
            optimizer,
            every=every,
            delay=delay,
            outer="mean",
            compression=None,
            comm=comm,
        ) as outer:
            train(model, optimizer, comm.rank, range(every + delay))
            local = weights(model)
            with outer.anchor():
                anchor = weights(model)
        return local, anchor

    models = [net() for _ in range(2)]
    inner = [torch.optim.SGD(m.parameters(), rate) for m in models]
    for r in range(2):
        train(models[r], inner[r], r, range(every))
    at_send = [weights(m) for m in models]
    mean = (at_send[0] + at_send[1]) / 2
    for r, (local, anchor) in enumerate(run_ranks(2, rank)):
        train(models[r], inner[r], r, range(every, every + delay))
        progress = weights(models[r]) - at_send[r]
        torch.testing.assert_close(anchor, mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(local, mean + progress, rtol=1e-5, atol=1e-6)


def test_delayed_fragments_keep_the_anchors_equal() -> None:
    def rank(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor, int]:
        model = net(sizes=(5, 8, 8, 8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        with OuterStep(
            model, optimizer, every=6, fragments=3, delay=1, compression="int4", comm=comm
        ) as outer:
            train(model, optimizer, comm.rank, range(13))
            with outer.anchor():
                anchor = weights(model)
            local = weights(model)
            rounds = outer.rounds
        return anchor, local, rounds

    (anchor, one, rounds), (other, two, _) = run_ranks(2, rank)
    assert rounds == 6
    assert torch.equal(anchor, other)
    assert not torch.equal(one, two)


def test_rounds_hide_behind_a_delay() -> None:
    """The early rank does not wait for the late one at the send."""
    early_goes_on = threading.Event()

    def rank(comm: Communicator) -> None:
        outer = OuterStep(Bag([100]), None, every=4, delay=2, compression=None, comm=comm)
        with outer:
            for _ in range(7):
                outer.tick()  # later rounds need not wait for headers
            assert not comm.rank or early_goes_on.wait(PATIENCE)
            for _ in range(2):
                outer.tick()
            early_goes_on.set()
            outer.tick()

    run_ranks(2, rank)


# ---- rounds that fail ----


class Unlucky:
    """Peers of which the second round fails at its end, on all ranks, and is repeated."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.members, self.ended = comm, tuple(range(comm.world_size)), 0

    def begin_round(self, number: int, token: bytes = b"") -> NoChange:
        return NoChange()

    def end_round(self) -> None:
        self.ended += 1
        if self.ended == 2:
            raise PeerLostError("as if a peer had been lost")

    def lost(self, error: RingcommError) -> NoChange:
        assert isinstance(error, PeerLostError)
        return NoChange()


@pytest.mark.parametrize(
    "way",
    [
        {"delay": 0},
        {"delay": 1, "outer": "sparse"},
        {"delay": 1, "compression": "int8", "feedback": True},
    ],
    ids=str,
)
def test_a_repeated_round_leaves_no_trace(way: dict[str, Any]) -> None:
    def run(is_unlucky: bool) -> torch.Tensor:
        def rank(comm: Communicator) -> tuple[torch.Tensor, int]:
            model = net(sizes=(5, 64, 3))
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            peers: Any = Unlucky(comm) if is_unlucky else comm
            with OuterStep(model, optimizer, every=3, comm=peers, **way) as outer:
                train(model, optimizer, comm.rank, range(10))
            return weights(model), outer.report().repeated

        found = run_ranks(2, rank)
        assert [repeated for _, repeated in found] == [is_unlucky] * 2
        assert torch.equal(found[0][0], found[1][0])
        weights_: torch.Tensor = found[0][0]
        return weights_

    assert torch.equal(run(True), run(False))


class Parted(Unlucky):
    """Peers that take rank 1 in with the second round: it has gone on apart."""

    def begin_round(self, number: int, token: bytes = b"") -> NoChange:
        one = NoChange()
        one.joined = (1,) if number == 2 else ()
        return one

    def end_round(self) -> None:
        pass


def test_who_went_on_apart_is_given_the_state() -> None:
    """Though it is at the same round."""

    def rank(comm: Communicator) -> torch.Tensor:
        model = Bag([300])
        outer = OuterStep(model, None, every=1, compression=None, comm=Parted(comm))
        with outer:
            [block] = outer._rounds.fragments[0].blocks
            block.anchor.fill_(comm.rank)
            outer.tick()
            return block.anchor.clone()

    assert all(torch.equal(one, torch.zeros(300)) for one in run_ranks(2, rank))


# ---- what does not count ----


def test_a_rank_that_is_not_finite_does_not_count() -> None:
    def rank(comm: Communicator) -> tuple[torch.Tensor, int]:
        model = Bag([300])
        outer = OuterStep(model, None, every=1, outer="mean", comm=comm)
        with outer, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with torch.no_grad():
                model.parts[0].fill_(float("nan") if comm.rank == 1 else 2.0)
            outer.tick()
            after = model.parts[0].detach().clone()
        return after, sum("not finite" in str(one.message) for one in caught)

    with World(3) as world:  # warnings are recorded for all threads alike
        for found, _ in world.run(rank):
            torch.testing.assert_close(found, torch.full((300,), 2.0), rtol=0.01, atol=0)


def test_of_a_rank_that_is_not_finite_all_fragments_are_brought_to_the_anchor() -> None:
    def rank(comm: Communicator) -> tuple[torch.Tensor, int, list[str]]:
        model = Bag([300, 200])
        outer = OuterStep(model, None, every=4, fragments=2, outer="mean", comm=comm)
        with outer, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(12):
                with torch.no_grad():
                    for part in model.parts:
                        part.add_(float("nan") if comm.rank == 1 and step == 1 else 1.0)
                outer.tick()
        texts = [str(one.message) for one in caught if "not finite" in str(one.message)]
        return weights(model), outer.report().dropped, texts

    with World(2) as world:
        found = world.run(rank)
    assert [dropped for _, dropped, _ in found] == [0, 1]
    assert all(bool(torch.isfinite(after).all()) for after, *_ in found)


def test_a_rank_whose_optimizer_is_poisoned_unseen_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def rank(comm: Communicator) -> list[str]:
        model = Bag([300])
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with OuterStep(model, None, every=2, comm=comm) as outer:
                for step in range(8):
                    loss = model.parts[0].square().sum()
                    (loss * float("nan") if step == 1 else loss).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    outer.tick()
        return [str(one.message) for one in caught if "not finite" in str(one.message)]

    texts = run_ranks(1, rank)[0]
    assert "it went on from the anchor" in texts[0]
    assert len(texts) >= 3
    assert all("optimizer.state.clear()" in text for text in texts[1:])
    assert "was without the deltas of ranks [0]" in caplog.text


# ---- buffers ----


def test_buffers_follow_the_mean_and_counters_the_largest() -> None:
    def rank(comm: Communicator) -> tuple[Any, ...]:
        norm = nn.BatchNorm1d(3)
        norm.register_buffer("mask", torch.tensor([-torch.inf, 0.3, 1 / 3]))
        outer = OuterStep(norm, None, every=2, comm=comm)
        with outer:
            for _ in range(2 + comm.rank):
                norm(torch.randn(4, 3) + comm.rank)
            before = norm.running_mean.clone()  # type: ignore[union-attr]
            for _ in range(2):
                outer.tick()
            after = norm.running_mean.clone()  # type: ignore[union-attr]
        return before, after, int(norm.num_batches_tracked), norm.mask.clone()  # type: ignore[arg-type,union-attr,operator]

    found = run_ranks(3, rank)
    mean = sum(before for before, *_ in found) / 3
    for _, after, tracked, mask in found:
        torch.testing.assert_close(after, mean)
        assert torch.equal(after, found[0][1])
        assert tracked == 4
        assert torch.equal(mask, torch.tensor([-torch.inf, 0.3, 1 / 3]))  # to the bit


def test_a_buffer_that_the_model_assigns_anew_is_exchanged() -> None:
    class Average(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("mean", torch.zeros(2))
            self.register_buffer("seen", torch.zeros(0))

    def rank(comm: Communicator) -> list[Any]:
        model = Average()
        with OuterStep(model, None, every=2, comm=comm) as outer:
            for step in range(3):
                model.mean = model.mean + comm.rank + step
                model.seen = torch.zeros(step)  # of another shape: it stays this rank's own
                outer.tick()
            with outer.anchor():
                anchor = model.mean.tolist()
        return [anchor, model.mean.tolist(), len(model.seen)]

    assert run_ranks(2, rank) == 2 * [[[2.0, 2.0], [4.5, 4.5], 2]]


# ---- iterations ----


def test_ranks_that_train_longer_are_waited_for_at_the_end() -> None:
    def rank(comm: Communicator) -> tuple[torch.Tensor, int]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        outer = OuterStep(model, optimizer, every=2, fragments=2, compression=None, comm=comm)
        with outer:
            train(model, optimizer, comm.rank, range(4 + 5 * comm.rank))
        return weights(model), outer.rounds

    found = run_ranks(3, rank)
    for one, rounds in found:
        assert torch.equal(one, found[0][0])
        assert rounds == found[0][1]


def test_a_flush_in_between_shifts_nothing() -> None:
    def rank(comm: Communicator) -> tuple[torch.Tensor, list[int]]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        rounds = []
        with OuterStep(model, optimizer, every=4, compression=None, comm=comm) as outer:
            for step in range(8):
                train(model, optimizer, comm.rank, [step])
                if step == 1:
                    outer.flush()
                    flushed = weights(model)
                rounds.append(outer.rounds)
        return flushed, rounds

    (a, rounds), (b, _) = run_ranks(2, rank)
    assert torch.equal(a, b)
    assert rounds == [0, 1, 1, 2, 2, 2, 2, 3]


# ---- what is warned of, at the start ----


def test_ranks_on_the_same_data_are_told() -> None:
    def rank(comm: Communicator, same: bool) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with OuterStep(model, optimizer, every=2, comm=comm):
            train(model, optimizer, 0 if same else comm.rank, range(4))

    for same in (True, False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_ranks(2, lambda comm, same=same: rank(comm, same))
        texts = [str(w.message) for w in caught if w.category is IdenticalDataWarning]
        assert len(texts) == 2 * same, texts
        assert all("ranks 0 and 1 have trained on the same first batch" in text for text in texts)


@pytest.mark.parametrize("again", [False, True])
def test_the_first_batch_is_that_of_this_attachment(again: bool) -> None:
    """Though one rank flushes before its first iteration is over."""

    def rank(comm: Communicator) -> None:
        model = net()
        outer = OuterStep(model, None, every=2, comm=comm)
        if again:  # an attachment before, with the same batch on both ranks and no round
            with outer:
                model(torch.ones(3, 5))
                outer.tick()
                outer.detach()
        with outer:
            model(torch.full((3, 5), float(comm.rank * again)))
            if comm.rank == 0:
                outer.tick()
            outer.flush()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, rank)
    found = [one for one in caught if one.category is IdenticalDataWarning]
    assert len(found) == (0 if again else 2)


@pytest.mark.parametrize(
    "other",
    [{"every": 3}, {"compression": "int8"}, {"outer": "mean"}, {"fragments": 2}, {"delay": 1}],
)
def test_ranks_that_are_set_up_differently_are_refused(other: dict[str, Any]) -> None:
    def rank(comm: Communicator) -> None:
        given: dict[str, Any] = {"every": 4, **(other if comm.rank else {})}
        outer = OuterStep(net(), None, comm=comm, **given)
        with pytest.raises(MismatchError, match="set up differently on ranks 0 and 1"):
            outer.attach()

    run_ranks(2, rank)
