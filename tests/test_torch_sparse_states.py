"""States of ringcomm.torch.sparse, and parameters that come later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ranks import run_ranks
from tensors import stored

from ringcomm import Communicator, ConfigError, MismatchError

torch = pytest.importorskip("torch")

from sparse_training import import_late, loss_of, model_of, weights  # noqa: E402

from ringcomm.torch.sparse import SGD, Adam  # noqa: E402

pytestmark = pytest.mark.usefixtures("nothing_left")

Made = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def what_torch_imports_late() -> None:
    import_late()


def test_a_restart_in_another_world_loses_nothing() -> None:
    """What was not applied is the same: the mean over the ranks of what each has left."""

    def left(optimizer: Any) -> Any:
        state = optimizer.gather_state_dict()["ringcomm"]["buckets"]
        return torch.cat([one["exchange"]["worker"] + one["exchange"]["owner"] for one in state])

    def save(comm: Communicator) -> tuple[Any, Any]:
        model = model_of(1)
        with SGD(model.parameters(), lr=0.05, density=0.1, comm=comm) as optimizer:
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, comm.rank, step).backward()
                optimizer.step()
            return optimizer.gather_state_dict(), left(optimizer)

    state, before = run_ranks(3, save)[1]
    assert before.any()

    def load(comm: Communicator) -> Any:
        with SGD(model_of(1).parameters(), lr=0.05, density=0.1, comm=comm) as optimizer:
            optimizer.load_state_dict(state)
            return left(optimizer)

    torch.testing.assert_close(run_ranks(2, load)[0], before)


def left_of(state: Any) -> Any:
    """Residuals in a rank's own state."""
    return torch.cat([one["exchange"]["worker"] for one in state["ringcomm"]["buckets"]])


def test_a_step_that_ranks_do_not_agree_on_changes_nothing() -> None:
    """The next one, with values that are alike, is made."""

    def run(comm: Communicator) -> Any:
        model = model_of(1)
        with SGD(model.parameters(), lr=0.05, density=0.1, comm=comm) as optimizer:
            loss_of(model, comm.rank, 0).backward()
            optimizer.step()
            before, held = optimizer.state_dict(), weights(model)
            optimizer.param_groups[0]["lr"] = 0.05 + comm.rank
            optimizer.zero_grad()
            loss_of(model, comm.rank, 1).backward()
            with pytest.raises(MismatchError, match=r"\['lr'\] is 0.05 on rank 0"):
                optimizer.step()
            assert torch.equal(weights(model), held)
            after = optimizer.state_dict()
            for one, other in zip(
                *(s["ringcomm"]["buckets"] for s in (before, after)), strict=True
            ):
                assert one["exchange"]["worker"].any()
                assert torch.equal(one["exchange"]["worker"], other["exchange"]["worker"])
            optimizer.param_groups[0]["lr"] = 0.05
            optimizer.zero_grad()
            loss_of(model, comm.rank, 2).backward()
            optimizer.step()
            return weights(model)

    assert torch.equal(*run_ranks(2, run))


def test_a_late_error_leaves_the_step_after_it() -> None:
    """With staleness 1: what this one sends is shown."""

    def run(comm: Communicator) -> None:
        one = torch.nn.Parameter(torch.zeros(320))
        with SGD([one], lr=1.0, comm=comm, density=1.0, staleness=1) as optimizer:
            optimizer.param_groups[0]["lr"] = 1.0 + comm.rank
            one.backward(torch.ones(320))
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 1.0
            one.backward(torch.ones(320))
            with pytest.raises(MismatchError):
                optimizer.step()
            optimizer.flush()
            assert (one == -2.0).all()

    run_ranks(2, run)


def test_a_refused_load_changes_nothing() -> None:
    def run(comm: Communicator) -> None:
        model = model_of(1)
        with SGD(model.parameters(), lr=0.05, density=0.1, comm=comm) as optimizer:
            loss_of(model, comm.rank, 0).backward()
            optimizer.step()
            before = optimizer.state_dict()
            other = stored(before)
            for bucket in other["ringcomm"]["buckets"]:
                bucket["exchange"]["worker"].fill_(1.0)
            other["param_groups"] = other["param_groups"] * 2
            with pytest.raises(ValueError, match="different number of parameter groups"):
                optimizer.load_state_dict(other)
            assert torch.equal(left_of(before), left_of(optimizer.state_dict()))

    run_ranks(2, run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_goes_on_after_a_refused_load(dtype: Any) -> None:
    """As if there had been none, though the state has other buckets."""

    def state_of_other_buckets(comm: Communicator) -> Any:
        other = model_of(2, dtype)
        other[0].requires_grad_(False)
        with SGD(other.parameters(), comm=comm) as optimizer:
            return optimizer.state_dict()

    def run(comm: Communicator, is_refused: bool) -> Any:
        model = model_of(1, dtype)
        wrong = state_of_other_buckets(comm)
        wrong["param_groups"] = wrong["param_groups"] * 2
        with SGD(model.parameters(), lr=0.05, momentum=0.9, density=0.1, comm=comm) as optimizer:
            for step in range(4):
                if step == 2 and is_refused:
                    with pytest.raises(ValueError, match="different number of parameter groups"):
                        optimizer.load_state_dict(wrong)
                optimizer.zero_grad()
                loss_of(model, comm.rank, step).backward()
                optimizer.step()
            return optimizer.state_dict()["ringcomm"]["buckets"]

    (expected, _), (found, _) = (
        run_ranks(2, lambda comm, way=way: run(comm, way)) for way in (False, True)
    )
    assert [one["indices"] for one in found] == [one["indices"] for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one["exchange"]["worker"].any()
        assert torch.equal(one["exchange"]["worker"], other["exchange"]["worker"])
        assert torch.equal(one["master"], other["master"])


def test_a_16_bit_model_may_be_loaded_after_its_optimizer() -> None:
    """The master copy goes on with all its digits."""

    def run(comm: Communicator) -> Any:
        models = model_of(1, torch.bfloat16), model_of(2, torch.bfloat16)
        with (
            SGD(models[0].parameters(), lr=1e-3, density=0.5, comm=comm) as before,
            SGD(models[1].parameters(), lr=1e-3, density=0.5, comm=comm) as after,
        ):
            for step in range(20):
                if step == 5:
                    state = stored([before.state_dict(), models[0].state_dict()])
                    after.load_state_dict(state[0])
                    models[1].load_state_dict(state[1])
                for model, optimizer in zip(models, (before, after), strict=True):
                    if model is models[0] or step >= 5:
                        optimizer.zero_grad()
                        loss_of(model, comm.rank, step).backward()
                        optimizer.step()
            return [one.state_dict()["ringcomm"]["buckets"] for one in (before, after)]

    for before, after in run_ranks(2, run):
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one["master"], other["master"])


def test_weights_in_other_memory_are_trained_on_after_a_load() -> None:
    def run(comm: Communicator) -> None:
        one = torch.nn.Parameter(torch.ones(20, 20))
        with SGD([one], lr=1.0, comm=comm, density=1.0) as optimizer:
            state = None
            for _ in range(2):
                one.grad = None
                one.backward(torch.ones_like(one))
                optimizer.step()
                if state is None:
                    state = optimizer.state_dict()
                    one.data = one.data.clone()
                    optimizer.load_state_dict(state)
            assert (one == -1.0).all()

    run_ranks(2, run)


def test_states_of_others_are_refused() -> None:
    def run(comm: Communicator) -> None:
        model = model_of(1)
        with SGD(model.parameters(), comm=comm) as one, Adam(model.parameters(), comm=comm) as two:
            with pytest.raises(ConfigError, match=r"state is of sparse\.Adam"):
                one.load_state_dict(two.state_dict())
            with pytest.raises(ConfigError, match="another optimizer"):
                one.load_state_dict(torch.optim.SGD(model.parameters()).state_dict())
        small = torch.nn.Linear(3, 3)
        with SGD(small.parameters(), comm=comm) as three:
            state = three.state_dict()
        with (
            SGD(model.parameters(), comm=comm) as one,
            pytest.raises(ConfigError, match="another model"),
        ):
            one.load_state_dict(state)

    run_ranks(1, run)


@pytest.mark.parametrize(("how", "staleness"), [("thaw", 1), ("add_param_group", 0)])
def test_parameters_that_come_later_are_trained_from_then_on(how: str, staleness: int) -> None:
    """The same with overlap and without; and a state of then goes on to the bit."""

    def steps(model: Any, optimizer: Any, rank: int, numbers: range) -> None:
        for step in numbers:
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()

    def make(model: Any, comm: Communicator, overlap: bool) -> Any:
        held = model[2:].parameters() if how == "add_param_group" else model.parameters()
        return SGD(held, lr=0.1, comm=comm, density=0.1, overlap=overlap, staleness=staleness)

    def add(model: Any, optimizer: Any) -> None:
        model[0].requires_grad_(True)
        if how == "add_param_group":
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.05})

    def run(comm: Communicator, overlap: bool) -> Any:
        model, other = model_of(1), model_of(2)
        model[0].requires_grad_(False)
        with make(model, comm, overlap) as optimizer:
            steps(model, optimizer, comm.rank, range(2))
            before = model[0].weight.detach().clone()
            add(model, optimizer)
            steps(model, optimizer, comm.rank, range(2, 5))
            optimizer.flush()
            assert not torch.equal(model[0].weight, before)
            kept = stored(optimizer.state_dict())
            steps(model, optimizer, comm.rank, range(5, 7))
            optimizer.flush()
        with make(other, comm, overlap) as optimizer:
            if how == "add_param_group":
                add(other, optimizer)
            optimizer.load_state_dict(kept)
            steps(other, optimizer, comm.rank, range(5, 7))
            optimizer.flush()
            assert torch.equal(weights(other), weights(model))
        return weights(model)

    got = [run_ranks(2, lambda comm, way=way: run(comm, way)) for way in (False, True)]
    assert all(torch.equal(one, got[0][0]) for pair in got for one in pair)


def test_a_state_of_fewer_parameters_is_loaded() -> None:
    """The others are laid out when they are trained."""

    def run(comm: Communicator, overlap: bool) -> None:
        model, other = model_of(1), model_of(1)
        model[0].requires_grad_(False)
        with SGD(model.parameters(), comm=comm, overlap=overlap) as optimizer:
            loss_of(model, comm.rank, 0).backward()
            optimizer.step()
            state = optimizer.state_dict()
        with SGD(other.parameters(), lr=0.1, comm=comm, overlap=overlap) as optimizer:
            optimizer.load_state_dict(state)
            assert torch.equal(weights(other), weights(model))
            loss_of(other, comm.rank, 1).backward()
            optimizer.step()
            assert not torch.equal(other[0].weight, model[0].weight)

    for overlap in (False, True):
        run_ranks(2, lambda comm, way=overlap: run(comm, way))
