"""compression="onebit-deepspeed" over many calls: its errors, other codecs, restarts, loss scales.

T numbers are as in test_feedback.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import deepspeed_reference as deepspeed
import numpy as np
import pytest
from deepspeed_cases import NAME, assert_same, average, errors_of, inputs, reference, values
from deepspeed_reference import Errors
from ranks import World, run_ranks
from reference import Array
from tensors import bits

from ringcomm import Communicator, ErrorFeedback
from ringcomm.residuals import Padding

pytestmark = pytest.mark.usefixtures("nothing_left")


def lacking(comm: Communicator, feedback: ErrorFeedback) -> Array:
    state = feedback.gather_state_dict(comm)
    return np.asarray(state["worker"], np.float64) + np.asarray(state["owner"], np.float64)


@pytest.mark.parametrize(("first", "second"), [(2, 3), (3, 5), (4, 4), (5, 2), (3, 1)])
def test_nothing_is_lost_over_steps_codecs_and_a_restart(first: int, second: int) -> None:
    """T4, T10 and T12: the sum of all results is that of all means, less what is left."""
    count = 1234
    codecs = [NAME] * 40 + ["onebit", "int8"] + [NAME] * 20

    def run(comm: Communicator, seed: int, saved: Any) -> tuple[Any, Array]:
        feedback = ErrorFeedback()
        lacks = np.zeros(count)
        if saved is not None:
            feedback.load_state_dict(saved[0], comm)
            lacks = saved[1].copy()
        for step, codec in enumerate(codecs):
            xs = inputs(count, comm.world_size, seed + step)
            lacks += np.mean(xs, axis=0, dtype=np.float64)
            x = xs[comm.rank]
            lacks -= comm.allreduce(x, "avg", compression=codec, feedback=feedback)
        assert np.abs(lacking(comm, feedback) - lacks).max() <= 1e-3
        return feedback.gather_state_dict(comm), lacks

    with World(first) as world:
        saved = world.run(lambda comm: run(comm, 0, None))
    assert all(bits(one[0][key]) == bits(saved[0][0][key])
               for one, key in itertools.product(saved, ("worker", "owner")))  # fmt: skip
    with World(second) as world:
        world.run(lambda comm: run(comm, 1000, saved[0]))


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("codec", [None, "bf16"])
def test_a_plain_codec_delivers_what_is_left(n: int, codec: str | None) -> None:
    """T10: the errors of the tensor's elements; those of the padding are dropped."""
    count = 777

    def body(comm: Communicator) -> None:
        feedback = ErrorFeedback()
        lacks = np.zeros(count)
        for step in range(10):
            xs = inputs(count, n, step)
            lacks += np.mean(xs, axis=0, dtype=np.float64)
            lacks -= average(comm, xs[comm.rank], feedback)
        left = np.abs(feedback.worker).max() + n * np.abs(feedback.owner).max()
        largest = comm.allreduce(np.array([left]), "max")[0]
        got = comm.allreduce(np.zeros(count, np.float32), "avg", compression=codec,
                             feedback=feedback)  # fmt: skip
        assert np.abs(got - lacks).max() <= largest * (2**-7 if codec else 1e-5)
        assert not feedback.worker.any()
        assert not len(feedback.owner)
        assert feedback.padding is None

    run_ranks(n, body)


@pytest.mark.parametrize("n", [2, 3])
def test_a_state_keeps_the_mean_and_the_owners_errors(n: int) -> None:
    """T12: a restart is the reference's with the mean of the workers' errors for each of them, the
    servers' as they were, and nothing in the padding."""
    count = 8 * n * n + 5

    def body(comm: Communicator) -> None:
        feedback = ErrorFeedback()
        for step in range(3):
            average(comm, values(count, comm.rank, step), feedback)
        owner = feedback.owner
        state = feedback.gather_state_dict(comm)
        assert state["parts"] == "deepspeed"
        restored = ErrorFeedback()
        restored.load_state_dict(state, comm)
        assert bits(restored.owner) == bits(owner)
        assert bits(restored.worker) == bits(np.asarray(state["worker"]))
        assert restored.gather_state_dict(comm)["parts"] == "deepspeed"
        begin = errors_of(restored)
        assert not begin.worker[count:].any()
        chunk = len(begin.server)
        servers = np.zeros(n * chunk, np.float32)
        servers[:count] = np.asarray(state["owner"])
        errors = [Errors(begin.worker, part) for part in np.split(servers, n)]
        expected, after = deepspeed.step(inputs(count, n, 9), errors)
        assert bits(average(comm, values(count, comm.rank, 9), restored)) == bits(expected)
        assert_same(errors_of(restored), after[comm.rank])

    run_ranks(n, body)


def test_a_loss_scale() -> None:
    """T11: a power of two changes all numbers alike, those of the padding, too."""
    n, count = 3, 100
    expected = reference(count, n, 4)

    def body(comm: Communicator) -> None:
        feedback = ErrorFeedback()
        for step, (result, errors) in enumerate(expected):
            scale = np.float32(2.0 ** (3 * step))
            feedback.loss_scale = float(scale)
            got = average(comm, values(count, comm.rank, step) * scale, feedback)
            assert np.array_equal(got / scale, result)
            after = errors_of(feedback)
            assert np.array_equal(after.worker / scale, errors[comm.rank].worker)
            assert np.array_equal(after.server / scale, errors[comm.rank].server)
        feedback.rescale(0)
        assert not errors_of(feedback).worker.any()

    run_ranks(n, body)


def test_the_padding_belongs_to_one_place() -> None:
    """In another world, or as another rank, it is dropped; what is left of results is not."""
    count = 20

    def body(comm: Communicator) -> None:
        feedback = ErrorFeedback()
        x = values(count, comm.rank, 0)
        feedback.load(x, x[:3], 5, Padding((7, 1), np.ones(1, np.float32), x[:0]))
        folded = [values(count, rank, 0) for rank in range(2)]
        for one in folded:
            one[5:8] += one[:3] * np.float32(2)
        errors = deepspeed.no_errors(count, 2)
        for one, error in zip(folded, errors, strict=True):
            error.worker[:count] = one
        expected, _ = deepspeed.step(inputs(count, 2, 1), errors)
        assert bits(average(comm, values(count, comm.rank, 1), feedback)) == bits(expected)

    run_ranks(2, body)
