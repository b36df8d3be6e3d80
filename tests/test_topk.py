"""compression="topk": the largest elements only, exact, from a threshold; owners select again.

T numbers as in test_quantised.py and test_feedback.py.
"""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
import topk_reference as reference
from quantised_reference import Residuals
from ranks import World
from reference import Array
from tensors import bits
from test_feedback import Sums, lacking, patterned, total_of

import ringcomm
from ringcomm import Communicator, Config, ConfigError, ErrorFeedback, MismatchError
from ringcomm.codecs import parse

pytestmark = pytest.mark.usefixtures("nothing_left")

SMALL = Config(segment_bytes=4096, timeout=30.0)


def same_residuals(ours: ErrorFeedback, expected: Residuals) -> bool:
    return np.array_equal(ours.worker, expected.worker) and (
        len(ours.owner) == 0 or np.array_equal(ours.owner, expected.owner)
    )


# ---- names ----


def test_densities_by_name() -> None:
    assert parse("topk").density == 0.01
    assert parse("topk:0.001").density == 0.001
    assert parse("topk:1").density == 1.0
    assert parse("topk:1e-3").number == parse("topk").number
    assert parse("topk:0.25").bits == 12


@pytest.mark.parametrize("bad", ["0", "-0.1", "1.01", "nan", "inf", "", "x", "0.1:2", "1%"])
def test_a_density_that_is_none(bad: str) -> None:
    with World(1) as world, pytest.raises(ConfigError, match="density must be a number above 0"):
        world.run(lambda comm: comm.allreduce(np.ones(9, np.float32), compression=f"topk:{bad}",
                                              feedback=False))  # fmt: skip


def test_it_needs_feedback() -> None:
    with World(1) as world, pytest.raises(ConfigError, match=r"'topk:0\.1' rounds so much away"):
        world.run(lambda comm: comm.allreduce(np.ones(9, np.float32), compression="topk:0.1"))


def test_ranks_that_differ_in_density() -> None:
    """T13."""

    def body(comm: Communicator) -> None:
        density = "topk:0.01" if comm.rank else "topk:0.001"
        comm.allreduce(np.ones(999, np.float32), compression=density, feedback=False)

    with World(3) as world, pytest.raises(MismatchError, match=r"compression=topk:0\.001"):
        world.run(body)


# ---- T1, T2, T8 ----


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 8, 16])
def test_bit_for_bit_what_the_rules_give(n: int) -> None:
    """T1, T2, T8: results, residuals and payload bytes on all ranks."""
    counts = sorted({0, 1, n - 1, 255, 256, 257, 3999})
    cases = list(itertools.product(counts, (0.01, 0.2, 1.0), ("sum", "avg")))
    expected, seq = [], 0
    for count, density, op in cases:
        left = None
        for step in range(3):
            every = [patterned(count, rank, step) for rank in range(n)]
            rule = reference.Rule(density, seq, SMALL.segment_bytes)
            result, left, sent = reference.allreduce(every, op, rule, left)
            expected.append((result, left, sent))
            seq += 1

    def body(comm: Communicator) -> None:
        wanted = iter(expected)
        for count, density, op in cases:
            feedback = ErrorFeedback()
            for step in range(3):
                result, left, sent = next(wanted)
                before = comm.stats()["payload_bytes"]
                x = patterned(count, comm.rank, step).copy()
                comm.allreduce(x, op, compression=f"topk:{density}", feedback=feedback)
                assert bits(x) == bits(result), (count, density, op, step)
                assert comm.stats()["payload_bytes"] - before == 6 * sent[comm.rank]
                assert same_residuals(feedback, left[comm.rank]), (count, density, op, step)

    with World(n, lanes=2, config=SMALL) as world:
        world.run(body)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_identical_bits_on_all_ranks(n: int) -> None:
    """T1, over random calls: sizes, densities, with and without feedback."""

    def body(comm: Communicator) -> str:
        rng, digest = np.random.default_rng(5), hashlib.sha256()
        feedbacks: dict[int, ErrorFeedback] = {}
        for step in range(150):
            count = int(rng.choice([10, 777, 5000, 70_001]))
            density = float(rng.choice([0.001, 0.01, 0.3]))
            feedback = feedbacks.setdefault(count, ErrorFeedback()) if step % 3 else False
            x = patterned(count, comm.rank, step % 11).copy()
            comm.allreduce(x, "avg", compression=f"topk:{density}", feedback=feedback)
            digest.update(x.tobytes())
        return digest.hexdigest()

    with World(n, lanes=2, rails=2) as world:
        assert len(set(world.run(body))) == 1


def test_bytes_do_not_grow_with_the_world() -> None:
    """T8: contributions as many as the density says, results half as many again."""
    count, density, steps = 60_000, 0.02, 12

    def body(comm: Communicator) -> float:
        feedback = ErrorFeedback()
        rng = np.random.default_rng(comm.rank)
        for _ in range(steps):
            x = rng.standard_normal(count).astype(np.float32)
            comm.allreduce(x, "avg", compression=f"topk:{density}", feedback=feedback)
        return comm.stats()["payload_bytes"] / steps / (6 * density * count)

    for n in (2, 3, 4, 8, 16):
        with World(n) as world:
            shares = world.run(body)
        expected = 1.0 if n == 2 else 2.5 * (n - 1) / n
        assert sum(shares) / n == pytest.approx(expected, rel=0.06)
        assert max(shares) < 2.5 * 1.15


# ---- T4, T10, T12 ----


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_nothing_is_lost_among_other_codecs(n: int) -> None:
    """T10: what one leaves, another sends."""
    count = 3333

    def body(comm: Communicator) -> None:
        rng = np.random.default_rng(1)
        feedback, sums = ErrorFeedback(), Sums(count)
        for step in range(60):
            codec = str(rng.choice(["topk:0.05", "topk", "int4", "onebit", "int8"]))
            x = patterned(count, comm.rank, step).copy()
            comm.allreduce(x, "avg", compression=codec, feedback=feedback)
            sums.add(x, total_of(count, n, step), n)
        sums.assert_telescopes(lacking(comm, feedback))
        x = np.zeros(count, np.float32)
        comm.allreduce(x, "avg", feedback=feedback)
        assert not feedback.worker.any()
        assert np.abs(sums.out + x - sums.exact).max() <= 1e-3

    with World(n, config=SMALL) as world:
        world.run(body)


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (3, 2)])
def test_several_ranks_on_each_host(hosts: int, local: int) -> None:
    count = 6000 + local

    def body(comm: Communicator) -> None:
        feedback, sums = ErrorFeedback(), Sums(count)
        for step in range(40):
            x = patterned(count, comm.rank, step).copy()
            comm.allreduce(x, "avg", compression="topk:0.03", feedback=feedback)
            sums.add(x, total_of(count, comm.world_size, step), comm.world_size)
        sums.assert_telescopes(lacking(comm, feedback))
        before = feedback.worker
        x = patterned(count, comm.rank, 1).copy()
        x[5000] = np.inf if comm.rank == 1 else 0
        comm.allreduce(x, "avg", compression="topk:0.03", feedback=feedback)
        assert np.isnan(x).all()
        assert bits(feedback.worker) == bits(before)

    with World(hosts * local, config=SMALL, memory=local) as world:
        world.run(body)


@pytest.mark.parametrize("n", [2, 3])
def test_reduce_scatter_and_allgather(n: int) -> None:
    count = 700

    def body(comm: Communicator) -> None:
        part = slice(comm.rank * count, (comm.rank + 1) * count)
        scattered, gathered, sums = ErrorFeedback(), ErrorFeedback(), Sums(count)
        out, exact = np.zeros((n, count)), np.zeros((n, count))
        for step in range(60):
            x = patterned(n * count, comm.rank, step)
            got = comm.reduce_scatter(x, "avg", compression="topk:0.05", feedback=scattered)
            sums.add(got, total_of(n * count, n, step)[part], n)
            every = np.stack([patterned(count, rank, step) for rank in range(n)])
            out += comm.allgather(every[comm.rank], compression="topk:0.05", feedback=gathered)
            exact += every
        sums.assert_telescopes(lacking(comm, scattered)[part])
        left = comm.allgather(gathered.worker)
        assert np.abs(out + left - exact).max() <= 1e-3

    with World(n, config=SMALL) as world:
        world.run(body)


# ---- T5 ----

#: ||sum of results - sum of means|| / ||E g|| after 200 steps, in steps, as simulated with workers'
#: residuals alone: Gaussian data, of log-normal scales, and 95 % zeros.
LAG = {"topk:0.1": (2.7, 2.1, 0.0), "topk:0.01": (33.0, 23.0, 1.4)}


def test_how_far_behind_the_results_are() -> None:
    n, count, steps = 4, 4096, 200

    def lag(comm: Communicator, codec: str, kind: int) -> float:
        rng = np.random.default_rng(3)
        scale: Array = np.ones(count)
        if kind > 0:
            scale = (
                np.exp(rng.standard_normal(count))
                if kind == 1
                else 1.0 * (rng.random(count) < 0.05)
            )
        mean = np.random.default_rng(4).standard_normal(count) * scale
        noise = np.random.default_rng((7, comm.rank))
        feedback, lacks = ErrorFeedback(), np.zeros(count)
        for _ in range(steps):
            x = (mean + noise.standard_normal(count) * scale / 0.3).astype(np.float32)
            exact = comm.allreduce(x.astype(np.float64), "avg")
            lacks += comm.allreduce(x, "avg", compression=codec, feedback=feedback) - exact
        return float(np.linalg.norm(lacks) / np.linalg.norm(mean))

    with World(n) as world:
        for codec, kind in itertools.product(LAG, range(3)):
            behind = world.run(lambda comm, c=codec, k=kind: lag(comm, c, k))[0]
            assert behind <= 1.5 * LAG[codec][kind] + 1e-3, (codec, kind, behind)


# ---- T6 ----


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite(n: int, bad: float) -> None:
    def body(comm: Communicator) -> None:
        feedback = ErrorFeedback()
        x = patterned(9001, comm.rank, 0).copy()
        comm.allreduce(x, compression="topk:0.001", feedback=feedback)
        before = feedback.worker, feedback.owner
        for where in (0, 4500, 9000):
            x = patterned(9001, comm.rank, 1).copy()
            x[where] = bad if comm.rank == n - 1 else 0
            comm.allreduce(x, compression="topk:0.001", feedback=feedback)
            assert np.isnan(x).all()
            assert bits(feedback.worker) == bits(before[0])
            assert bits(feedback.owner) == bits(before[1])

    with World(n, config=SMALL) as world:
        world.run(body)


def test_the_package_takes_it() -> None:
    """A world of one: nothing is encoded, and what was left is delivered."""

    def body(comm: Communicator) -> None:
        x = np.arange(9, dtype=np.float32)
        got = comm.allreduce(x.copy(), compression="topk", feedback=ErrorFeedback())
        assert np.array_equal(got, x)

    assert ringcomm.ErrorFeedback is ErrorFeedback
    with World(1) as world:
        world.run(body)
