"""Muon by owner-compute: torch's Muon of the mean gradient where nothing is rounded, and the same
bits on all ranks whatever is."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from optim_steps import gradient_of
from ranks import run_ranks
from torch import nn

from ringcomm import Communicator, ConfigError
from ringcomm.torch.optim import Muon

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]
beside_torchs = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="PyTorch has no Muon before 2.9"
)

SHAPES = ((48, 31), (16, 100), (64, 64), (5, 9), (100, 20))
EXACT: dict[str, Any] = {"gradients": "none", "updates": "bf16"}
Parameters = list[nn.Parameter]


def parameters() -> Parameters:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradient(index: int, rank: int, step: int) -> torch.Tensor:
    return gradient_of(f"matrix {index}", torch.Size(SHAPES[index]), rank, step)


def go_on(held: Parameters, optimizer: Any, rank: int, first: int, steps: int) -> Parameters:
    for step in range(first, first + steps):
        for index, parameter in enumerate(held):
            parameter.grad = gradient(index, rank, step)
        optimizer.step()
    return held


def trained(comm: Communicator, steps: int, **settings: Any) -> tuple[Parameters, Muon]:
    held = parameters()
    optimizer = Muon(held, comm=comm, **{"lr": 0.05, **settings})
    return go_on(held, optimizer, comm.rank, 0, steps), optimizer


def alike(worlds: list[Parameters]) -> bool:
    return all(torch.equal(a, b) for one in worlds for a, b in zip(worlds[0], one, strict=True))


@torch.no_grad()
def distance(held: Parameters, others: Parameters) -> float:
    """The largest distance of a matrix to the other one, by the length that it has moved."""
    moved = zip(held, others, parameters(), strict=True)
    return max(float((a - b).norm() / (b - start).norm()) for a, b, start in moved)


@beside_torchs
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "settings",
    [{}, {"nesterov": False, "weight_decay": 0.0}, {"adjust_lr_fn": "match_rms_adamw"}],
    ids=["default", "plain", "rms"],
)
def test_it_is_torchs_muon_of_the_mean(ranks: int, settings: dict[str, Any]) -> None:
    """With more ranks than matrices, too. Means of float32 differ in last bits, which bfloat16 may
    round apart."""
    worlds = run_ranks(ranks, lambda comm: trained(comm, 4, **EXACT, **settings)[0])
    assert alike(worlds)
    expected = parameters()
    optimizer = torch.optim.Muon(expected, lr=0.05, **settings)
    for step in range(4):
        for index, parameter in enumerate(expected):
            every = [gradient(index, rank, step) for rank in range(ranks)]
            parameter.grad = torch.stack(every).mean(0)
        optimizer.step()
    assert distance(worlds[0], expected) <= 0.02


@pytest.mark.parametrize(
    ("gradients", "updates", "most"),
    [("int8", "int4", 0.15), ("int4", "int4", 0.25), ("int8", "bf16", 0.05)],
)
def test_codecs(gradients: Any, updates: Any, most: float) -> None:
    exact = run_ranks(1, lambda comm: trained(comm, 1, **EXACT)[0])[0]

    def body(comm: Communicator) -> Parameters:
        """One gradient for all ranks, so that one rank's run has the same mean."""
        held = parameters()
        optimizer = Muon(held, lr=0.05, comm=comm, gradients=gradients, updates=updates)
        return go_on(held, optimizer, 0, 0, 1)

    worlds = run_ranks(3, body)
    assert alike(worlds)
    assert 0 < distance(worlds[0], exact) <= most


def test_bytes_of_a_step() -> None:
    """One of each gradient and half a one of each update, to each of the other ranks' rows."""

    def body(comm: Communicator) -> int:
        held = [nn.Parameter(torch.ones(64, 128)) for _ in range(8)]
        optimizer = Muon(held, comm=comm)
        sent = []
        for _ in range(2):
            for parameter in held:
                parameter.grad = torch.ones_like(parameter)
            before = optimizer.carried
            optimizer.step()
            sent.append(optimizer.carried - before)
        return sent[1]

    elements = 8 * 64 * 128
    for sent in run_ranks(2, body):
        assert 0.5 * 1.5 * elements <= sent <= 0.5 * (1.02 + 0.54) * elements + 2000


@beside_torchs
def test_a_gathered_state_fits_torchs_muon() -> None:
    def save(comm: Communicator) -> tuple[dict[str, Any], list[torch.Tensor]]:
        held, optimizer = trained(comm, 3, **EXACT)
        return optimizer.gather_state_dict(), [p.detach().clone() for p in held]

    state, weights = run_ranks(2, save)[0]

    def load(comm: Communicator) -> Parameters:
        held = [nn.Parameter(weight.clone()) for weight in weights]
        optimizer = Muon(held, comm=comm, **EXACT)
        optimizer.load_state_dict(state)
        assert optimizer.steps == 3
        assert optimizer.param_groups[0]["lr"] == 0.05
        return go_on(held, optimizer, 0, 3, 2)  # one gradient for all ranks

    worlds = run_ranks(3, load)
    assert alike(worlds)
    expected = [nn.Parameter(weight.clone()) for weight in weights]
    theirs = torch.optim.Muon(expected)
    theirs.load_state_dict(state)
    go_on(expected, theirs, 0, 3, 2)
    assert distance(worlds[0], expected) <= 0.02


def test_residuals_survive_another_world() -> None:
    """With all that results lack: of a mean over the ranks, whatever their number."""

    def again(comm: Communicator, state: Any) -> Any:
        optimizer = Muon(parameters(), comm=comm, gradients="int4")
        optimizer.load_state_dict(state)
        return optimizer.gather_state_dict()

    state = run_ranks(2, lambda comm: trained(comm, 3, gradients="int4")[1].gather_state_dict())[0]
    for found in run_ranks(3, lambda comm: again(comm, state)):
        for index, kept in state["state"].items():
            assert kept["residual"].norm() > 0
            for name, value in kept.items():
                torch.testing.assert_close(found["state"][index][name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["own", "gathered"])
def test_a_codec_without_residuals_delivers_those_of_a_state(kind: str) -> None:
    def body(comm: Communicator) -> None:
        before = trained(comm, 3, gradients="int4")[1]
        gathered = before.gather_state_dict()
        optimizer = Muon(parameters(), comm=comm, gradients="bf16", updates="none")
        optimizer.load_state_dict(before.state_dict() if kind == "own" else gathered)
        group = optimizer.param_groups[0]
        group["momentum"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        after = optimizer.gather_state_dict()["state"]
        for index, kept in gathered["state"].items():
            assert not after[index]["residual"].any()
            moved = after[index]["momentum_buffer"]  # what all results lacked, as the mean gradient
            assert (moved - kept["residual"]).norm() <= 0.01 * kept["residual"].norm()

    run_ranks(2, body)


def test_states_that_do_not_fit() -> None:
    states = run_ranks(2, lambda comm: trained(comm, 1)[1].state_dict())

    def refuses(comm: Communicator) -> None:
        optimizer = trained(comm, 1)[1]
        before = optimizer.state_dict()
        thin = [nn.Parameter(torch.ones(1, shape[1])) for shape in SHAPES]
        other = Muon(thin, comm=comm)
        for parameter in thin:
            parameter.grad = torch.ones_like(parameter)
        other.step()
        for state, text in (
            (states[0], "world of the same size"),
            ({"state": {}, "param_groups": []}, "none of ringcomm's Muon"),
            (other.gather_state_dict(), "momentum_buffer of parameter"),
        ):
            with pytest.raises(ConfigError, match=text):
                optimizer.load_state_dict(state)
        after = optimizer.state_dict()
        for index, kept in before["state"].items():
            assert torch.equal(after["state"][index]["momentum_buffer"], kept["momentum_buffer"])

    run_ranks(1, refuses)

    def swapped(comm: Communicator) -> None:
        optimizer = trained(comm, 1)[1]
        optimizer.load_state_dict(states[1 - comm.rank])
        assert not any(kept["momentum_buffer"].any() for kept in optimizer.state.values())

    with pytest.warns(UserWarning, match="starts from zero"):
        run_ranks(2, swapped)


def test_all_ranks_may_load_what_rank_0_has_saved() -> None:
    """Its residuals start from zero on the others, on which they have the same names."""
    state = run_ranks(2, lambda comm: trained(comm, 2, gradients="int4")[1].state_dict())[0]

    def load(comm: Communicator) -> None:
        optimizer = trained(comm, 0)[1]
        optimizer.load_state_dict(state)
        go_on(optimizer.param_groups[0]["params"], optimizer, comm.rank, 2, 1)
        optimizer.gather_state_dict()

    with pytest.warns(UserWarning, match="starts from zero"):
        run_ranks(2, load)


def test_residuals_begin_at_zero_where_a_state_has_none() -> None:
    state = run_ranks(1, lambda comm: trained(comm, 1)[1].gather_state_dict())[0]

    def load(comm: Communicator) -> None:
        optimizer = trained(comm, 1, gradients="int4")[1]
        optimizer.load_state_dict(state)
        found = optimizer.gather_state_dict()["state"]
        assert not any(kept["residual"].any() for kept in found.values())

    run_ranks(2, load)


def test_a_step_that_is_not_finite_on_one_rank_is_left_out_on_all() -> None:
    def body(comm: Communicator) -> Parameters:
        held, optimizer = trained(comm, 1)
        before = [p.detach().clone() for p in held]
        for index, parameter in enumerate(held):
            parameter.grad = gradient(index, comm.rank, 1)
        if comm.rank == 1:
            held[2].grad = torch.full(SHAPES[2], float("inf"))
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))
        assert (optimizer.steps, optimizer.skipped) == (1, 1)
        return go_on(held, optimizer, comm.rank, 2, 1)

    with pytest.warns(UserWarning, match="a gradient is not finite"):
        assert alike(run_ranks(2, body))


def test_a_matrix_without_a_gradient_stays() -> None:
    def body(comm: Communicator) -> Parameters:
        held, optimizer = trained(comm, 1)
        before = [p.detach().clone() for p in held]
        for index, parameter in enumerate(held):
            parameter.grad = gradient(index, comm.rank, 1)
        held[1].grad = None  # of no rank
        held[2].grad = gradient(2, 0, 1) if comm.rank == 0 else None
        optimizer.step()
        assert torch.equal(held[1], before[1])
        assert not torch.equal(held[2], before[2])
        return held

    assert alike(run_ranks(2, body))


@pytest.mark.parametrize("gradients", ["none", "int4"])
def test_the_momentum_of_a_matrix_without_a_gradient_stays(gradients: Any) -> None:
    """As in torch.optim.Muon, but for what a state's residuals bring, which is added to it."""

    def body(comm: Communicator) -> None:
        before = trained(comm, 3, gradients="int4")[1]
        state = before.gather_state_dict()
        held = parameters()
        optimizer = Muon(held, comm=comm, gradients=gradients)
        optimizer.load_state_dict(before.state_dict())
        for step in range(3, 40):
            held[0].grad = gradient(0, comm.rank, step)
            optimizer.step()
        found, kept = optimizer.gather_state_dict()["state"][1], state["state"][1]
        expected = kept["momentum_buffer"] + 0.05 * kept["residual"]
        assert kept["residual"].any()
        torch.testing.assert_close(found["momentum_buffer"], expected, rtol=1e-5, atol=1e-6)

    run_ranks(2, body)


def test_a_clipped_step_is_one_of_smaller_gradients() -> None:
    """Muon's update has no scale, but its momentum has."""

    def body(comm: Communicator, max_norm: float | None) -> torch.Tensor:
        _, optimizer = trained(comm, 1, max_norm=max_norm, **EXACT)
        return optimizer.gather_state_dict()["state"][0]["momentum_buffer"]

    plain = run_ranks(2, lambda comm: body(comm, None))[0]
    clipped = run_ranks(2, lambda comm: body(comm, 1e-3))[0]
    ratio = clipped / plain
    assert float(ratio.max()) < 0.01
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lr": -1.0}, "Invalid lr value: -1.0"),
        ({"momentum": -0.1}, "Invalid momentum value: -0.1"),
        ({"ns_steps": 5.0}, "ns_steps"),
        ({"ns_coefficients": (1.0, 2.0)}, "give three numbers"),
        ({"ns_coefficients": 3.0}, "give three numbers"),
        ({"ns_steps": 100}, "give less than 100"),
        ({"max_norm": 0}, "Invalid max_norm: 0"),
        ({"adjust_lr_fn": "mine"}, "Invalid adjust_lr_fn: 'mine'"),
        ({"gradients": "int3"}, "gradients="),
        ({"compression": "int4"}, "no argument 'compression'"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], text: str) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ConfigError, match=text):
            Muon(parameters(), comm=comm, **settings)

    run_ranks(1, body)


def test_what_overflows_on_the_way_changes_no_momentum() -> None:
    def body(comm: Communicator) -> Parameters:
        held, optimizer = trained(comm, 1, gradients="fp16")
        before = [kept["momentum_buffer"].clone() for kept in optimizer.state.values()]
        for parameter in held:
            parameter.grad = torch.full_like(parameter, 1e5)
        optimizer.step()
        after = [kept["momentum_buffer"] for kept in optimizer.state.values()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert optimizer.skipped == 1
        return held

    with pytest.warns(UserWarning, match="the update of this rank's matrices is zero"):
        worlds = run_ranks(2, body)
    assert alike(worlds)
    assert all(parameter.isfinite().all() for parameter in worlds[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_and_groups(dtype: torch.dtype) -> None:
    def body(comm: Communicator) -> Parameters:
        held = [nn.Parameter(p.detach().to(dtype)) for p in parameters()]
        optimizer = Muon(held[:2], 0.05, comm=comm)
        optimizer.add_param_group({"params": held[2:], "adjust_lr_fn": "match_rms_adamw"})
        for step in range(3):
            for index, parameter in enumerate(held):
                parameter.grad = gradient(index, comm.rank, step).to(dtype)
            optimizer.step()
        with pytest.raises(ConfigError, match="Invalid adjust_lr_fn: 'mine'"):
            optimizer.add_param_group({"params": held[2:], "adjust_lr_fn": "mine"})
        return held

    worlds = run_ranks(2, body)
    assert alike(worlds)
    moved = zip(worlds[0], parameters(), strict=True)
    assert all(not torch.equal(one.float(), start) for one, start in moved)


def test_a_parameter_that_has_changed_its_dtype() -> None:
    def body(comm: Communicator) -> None:
        held, optimizer = trained(comm, 1)
        held[0].data = held[0].data.bfloat16()
        with pytest.raises(ConfigError, match=r"make the optimizer after model.to\(\)"):
            optimizer.step()

    run_ranks(1, body)


def test_vectors_are_for_another_optimizer() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ConfigError, match=r"Muon takes matrices: \[4\]"):
            Muon([nn.Parameter(torch.zeros(4))], comm=comm)
        held, optimizer = trained(comm, 1)
        with pytest.raises(ConfigError, match=r"Muon takes matrices: \[4\]"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(4))]})
        go_on(held, optimizer, comm.rank, 1, 1)

    run_ranks(1, body)
