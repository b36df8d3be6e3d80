"""SGD with its momentum on the wire: equal to torch.optim.SGD where nothing is rounded."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from optim_steps import (
    THRESHOLD,
    Net,
    alike,
    flat,
    mean_gradients,
    set_gradients,
    steps_of,
)
from ranks import World, run_ranks

from ringcomm import Communicator
from ringcomm.torch.optim import SGD

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]

CASES: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"lr": 0.1, "momentum": 0.0},
    {"lr": 0.1, "momentum": 0.0, "dampening": 0.3},
    {"lr": 0.05, "momentum": 0.5, "dampening": 0.3},
    {"lr": 0.1, "maximize": True},
]
DECAYED: list[dict[str, Any]] = [
    {"lr": 0.1, "weight_decay": 0.01},
    {"lr": 0.1, "weight_decay": 0.01, "nesterov": True},
    {"lr": 0.1, "nesterov": True},
    {"lr": 0.1, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.02, "maximize": True},
]


def of_torch(ranks: int, steps: int, **settings: Any) -> torch.Tensor:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), **{"momentum": 0.9, **settings})
    for step in range(steps):
        if ranks == 1:
            set_gradients(model, 0, step)
        else:
            mean_gradients(model, ranks, step)
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("settings", CASES)
def test_one_rank_is_torchs_sgd(settings: dict[str, Any]) -> None:
    """But for a rounding more in each operation that torch's CPU kernels may fuse."""

    def body(comm: Communicator) -> torch.Tensor:
        def make(params: Any, comm: Communicator) -> SGD:
            return SGD(params, comm=comm, compression="onebit", threshold=THRESHOLD, **settings)

        return flat(steps_of(comm, make, range(5))[0])

    most = 5 * 4 * 2.0**-22  # of five steps four roundings each, of values below 8
    assert torch.allclose(run_ranks(1, body)[0], of_torch(1, 5, **settings), rtol=0, atol=most)


@pytest.mark.parametrize("settings", CASES + DECAYED)
def test_without_a_codec_it_is_torchs_sgd(settings: dict[str, Any]) -> None:
    ranks = 3

    def body(comm: Communicator) -> Any:
        def make(params: Any, comm: Communicator) -> SGD:
            return SGD(params, comm=comm, compression="none", **settings)

        return steps_of(comm, make, range(6))[0]

    models = run_ranks(ranks, body)
    assert alike(models)
    expected = of_torch(ranks, 6, **settings)
    assert torch.allclose(flat(models[0]), expected, rtol=1e-5, atol=1e-5)


def test_groups_have_their_own_rate_and_decay() -> None:
    def groups(model: Net) -> list[dict[str, Any]]:
        return [
            {"params": [model.embed, model.head], "lr": 0.1, "weight_decay": 0.1},
            {"params": [model.norm, model.filter, model.small, model.temperature], "lr": 0.01},
        ]

    def body(comm: Communicator) -> Net:
        model = Net()
        optimizer = SGD(groups(model), compression="none", comm=comm)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(5):
            set_gradients(model, comm.rank, step)
            optimizer.step()
            schedule.step()
        return model

    expected = Net()
    optimizer = torch.optim.SGD(groups(expected), momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(5):
        mean_gradients(expected, 2, step)
        optimizer.step()
        schedule.step()
    models = run_ranks(2, body)
    assert alike(models)
    assert torch.allclose(flat(models[0]), flat(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("codec", "ranks"), [("bf16", 3), ("int8", 2), ("int4", 3), ("onebit", 4)])
def test_ranks_have_the_same_bits(codec: str, ranks: int) -> None:
    def body(comm: Communicator) -> Net:
        def make(params: Any, comm: Communicator) -> SGD:
            return SGD(params, 0.01, compression=codec, comm=comm, threshold=THRESHOLD)  # type: ignore[arg-type]

        return steps_of(comm, make, range(4), Net(seed=comm.rank))[0]  # type: ignore[return-value]

    models = run_ranks(ranks, body)
    assert alike(models)
    assert torch.isfinite(flat(models[0])).all()
    assert not torch.equal(models[0].embed, Net(seed=0).embed)
    assert torch.equal(models[0].frozen, Net(seed=0).frozen)  # all have rank 0's


def test_what_has_arrived_and_what_is_left_is_what_was_sent() -> None:
    """With momentum 0 and lr 1 the parameters have the sum of what arrived."""
    steps = 30

    def body(comm: Communicator) -> tuple[torch.Tensor, dict[str, Any], list[Any]]:
        def make(params: Any, comm: Communicator) -> SGD:
            return SGD(params, 1.0, 0.0, compression="onebit", comm=comm, threshold=THRESHOLD)

        model, optimizer = steps_of(comm, make, range(steps))
        left = optimizer.feedback.gather_state_dict(comm)["tensors"]
        return model.embed.detach(), left, list(optimizer.spans)

    embed, left, spans = run_ranks(3, body)[0]
    span = next(span for span in spans if not span.is_small)
    place = next(place for place in span.slices if place.tensor.shape == embed.shape)
    lacks = left[f"momentum/{span.name}"]
    missing = place.of(lacks["worker"] + lacks["owner"])
    exact = Net().embed.detach().double()
    model = Net()
    for step in range(steps):
        mean_gradients(model, 3, step)
        exact -= model.embed.grad.double()
    assert (embed - exact).abs().max() > 0.1
    assert torch.allclose(embed - missing, exact.float(), atol=2e-4)


def test_a_bit_per_parameter() -> None:
    """Of the bytes that fp32 sends, 1-bit steps send at most a 28th, agreements included."""

    def sent(comm: Communicator, codec: str) -> tuple[int, int]:
        generator = torch.Generator().manual_seed(0)
        shapes = [(1024, 512), (1024,), (1024, 512), (512,)]
        params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
        optimizer = SGD(params, 0.1, compression=codec, comm=comm)  # type: ignore[arg-type]
        before = comm.stats()["wire_bytes"]
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        return comm.stats()["wire_bytes"] - before, optimizer.carried

    with World(2) as world:
        plain = world.run(lambda comm: sent(comm, "none"))
        bits = world.run(lambda comm: sent(comm, "onebit"))
    for (all_plain, own_plain), (all_bits, own_bits) in zip(plain, bits, strict=True):
        assert 28 * all_bits <= all_plain
        assert 28 * own_bits <= own_plain


def test_warm_up_steps_are_gentle() -> None:
    def body(comm: Communicator) -> list[int]:
        model, sent = Net(), []
        optimizer = SGD(model.parameters(), 0.1, warmup_steps=2, comm=comm, threshold=0)
        for step in range(4):
            before = optimizer.carried
            set_gradients(model, comm.rank, step)
            optimizer.step()
            sent.append(optimizer.carried - before)
        return sent

    first, second, third, fourth = run_ranks(2, body)[0]
    assert first == second > 5 * third
    assert third == fourth


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lr": -0.1}, "Invalid learning rate: -0.1"),
        ({"momentum": -1.0}, "Invalid momentum value: -1.0"),
        ({"weight_decay": -0.1}, "Invalid weight_decay value: -0.1"),
        (
            {"nesterov": True, "momentum": 0.0},
            "Nesterov momentum requires a momentum and zero dampening",
        ),
        ({"compression": "onebits"}, "did you mean onebit"),
        ({"compression": "onebits", "warmup_steps": 100}, "did you mean onebit"),
        ({"compression": "onebit-deepspeed"}, "has been removed; use 'onebit'"),
        ({"lr": "0.1"}, "Invalid learning rate: 0.1"),
        ({"dampening": "1"}, "Invalid dampening value: 1"),
        ({"warmup_steps": "2"}, "Invalid warmup_steps value: 2"),
        ({"max_norm": 0.0}, "max_norm"),
        ({"max_norm": "1"}, "Invalid max_norm: '1'"),
        ({"threshold": -1}, "threshold"),
        ({"span_bytes": 0}, "span_bytes"),
        ({"max_norm": 1.0, "overlap": True}, "give one of the two"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], text: str) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=text):
            SGD(Net().parameters(), comm=comm, **settings)

    run_ranks(1, body)
