"""What the correction of one step of staleness costs beside the optimizer: a step of a fused AdamW,
and the same with one on trial, copies and all. The model does nothing in either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

LAYERS, WIDTH = 16, 1024


@pytest.mark.parametrize("corrected", [False, True])
def test_trial_step(measure: Callable[..., Any], corrected: bool) -> None:
    from ringcomm.torch.correction import Correction

    model = torch.nn.ParameterList([torch.zeros(WIDTH, WIDTH) for _ in range(LAYERS)])
    count = LAYERS * WIDTH * WIDTH
    sent, handed = torch.randn(2, count)
    spans = [(weight, at * WIDTH * WIDTH, (at + 1) * WIDTH * WIDTH)
             for at, weight in enumerate(model)]  # fmt: skip
    for weight, start, stop in spans:
        weight.grad = handed[start:stop].view_as(weight)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    correction = Correction()
    correction.attach(model)

    def call() -> None:
        if corrected:
            correction.note(spans, sent, handed)
        optimizer.step()
        if corrected:
            correction.before_forward(model)
            correction.end_backward()

    call()
    with_trial = " and one on trial" if corrected else ""
    measure(f"AdamW's step{with_trial}, {count >> 20} Mi parameters", call, 1, 4 * count)
