"""compression="onebit-deepspeed": DeepSpeed's compressed all-reduce, bit for bit.

T7 of the list of what such codecs must be tested for; the other T numbers are as in
test_quantised.py. What is carried from call to call is in test_deepspeed_feedback.py, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed_reference as deepspeed
import numpy as np
import pytest
from deepspeed_cases import NAME, assert_same, average, errors_of, inputs, reference, values
from ranks import World, run_ranks
from reference import Array
from tensors import bits

from ringcomm import (
    AbortedError,
    CommTimeoutError,
    Communicator,
    Config,
    ConfigError,
    ErrorFeedback,
    MismatchError,
    RingcommError,
    TensorError,
)
from ringcomm.deepspeed import sum_of_squares

pytestmark = pytest.mark.usefixtures("nothing_left")

SMALL = Config(segment_bytes=4096, timeout=30.0)


# ---- T7: bits ----


def counts(n: int) -> list[int]:
    """Most of them no multiple of 8 n, some so small that ranks own nothing but padding."""
    return [1, 3, 8 * n - 1, 8 * n, 8 * n + 1, 500, 1717]


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_several_steps_bit_for_bit(n: int) -> None:
    """T1 and T7: results and both errors, in place and out of place."""
    expected = {count: reference(count, n) for count in counts(n)}

    def body(comm: Communicator) -> None:
        for count, steps in expected.items():
            feedback = ErrorFeedback()
            for step, (result, errors) in enumerate(steps):
                x = values(count, comm.rank, step)
                out = np.empty_like(x) if step % 2 else None
                got = average(comm, x, feedback, out=out)
                assert got is (x if out is None else out)
                assert out is None or bits(x) == bits(values(count, comm.rank, step))
                assert bits(got) == bits(result), (count, step)
                assert_same(errors_of(feedback), errors[comm.rank])
            assert feedback.count == count

    for lanes, engines in ((1, "shared"), (2, "own")):
        with World(n, lanes=lanes, config=SMALL, engines=engines) as world:
            world.run(body)


@pytest.mark.parametrize("count", [1, 31, 32, 33, 1000, 20_001, 70_001])
def test_squares_are_summed_in_one_order(count: int) -> None:
    """T7: in float64, where another order shows, as it would not in the scale."""
    x = values(count, 0, 0)
    assert sum_of_squares(x) == deepspeed.sum_of_squares(x)
    if count > 1000:
        assert sum_of_squares(x) != deepspeed.sum_of_squares(x[::-1])


@pytest.mark.parametrize("n", [2, 4])
def test_where_ranks_share_memory(n: int) -> None:
    expected = reference(5003, n, 2)

    def body(comm: Communicator) -> None:
        feedback = ErrorFeedback()
        for step, (result, errors) in enumerate(expected):
            got = average(comm, values(5003, comm.rank, step), feedback)
            assert bits(got) == bits(result)
            assert_same(errors_of(feedback), errors[comm.rank])

    for memory in (2, True):
        with World(n, memory=memory) as world:
            world.run(body)


@pytest.mark.parametrize("n", [2, 3])
def test_against_the_formula_in_float64(n: int) -> None:
    """Another arithmetic, that of the definition in real numbers. Where the mean is next to zero
    its sign is anyone's."""
    count = 777
    xs, size = inputs(count, n, 0), deepspeed.padded(777, n)

    def encoded(x: Array) -> Array:
        return np.linalg.norm(x) / np.sqrt(len(x)) * np.where(x < 0, -1.0, 1.0)

    sent = [encoded(np.pad(x.astype(np.float64), (0, size - count))) for x in xs]
    means = np.mean(sent, axis=0)
    expected = np.concatenate([encoded(part) for part in np.split(means, n)])
    sure = np.abs(means[:count]) > 1e-6

    def body(comm: Communicator) -> None:
        got = average(comm, xs[comm.rank], False)
        assert np.allclose(got[sure], expected[:count][sure], rtol=1e-5, atol=0)
        assert np.allclose(np.abs(got), np.abs(expected[:count]), rtol=1e-5, atol=0)

    run_ranks(n, body)


@pytest.mark.parametrize("n", [2, 3])
def test_without_feedback_every_call_is_the_first(n: int) -> None:
    def body(comm: Communicator) -> None:
        for step in range(3):
            expected, _ = deepspeed.step(inputs(300, n, step), deepspeed.no_errors(300, n))
            assert bits(average(comm, values(300, comm.rank, step), False)) == bits(expected)

    run_ranks(n, body)


def test_any_layout_float64_and_torch() -> None:
    """float64 is rounded to float32 first; what is not dense is written back."""
    torch = pytest.importorskip("torch")
    n, count = 2, 60
    expected, _ = deepspeed.step(inputs(count, n, 0), deepspeed.no_errors(count, n))

    def body(comm: Communicator) -> None:
        x = values(count, comm.rank, 0)
        wide = x.astype(np.float64)
        assert average(comm, wide, False) is wide
        assert bits(wide.astype(np.float32)) == bits(expected)
        holes = np.full((count, 3), 7.0, np.float32)
        holes[:, 1] = x
        average(comm, holes[:, 1], False)
        assert bits(holes[:, 1].copy()) == bits(expected)
        assert (holes[:, ::2] == 7).all()
        tensor = torch.from_numpy(x.copy()).reshape(6, 10).T.contiguous().T
        assert average(comm, tensor, False) is tensor
        assert bits(tensor.flatten().numpy().copy()) == bits(expected)
        matrix = x.reshape(6, 10)
        assert average(comm, matrix, False).shape == (6, 10)

    run_ranks(n, body)


# ---- T6: special values ----


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_what_is_not_finite_makes_all_of_it_nan(n: int, bad: float) -> None:
    """T6: and changes no error, those of the padding neither. Two of 3e38 have an infinite norm."""
    count = 45
    expected = reference(count, n, 3)

    def body(comm: Communicator) -> None:
        feedback = ErrorFeedback()
        for step, (result, errors) in enumerate(expected):
            x = values(count, comm.rank, 99)
            if comm.rank == n - 1:
                x[17:19] = bad
            assert np.isnan(average(comm, x, feedback)).all()
            got = average(comm, values(count, comm.rank, step), feedback)
            assert bits(got) == bits(result)
            assert_same(errors_of(feedback), errors[comm.rank])

    run_ranks(n, body)


def test_a_mean_that_is_not_finite() -> None:
    """T6: only its owner can tell, and tells all."""
    n, count = 3, 100

    def body(comm: Communicator) -> None:
        feedback = ErrorFeedback()
        average(comm, values(count, comm.rank, 0), feedback)
        before = errors_of(feedback)
        owner = feedback.owner
        if comm.rank == 1:
            owner[2:4] = 3e38
        feedback.load(feedback.worker, owner, feedback.owner_start, feedback.padding)
        assert np.isnan(average(comm, values(count, comm.rank, 1), feedback)).all()
        assert bits(feedback.worker) == bits(before.worker[:count])
        assert bits(feedback.owner) == bits(owner)

    run_ranks(n, body)


def test_zeros() -> None:
    """T6: a tensor of zeros stays one; a zero among others is +s, as in DeepSpeed."""

    def body(comm: Communicator) -> None:
        feedback = ErrorFeedback()
        x = np.zeros(100, np.float32)
        x[1::2] = -0.0
        assert not average(comm, x, feedback).any()
        assert not errors_of(feedback).worker.any()
        x[:] = 0
        x[0] = -10
        got = average(comm, x, feedback)
        assert got[0] < 0
        assert (got[1:] > 0).all()

    run_ranks(2, body)


@pytest.mark.parametrize("stage", ["alltoall", "allgather"])
@pytest.mark.parametrize("ends", [AbortedError, CommTimeoutError])
def test_a_failure_on_the_way_changes_nothing(
    stage: str, ends: type[RingcommError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """T6: and is told of under the call's own name."""
    original = getattr(Communicator, stage)
    broken = threading.Event()

    def call(comm: Communicator, tensor: Array, **options: Any) -> Any:
        if broken.is_set() and comm.rank == 1:
            if ends is AbortedError:
                comm.abort("enough")
            raise InterruptedError
        if broken.is_set() and ends is CommTimeoutError:  # of the time that is left, little
            options["timeout"] = min(options["timeout"], 0.3)
        return original(comm, tensor, **options)

    def body(comm: Communicator) -> None:
        feedback = ErrorFeedback()
        average(comm, values(100, comm.rank, 0), feedback)
        before = errors_of(feedback)
        comm.barrier()
        broken.set()
        x = values(100, comm.rank, 1)
        if comm.rank == 1:
            with pytest.raises(InterruptedError):
                average(comm, x, feedback, timeout=30.0)
        else:
            with pytest.raises(ends, match=r"allreduce\(f32\[100\]\) #\d+ failed"):
                average(comm, x, feedback, timeout=30.0)
        assert bits(x) == bits(values(100, comm.rank, 1))
        assert_same(errors_of(feedback), before)

    monkeypatch.setattr(Communicator, stage, call)
    run_ranks(2, body)


# ---- sizes of 0 and worlds of 1 ----


def test_a_world_of_one_keeps_its_values() -> None:
    """DeepSpeed's optimizers leave the all-reduce out there."""
    with World(1) as world:
        comm = world.comms[0]
        feedback, x = ErrorFeedback(), values(100, 0, 0)
        assert bits(average(comm, x.copy(), feedback)) == bits(x)
        feedback.load(x, x[:0], 0)
        assert np.array_equal(average(comm, x.copy(), feedback), x + x)
        assert not feedback.worker.any()


def test_nothing_at_all() -> None:
    def body(comm: Communicator) -> None:
        feedback = ErrorFeedback()
        assert average(comm, np.zeros(0, np.float32), feedback).shape == (0,)
        assert feedback.count == 0
        assert average(comm, np.zeros((3, 0)), False).shape == (3, 0)

    run_ranks(2, body)


# ---- T8: what travels ----


@pytest.mark.parametrize("n", [2, 3, 5])
def test_bytes_on_the_wire(n: int) -> None:
    """T8: a bit for each element, 12 bytes for each part, and 4 for each result."""
    count = 10_001

    def body(comm: Communicator) -> None:
        before = comm.stats()["payload_bytes"]
        average(comm, values(count, comm.rank, 0), False)
        chunk = deepspeed.padded(count, n) // n
        sent = (n - 1) * (12 + chunk // 8) + (n - 1) * (4 + chunk // 8)
        assert comm.stats()["payload_bytes"] - before == sent

    run_ranks(n, body)


def test_rows_are_as_the_format_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """T8: scale, dtype and count, and signs, of which the first is a byte's highest bit."""
    rows: dict[str, Array] = {}

    def record(name: str) -> None:
        original = getattr(Communicator, name)

        def call(comm: Communicator, tensor: Array, **options: Any) -> Any:
            if comm.rank == 0:
                rows[name] = tensor.copy()
            return original(comm, tensor, **options)

        monkeypatch.setattr(Communicator, name, call)

    record("alltoall")
    record("allgather")
    x = np.full(20, -2.0, np.float32)
    x[[0, 9, 16]] = 2

    run_ranks(2, lambda comm: average(comm, x.copy(), False))
    scale = deepspeed.rms(np.pad(x, (0, 12)))
    head = bits(np.array([scale])) + (20).to_bytes(7, "little") + b"\x02"
    assert rows["alltoall"].tobytes() == head + b"\x80\x40" + head + b"\x8f\xff"
    assert rows["allgather"].tobytes() == bits(np.array([scale])) + b"\x80\x40"


# ---- what is refused; T13: ranks that disagree ----


def ones(count: int = 20, dtype: Any = np.float32) -> Array:
    return np.ones(count, dtype)


REFUSED: Sequence[tuple[Callable[[Communicator], Any], type[Exception], str]] = [
    (lambda c: average(c, ones(), None), ConfigError, "needs feedback=ringcomm.ErrorFeedback"),
    (lambda c: average(c, ones(), True), ConfigError, "feedback=True: give"),
    (lambda c: c.allreduce(ones(), compression=NAME, feedback=False), ConfigError,
     "does not go with op='sum': .* gives the average and is waited for; use onebit"),
    (lambda c: c.allreduce(ones(), "max", compression=NAME, feedback=False), ConfigError, "'max'"),
    (lambda c: average(c, ones(), False, async_op=True), ConfigError, "with async_op"),
    (lambda c: average(c, ones(), False, async_op=True, on_done=print), ConfigError, "async_op"),
    (lambda c: c.reduce_scatter(ones(), "avg", compression=NAME, feedback=False), ConfigError,
     "does not go with reduce_scatter"),
    (lambda c: c.allgather(ones(), compression=NAME, feedback=False), ConfigError, "allgather"),
    (lambda c: c.allreduce_many([ones()], "avg", compression=NAME, feedback=False), ConfigError,
     "does not go with allreduce_many"),
    (lambda c: average(c, ones(dtype=np.int32), False), TensorError, "not int32"),
    (lambda c: average(c, ones(), ErrorFeedback(21)), ConfigError, "is of 21 elements"),
    (lambda c: average(c, ones(), False, timeout=0), ConfigError, "timeout=0"),
    (lambda c: average(c, ones(), False, out=ones(21)), TensorError, "out is"),
]  # fmt: skip


@pytest.mark.parametrize("n", [1, 2])
def test_what_is_refused(n: int) -> None:
    """Before anything is sent, in a world of one as in others."""

    def body(comm: Communicator) -> None:
        for call, kind, says in REFUSED:
            with pytest.raises(kind, match=says):
                call(comm)
        assert comm.stats()["works"] == 0

    run_ranks(n, body)


def test_the_hook_refuses_it() -> None:
    pytest.importorskip("torch")
    from ringcomm.torch import HookState

    with pytest.raises(ConfigError, match="does not go with the hook"):
        HookState(NAME, feedback=False)
    state = HookState("bf16")
    with pytest.raises(ConfigError, match="does not go with the hook"):
        state.compression = NAME
    assert state.compression == "bf16"


def test_a_feedback_that_another_thread_uses() -> None:
    feedback, told = ErrorFeedback(20), []

    def use() -> None:
        for call in (feedback.require_idle, lambda: feedback.rescale(2.0)):
            with pytest.raises(ConfigError, match="in use by a collective of another thread"):
                call()
            told.append(call)

    with feedback.taken():
        feedback.require_idle()
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    feedback.require_idle()
    assert len(told) == 2


def test_sizes_that_only_the_padding_makes_equal() -> None:
    """T13: every rank is told the same, nothing is kept, and the communicator goes on."""

    def body(comm: Communicator) -> None:
        feedback = ErrorFeedback()
        count = (20, 20, 21)[comm.rank]
        other = {0: 2, 1: 2, 2: 0}[comm.rank]
        says = rf"allreduce\(f32\[{count}\]\): rank {other} has called"
        with pytest.raises(MismatchError, match=says) as caught:
            average(comm, values(count, comm.rank, 0), feedback)
        assert caught.value.rank == other
        assert not feedback.worker.any()
        wide = values(20, comm.rank, 0).astype(np.float64 if comm.rank else np.float32)
        with pytest.raises(MismatchError, match=r"allreduce\(f(32|64)\[20\]\)"):
            average(comm, wide, False)
        expected, _ = deepspeed.step(inputs(20, 3, 1), deepspeed.no_errors(20, 3))
        assert bits(average(comm, values(20, comm.rank, 1), False)) == bits(expected)

    run_ranks(3, body)


@pytest.mark.parametrize("other", [{"count": 500}, {"compression": "onebit"}, {"op": "sum"}])
def test_ranks_that_disagree(other: dict[str, Any]) -> None:
    """T13: what the core can tell."""

    def body(comm: Communicator) -> None:
        call = {"count": 100, "compression": NAME, "op": "avg"}
        if comm.rank == 1:
            call |= other
            if call["op"] == "sum":
                call["compression"] = "onebit"
        x = values(int(str(call["count"])), comm.rank, 0)
        with pytest.raises(MismatchError, match="allreduce"):
            comm.allreduce(x, str(call["op"]), compression=str(call["compression"]), feedback=False)

    run_ranks(2, body)
