"""The benchmarks' emulated device: how long passes take, and when gradients come."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

from sources import _emulate  # noqa: E402
from sources._emulate import EmulatedDevice  # noqa: E402
from torch import Tensor, nn  # noqa: E402

pytestmark = pytest.mark.torch

SECONDS = 0.12


class Clock:
    """Time that passes by sleeping alone, so that nothing hangs on this machine's speed."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds

    def timed(self, call: Any) -> tuple[float, Any]:
        began = self.now
        result = call()
        return self.now - began, result


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_emulate, "time", clock)
    return clock


def test_a_third_of_the_time_is_forward(clock: Clock) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    EmulatedDevice(model, SECONDS)
    for _ in range(2):  # the schedule starts anew with each forward
        forward, out = clock.timed(lambda: model(torch.ones(2, 16)))
        backward, _ = clock.timed(lambda out=out: out.sum().backward())
        assert forward == pytest.approx(SECONDS / 3)
        assert backward == pytest.approx(2 * SECONDS / 3)


def test_gradients_come_one_after_the_other_in_proportion(clock: Clock) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 24, bias=False))
    EmulatedDevice(model, SECONDS)
    came: dict[int, float] = {}
    for index in (0, 2):

        def note(parameter: Tensor, index: int = index) -> None:
            came[index] = clock.now

        model[index].weight.register_post_accumulate_grad_hook(note)
    out = model(torch.ones(1, 8)).sum()
    began = clock.now
    out.backward()
    backward = 2 / 3 * SECONDS
    assert came[2] - began == pytest.approx(0.75 * backward)
    assert came[0] - began == pytest.approx(backward)


def test_several_forwards_in_flight(clock: Clock) -> None:
    """Micro-batches of a pipeline: the device stands still between their backwards."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    EmulatedDevice(model, SECONDS)
    outs = [model(torch.ones(1, 8)).sum() for _ in range(2)]
    for out in outs:
        clock.sleep(SECONDS)  # until its gradient comes
        took, _ = clock.timed(lambda out=out: out.backward())
        assert took == pytest.approx(2 * SECONDS / 3)
