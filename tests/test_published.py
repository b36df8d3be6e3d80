"""bench/training/published.py, 1-bit Adam as its paper has it, against references in numpy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed_reference as reference
import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import torch
from ranks import run_ranks
from training.published import CompressedMean, PublishedAdam

from ringcomm import Communicator

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]

BETAS, EPS, DECAY, LR = (0.9, 0.95), 1e-8, 0.1, 0.01


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("count", [7, 130])
def test_the_mean_is_that_of_deepspeed(n: int, count: int) -> None:
    def given(step: int, rank: int) -> Any:
        return np.random.default_rng([step, rank]).standard_normal(count).astype(np.float32)

    def body(comm: Communicator) -> list[Any]:
        mean = CompressedMean(comm, count)
        return [mean(given(step, comm.rank)) for step in range(4)]

    errors, every = reference.no_errors(count, n), run_ranks(n, body)
    for step in range(4):
        result, errors = reference.step([given(step, rank) for rank in range(n)], errors)
        for one in every:
            np.testing.assert_allclose(one[step], result, rtol=1e-5)


def test_a_step_is_that_of_the_paper() -> None:
    """Dense as Adam without a correction, then by the mean of momenta; of one rank, whose mean is
    exact."""
    rng = np.random.default_rng(1)
    p = rng.standard_normal(50)
    parameter = torch.nn.Parameter(torch.tensor(p, dtype=torch.float32))
    m = v = np.zeros(50)

    def body(comm: Communicator) -> None:
        nonlocal p, m, v
        optimizer = PublishedAdam(
            [parameter], LR, BETAS, EPS, DECAY, freeze=3, max_norm=2.0, comm=comm
        )
        for step in range(1, 7):
            g = np.round(rng.standard_normal(50) * 4) / 4  # which bf16 holds
            parameter.grad = torch.tensor(g, dtype=torch.float32)
            optimizer.step()
            g = g * min(1.0, 2.0 / np.linalg.norm(g))
            m = BETAS[0] * m + (1 - BETAS[0]) * g
            if step <= 3:
                v = BETAS[1] * v + (1 - BETAS[1]) * g * g
            p = p - LR * (m / (np.sqrt(v) + EPS) + DECAY * p)
            np.testing.assert_allclose(parameter.detach().numpy(), p, rtol=1e-4, atol=1e-5)

    run_ranks(1, body)
