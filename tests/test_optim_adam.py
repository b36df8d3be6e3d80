"""OneBitAdam against references written from the papers, and what it promises of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from onebit_reference import Blocks, FrozenAdam, Settings
from optim_cases import (
    Given,
    assert_alike,
    assert_follows,
    flat,
    follow,
    give,
    gradient,
    gradients,
    parameters,
    start_values,
    train,
)
from ranks import run_ranks
from reference import Array
from tensors import stored

from ringcomm import Communicator
from ringcomm.errors import ConfigError
from ringcomm.torch.optim import OneBitAdam
from ringcomm.torch.optim.adam import FreezePoint, Renewals, Units
from ringcomm.torch.optim.arithmetic import norm, total

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]

SHAPES = [(32, 40), (16, 48)]  # whole blocks, so that nothing is between them
HYPER = Settings(lr=0.01, b1=0.9, b2=0.95, eps=1e-8, decay=0.1)
TORCH: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def test_elements_without_a_variance_stay_where_they_are() -> None:
    """As a symbol that never occurs. Without the mask they are NaN where eps is 0."""
    shapes, n, steps, dead = [(64, 32)], 3, 12, 40
    start = start_values(shapes)
    open_ = FrozenAdam(start[0], Settings(eps=0.0), 3, Blocks(2048, n), n, masked=False)
    for step in range(1, steps + 1):
        grads = gradients(shapes, step, n, dead)
        with np.errstate(all="ignore"):
            open_.step([one[0] for one in grads])
    assert np.isnan(open_.p[:dead]).all()

    for refresh in (None, "exponential"):
        outcomes = train(
            lambda params, comm, refresh=refresh: OneBitAdam(
                params, eps=0.0, weight_decay=0.0, freeze=3, refresh=refresh, comm=comm, threshold=0
            ),
            shapes,
            n,
            steps,
            dead,
        )
        ours = outcomes[0][0][-1][0]
        assert np.isfinite(ours).all()
        assert ours[:dead].tobytes() == start[0][:dead].tobytes()
        assert (ours[dead:] != start[0][dead:]).all()


# ---- the default form ----


@pytest.mark.parametrize(("n", "refresh"), [(1, "exponential"), (2, None), (3, "exponential")])
def test_the_update_is_that_of_its_formula(n: int, refresh: Any) -> None:
    """Over freeze and renewals, with elements that have no variance."""
    steps, freeze, dead = 22, 6, 5
    due = [7, 8, 9, 10, 12, 14, 16, 18, 22] if refresh else []
    bounds = np.cumsum([np.prod(shape) for shape in SHAPES[::-1]])  # as they travel

    def reference(given: Given) -> Iterator[list[Array]]:
        start = np.concatenate(given.start()[::-1])
        adam = FrozenAdam(start, HYPER, freeze, Blocks(len(start), n), n, due)
        for step in range(1, steps + 1):
            adam.step([np.concatenate(one[::-1]) for one in given.gradients(step)])
            yield np.split(adam.p, bounds[:-1])[::-1]

    expected = follow(reference, SHAPES, n, dead)
    outcomes = train(
        lambda params, comm: OneBitAdam(
            params,
            **TORCH,
            freeze=freeze,
            refresh=refresh,
            dense="none",
            comm=comm,
            threshold=0,
        ),
        SHAPES,
        n,
        steps,
        dead,
        after=lambda optimizer: optimizer.renewals,
        seed=expected.seed,
    )
    assert_alike(outcomes)
    assert outcomes[0][1] == len(due)
    assert_follows(outcomes[0][0], expected)


def test_the_dense_stage_is_adamw() -> None:
    """On the mean gradient."""
    n, steps = 2, 12
    outcomes = train(
        lambda params, comm: OneBitAdam(
            params, **TORCH, freeze=99, dense="none", comm=comm, threshold=0
        ),
        SHAPES,
        n,
        steps,
    )

    def reference(given: Given) -> Iterator[list[Array]]:
        params = [torch.nn.Parameter(torch.from_numpy(one)) for one in given.start()]
        adamw = torch.optim.AdamW(params, **TORCH)
        for step in range(1, steps + 1):
            give(params, [sum(same) / n for same in zip(*given.gradients(step), strict=True)])
            adamw.step()
            yield flat(params)

    assert_follows(outcomes[0][0], follow(reference, SHAPES, n))


def test_no_momentum_is_lost_over_renewals() -> None:
    """In units of the momentum: what was applied, and what is left, is what all ranks gave."""
    n, steps, freeze, shapes = 3, 40, 5, [(32, 40)]

    def body(comm: Communicator) -> float:
        params = parameters(shapes)
        optimizer = OneBitAdam(params, **TORCH, freeze=freeze, comm=comm, threshold=0)
        given = np.zeros(1280)
        applied = np.zeros(1280)
        state: Any = optimizer.state[params[0]]
        for step in range(1, steps + 1):
            grads = gradients(shapes, step, n)
            moment = state["exp_avg"].numpy().reshape(-1).copy() if step > 1 else None
            give(params, grads[comm.rank])
            optimizer.step()
            state = optimizer.state[params[0]]
            if step > freeze and moment is not None:
                given += 0.9 * moment + 0.1 * np.mean([one[0] for one in grads], axis=0)
                applied += state["exp_avg"].numpy().reshape(-1)
        (name,) = optimizer.feedback
        left = optimizer.feedback[name].gather_state_dict(comm)
        (tile,) = optimizer.spans[0].tiles()
        units = Units().of(tile).numpy()
        rest = (np.asarray(left["worker"]) + np.asarray(left["owner"])) * units
        assert np.abs(rest).max() > 1e-4
        return float(np.abs(given - applied - rest).max())

    assert max(run_ranks(n, body)) <= 2e-6


@pytest.mark.parametrize("n", [2, 3])
def test_a_renewed_variance_is_between_its_bounds(n: int) -> None:
    """From w / n to w, where Adam's v is from 0 to w. The least is of gradients that oscillate on
    all ranks together, which makes steps of sqrt(n) times Adam's."""
    steps, b2, count = 20, 0.95, 512  # the last renewal is in the last step
    rng = np.random.default_rng(5)
    fixed, swinging, own = 10.0 ** rng.uniform(-2, 0, (3, count))
    fixed[:256] = own[:256] = 0.0
    grads = [
        [fixed + swinging * (-1) ** step + own * rng.standard_normal(count) for _ in range(n)]
        for step in range(steps)
    ]
    weights = (1 - b2) * b2 ** np.arange(steps)[::-1] / (1 - b2**steps)
    adams = weights @ np.mean(grads, axis=1) ** 2
    ranks_own = weights @ np.mean(np.square(grads), axis=1)

    def body(comm: Communicator) -> Any:
        parameter = torch.nn.Parameter(torch.zeros(16, 32))
        optimizer = OneBitAdam(
            [parameter], betas=(0.9, b2), freeze=4, dense="none", comm=comm, threshold=1024
        )
        for one in grads:
            give([parameter], [one[comm.rank].astype(np.float32)])
            optimizer.step()
        assert optimizer.renewals == 9  # 5, 6, 7, 8, 10, 12, 14, 16, 20
        return flat([optimizer.state[parameter]["exp_avg_sq"]])[0]

    for renewed in run_ranks(n, body):
        rounded = 1 + 1e-5  # 20 sums of float32
        assert bool((renewed * rounded >= ranks_own / n).all())
        assert bool((renewed <= ranks_own * rounded).all())
        assert bool((ranks_own * rounded >= adams).all())
        longer = np.sqrt(adams[:256] / renewed[:256])  # 1 bit's noise in m makes v larger
        assert 0.9 * np.sqrt(n) < longer.min() <= longer.max() < np.sqrt(n) * rounded


def test_renewals_come_at_growing_intervals() -> None:
    """Four of each length, up to the longest."""
    renewals = Renewals(4, 8)
    renewals.begin(10)
    due = []
    for step in range(11, 100):
        if renewals.is_due(step):
            due.append(step)
            renewals.advance(step)
    assert due == [11, 12, 13, 14, 16, 18, 20, 22, 26, 30, 34, 38, 42, 50, 58, 66, 74, 82, 90, 98]


def test_the_freeze_point_waits_for_a_stable_variance() -> None:
    """Not while the rate rises, nor while the sum falls; at last in any case."""

    def frozen(sizes: Any, rates: Any) -> int | None:
        point = FreezePoint("stable", beta2=0.95, renews=False)
        for step in range(1, 400):
            if point.is_due(step):
                point.look(step, sizes(step), [rates(step)])
        return point.step

    assert frozen(lambda step: 1.0, lambda step: 1.0) == 21
    assert frozen(lambda step: 1.0, lambda step: min(step, 50)) == 51
    assert frozen(lambda step: 1.0 + 10 * 0.9**step, lambda step: 1.0) == 71  # 4 % in 20 steps
    assert frozen(lambda step: 1.01**step, lambda step: 1.0) == 101


@pytest.mark.parametrize("rising", [0, 1])
def test_the_variance_is_not_frozen_while_a_groups_rate_rises(rising: int) -> None:
    """Whichever group it is, and over a restart."""

    def body(comm: Communicator) -> int | None:
        params = parameters([(2, 2), (2, 2)])
        rates = [0.1, 0.1]

        def made() -> OneBitAdam:
            groups = [{"params": [one], "lr": lr} for one, lr in zip(params, rates, strict=True)]
            return OneBitAdam(groups, betas=(0.9, 0.8), comm=comm, threshold=0)

        optimizer = made()
        for step in range(1, 20):
            rates[rising] = optimizer.param_groups[rising]["lr"] = 0.1 * min(step, 12)
            for one in params:
                one.grad = torch.ones_like(one)
            optimizer.step()
            if step == 9:
                state = stored(optimizer.state_dict())
                optimizer = made()
                optimizer.load_state_dict(state)
        return optimizer.frozen_at

    assert run_ranks(2, body) == [13, 13]


@pytest.mark.parametrize("decays", [(0.8, 0.95), (0.95, 0.8)])
def test_each_groups_variance_has_its_own_bias(decays: tuple[float, float]) -> None:
    """So the sum of constant squares is stable from the first step on."""

    def body(comm: Communicator) -> int | None:
        params = parameters([(2, 2), (2, 2)])
        groups = [
            {"params": [one], "betas": (0.9, decay)}
            for one, decay in zip(params, decays, strict=True)
        ]
        optimizer = OneBitAdam(groups, betas=(0.9, 0.8), comm=comm, threshold=0)
        for _ in range(8):
            for one in params:
                one.grad = torch.ones_like(one)
            optimizer.step()
        return optimizer.frozen_at

    assert run_ranks(2, body) == [6, 6]


def test_the_freeze_point_reads_the_rate_of_an_earlier_version() -> None:
    point = FreezePoint("stable", beta2=0.8, renews=False)
    for step in range(1, 6):
        point.look(step, 1.0, [0.1 * step])
    state = point.saved()
    (state["rate"],) = state["rate"]
    point.restore(state)
    for step in range(6, 9):
        point.look(step, 1.0, [0.1 * min(step, 7)])
    assert point.step == 8


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"betas": (1.0, 0.999)}, "Invalid beta parameter at index 0: 1.0"),
        ({"betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
        ({"betas": (0.9,)}, r"Invalid betas, give two numbers: \(0.9,\)"),
        ({"betas": 0.9}, "Invalid betas, give two numbers: 0.9"),
        ({"betas": ("0.9", 0.999)}, "Invalid beta parameter at index 0: 0.9"),
        ({"freeze": None}, "Invalid freeze value.*: None"),
        ({"freeze": 0.1}, "Invalid freeze value, give the number of a step, or 'stable': 0.1"),
        ({"total_steps": 9}, "total_steps= has been removed"),
        ({"units": "update"}, "units= has been removed"),
        ({"eps": -1e-8}, "Invalid epsilon value: -1e-08"),
        ({"weight_decay": -0.1}, "Invalid weight_decay value: -0.1"),
        ({"freeze": 0}, "Invalid freeze value.*: 0"),
        ({"freeze": "later"}, "Invalid freeze value.*: 'later'"),
        ({"refresh": "always"}, "Invalid refresh value: 'always'"),
        ({"compression": "onebits"}, "did you mean onebit"),
        ({"compression": "onebits", "refresh": None}, "did you mean onebit"),
        ({"dense": "bf15"}, "dense='bf15' is unknown"),
    ],
)
def test_hyperparameters_are_refused_in_the_words_of_torch(bad: Any, text: str) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=text) as caught:
            OneBitAdam(parameters([(4, 4)]), comm=comm, **bad)
        assert isinstance(caught.value, ConfigError)

    run_ranks(1, body)


def test_parameters_behind_the_freeze() -> None:
    """They have no variance: refused without renewals, else they wait for one."""
    shapes = [(16, 32), (32, 16)]

    def body(comm: Communicator, refresh: Any) -> bool:
        params = parameters(shapes)
        optimizer = OneBitAdam(params[:1], freeze=2, refresh=refresh, comm=comm, threshold=0)
        for step in range(1, 12):
            if step == 6:
                optimizer.add_param_group({"params": params[1:]})
            give(params, gradient(shapes, step, comm.rank))
            optimizer.step()
        return flat(params)[1].tobytes() != start_values(shapes)[1].tobytes()

    assert run_ranks(2, lambda comm: body(comm, "exponential")) == [True, True]
    with pytest.raises(ConfigError, match="added after the freeze"):
        run_ranks(2, lambda comm: body(comm, None))


# ---- what goes on around it ----


def _go(params: Any, optimizer: Any, comm: Communicator, first: int, last: int) -> None:
    for step in range(first, last):
        give(params, gradient(SHAPES, step, comm.rank))
        optimizer.step()


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(
    ("refresh", "units", "text"),
    [
        ("exponential", "update", r"units='update'.* removed"),  # of earlier versions
        (None, "bounded", "state is of refresh=None"),
    ],
)
def test_states_of_other_settings_are_refused(
    refresh: Any, units: str, text: str, steps: int
) -> None:
    """Before anything changes."""

    def body(comm: Communicator) -> None:
        params = parameters(SHAPES)
        other = OneBitAdam(params, lr=0.5, freeze=1, refresh=refresh, comm=comm, threshold=0)
        _go(params, other, comm, 0, steps)
        state = other.state_dict()
        state["ringcomm"]["rule"]["units"] = units
        optimizer = OneBitAdam(params, freeze=1, comm=comm, threshold=0)
        _go(params, optimizer, comm, 0, 1)
        with pytest.raises(ConfigError, match=text):
            optimizer.load_state_dict(state)
        assert (optimizer.steps, optimizer.param_groups[0]["lr"]) == (1, 1e-3)

    run_ranks(2, body)


@pytest.mark.filterwarnings("ignore:a gradient is not finite")
def test_a_step_that_is_left_out_changes_nothing() -> None:
    """At the last dense step, at a renewal and between: states, residuals and the schedule."""

    def body(comm: Communicator, bad: set[int]) -> list[bytes]:
        params = parameters(SHAPES)
        optimizer = OneBitAdam(params, **TORCH, freeze=4, comm=comm, threshold=0)
        for step in range(1, 16):
            if step in bad:
                grads = gradient(SHAPES, 99, comm.rank)
                grads[0][3] = np.inf if comm.rank == 1 else 0.0
                give(params, grads)
                optimizer.step()
            give(params, gradient(SHAPES, step, comm.rank))
            optimizer.step()
        assert optimizer.frozen_at == 4
        assert optimizer.renewals == 7  # 5, 6, 7, 8, 10, 12, 14
        return [one.tobytes() for one in flat(params)]

    assert run_ranks(2, lambda comm: body(comm, {4, 5, 9, 12})) == run_ranks(
        2, lambda comm: body(comm, set())
    )


def test_overlap_changes_no_bit() -> None:
    """Exchanges that begin in backward, over freeze and renewals."""

    def body(comm: Communicator, overlap: bool) -> list[bytes]:
        model = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16)
        )
        shapes = [tuple(one.shape) for one in model.parameters()]
        for parameter, values in zip(model.parameters(), start_values(shapes), strict=True):
            parameter.detach().copy_(torch.from_numpy(values).view(parameter.shape))
        optimizer = OneBitAdam(
            model.parameters(), **TORCH, freeze=3, comm=comm, threshold=0, overlap=overlap
        )
        for step in range(12):
            x = torch.from_numpy(gradient([(8, 32)], step, comm.rank)[0]).view(8, 32)
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        assert optimizer.renewals == 6
        return [one.tobytes() for one in flat(list(model.parameters()))]

    assert run_ranks(2, lambda comm: body(comm, True)) == run_ranks(
        2, lambda comm: body(comm, False)
    )


def test_sums_do_not_depend_on_the_order() -> None:
    """Backwards, and in threads' pieces, a float32 sum differs; these do not."""
    values = torch.from_numpy(np.random.default_rng(0).lognormal(0, 4, 100_003)).float()
    assert total(values) == total(values.flip(0)) == total(values[torch.randperm(len(values))])
    assert total(values) == pytest.approx(float(values.double().sum()), rel=1e-9)
    assert norm(values) == pytest.approx(float(values.double().norm()), rel=1e-9)
    assert total(torch.zeros(5)) == 0.0
    assert total(torch.zeros(0)) == 0.0
    assert np.isnan(total(torch.tensor([1.0, float("nan")])))
    assert np.isinf(total(torch.tensor([1.0, float("inf")])))
