"""Data, the call and what it leaves, for the tests of onebit-deepspeed."""

from __future__ import annotations

from typing import Any

import deepspeed_reference as deepspeed
import numpy as np
from deepspeed_reference import Errors
from reference import Array
from tensors import bits

from ringcomm import Communicator, ErrorFeedback

NAME = "onebit-deepspeed"


def values(count: int, rank: int, step: int) -> Array:
    """Of scales from 1e-3 to 10 in one tensor, with zeros of both signs among them."""
    rng = np.random.default_rng((count, rank, step))
    x = rng.standard_normal(count) * 10.0 ** rng.uniform(-3, 1, count)
    x[rng.random(count) < 0.1] = 0.0
    x[rng.random(count) < 0.1] = -0.0
    return x.astype(np.float32)


def inputs(count: int, n: int, step: int) -> list[Array]:
    """Those of all ranks."""
    return [values(count, rank, step) for rank in range(n)]


def reference(count: int, n: int, steps: int = 5) -> list[tuple[Array, list[Errors]]]:
    """Results and errors after each step."""
    errors, found = deepspeed.no_errors(count, n), []
    for step in range(steps):
        result, errors = deepspeed.step(inputs(count, n, step), errors)
        found.append((result, errors))
    return found


def average(comm: Communicator, x: Any, feedback: Any, **options: Any) -> Any:
    """The call that all these tests are about."""
    return comm.allreduce(x, "avg", compression=NAME, feedback=feedback, **options)


def errors_of(feedback: ErrorFeedback) -> Errors:
    """With the padding."""
    padding = feedback.padding
    assert padding is not None
    return Errors(
        np.concatenate([feedback.worker, padding.worker]),
        np.concatenate([feedback.owner, padding.owner]),
    )


def assert_same(ours: Errors, expected: Errors) -> None:
    """Bit for bit."""
    assert bits(ours.worker) == bits(expected.worker)
    assert bits(ours.server) == bits(expected.server)
