"""What steps cost on a processor: a fused AdamW's; the same with one on trial, as the correction of
one step of staleness has it, copies and all; and OneBitAdam's arithmetic, in a world of one, where
nothing is sent. The model does nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

LAYERS, WIDTH = 16, 1024
COUNT = LAYERS * WIDTH * WIDTH


@pytest.mark.parametrize("corrected", [False, True])
def test_trial_step(measure: Callable[..., Any], corrected: bool) -> None:
    from ringcomm.torch.buckets import GradientSlice
    from ringcomm.torch.correction import Correction

    model = torch.nn.ParameterList([torch.zeros(WIDTH, WIDTH) for _ in range(LAYERS)])
    sent, handed = torch.randn(2, COUNT)
    size = WIDTH * WIDTH
    bounds = [(at * size, (at + 1) * size) for at in range(LAYERS)]
    slices = [
        GradientSlice(weight, start, end, end)
        for weight, (start, end) in zip(model, bounds, strict=True)
    ]
    for one in slices:
        one.tensor.grad = one.of(handed)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    correction = Correction()
    correction.attach(model)

    def call() -> None:
        if corrected:
            correction.note(slices, sent, handed)
        optimizer.step()
        if corrected:
            correction.before_forward(model)
            correction.end_backward()

    call()
    with_trial = " and one on trial" if corrected else ""
    measure(f"AdamW's step{with_trial}, {COUNT >> 20} Mi parameters", call, 1, 4 * COUNT)


@pytest.mark.parametrize("frozen", [False, True])
def test_onebit_adam_step(measure: Callable[..., Any], frozen: bool) -> None:
    from ringcomm import Communicator
    from ringcomm.torch.optim import OneBitAdam

    weights = [torch.zeros(WIDTH, WIDTH, requires_grad=True) for _ in range(LAYERS)]
    for weight in weights:
        weight.grad = torch.randn(WIDTH, WIDTH)
    with Communicator.create(0, 1) as comm:
        optimizer = OneBitAdam(weights, freeze=1 if frozen else 10**6, refresh=None, comm=comm)
        optimizer.step()
        stage = "at 1 bit" if frozen else "dense"
        name = f"OneBitAdam's step, {stage}, {COUNT >> 20} Mi parameters"
        measure(name, optimizer.step, 1, 4 * COUNT)
