"""Error feedback over many calls: nothing that a codec rounds away is lost for good.

T numbers are those of the list of what such codecs must be tested for:

    T4   the sum of all results is that of all exact ones, less what is left     T11  loss scales
    T5   how far behind the results are                                          T12  restarts
    T10  a codec that changes in mid-run

The identity holds exactly in real numbers, so one test of it covers both residuals, padding,
packing, chunks and worlds: whatever goes astray in any of them stays in the sum.
"""

from __future__ import annotations

import copy
import functools
import itertools
import threading
from typing import Any

import numpy as np
import pytest
import quantised_reference as quantised
from patience import PATIENCE
from quantised_reference import CODECS, Residuals
from ranks import World
from reference import Array
from tensors import bits

from ringcomm import (
    AbortedError,
    Communicator,
    Config,
    ConfigError,
    ErrorFeedback,
)

pytestmark = pytest.mark.usefixtures("nothing_left")

SMALL = Config(segment_bytes=4096, timeout=30.0)
PLAIN = {"none": 1e-5, "bf16": 2**-7, "fp16": 2**-10}
"""What the others lose of a value."""


@functools.lru_cache(maxsize=4096)
def patterned(count: int, rank: int, step: int) -> Array:
    """Blocks that are large, small, zero, of one sign or sparse, anew in each step. Read-only."""
    rng = np.random.default_rng((count, rank, step))
    rows = rng.standard_normal((-(-count // 256), 256)).astype(np.float32)
    for row, kind in zip(rows, rng.integers(0, 6, len(rows)), strict=True):
        if kind == 0:
            row[:] = 0
        elif kind == 1:
            np.abs(row, out=row)
        elif kind == 2:
            row[rng.random(256) < 0.95] = 0
        else:
            row *= np.float32(10.0 ** rng.uniform(-3, 1))
    rows.flags.writeable = False
    return rows.reshape(-1)[:count]


@functools.lru_cache(maxsize=512)
def total_of(count: int, n: int, step: int) -> Array:
    """The exact sum over all ranks."""
    return np.sum([patterned(count, rank, step).astype(np.float64) for rank in range(n)], axis=0)


class Sums:
    """What came out of one rank's calls, and what should have, in float64."""

    def __init__(self, count: int) -> None:
        self.out, self.exact = np.zeros(count), np.zeros(count)
        self.largest, self.calls = 0.0, 0

    def add(self, result: Array, total: Array, divisor: int = 1) -> None:
        self.out += result
        self.exact += total / divisor
        self.largest = max(self.largest, float(np.abs(total).max()))
        self.calls += 1

    def assert_telescopes(self, left: Array, what: object = "") -> None:
        """left: what the state says that the results lack."""
        error = np.abs(self.out + left - self.exact).max()
        assert error <= 1e-6 * self.calls * max(1.0, self.largest), (what, error)


def divisor(comm: Communicator, op: str) -> int:
    return comm.world_size if op == "avg" else 1


def lacking(comm: Communicator, feedback: ErrorFeedback) -> Array:
    """What the results lack, from a checkpoint, whose sum it is."""
    state = feedback.gather_state_dict(comm)
    return np.asarray(state["worker"], np.float64) + np.asarray(state["owner"], np.float64)


# ---- T4, T12: telescoping sums, and restarts in other worlds ----


@pytest.mark.parametrize(("first", "second"), [(2, 3), (3, 2), (8, 5), (3, 1), (1, 2)])
def test_nothing_is_lost_over_many_steps_and_a_restart(first: int, second: int) -> None:
    """T4 and T12: 30 steps, a checkpoint, and 30 steps in another world."""
    count = 2600 + first
    op = ("avg", "sum")[second % 2]

    def run(comm: Communicator, steps: range, states: dict[str, Any]) -> dict[str, Any]:
        saved = {}
        for codec in CODECS:
            feedback, sums = ErrorFeedback(), Sums(count)
            if states:
                feedback.load_state_dict(states[codec][0], comm)
                sums = copy.deepcopy(states[codec][1])
            for step in steps:
                x = patterned(count, comm.rank, step).copy()
                comm.allreduce(x, op, compression=codec, feedback=feedback)
                sums.add(x, total_of(count, comm.world_size, step), divisor(comm, op))
            sums.assert_telescopes(lacking(comm, feedback), codec)
            saved[codec] = feedback.gather_state_dict(comm), sums
        return saved

    with World(first, lanes=2, config=SMALL) as world:
        saved = world.run(lambda comm: run(comm, range(30), {}))
    for codec in CODECS:
        for mine, other in itertools.pairwise([one[codec][0] for one in saved]):
            assert all(bits(mine[part]) == bits(other[part]) for part in ("worker", "owner"))
    with World(second, config=SMALL) as world:
        world.run(lambda comm: run(comm, range(30, 60), saved[0]))


@pytest.mark.parametrize("n", [2, 4])
def test_nothing_is_lost_on_another_communicator(n: int) -> None:
    """T4: of the same ranks in another order, where each owns another part; and back."""
    count = 3001

    def body(comm: Communicator) -> None:
        other = comm.split(0, key=-comm.rank)
        assert other is not None
        assert other.rank == n - 1 - comm.rank
        for codec in CODECS:
            feedback, sums = ErrorFeedback(), Sums(count)
            for step in range(30):
                x = patterned(count, comm.rank, step).copy()
                which = other if step // 5 % 2 else comm
                which.allreduce(x, "avg", compression=codec, feedback=feedback)
                sums.add(x, total_of(count, n, step), n)
            sums.assert_telescopes(lacking(comm, feedback), codec)
        other.close()

    with World(n, bring_up="tcp") as world:
        world.run(body)


def test_a_call_that_fails_at_once_is_not_undone_as_the_one_before() -> None:
    both = threading.Barrier(2)

    def body(comm: Communicator) -> None:
        feedback = ErrorFeedback()
        comm.allreduce(patterned(1000, comm.rank, 0).copy(), compression="int4", feedback=feedback)
        before = feedback.worker
        both.wait(PATIENCE)
        comm.abort("enough")
        with pytest.raises(AbortedError):
            comm.allreduce(np.ones(1000, np.float32), compression="int4", feedback=feedback)
        feedback.undo()
        assert before.any()
        assert bits(feedback.worker) == bits(before)

    with World(2) as world:
        world.run(body)


# ---- T5: lag ----

#: ||sum of results - sum of means|| / ||E g|| after 200 steps, in steps, by codec: Gaussian data,
#: of log-normal scales, and 95 % zeros; signal to noise 0.3, 4 ranks.
LAG = {
    "int8": (0.02, 0.05, 0.01),
    "int4": (0.28, 0.55, 0.13),
    "int2": (0.97, 0.85, 0.82),
    "onebit": (2.5, 10.5, 13.4),
    "fp8": (0.07, 0.06, 0.05),
}


def test_how_far_behind_the_results_are() -> None:
    """T5: one and a half times the lag that simulations gave. The data lie side by side."""
    n, count, steps = 4, 2048, 200
    kinds = [slice(kind * count, (kind + 1) * count) for kind in range(3)]
    rng = np.random.default_rng(3)
    scale = np.ones(3 * count)
    scale[kinds[1]] = np.exp(rng.standard_normal(count))
    scale[kinds[2]] = rng.random(count) < 0.05
    mean = np.random.default_rng(4).standard_normal(3 * count) * scale

    def lacks(comm: Communicator) -> dict[str, Array]:
        noise = np.random.default_rng((7, comm.rank))
        feedbacks = {codec: ErrorFeedback() for codec in LAG}
        lacking = {codec: np.zeros(3 * count) for codec in LAG}
        for _ in range(steps):
            x = (mean + noise.standard_normal(3 * count) * scale / 0.3).astype(np.float32)
            exact = comm.allreduce(x.astype(np.float64), "avg")
            for codec, feedback in feedbacks.items():
                y = comm.allreduce(x.copy(), "avg", compression=codec, feedback=feedback)
                lacking[codec] += y - exact
        return lacking

    with World(n) as world:
        lacking = world.run(lacks)[0]
    for (codec, bounds), kind in itertools.product(LAG.items(), range(3)):
        behind = np.linalg.norm(lacking[codec][kinds[kind]]) / np.linalg.norm(mean[kinds[kind]])
        assert behind <= 1.5 * bounds[kind], (codec, kind, behind)


# ---- T10, T11: another codec, another unit ----


@pytest.mark.parametrize(("n", "op"), [(1, "avg"), (2, "sum"), (3, "avg"), (5, "sum")])
def test_the_codec_changes_in_mid_run(n: int, op: str) -> None:
    """T10: among those that quantise what is left stays; the others deliver it at once."""
    count = 3333

    def body(comm: Communicator) -> None:
        rng = np.random.default_rng(1)
        feedback, sums = ErrorFeedback(), Sums(count)
        for step in range(80):
            codec = str(rng.choice([*CODECS, *PLAIN] if step % 10 == 5 else CODECS))
            x = patterned(count, comm.rank, step).copy()
            comm.allreduce(x, op, compression=codec, feedback=feedback)
            sums.add(x, total_of(count, n, step), divisor(comm, op))
            if codec in PLAIN:
                assert not feedback.worker.any()
                assert not feedback.owner.any()
                error = np.abs(sums.out - sums.exact).max()
                assert error <= n * PLAIN[codec] * max(1.0, sums.largest), (codec, error)
                sums.exact = sums.out.copy()  # what it rounds away by itself is lost
        sums.assert_telescopes(lacking(comm, feedback))

    with World(n, config=SMALL) as world:
        world.run(body)


@pytest.mark.parametrize("codec", [None, "bf16", "fp16"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_plain_codec_delivers_what_is_left(n: int, dtype: type, codec: str | None) -> None:
    """T10: to within what it rounds itself."""
    count = 1500

    def body(comm: Communicator) -> None:
        feedback = ErrorFeedback()
        rng = np.random.default_rng(comm.rank)
        error = rng.standard_normal(count).astype(np.float32)
        everyones = comm.allgather(error).astype(np.float64).sum(axis=0)
        feedback.load_state_dict(
            {
                "format": 1,
                "op": "sum",
                "loss_scale": 1.0,
                "worker": error * np.float32(n),
                "owner": np.zeros(count, np.float32),
            },
            comm,
        )
        x = np.zeros(count, dtype)
        comm.allreduce(x, compression=codec, feedback=feedback)
        assert np.abs(x - everyones).max() <= 4 * n * PLAIN[codec or "none"]
        assert not feedback.worker.any()
        comm.allreduce(y := np.zeros(count, dtype), compression=codec, feedback=feedback)
        assert not y.any()

    with World(n) as world:
        world.run(body)


@pytest.mark.parametrize("n", [2, 3])
def test_loss_scale(n: int) -> None:
    """T11: with a scale that halves and doubles, the sum of what is scaled back telescopes."""
    count = 2000

    def body(comm: Communicator) -> None:
        for codec in CODECS:
            feedback, sums, scale = ErrorFeedback(), Sums(count), 1.0
            for step in range(60):
                if step % 7 == 6:
                    scale *= (2.0, 0.5, 4.0)[step % 3]
                    feedback.loss_scale = scale
                x = patterned(count, comm.rank, step) * np.float32(scale)
                comm.allreduce(x, "avg", compression=codec, feedback=feedback)
                sums.add(x / scale, total_of(count, n, step), n)
            assert scale != 1.0
            assert feedback.loss_scale == scale
            sums.assert_telescopes(lacking(comm, feedback) / scale, codec)

    with World(n) as world:
        world.run(body)


def test_a_rescaled_residual_is_what_it_says() -> None:
    def body(comm: Communicator) -> None:
        feedback = ErrorFeedback()
        x = patterned(3000, comm.rank, 0).copy()
        comm.allreduce(x, compression="onebit", feedback=feedback)
        before = feedback.worker, feedback.owner
        feedback.rescale(0.5)
        assert np.array_equal(feedback.worker, before[0] * np.float32(0.5))
        assert np.array_equal(feedback.owner, before[1] * np.float32(0.5))
        with pytest.raises(ConfigError, match="feedback times 1e\\+39 is infinite"):
            feedback.rescale(1e39)
        feedback.rescale(0)
        assert not feedback.worker.any()
        assert not feedback.owner.any()
        for bad in (-1.0, np.nan, np.inf, "2", None, True):
            with pytest.raises(ConfigError, match="give a finite number above 0"):
                feedback.rescale(bad)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="give a finite number above 0"):
                feedback.loss_scale = bad  # type: ignore[assignment]
        with pytest.raises(ConfigError, match="give a finite number above 0"):
            feedback.loss_scale = 0

    with World(3) as world:
        world.run(body)


# ---- hosts ----


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (3, 2), (2, 3)])
def test_several_ranks_on_each_host(hosts: int, local: int) -> None:
    """T4 and T12 where hosts join in memory first; the checkpoint goes on elsewhere, and back."""
    n, count = hosts * local, 6000 + local

    def body(comm: Communicator, states: dict[str, Any] | None, steps: range) -> dict[str, Any]:
        saved = {}
        for codec in CODECS:
            feedback, sums = ErrorFeedback(), Sums(count)
            if states is not None:
                feedback.load_state_dict(states[codec][0], comm)
                sums = copy.deepcopy(states[codec][1])
            for step in steps:
                x = patterned(count, comm.rank, step).copy()
                comm.allreduce(x, "avg", compression=codec, feedback=feedback)
                sums.add(x, total_of(count, comm.world_size, step), comm.world_size)
            sums.assert_telescopes(lacking(comm, feedback), codec)
            saved[codec] = feedback.gather_state_dict(comm), sums
        return saved

    def in_world(n: int, memory: int, states: dict[str, Any] | None, steps: range) -> Any:
        with World(n, config=SMALL, memory=memory) as world:
            results = world.run(lambda comm: body(comm, states, steps))
        return results[0]

    states = in_world(n, local, None, range(10))
    states = in_world(3, 0, states, range(10, 20))
    in_world(n, local, states, range(20, 30))


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (3, 2), (2, 3), (4, 2)])
def test_several_ranks_on_each_host_bit_for_bit(hosts: int, local: int) -> None:
    n, count = hosts * local, 9001
    runs = list(itertools.product(CODECS, ("sum", "avg")))
    expected: dict[tuple[str, str], list[tuple[Array, list[Residuals]]]] = {}
    for codec, op in runs:
        left = None
        for step in range(2):
            every = [patterned(count, rank, step) for rank in range(n)]
            result, left = quantised.among_hosts(every, op, codec, local, left)
            expected.setdefault((codec, op), []).append((result, left))

    def body(comm: Communicator) -> None:
        for codec, op in runs:
            feedback = ErrorFeedback()
            for step, (result, left) in enumerate(expected[codec, op]):
                x = patterned(count, comm.rank, step).copy()
                comm.allreduce(x, op, compression=codec, feedback=feedback)
                assert bits(x) == bits(result), (codec, op, step)
                assert np.array_equal(feedback.worker, left[comm.rank].worker)
                assert np.array_equal(feedback.owner, left[comm.rank].owner)

    with World(n, config=SMALL, memory=local) as world:
        world.run(body)
