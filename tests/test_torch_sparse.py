"""ringcomm.torch.sparse: what arrives is applied, the same on all ranks, late by what was asked.

Beside tests of whole trainings, a step is compared with references: the exchange with
sparse_reference.py, the optimizers with torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sparse_reference as slow
from ranks import run_ranks
from sparse_reference import words

from ringcomm import Communicator, ConfigError, RingcommError

torch = pytest.importorskip("torch")

from sparse_training import import_late, loss_of, model_of, weights  # noqa: E402

from ringcomm.torch.sparse import SGD, Adam  # noqa: E402
from ringcomm.torch.sparse.host_bucket import HostBucket  # noqa: E402

pytestmark = pytest.mark.usefixtures("nothing_left")

Made = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def what_torch_imports_late() -> None:
    import_late()


def train(
    comm: Communicator, make: Made, steps: int, dtype: Any = torch.float32, **more: Any
) -> list[Any]:
    """The weights after each step."""
    model = model_of(7 + comm.rank, dtype)  # ranks begin apart
    with make(model.parameters(), comm=comm, **more) as optimizer:
        seen = [weights(model)]
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, comm.rank, step).backward()
            optimizer.step()
            seen.append(weights(model))
        optimizer.flush()
        return [*seen, weights(model)]


@pytest.mark.parametrize(
    ("make", "staleness", "exchange", "overlap"),
    [
        (SGD, 0, "gather", True),
        (SGD, 1, "owner", False),
        (Adam, 0, "owner", True),
        (Adam, 1, "gather", False),
        (Adam, 1, "owner", True),
        (SGD, 0, "gather", False),
    ],
)
def test_all_ranks_have_the_same_bits(
    make: Made, staleness: int, exchange: str, overlap: bool
) -> None:
    got = run_ranks(
        3,
        lambda comm: train(
            comm,
            make,
            6,
            lr=0.05,
            density=0.1,
            staleness=staleness,
            exchange=exchange,
            overlap=overlap,
            values="bf16",
        ),
    )
    for other in got[1:]:
        for mine, theirs in zip(got[0], other, strict=True):
            assert torch.equal(mine, theirs)
    changed = [not torch.equal(a, b) for a, b in zip(got[0], got[0][1:], strict=False)]
    assert changed == [not staleness, *[True] * 5, bool(staleness)]


def adamw(parameters: Any, *, decoupled_weight_decay: bool, **settings: Any) -> Any:
    """Not every supported torch.optim.Adam has that setting."""
    assert decoupled_weight_decay
    return torch.optim.AdamW(parameters, **settings)


@pytest.mark.parametrize(
    ("make", "theirs", "settings"),
    [
        (SGD, torch.optim.SGD, {"lr": 0.1}),
        (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (Adam, torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01}),
        (Adam, adamw, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ],
)
def test_at_density_1_they_are_torchs(make: Made, theirs: Made, settings: dict[str, Any]) -> None:
    def reference() -> Any:
        model = model_of(7)
        optimizer = theirs(model.parameters(), **settings)
        for step in range(10):
            optimizer.zero_grad()
            sum(loss_of(model, rank, step) / 2 for rank in range(2)).backward()
            optimizer.step()
        return weights(model)

    got = run_ranks(2, lambda comm: train(comm, make, 10, density=1.0, values="fp32", **settings))
    torch.testing.assert_close(got[0][-1], reference(), rtol=1e-4, atol=1e-6)


def test_momentum_of_a_block_decays_while_it_is_not_touched() -> None:
    """Weights and momentum are those of a slow optimizer that has what the reference sends."""
    count, steps, mu, lr = 16 * 40, 12, 0.9, 0.1
    rng = np.random.default_rng(3)
    gradients = rng.standard_normal((steps, count)).astype(np.float32)
    gradients *= np.repeat(rng.uniform(0.1, 1, (steps, 40)), 16, 1).astype(np.float32)
    start = rng.standard_normal(count).astype(np.float32)

    def run(comm: Communicator) -> Any:
        one = torch.nn.Parameter(torch.from_numpy(start.copy()))
        with SGD([one], lr=lr, momentum=mu, comm=comm, density=0.1, chunk=640) as optimizer:
            for gradient in gradients:
                one.backward(torch.from_numpy(gradient))
                optimizer.step()
                optimizer.zero_grad()
            return one.detach().numpy().copy()

    world = slow.World(1, count, 640, 16, 4, 1.0, "bf16", "mean")
    weight, momentum, last = start.astype(float), np.zeros(count), np.zeros(count)
    for step, gradient in enumerate(gradients, 1):
        came = world.round([gradient])
        there = slow.senders(came, 640, 16).astype(bool)
        momentum[there] = momentum[there] * mu ** (step - last[there]) + came[there]
        last[there] = step
        weight[there] -= lr * momentum[there]
    assert 0 < there.sum() < count / 5
    np.testing.assert_allclose(run_ranks(1, run)[0], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [SGD, Adam])
def test_staleness_1_is_one_step_late(make: Made) -> None:
    """With gradients that do not depend on the weights, it shows what staleness 0 showed."""

    def run(comm: Communicator, staleness: int) -> list[Any]:
        one = torch.nn.Parameter(torch.zeros(4000))
        shown = []
        with make([one], lr=0.1, comm=comm, density=0.1, staleness=staleness) as optimizer:
            for step in range(6):
                made = torch.Generator().manual_seed(step * 10 + comm.rank)
                one.backward(torch.randn(4000, generator=made))
                optimizer.step()
                optimizer.zero_grad()
                shown.append(one.detach().clone())
            optimizer.flush()
            shown.append(one.detach().clone())
        return shown

    prompt = run_ranks(2, lambda comm: run(comm, 0))[0]
    late = run_ranks(2, lambda comm: run(comm, 1))[1]
    assert not late[0].any()
    for step in range(5):
        assert torch.equal(late[step + 1], prompt[step])
    assert torch.equal(late[-1], prompt[-1])


@pytest.mark.parametrize("make", [SGD, Adam])
def test_parameters_of_16_bits_follow_a_master_copy(make: Made) -> None:
    """Steps too small for bfloat16 add up."""

    def run(comm: Communicator) -> tuple[Any, Any]:
        one = torch.nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
        with make([one], lr=1e-4, comm=comm, density=1.0) as optimizer:
            for _ in range(200):
                one.backward(torch.ones_like(one))
                optimizer.step()
                optimizer.zero_grad()
            return one.detach().clone(), torch.from_numpy(optimizer._spans[0].master.copy())

    shown, master = run_ranks(2, run)[0]
    torch.testing.assert_close(master[:100], torch.full((100,), 0.98), rtol=0, atol=1e-4)
    assert torch.equal(shown, master[:100].bfloat16())


def test_what_is_not_finite_leaves_out_the_bucket_on_all_ranks() -> None:
    def run(comm: Communicator) -> None:
        one = torch.nn.Parameter(torch.ones(1000))
        with SGD([one], lr=0.1, momentum=0.9, comm=comm, density=0.1) as optimizer:
            for step in range(4):
                gradient = torch.ones(1000)
                if step == 1 and comm.rank == 1:
                    gradient[17] = float("nan")
                before = one.detach().clone()
                one.backward(gradient)
                optimizer.step()
                optimizer.zero_grad()
                assert torch.equal(before, one.detach()) == (step == 1)
            assert optimizer.skipped == 1
            assert one.isfinite().all()

    with pytest.warns(UserWarning, match="not finite") as told:
        run_ranks(2, run)
    assert {one.filename for one in told} == {__file__}


def test_weights_that_somebody_else_writes_are_taken() -> None:
    def run(comm: Communicator, staleness: int) -> None:
        one = torch.nn.Parameter(torch.ones(320))
        with SGD([one], lr=1.0, comm=comm, density=1.0, staleness=staleness) as optimizer:
            for _ in range(2):
                one.backward(torch.ones(320))
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                one.fill_(10.0)
            one.backward(torch.ones(320))
            optimizer.step()
            optimizer.flush()
            assert (one == 9.0).all()

    for staleness in (0, 1):
        run_ranks(2, lambda comm, late=staleness: run(comm, late))


@pytest.mark.parametrize("overlap", [False, True])
def test_weights_that_one_rank_writes_alone(overlap: bool) -> None:
    """The same values, as after an evaluation with others: the exchanges stay in their order."""

    def run(comm: Communicator) -> Any:
        pair = [torch.nn.Parameter(torch.ones(320)) for _ in range(2)]
        groups = [{"params": [one]} for one in pair]
        way: dict[str, Any] = {"exchange": "owner", "overlap": overlap}
        with SGD(groups, lr=1.0, comm=comm, density=1.0, **way) as optimizer:
            for _ in range(3):
                sum(one.sum() for one in pair).backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for one in pair if comm.rank == 0 else ():
                        one.copy_(one.clone())
        return torch.cat(pair).detach()

    for found in run_ranks(2, run):
        assert (found == -2.0).all()


@pytest.mark.parametrize(
    ("dtype", "overlap"), [(torch.float32, True), (torch.bfloat16, False), (torch.float64, True)]
)
def test_parameters_whose_data_is_assigned_are_followed(dtype: Any, overlap: bool) -> None:
    """Other memory, another order of elements in it, another shape."""

    def run(comm: Communicator) -> None:
        one = torch.nn.Parameter(torch.ones(20, 20, dtype=dtype))
        new = torch.arange(400, dtype=dtype).view(20, 20)
        with SGD([one], lr=2.0, comm=comm, density=1.0, overlap=overlap) as optimizer:
            for value in (new.clone(), one.data.t(), new.t().clone(), new.view(400).clone()):
                want = value - 2  # exact in 16 bits, too
                one.data = value
                one.grad = None
                one.backward(torch.ones_like(one))
                optimizer.step()
                assert torch.equal(one, want)
                with torch.no_grad():
                    one.copy_(new.view(one.shape))

    run_ranks(2, run)


def test_accumulation_and_misuse() -> None:
    def run(comm: Communicator) -> None:
        one = torch.nn.Parameter(torch.zeros(320))
        with SGD([one], lr=1.0, comm=comm, density=1.0) as optimizer:
            with optimizer.no_sync():
                one.backward(torch.ones(320))
            one.backward(torch.ones(320))
            with pytest.raises(ConfigError, match=r"call step\(\) first"):
                optimizer.zero_grad()
            with pytest.raises(ConfigError, match=r"call step\(\) first"):
                optimizer.state_dict()
            optimizer.step()
            assert (one == -2.0).all()
            one.grad = None
            one.backward(torch.ones(320))
            with pytest.raises(ConfigError, match="second backward"):
                one.backward(torch.ones(320))

    run_ranks(1, run)


@pytest.mark.parametrize("staleness", [0, 1])
def test_gradients_that_change_on_their_way_are_applied_as_they_were(staleness: int) -> None:
    """The step says so; the next one is made, and a state is to be had."""

    def run(comm: Communicator) -> None:
        one = torch.nn.Parameter(torch.zeros(320))
        with SGD([one], lr=1.0, comm=comm, density=1.0, staleness=staleness) as optimizer:
            one.backward(torch.ones(320))
            one.grad.mul_(0.5)
            with pytest.raises(ConfigError, match="gradients have changed"):
                optimizer.step()
            optimizer.zero_grad()
            one.backward(torch.ones(320))
            optimizer.step()
            optimizer.state_dict()
            assert (one == -2.0).all()
            assert optimizer.steps == 2

    run_ranks(2, run)


def test_a_parameter_that_is_frozen_later_is_refused() -> None:
    """On all ranks, before anything is sent; thawed, it is trained on."""

    def run(comm: Communicator, overlap: bool) -> None:
        pair = [torch.nn.Parameter(torch.zeros(320)) for _ in range(2)]
        with SGD(pair, lr=1.0, comm=comm, density=1.0, overlap=overlap) as optimizer:
            sum(one.sum() for one in pair).backward()
            optimizer.step()
            pair[0].requires_grad_(False)
            with pytest.raises(ConfigError, match="parameter 0 is frozen"):
                optimizer.step()
            assert optimizer.state_dict()["ringcomm"]["steps"] == 1
            pair[0].requires_grad_(True)
            optimizer.step()
            assert all((one == -2.0).all() for one in pair)
        pair[0].requires_grad_(False)  # as the error says: the old one sends nothing any more
        with SGD(pair[1:], lr=1.0, comm=comm, density=1.0, overlap=overlap) as optimizer:
            optimizer.zero_grad()
            pair[1].sum().backward()
            optimizer.step()
        assert (pair[1] == -3.0).all()

    for overlap in (False, True):
        run_ranks(2, lambda comm, way=overlap: run(comm, way))


@pytest.mark.parametrize(
    ("make", "arguments", "told"),
    [
        (SGD, {"lr": -1.0}, "Invalid learning rate: -1.0"),
        (SGD, {"momentum": -0.1}, "Invalid momentum value: -0.1"),
        (SGD, {"weight_decay": -1.0}, "Invalid weight_decay value: -1.0"),
        (SGD, {"nesterov": True}, "Nesterov momentum requires a momentum"),
        (SGD, {"density": 0.0}, "Invalid density: 0.0"),
        (SGD, {"staleness": 2}, "Invalid staleness: 2"),
        (Adam, {"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
        (SGD, {"lr": "1"}, "Invalid learning rate: 1"),
        (Adam, {"betas": (0.9,)}, r"Invalid betas, give two numbers: \(0.9,\)"),
        (Adam, {"eps": -1.0}, "Invalid epsilon value: -1.0"),
        (Adam, {"values": "int8"}, "Invalid values"),
        (Adam, {"exchange": "ring"}, "Invalid exchange"),
    ],
)
def test_arguments_that_cannot_work(make: Made, arguments: dict[str, Any], told: str) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=told) as caught:
            make([torch.nn.Parameter(torch.zeros(3))], comm=comm, **arguments)
        assert isinstance(caught.value, ConfigError)

    run_ranks(1, run)


def test_nobody_has_a_gradient() -> None:
    def run(comm: Communicator) -> None:
        one = torch.nn.Parameter(torch.zeros(320))
        with SGD([one], comm=comm) as optimizer:
            for _ in range(2):
                optimizer.step()
            with pytest.raises(RingcommError, match="no gradient"):
                optimizer.step()

    run_ranks(2, run)


def test_it_learns_with_one_block_in_ten() -> None:
    """Less than half of the loss is left after steps in which dense SGD leaves about as much."""

    def run(comm: Communicator) -> tuple[float, float]:
        model = model_of(3)
        with SGD(model.parameters(), lr=0.2, momentum=0.5, comm=comm, density=0.1) as optimizer:
            first = loss_of(model, comm.rank, 0).item()
            for step in range(60):
                optimizer.zero_grad()
                loss_of(model, comm.rank, step).backward()
                optimizer.step()
            return first, loss_of(model, comm.rank, 0).item()

    first, last = run_ranks(2, run)[0]
    assert last < first / 2


def test_the_layout_follows_the_parameters() -> None:
    from ringcomm.torch.optim.span import IndexedParameter, filled

    parameters = [torch.nn.Parameter(torch.randn(5, 7)) for _ in range(5)]
    before = [one.detach().clone() for one in parameters]
    every = [IndexedParameter(i, 0, one) for i, one in enumerate(parameters)]
    made = [HostBucket(held, lambda *_: {}) for held in filled(every, 280, itemsize=4)]
    assert [[place.index for place in one.slices] for one in made] == [[4, 3], [2, 1], [0]]
    assert all(place.start % 16 == 0 for one in made for place in one.slices)
    assert [one.count for one in made] == [96, 96, 48]
    assert all(torch.equal(x, y) for x, y in zip(before, parameters, strict=True))
    assert (words(made[2].master[:35]) == words(before[0].numpy().ravel())).all()
