"""Checkpoints of OuterStep: on from the anchor in another world. In the same one it is to the bit,
as test_states.py has it."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from outer_training import net, train, weights
from ranks import run_ranks
from tensors import stored
from torch import nn

from ringcomm import Communicator, ConfigError
from ringcomm.torch import OuterStep
from ringcomm.torch.outer import Sparse

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]

WAYS: list[dict[str, Any]] = [
    {"every": 6, "fragments": 3, "delay": 1},
    {"every": 4, "outer": Sparse(density=0.1)},
    {"every": 4, "compression": None, "outer": "mean"},
    {"every": 7, "compression": "int8", "feedback": True, "fragments": 2, "delay": 2},
]


def made(comm: Communicator, **way: Any) -> tuple[nn.Module, torch.optim.Optimizer, OuterStep]:
    model = net(sizes=(5, 16, 16, 3))
    model.append(nn.BatchNorm1d(3))  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    return model, optimizer, OuterStep(model, optimizer, comm=comm, **way)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_restart_in_other_worlds(way: dict[str, Any]) -> None:
    def first(comm: Communicator) -> tuple[Any, torch.Tensor]:
        model, optimizer, outer = made(comm, **way)
        with outer:
            train(model, optimizer, comm.rank, range(12))
            saved = stored(outer.gather_state_dict())
            outer.detach()
            with outer.anchor():
                anchor = weights(model)
        return saved, anchor

    saved, anchor = run_ranks(3, first)[0]

    def second(comm: Communicator) -> torch.Tensor:
        model, optimizer, outer = made(comm, **way)
        outer.load_state_dict(copy.deepcopy(saved))
        with outer:
            start = weights(model)
            assert outer.iteration == 12
            train(model, optimizer, comm.rank, range(12, 15))  # to the next round, or its end
        assert torch.isfinite(weights(model)).all()
        return start

    for others in (1, 4):
        for start in run_ranks(others, second):
            assert torch.equal(start, anchor)  # of a round on its way, as it was applied later


def test_what_has_not_travelled_is_in_the_state() -> None:
    """The sum of what a state has left is what the ranks have left, at any world size."""

    def first(comm: Communicator) -> tuple[Any, float]:
        model, optimizer, outer = made(comm, every=2)
        with outer:
            train(model, optimizer, comm.rank, range(6))
            saved = outer.gather_state_dict()
            again = outer.gather_state_dict()
            for one, other in zip(saved["anchor"].items(), again["anchor"].items(), strict=True):
                assert torch.equal(one[1], other[1])
        return saved, 0.0

    saved = run_ranks(3, first)[0][0]
    left = saved["wires"]["tensors"]["fragment 0"]

    def second(comm: Communicator) -> Any:
        _, _, outer = made(comm, every=2)
        outer.load_state_dict(saved)
        return outer.gather_state_dict()["wires"]["tensors"]["fragment 0"]

    for told in run_ranks(2, second):
        assert float(left["worker"].abs().sum()) > 0
        torch.testing.assert_close(told["worker"], left["worker"], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(told["owner"], left["owner"])


def test_states_that_do_not_fit_are_refused() -> None:
    def rank(comm: Communicator) -> None:
        _, _, outer = made(comm, every=4)
        state = outer.state_dict()
        known = {name: one for name, one in state["anchor"].items() if name != "0.bias"}
        for wrong, text in (
            ({}, "no state of an OuterStep"),
            ({"method": "OneBitAdam"}, "but of OneBitAdam"),
            ({**state, "format": 7}, "has format 7"),
            ({**state, "outer": "Mean"}, "outer=Mean, and this OuterStep has outer=Nesterov"),
            ({**state, "fragments": 2}, "fragments=2"),
            ({**state, "anchor": {"x": torch.zeros(1)}}, "another model"),
            ({**state, "exact": {}}, "does not say whose"),
            ({**state, "anchor": known}, "lacks '0.bias', which is trained here: "),
        ):
            with pytest.raises(ConfigError, match=text):
                outer.load_state_dict(wrong)
        outer.load_state_dict(state)
        for how in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match=r"OuterStep cannot be .* use state_dict\(\)"):
                how(outer)

    run_ranks(1, rank)


def test_a_state_replaces_the_round_on_its_way() -> None:
    def rank(comm: Communicator) -> None:
        model, optimizer, outer = made(comm, every=4, delay=2)
        with outer:
            train(model, optimizer, comm.rank, range(7))
            kept, state = copy.deepcopy(model.state_dict()), outer.state_dict()
            own = weights(model)
            with outer.anchor():
                anchor = weights(model)
            train(model, optimizer, comm.rank, range(7, 9))
            model.load_state_dict(kept)
            outer.load_state_dict(state)
            assert torch.equal(weights(model), own)
            with outer.anchor():
                assert torch.equal(weights(model), anchor)

    run_ranks(2, rank)


def test_a_rank_without_a_state_gets_the_round_on_its_way_too() -> None:
    def rank(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        model, optimizer, outer = made(comm, every=4, delay=2)
        with outer:
            train(model, optimizer, comm.rank, range(9))
            kept, state = copy.deepcopy(model.state_dict()), outer.state_dict()
        model, optimizer, outer = made(comm, every=4, delay=2)
        if comm.rank == 1:
            model.load_state_dict(kept)
            outer.load_state_dict(state)
        with outer:
            with outer.anchor():
                start = weights(model)
            train(model, optimizer, comm.rank, range(9, 13))
        return start, weights(model)

    first, second = run_ranks(2, rank)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_a_rank_without_a_state_gets_that_of_the_others() -> None:
    def rank(comm: Communicator) -> torch.Tensor:
        model, optimizer, outer = made(comm, every=4)
        with outer:
            train(model, optimizer, comm.rank, range(8))
        state, after = outer.state_dict(), weights(model)
        model, optimizer, outer = made(comm, every=4)
        if comm.rank == 1:
            outer.load_state_dict(state)
        with outer:
            assert outer.iteration == 8
            with outer.anchor():
                assert torch.equal(weights(model), after)
            train(model, optimizer, comm.rank, range(8, 12))
        return weights(model)

    first, second = run_ranks(2, rank)
    assert torch.equal(first, second)


def test_a_refused_state_leaves_the_round_on_its_way() -> None:
    def rank(comm: Communicator) -> torch.Tensor:
        model, optimizer, outer = made(comm, every=4, delay=2)
        with outer:
            train(model, optimizer, comm.rank, range(4))
            state = outer.state_dict()
            flight = state["exact"]["flight"]
            short = [mean[:-1] for mean in flight["means"]]
            of_another = "round on its way is of another model"
            own = {key: part for key, part in state["exact"].items() if key != "flight"}
            undated = {key: part for key, part in flight.items() if key != "due"}
            for wrong, text in (
                ({"exact": {**state["exact"], "flight": {**flight, "means": short}}}, of_another),
                ({"exact": {**state["exact"], "flight": {**flight, "means": []}}}, of_another),
                ({"exact": {**state["exact"], "flight": {**flight, "at_send": short}}}, of_another),
                ({"memory": {}}, r"lacks the momentum of '0\.weight'"),
                ({"exact": own}, "its own part lacks something"),
                ({"exact": {**state["exact"], "iterations": []}}, "its own part lacks something"),
                ({"exact": {**own, "flight": undated}}, r"on its way lacks \['due'\]"),
            ):
                if comm.rank == 0:
                    with pytest.raises(ConfigError, match=text):
                        outer.load_state_dict({**state, **wrong})
            train(model, optimizer, comm.rank, range(4, 10))
        return weights(model)

    def undisturbed(comm: Communicator) -> torch.Tensor:
        model, optimizer, outer = made(comm, every=4, delay=2)
        with outer:
            train(model, optimizer, comm.rank, range(10))
        return weights(model)

    ends = [*run_ranks(2, rank), *run_ranks(2, undisturbed)]
    assert all(torch.equal(end, ends[0]) for end in ends)


def test_a_state_without_residuals_drops_those_of_before() -> None:
    def rank(comm: Communicator) -> bool:
        model, optimizer, outer = made(comm, every=2, compression="none")
        with outer:
            train(model, optimizer, comm.rank, range(2))
            state = outer.gather_state_dict()
        model, optimizer, outer = made(comm, every=2, compression="int4")
        with outer:
            train(model, optimizer, comm.rank, range(2))
            wires = outer.state_dict()["wires"]["tensors"].values()
            assert any(one["worker"].any() for one in wires)
            outer.load_state_dict(state)
            wires = outer.state_dict()["wires"]["tensors"].values()
            return any(bool(one["worker"].any()) for one in wires)

    assert run_ranks(2, rank) == [False, False]


@pytest.mark.parametrize(("there", "here"), [(3, None), (None, 3)])
def test_a_state_of_another_kind_of_every(there: Any, here: Any) -> None:
    """Refused, and nothing is changed."""

    def rank(comm: Communicator) -> None:
        _, _, outer = made(comm, every=there)
        saved = outer.gather_state_dict()
        model, _, outer = made(comm, every=here)
        with torch.no_grad():
            model[0].weight.add_(1.0)  # type: ignore[index]
        before = weights(model)
        with pytest.raises(ConfigError, match="of another kind of every="):
            outer.load_state_dict(saved)
        del saved["number"]
        with pytest.raises(ConfigError, match=r"it lacks \['number'\]"):
            outer.load_state_dict(saved)
        assert torch.equal(weights(model), before)

    run_ranks(1, rank)


def test_small_tensors_move_by_one_bit_as_far_as_large_ones() -> None:
    """A block that a tensor does not fill is scaled by that tensor's mean alone."""

    def rank(comm: Communicator) -> list[float]:
        model = nn.ParameterList([torch.zeros(count) for count in (4, 100, 5000)])
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        with OuterStep(model, optimizer, every=1, outer="mean", compression="onebit", comm=comm):
            for weight in model:
                weight.grad = torch.ones_like(weight)
            optimizer.step()
        return [float(weight.detach().mean()) for weight in model]

    assert run_ranks(2, rank)[0] == pytest.approx([-1.0] * 3)
