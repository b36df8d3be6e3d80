"""ringcomm.sparse: what is chosen, what comes of it on all ranks, and what stays.

Everything is compared bit for bit with sparse_reference.py, on worlds of threads.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import numpy as np
import pytest
import sparse_reference as slow
from ranks import World, run_ranks
from reference import Array
from sparse_reference import words
from tensors import subnormals_are_zeros

from ringcomm import (
    CommTimeoutError,
    Communicator,
    Config,
    ConfigError,
    MismatchError,
    ProtocolError,
    RingcommError,
    TensorError,
)
from ringcomm.sparse import SparseExchange

pytestmark = pytest.mark.usefixtures("nothing_left")


@functools.lru_cache(maxsize=512)
def deltas(count: int, ranks: int, step: int) -> list[Array]:
    """With outliers, ties, zeros, tiny numbers and chunks of nothing. Read-only."""
    out = []
    for rank in range(ranks):
        rng = np.random.default_rng((count, rank, step))
        x = rng.standard_normal(count).astype(np.float32)
        x *= 10.0 ** rng.uniform(-4, 2, count).astype(np.float32)
        x[rng.random(count) < 0.2] = 0
        x[rng.random(count) < 0.1] = 0.5
        x[rng.random(count) < 0.01] = 1e-42
        x[count // 3 : count // 2] = 0
        x.flags.writeable = False
        out.append(x)
    return out


SHAPES = [
    {"count": 5000, "chunk": 1024, "k": 16, "block": 1},
    {"count": 12288, "chunk": 4096, "k": 64, "block": 1},
    {"count": 12289, "chunk": 4096, "k": 512, "block": 1},
    {"count": 5003, "chunk": 1024, "k": 32, "block": 16},
    {"count": 100, "chunk": 4096, "k": 64, "block": 16},
    {"count": 3, "chunk": 16, "k": 16, "block": 1},
    {"count": 70000, "chunk": 65536, "k": 16, "block": 16},
]


def exchanged(
    comm: Communicator, steps: int, ranks: int, shape: dict[str, Any], **more: Any
) -> list[Any]:
    """[(what came, dense; the residual)] of some rounds."""
    one = SparseExchange(comm, **shape, **more)
    got = []
    for step in range(steps):
        entries = one.submit(deltas(shape["count"], ranks, step)[comm.rank]).wait()
        got.append((entries.scatter(), one.residual.copy()))
    return got


@pytest.mark.parametrize("turn", range(len(SHAPES)), ids=lambda turn: str(SHAPES[turn]["count"]))
@pytest.mark.parametrize("exchange", ["gather", "owner"])
def test_all_ranks_get_the_bits_of_the_reference(turn: int, exchange: str) -> None:
    """By both exchanges each shape, and each pair of values and aggregate."""
    values, aggregate = (("bf16", "fp32")[turn % 2], ("mean", "senders")[turn // 2 % 2])
    shape, steps = SHAPES[turn], 3
    ranks, block, chunk = 3, shape["block"], shape["chunk"]
    kept = shape["k"] // block
    more = min(2 * kept, chunk // block) if exchange == "owner" else 0
    want = slow.World(ranks, shape["count"], chunk, block, kept, 0.95, values, aggregate, more)
    got = run_ranks(
        ranks,
        lambda comm: exchanged(
            comm, steps, ranks, shape, values=values, aggregate=aggregate, exchange=exchange
        ),
    )
    for step in range(steps):
        mean = want.round(deltas(shape["count"], ranks, step))
        for rank in range(ranks):
            dense, residual = got[rank][step]
            # A zero that arrives has the sign of the sum, and the reference's of the element.
            assert (words(dense + np.float32(0)) == words(mean + np.float32(0))).all()
            assert (words(residual) == words(want.residuals[rank])).all()


@pytest.mark.parametrize("exchange", ["gather", "owner"])
def test_a_rank_whose_thread_takes_subnormals_for_zeros(exchange: str) -> None:
    count, rng = 3000, np.random.default_rng(7)
    tiny = rng.integers(-50, 51, (2, count)).astype(np.float32) * np.float32(2.0**-149)

    def run(comm: Communicator) -> Array:
        one = SparseExchange(
            comm, count, k=64, chunk=1024, decay=1.0, values="fp32", exchange=exchange
        )
        with subnormals_are_zeros() if comm.rank else contextlib.nullcontext():
            return words(one.submit(tiny[comm.rank]).wait().scatter())

    first, second = run_ranks(2, run)
    assert first.any()
    assert (first == second).all()


@pytest.mark.parametrize("exchange", ["gather", "owner"])
def test_nothing_is_lost_at_decay_1(exchange: str) -> None:
    """The sum of all means is that of the deltas' means, less what is left."""
    count, ranks = 9000, 4

    def run(comm: Communicator) -> tuple[Array, Array, Array]:
        one = SparseExchange(comm, count, k=64, decay=1.0, exchange=exchange)
        total = np.zeros(count)
        for step in range(10):
            one.submit(deltas(count, ranks, step)[comm.rank]).wait().add_to(
                dense := np.zeros(count, np.float32)
            )
            total += dense
        state = one.gather_state_dict()
        return total, np.asarray(state["worker"]), np.asarray(state["owner"])

    total, worker, owner = run_ranks(ranks, run)[2]
    put_in = sum(
        np.mean([one.astype(float) for one in deltas(count, ranks, step)], 0) for step in range(10)
    )
    np.testing.assert_allclose(total + worker + owner, put_in, rtol=1e-5, atol=2e-4)
    assert (exchange == "owner") == bool(owner.any())


def test_what_is_not_finite_poisons_all_and_leaves_the_residuals() -> None:
    count = 5000

    def run(comm: Communicator, exchange: str) -> tuple[bool, bool, bool]:
        one = SparseExchange(comm, count, exchange=exchange)
        one.submit(deltas(count, 3, 0)[comm.rank]).wait()
        before = one.state_dict()
        bad = deltas(count, 3, 1)[comm.rank].copy()
        if comm.rank == 1:
            bad[4500] = np.inf
        entries = one.submit(bad).wait()
        after = one.state_dict()
        same = all(
            (np.asarray(before[key]) == np.asarray(after[key])).all() for key in ("worker", "owner")
        )
        return entries.poisoned, bool(np.isnan(entries.scatter()).all()), same

    for exchange in ("gather", "owner"):
        assert run_ranks(3, lambda comm, way=exchange: run(comm, way)) == [(True,) * 3] * 3


def test_a_sum_that_overflows_poisons_too() -> None:
    def run(comm: Communicator) -> tuple[bool, bool]:
        one = SparseExchange(comm, 16, chunk=16, k=4, values="fp32")
        x = np.zeros(16, np.float32)
        x[3] = 3e38
        entries = one.submit(x).wait()
        return entries.poisoned, bool(one.residual.any())

    assert run_ranks(2, run) == [(True, False)] * 2


@pytest.mark.parametrize("exchange", ["gather", "owner"])
def test_a_round_that_failed_can_be_repeated(exchange: str) -> None:
    """Its residuals are those from before it, so that the same delta gives the same again."""

    def fails(_timeout: float | None) -> Any:
        raise ProtocolError("made up")

    def run(comm: Communicator) -> None:
        one, other = (SparseExchange(comm, 5000, exchange=exchange) for _ in range(2))
        for step in range(4):
            if step == 2:
                end, one._way.end = one._way.end, fails  # type: ignore[method-assign]
                late = one.submit(deltas(5000, 2, step)[comm.rank])
                for _ in range(2):
                    with pytest.raises(ProtocolError):
                        late.wait()
                one._way.end = end  # type: ignore[method-assign]
            got = [
                each.submit(deltas(5000, 2, step)[comm.rank]).wait().scatter()
                for each in (one, other)
            ]
            assert (words(got[0]) == words(got[1])).all()
            assert (words(one.residual) == words(other.residual)).all()

    run_ranks(2, run)


@pytest.mark.parametrize("exchange", ["gather", "owner"])
def test_a_round_can_be_undone(exchange: str) -> None:
    """As if it had not been, until the next one begins."""

    def run(comm: Communicator) -> None:
        one, other = (SparseExchange(comm, 5000, exchange=exchange) for _ in range(2))
        for step in range(4):
            mine = deltas(5000, 2, step)[comm.rank]
            late = one.submit(deltas(5000, 2, step + 1)[comm.rank])
            late.wait()
            late.undo()
            late.undo()
            got = [each.submit(mine).wait().scatter() for each in (one, other)]
            late.undo()
            assert (words(got[0]) == words(got[1])).all()
            assert (words(one.residual) == words(other.residual)).all()

    run_ranks(2, run)


@pytest.mark.parametrize("exchange", ["gather", "owner"])
def test_the_ranks_that_remain_go_on(exchange: str) -> None:
    """Nothing of theirs is lost, whatever they owned."""

    def run(comm: Communicator) -> None:
        one = SparseExchange(comm, 9000, decay=1.0, exchange=exchange)
        for step in range(3):
            one.submit(deltas(9000, 3, step)[comm.rank]).wait()
        start, owner = one._way.owner_residual()
        before = one.residual.copy()
        fewer = comm.split(comm.rank == 0)
        one.use(fewer)
        before[start : start + len(owner)] += owner * np.float32(fewer.world_size)
        assert (words(one.residual) == words(before)).all()
        one.submit(deltas(9000, 3, 3)[comm.rank]).wait()
        fewer.close()

    run_ranks(3, run, bring_up="tcp")


def test_a_peer_that_does_not_come() -> None:
    def run(comm: Communicator) -> None:
        one = SparseExchange(comm, 5000)
        if comm.rank == 0:
            late = one.submit(deltas(5000, 2, 1)[comm.rank], timeout=0.2)
            with pytest.raises(CommTimeoutError):
                late.wait()
            assert not one.residual.any()

    with World(2) as world:
        world.run(run)
        with pytest.raises(RingcommError):  # the communicator has failed
            world.run(lambda comm: comm.barrier())


def test_one_round_at_a_time() -> None:
    def run(comm: Communicator) -> None:
        one = SparseExchange(comm, 100)
        first = one.submit(np.ones(100, np.float32))
        with pytest.raises(ConfigError, match="one round in flight"):
            one.submit(np.ones(100, np.float32))
        with pytest.raises(ConfigError, match="in flight"):
            one.state_dict()
        entries = first.wait()
        assert entries is first.wait()
        one.submit(np.ones(100, np.float32)).wait()

    run_ranks(2, run)


@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
def test_bytes(ranks: int) -> None:
    """At density 1/64, less than 1/30 of those of an all-reduce of float32."""
    count = 1 << 18

    def run(comm: Communicator) -> tuple[int, int, str]:
        one = SparseExchange(comm, count)
        before = comm.stats()["wire_bytes"]
        one.submit(np.random.default_rng(comm.rank).random(count, np.float32)).wait()
        comm.barrier()
        return comm.stats()["wire_bytes"] - before, one.sent_bytes, one.exchange

    dense = 2 * (ranks - 1) / ranks * 4 * count
    for sent, told, exchange in run_ranks(ranks, run):
        assert exchange == ("gather" if ranks <= 4 else "owner")
        assert told <= dense / 30
        assert sent <= dense / 30 + 2000
        assert told <= sent or ranks == 1


@pytest.mark.parametrize(("before", "after"), [("gather", "owner"), ("owner", "gather")])
def test_states_fit_other_worlds(before: str, after: str) -> None:
    """What all ranks lack together is the same."""
    count = 9000

    def save(comm: Communicator) -> dict[str, Any]:
        one = SparseExchange(comm, count, decay=1.0, exchange=before)
        for step in range(3):
            one.submit(deltas(count, 4, step)[comm.rank]).wait()
        return one.gather_state_dict()

    state = run_ranks(4, save)[0]

    def load(comm: Communicator) -> dict[str, Any]:
        one = SparseExchange(comm, count, decay=1.0, exchange=after)
        one.load_state_dict(state)
        return one.gather_state_dict()

    told = run_ranks(3, load)[0]
    lacking = [np.asarray(one["worker"]) + np.asarray(one["owner"]) for one in (state, told)]
    np.testing.assert_allclose(*lacking, rtol=1e-5, atol=1e-6)


def test_states_of_others_are_refused() -> None:
    def run(comm: Communicator) -> None:
        one = SparseExchange(comm, 100)
        state = one.state_dict()
        for wrong, told in (
            ({}, "no state"),
            ({**state, "count": 99}, "of 99 elements"),
            ({**state, "exact": {}}, "does not say whose"),
            ({**state, "worker": np.zeros(100)}, "float32 of one dimension"),
            ({**state, "worker": np.zeros(99, np.float32)}, "of 99 elements"),
            ({**state, "owner_start": -1}, "its owner_start is -1"),
            ({**state, "format": 2}, "format 2; this version reads 1"),
        ):
            with pytest.raises(ConfigError, match=told):
                one.load_state_dict(wrong)

    run_ranks(2, run)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"density": 0}, "Invalid density: 0"),
        ({"density": 1.5}, "Invalid density"),
        ({"density": float("nan")}, "Invalid density"),
        ({"k": 0}, "Invalid k: 0"),
        ({"k": 5000}, "Invalid k"),
        ({"k": 24, "block": 16}, "Invalid k: 24"),
        ({"chunk": 8}, "Invalid chunk: 8"),
        ({"chunk": 100, "block": 16}, "Invalid chunk"),
        ({"chunk": 1 << 17}, "Invalid chunk"),
        ({"block": 2}, "Invalid block: 2"),
        ({"decay": -0.1}, "Invalid decay"),
        ({"decay": 1.1}, "Invalid decay"),
        ({"values": "int3"}, "Invalid values: 'int3'"),
        ({"aggregate": "sum"}, "Invalid aggregate"),
        ({"exchange": "ring"}, "Invalid exchange"),
    ],
)
def test_arguments_that_cannot_work(arguments: dict[str, Any], told: str) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=told) as caught:
            SparseExchange(comm, 100, **arguments)
        assert isinstance(caught.value, ConfigError)

    run_ranks(1, run)


def test_tensors_that_do_not_fit() -> None:
    def run(comm: Communicator) -> None:
        one = SparseExchange(comm, 100)
        for wrong in (np.zeros(99, np.float32), np.zeros(100), "delta"):
            with pytest.raises(TensorError):
                one.submit(wrong)
        entries = one.submit(np.ones(100, np.float32)).wait()
        with pytest.raises(TensorError):
            entries.scatter(np.zeros(101, np.float32))
        with pytest.raises(TensorError):
            entries.add_to(np.zeros(100))

    run_ranks(1, run)


def test_ranks_of_different_formats_get_an_error() -> None:
    """Of different sizes from the core; of equal sizes where that can be told."""

    def sizes(comm: Communicator) -> None:
        one = SparseExchange(comm, 8192, k=64 + comm.rank)
        with pytest.raises(MismatchError):
            one.submit(np.ones(8192, np.float32)).wait()

    def records(comm: Communicator) -> None:
        one = SparseExchange(comm, 8192, k=64, values="fp32")
        first = one.submit(np.ones(8192, np.float32))
        one._way._received[:] = 255
        with pytest.raises(ProtocolError) as caught:
            first.wait()
        assert caught.value.rank == 0

    def results(comm: Communicator) -> None:
        one = SparseExchange(comm, 8192, k=64, exchange="owner")
        one.submit(np.ones(8192, np.float32)).wait()
        one._way._results[1] = 255
        with pytest.raises(ProtocolError, match="rank 1 sent") as caught:
            one._way._joined()
        assert caught.value.rank == 1

    run_ranks(2, sizes)
    run_ranks(1, records)
    run_ranks(2, results)


def test_nothing_at_all() -> None:
    def run(comm: Communicator) -> None:
        entries = SparseExchange(comm, 0).submit(np.zeros(0, np.float32)).wait()
        assert entries.elements() == 0
        assert entries.scatter().shape == (0,)
        zeros = SparseExchange(comm, 100).submit(np.zeros(100, np.float32)).wait()
        assert zeros.elements() == 0
        assert not zeros.scatter().any()

    run_ranks(2, run)


def test_worlds_of_many_rounds_at_once() -> None:
    """One exchange for each tensor, all in flight together."""

    def run(comm: Communicator) -> list[Array]:
        many = [SparseExchange(comm, 1000 + i, k=64, chunk=1024) for i in range(5)]
        rounds = [one.submit(deltas(one.count, 2, 7)[comm.rank]) for one in many]
        return [one.wait().scatter() for one in reversed(rounds)]

    with World(2, config=Config()) as world:
        first, second = world.run(run)
    assert all((words(x) == words(y)).all() for x, y in zip(first, second, strict=True))
