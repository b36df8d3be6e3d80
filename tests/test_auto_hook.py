"""compression="auto" in the DDP hook: ranks change codec at the same step, whatever they see."""

from __future__ import annotations

import gc
import importlib.util
import logging
import pickle
import types
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from ddp_buckets import LARGE, THRESHOLD, Net, gradients_of, reduce, trained
from quantised_reference import payload_bytes
from ranks import run_ranks
from torch import nn

from ringcomm import AbortedError, Communicator, ConfigError
from ringcomm.adaptive.law import DELAY, FIRST_WINDOW, Change, Law, Load, Rung, WindowMedians
from ringcomm.codecs import parse
from ringcomm.torch import Auto, HookState, Stale1
from ringcomm.torch.exchange import CommExchange, GridExchange
from ringcomm.torch.steps import before_steps

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]

FIRST = 1 + FIRST_WINDOW  # the step before which the first window is gathered


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Sequence[WindowMedians], Load]]:
    """Laws that decide for int8, int4, none and bf16, one after the other, whatever they are told;
    and what they were told."""
    told: list[tuple[str, Sequence[WindowMedians], Load]] = []

    def decide(
        self: Law,
        step: int,
        ranks: Sequence[WindowMedians],
        load: Load,
        ready_s: Sequence[float],
        latency_s: float = 0.0,
    ) -> Change:
        codec = ("int8", "int4", "none", "bf16")[len(told) % 4]
        told.append((codec, ranks, load))
        self.rung = Rung(parse(codec))
        return Change(step + DELAY, self.rung, "the script says so")

    monkeypatch.setattr(Law, "decide", decide)
    return told


Told = list[tuple[str, Sequence[WindowMedians], Load]]


def hook(comm: Communicator, model: nn.Module, **settings: object) -> HookState:
    policy = Auto(model, allow=["int4"], **settings)  # type: ignore[arg-type]
    return HookState(policy, comm, model=model, threshold=THRESHOLD)


def sent_in(codec: str) -> int:
    """Bytes that a rank of two sends of a step."""
    sizes = {name: p.numel() for name, p in trained(Net())}
    if codec in ("none", "bf16"):
        return (4 if codec == "none" else 2) * sum(sizes.values())
    return sum(payload_bytes(codec, n) if name in LARGE else 2 * n for name, n in sizes.items())


def said_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What has been logged of it."""
    told = [record.getMessage() for record in caplog.records]
    return [line for line in told if line.startswith("auto:")]


# ---- the hook ----


def test_a_model_without_elements_decides_nothing() -> None:
    gc.collect()  # hooks of states that other tests have left
    before = len(before_steps)

    def body(comm: Communicator) -> None:
        model = nn.Linear(0, 5, bias=False)
        state = hook(comm, model)
        for step in range(FIRST + DELAY + 1):
            reduce(state, model, gradients_of(model, comm.rank, step))
        assert len(before_steps) <= before

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a tensor without elements
        run_ranks(2, body)


def test_all_ranks_change_before_the_same_step(
    scripted: Told, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that had changed at another one would fail all with MismatchError."""
    changes = [FIRST + DELAY + (DELAY + FIRST_WINDOW) * i for i in range(4)]
    caplog.set_level(logging.INFO, "ringcomm")

    def body(comm: Communicator) -> Mapping[str, object]:
        model = Net()
        state = hook(comm, model)
        for step in range(36):
            reduce(state, model, gradients_of(model, comm.rank, step), buckets=3)
        report = state.report()
        assert [stretch["first"] for stretch in report.codecs] == [0, *changes]
        assert [stretch["codec"] for stretch in report.codecs] == [
            "bf16",
            "int8",
            "int4",
            "none",
            "bf16",
        ]
        assert report.codecs[-1]["last"] == 35
        for stretch in report.codecs:
            for number in (stretch["first"], stretch["last"]):
                assert report.steps[number]["wire_bytes"] == sent_in(stretch["codec"]), number
        return report

    run_ranks(2, body)
    assert said_in(caplog) == [
        f"auto: {codec} from step {step}: the script says so"
        for step, codec in zip(changes, ("int8", "int4", "none", "bf16"), strict=True)
    ]


def test_one_rank_decides_by_what_all_have_measured(scripted: Told) -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        state = hook(comm, model)
        for step in range(10):
            reduce(state, model, gradients_of(model, comm.rank, step), buckets=2)

    run_ranks(3, body)
    ((_, ranks, load),) = scripted
    assert len(ranks) == 3
    for seen in ranks:
        assert seen.steps == FIRST
        assert seen.wire_bytes > 0
        assert 0 < seen.hide_s <= seen.compute_s  # the first step begins with its first bucket
        assert seen.busy_s > 0
    assert [bucket.large for bucket in load] == [48 * 31 + 4 * 4, 16 * 8 * 9 + 4800]
    assert sum(bucket.small for bucket in load) == 48 + 5000 + 1


def test_late_steps_tell_what_the_next_one_hides(scripted: Told) -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        pace, policy = Stale1(dense_steps=FIRST, correction=False), Auto(model)
        state = HookState(policy, comm, model=model, threshold=THRESHOLD, pace=pace)
        for step in range(FIRST + DELAY + FIRST_WINDOW + 2):
            reduce(state, model, gradients_of(model, comm.rank, step), buckets=2)

    run_ranks(2, body)
    (_, dense, _), (_, late, _) = scripted
    assert [seen.deferred for seen in dense] == [0, 0]
    assert [seen.deferred for seen in late] == [1, 1]


def test_nothing_is_lost_over_changes_of_the_codec(scripted: Told) -> None:
    """What int4 has left is delivered by the codecs that follow it."""

    def body(comm: Communicator) -> None:
        model = Net()
        state = hook(comm, model)
        lacks = {name: torch.zeros(p.shape) for name, p in trained(model)}
        for step in range(36):
            for rank in range(2):
                for name, gradient in gradients_of(model, rank, step).items():
                    lacks[name] += gradient / 2
            got = reduce(state, model, gradients_of(model, comm.rank, step))
            for name in lacks:
                lacks[name] -= got[name].reshape(lacks[name].shape)
            if step == 20:
                assert state.report().codecs[-1]["codec"] == "int4"
                assert any(lacks[name].abs().max() > 5e-3 for name in LARGE)
        for name in LARGE:  # 36 roundings of int8 and bf16
            assert lacks[name].abs().max() < 36 * 2**-9 * 0.5, name

    run_ranks(2, body)


def test_a_world_of_one_has_nobody_to_ask() -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        state = HookState("auto", comm, model=model)
        for step in range(20):
            reduce(state, model, gradients_of(model, 0, step))
        assert state.compression == "auto"
        assert [stretch["codec"] for stretch in state.report().codecs] == ["bf16"]

    run_ranks(1, body)


def test_a_rank_that_fails_leaves_nobody_waiting() -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        state = hook(comm, model)
        for step in range(FIRST + 1):
            reduce(state, model, gradients_of(model, comm.rank, step))
        if comm.rank == 1:  # what all have been asked to tell is under way
            comm.abort("it has had enough")
            return

        def go_on() -> None:
            for step in range(20):
                reduce(state, model, gradients_of(model, comm.rank, step))

        with pytest.raises(RuntimeError, match="had enough"):
            go_on()
        assert isinstance(state.error, AbortedError)

    run_ranks(3, body)


# ---- what it recognises ----


def adapted() -> nn.Module:
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 2))
    model[0].requires_grad_(False)
    return model


def test_adapters_travel_at_bf16_at_most(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ringcomm")
    policy = Auto(adapted(), allow=["int4"])
    assert [codec.name for codec in policy.codecs] == ["none", "bf16"]
    assert "int8" in [codec.name for codec in Auto(nn.Linear(9, 9)).codecs]

    def body(comm: Communicator) -> None:
        model = adapted()
        state = HookState("auto", comm, model=model)
        reduce(state, model, gradients_of(model, comm.rank, 0))

    run_ranks(2, body)
    (line,) = said_in(caplog)
    assert line.startswith("auto: 2 % of the parameters are trained, so bf16 is the harshest")


@pytest.mark.parametrize(
    ("kind", "linear", "taken"),
    [("SGD", None, True), ("AdamW", None, False), ("AdamW", True, True), ("SGD", False, False)],
)
def test_onebit_is_for_linear_optimizers(
    kind: str, linear: bool | None, taken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        policy = Auto(model, allow=["onebit"], linear=linear)
        state = HookState(policy, comm, model=model)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.0)
        for step in range(3):
            reduce(state, model, gradients_of(model, comm.rank, step))
            optimizer.step()
        law = policy._law
        assert ("onebit" in [str(rung) for rung in law.rungs]) is taken

    run_ranks(2, body)
    assert said_in(caplog) == (
        []
        if taken
        else [
            f"auto: onebit is left out, as {kind} is not known to be linear in the gradients; "
            "Auto(linear=True) declares that it is"
        ]
    )


# ---- checkpoints and refusals ----


def test_a_checkpoint_goes_on_in_the_same_codec(scripted: Told) -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        state = hook(comm, model)
        for step in range(10):
            reduce(state, model, gradients_of(model, comm.rank, step))
        saved = state.gather_state_dict()
        assert saved["policy"]["codec"] == "int8"
        assert saved["steps"] == 10
        again = hook(comm, model)
        again.load_state_dict(saved)
        copied = pickle.loads(pickle.dumps(state))
        assert copied.compression == "auto"
        assert copied._policy.state_dict() == saved["policy"]
        reduce(again, model, gradients_of(model, comm.rank, 10))
        assert again.report().codecs == [{"codec": "int8", "first": 10, "last": 10}]

    run_ranks(2, body)


def test_a_refused_state_changes_nothing(scripted: Told) -> None:
    """Neither residuals, where the policy's is refused, nor the other way round; nor whether
    residuals are kept."""

    def body(comm: Communicator) -> None:
        model = Net()
        state = hook(comm, model)
        reduce(state, model, gradients_of(model, comm.rank, 0))
        saved, before = state.state_dict(), state._policy.state_dict()
        for one in saved["feedback"]["tensors"].values():
            one["worker"].fill_(1.0)
        with pytest.raises(ConfigError, match="no state of compression='auto'"):
            state.load_state_dict({**saved, "policy": {"codec": "int8"}})
        saved["policy"]["codec"] = "int8"
        unknown = {
            **saved["feedback"],
            "tensors": {"other": next(iter(saved["feedback"]["tensors"].values()))},
        }
        with pytest.raises(ConfigError, match="of another model"):
            state.load_state_dict({**saved, "feedback": unknown})
        assert state._policy.state_dict() == before
        assert not any((state.feedback[name].worker == 1).any() for name in state.feedback)
        gentle = HookState("bf16", comm, model=model, threshold=THRESHOLD)
        with pytest.raises(ConfigError, match="of another model"):
            gentle.load_state_dict({"feedback": unknown})
        assert len(gentle.feedback) == 0

    run_ranks(2, body)


def test_it_refuses_what_cannot_work() -> None:
    for settings, text in (
        ({"allow": "int4"}, "give a list of codecs"),
        ({"allow": ["fp16"]}, "what may be allowed"),
        ({"allow": ["int5"]}, "allow='int5' is unknown"),
        ({"max_accumulate": 0}, "Invalid max_accumulate: 0"),
        ({"max_accumulate": 1.5}, "Invalid max_accumulate: 1.5"),
        ({"warmup_steps": -1}, "Invalid warmup_steps: -1"),
        ({"linear": "no"}, "give True or False"),
        ({"model": 5}, "give a torch.nn.Module"),
    ):
        with pytest.raises(ConfigError, match=text):
            Auto(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no state of compression='auto'"):
        Auto().load_state_dict({"codec": "int8"})


# ---- several ranks on a host ----


def test_where_hosts_have_several_ranks_one_of_each_speaks_for_it() -> None:
    """Two hosts of two ranks; the decision reaches all four."""

    def body(comm: Communicator) -> None:
        place = comm.rank % 2
        row, column = comm.split(comm.rank // 2, place), comm.split(place, comm.rank)
        assert row is not None
        assert column is not None
        grid = types.SimpleNamespace(row=row, column=column, place=place)
        exchange: CommExchange = GridExchange(grid)  # type: ignore[arg-type]
        assert exchange.decides is (comm.rank == 0)
        rows = exchange.gather([float(comm.rank)] * 3)()
        assert rows == ([[0.0] * 3, [2.0] * 3] if place == 0 else [[float(comm.rank)] * 3])
        for text in ("", '["int8", 1, "why"]'):
            assert exchange.spread(text if comm.rank == 0 else "ignored")() == text
        assert exchange.latency_s() > 0
        row.close()
        column.close()

    run_ranks(4, body)


def test_rows_are_numbers_as_they_were() -> None:
    row = [0.1, 1e-300, float("inf"), 3.0]

    def body(comm: Communicator) -> None:
        rows = CommExchange(comm).gather(row)()
        assert np.array_equal(rows, [row, row])

    run_ranks(2, body)
