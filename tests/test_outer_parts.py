"""The parts of OuterStep, each by itself, without a communicator."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from outer_training import net
from torch import nn

from ringcomm import ConfigError, MismatchError
from ringcomm.torch.outer import Nesterov, Sparse
from ringcomm.torch.outer.blocks import Block, buffers_of, cut, trained_of
from ringcomm.torch.outer.inner_steps import follow_scaler, follow_steps, optimizers_of
from ringcomm.torch.outer.round import Header, Headers, Hello, Hellos
from ringcomm.torch.outer.rounds import RoundPace
from ringcomm.torch.outer.rules import rule_of
from ringcomm.torch.outer.wires import DenseWires
from ringcomm.torch.wrapped import inner_of

pytestmark = pytest.mark.torch


def block_of(tensors: Sequence[tuple[str, torch.Tensor]], align: int = 1) -> Block:
    wires = DenseWires(None, None)
    wires.align = align
    return Block("a block", tensors, rule_of("mean"), wires)


# ---- rules ----


@pytest.mark.parametrize("mu", [0.0, 0.5, 0.9])
def test_nesterov_is_torchs(mu: float) -> None:
    rule, found = Nesterov(0.3, mu), torch.randn(50)
    theirs = nn.Parameter(found.clone())
    optimizer = torch.optim.SGD([theirs], 0.3, momentum=mu, nesterov=mu > 0)
    memory = rule.memory(found)
    for _ in range(5):
        mean = torch.randn(50)
        theirs.grad = mean.clone()
        optimizer.step()
        rule.step(found, mean.clone(), memory)
    torch.testing.assert_close(found, theirs.detach(), rtol=1e-6, atol=1e-6)


def test_rules_that_are_the_mean() -> None:
    anchor, mean = torch.randn(9), torch.randn(9)
    for rule in (rule_of("mean"), Sparse(gamma=1.0)):
        found = anchor.clone()
        rule.step(found, mean.clone(), rule.memory(found))
        assert torch.equal(found, anchor - mean)
    whole, change = torch.tensor([5, 7]), torch.tensor([2, -1])
    rule_of("mean").step(whole, change, {})
    assert whole.tolist() == [3, 8]


def test_the_law_of_rate_and_momentum() -> None:
    assert (Nesterov().gamma, Nesterov().mu) == (pytest.approx(0.7), 0.5)
    for one in (Nesterov(mu=0.9), Nesterov(gamma=0.35), Nesterov(mu=0.0)):
        assert one.gamma / (1 - one.mu) == pytest.approx(1.4)
    assert Nesterov(gamma=2.0).mu == 0.0
    assert (Nesterov(0.7, 0.9).gamma, Nesterov(0.7, 0.9).mu) == (0.7, 0.9)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Nesterov(0.0, 0.0), "Invalid gamma: 0.0"),
        (lambda: Nesterov(math.nan, 0.0), "Invalid gamma: nan"),
        (lambda: Nesterov(0.7, 1.0), "Invalid mu: 1.0"),
        (lambda: Nesterov(-0.7), "Invalid gamma: -0.7"),
        (lambda: Nesterov(0.7, True), "Invalid mu: True"),
        (lambda: Sparse(0.0), "Invalid density: 0.0"),
        (lambda: Sparse(decay=1.5), "Invalid decay: 1.5"),
        (lambda: Sparse(aggregate="sum"), "Invalid aggregate: 'sum'"),
        (lambda: RoundPace("ends"), "Invalid every: 'ends'"),  # type: ignore[arg-type]
        (lambda: RoundPace(2.5), "Invalid every: 2.5"),  # type: ignore[arg-type]
        (lambda: RoundPace(True), "Invalid every: True"),
        (lambda: rule_of("nesterow"), "did you mean nesterov"),
        (lambda: rule_of(Nesterov), "give one of mean, nesterov, sparse"),
        (lambda: cut(trained_of(nn.Linear(2, 2)), 3), "Invalid fragments: 3"),
        (lambda: optimizers_of("adam"), "give a torch.optim.Optimizer"),
    ],
)
def test_bad_settings(make: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert text in str(caught.value)
    assert isinstance(caught.value, ValueError)


# ---- what is trained meanwhile ----


def test_a_block_carries_its_progress_to_the_anchor() -> None:
    layer = nn.Linear(3, 5)
    block = block_of(list(layer.named_parameters()), align=16)
    at_send, anchor = block.local(), torch.randn(block.count)
    block.anchor = anchor
    block.rebase(at_send)  # no progress: the anchor, to the bit
    for base, tensor in zip(block.parts(anchor), (s.tensor for s in block.slices), strict=True):
        assert torch.equal(tensor, base)
    at_send = block.local()
    with torch.no_grad():
        layer.weight += 2.0
    block.rebase(at_send)
    torch.testing.assert_close(layer.weight.detach(), block.named(anchor)[0][1] + 2.0)
    assert torch.equal(layer.bias.detach(), block.named(anchor)[1][1])


# ---- paces ----


@given(every=st.integers(1, 40), fragments=st.integers(1, 12), rounds=st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_each_fragment_has_a_round_every_so_many(every: int, fragments: int, rounds: int) -> None:
    fragments = min(every, fragments)
    pace = RoundPace(every, fragments)
    sent: dict[int, list[int]] = {number: [] for number in range(fragments)}
    number = 0
    for iteration in range(1, every * rounds + 1):
        if pace.is_due(iteration):
            sent[number % fragments].append(iteration)
            number += 1
            pace.advance()
            assert not pace.is_due(iteration)
    for moments in sent.values():
        assert len(moments) == rounds
        assert all(b - a == every for a, b in itertools.pairwise(moments))


def test_a_pace_of_none_is_never_due() -> None:
    pace = RoundPace(None)
    pace.advance()  # by a flush
    assert not any(pace.is_due(iteration) for iteration in range(100))
    pace.restore(pace.saved())


def test_pace_goes_on_from_its_state() -> None:
    pace = RoundPace(6, 4)
    for iteration in range(1, 11):
        if pace.is_due(iteration):
            pace.advance()
    again = RoundPace(6, 4)
    again.restore(pace.saved())
    assert [again.is_due(i) for i in range(9, 15)] == [pace.is_due(i) for i in range(9, 15)]


# ---- fragments and blocks ----


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 3)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(5))
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 11)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))


def test_fragments_are_strided_layers() -> None:
    model = Tied()
    parts = cut(trained_of(model), 3)
    layers = [sorted({".".join(name.split(".")[:-1]) for name, _ in part}) for part in parts]
    assert layers == [
        ["blocks.2", "embedding", "norm"],
        ["blocks.0", "blocks.3", "head"],
        ["blocks.1", "blocks.4"],
    ]
    names = [name for part in parts for name, _ in part]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    floating, whole = buffers_of(model)
    assert [name for name, _ in floating] == ["norm.running_mean", "norm.running_var"]
    assert [name for name, _ in whole] == ["norm.num_batches_tracked"]
    assert inner_of(nn.DataParallel(model)) is model
    assert len(cut(trained_of(nn.Linear(2, 2)), 2)) == 2  # fewer layers: by parameters


@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=6),
    align=st.sampled_from([1, 16, 256]),
)
@settings(deadline=None, max_examples=60)
def test_a_block_holds_every_element(shapes: list[list[int]], align: int) -> None:
    named = [(f"t{number}", torch.randn(shape)) for number, shape in enumerate(shapes)]
    block = block_of(named, align)
    assert block.count % align == 0
    for (name, part), (_, tensor) in zip(block.named(block.local()), named, strict=True):
        assert torch.equal(part, tensor), name
    assert float(block.local().abs().sum()) == pytest.approx(
        sum(float(tensor.abs().sum()) for _, tensor in named), rel=1e-4
    )
    block.scatter(torch.arange(block.count, dtype=torch.float32))
    written = torch.cat([tensor.flatten() for _, tensor in named])
    assert len(set(written.tolist())) == len(written)


def test_a_block_of_16_bits_has_an_anchor_of_32() -> None:
    tensor = torch.randn(1000).bfloat16()
    block = block_of([("w", tensor)])
    block.anchor += 1e-4  # less than bfloat16 holds
    block.scatter(block.anchor)
    assert not block.delta(block.local(), block.empty())[0].any()  # rounding is no training
    assert block.dtype == torch.float32
    assert block_of([("w", torch.zeros(1, dtype=torch.float64))]).dtype == torch.float64


def test_a_block_where_values_are_infinite_and_equal() -> None:
    tensor = torch.tensor([-math.inf, 1.0, math.inf])
    block = block_of([("mask", tensor)])
    delta, is_finite = block.delta(block.local(), block.empty())
    assert is_finite
    assert torch.equal(delta, torch.zeros(3))
    assert block.is_finite
    block.anchor[1] = -0.0
    block.rebase(block.local())  # what has not changed becomes the anchor, to the bit
    assert list(map(str, tensor.tolist())) == ["-inf", "-0.0", "inf"]
    tensor[1] = math.nan
    delta, is_finite = block.delta(block.local(), block.empty())
    assert not is_finite
    assert not torch.isfinite(delta).all()


def test_channels_last_and_views_are_flattened_in_order() -> None:
    tensor = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    block = block_of([("w", tensor)])
    assert torch.equal(block.local(), tensor.flatten())
    block.scatter(block.local() * 2)
    assert torch.equal(tensor.flatten(), block.anchor * 2)


def test_a_block_refuses_what_is_not_whole() -> None:
    with pytest.raises(ConfigError, match="complex"):
        block_of([("w", torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(ConfigError, match="on one device"):
        block_of([("a", torch.zeros(2)), ("b", torch.zeros(2, device="meta"))])


# ---- ticks ----


def test_several_optimizers_make_one_iteration() -> None:
    model = net()
    both = [torch.optim.SGD([p], 0.1) for p in list(model.parameters())[:2]]
    count: list[int] = []
    with contextlib.ExitStack() as hooks:
        follow_steps(both, lambda: count.append(1), hooks)
        for order in (both, both[::-1]):
            for one in order:
                one.step()
        assert len(count) == 2
    for one in both:
        one.step()
    assert len(count) == 2


def test_a_scaler_that_skips_makes_iterations() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    count: list[int] = []
    before = [p.detach().clone() for p in model.parameters()]
    with contextlib.ExitStack() as hooks:
        follow_scaler(scaler, lambda: count.append(1), hooks)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale((model(torch.full((4, 5), 1e6)) ** 2).sum() * 1e6).backward()
            scaler.step(optimizer)
            scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert len(count) == 3
    assert "update" not in vars(scaler)


def test_wrapped_optimizers_are_found() -> None:
    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    inner = torch.optim.SGD(net().parameters(), 0.1)
    assert optimizers_of([Wrapper(inner)]) == [inner]
    assert optimizers_of(None) == []


# ---- headers and hellos ----


def header(**given: Any) -> Header:
    known = {"is_ending": False, "has_unsent": True, "is_dropped": False, "counts": True}
    return Header(**{**known, **given})


def test_headers() -> None:
    same = Headers(
        [header(first_batch=b"a" * 16), header(), header(first_batch=b"a" * 16, counts=False)]
    )
    assert same.same_data() == (0, 2)
    assert (same.counting, same.ends_flush) == (2, False)
    ends = Headers([header(is_ending=True, has_unsent=False)] * 2)
    assert ends.ends_flush
    assert not Headers(
        [header(is_ending=True), header(is_ending=True, has_unsent=False)]
    ).ends_flush


def hello(number: int, state: bool = True, start: bool = False, setup: bytes = b"s" * 16) -> Hello:
    return Hello(start, state, number, -1, setup)


def test_hellos() -> None:
    fresh = Hellos([hello(0, False, True)] * 3, 1)
    assert (fresh.leader, fresh.needs_state) == (0, [True] * 3)
    behind = Hellos([hello(4), hello(5), hello(0, False, True)], 0)
    assert (behind.leader, behind.needs_state) == (1, [True, False, True])
    assert behind.own_need
    with pytest.raises(MismatchError, match="ranks 0 and 2"):
        Hellos([hello(0), hello(0), hello(0, setup=b"t" * 16)], 0)
