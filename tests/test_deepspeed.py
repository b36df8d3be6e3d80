"""compression="onebit-deepspeed": DeepSpeed's compressed all-reduce, bit for bit.

T7 of the list of what such codecs must be tested for; the other T numbers are as in
test_quantised.py and test_feedback.py.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed_reference as deepspeed
import numpy as np
import pytest
from deepspeed_reference import Errors
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
from ringcomm.residuals import Padding

pytestmark = pytest.mark.usefixtures("nothing_left")

NAME = "onebit-deepspeed"
SMALL = Config(segment_bytes=4096, timeout=30.0)
STEPS = 5


def counts(n: int) -> list[int]:
    """Most of them no multiple of 8 n, some so small that ranks own nothing but padding."""
    return [1, 3, 8 * n - 1, 8 * n, 8 * n + 1, 500, 1717]


def values(count: int, rank: int, step: int) -> Array:
    """Of scales from 1e-3 to 10 in one tensor, with zeros of both signs among them."""
    rng = np.random.default_rng((count, rank, step))
    x = rng.standard_normal(count) * 10.0 ** rng.uniform(-3, 1, count)
    x[rng.random(count) < 0.1] = 0.0
    x[rng.random(count) < 0.1] = -0.0
    return x.astype(np.float32)


def inputs(count: int, n: int, step: int) -> list[Array]:
    return [values(count, rank, step) for rank in range(n)]


def reference(count: int, n: int, steps: int = STEPS) -> list[tuple[Array, list[Errors]]]:
    """Results and errors after each step."""
    errors, found = deepspeed.no_errors(count, n), []
    for step in range(steps):
        result, errors = deepspeed.step(inputs(count, n, step), errors)
        found.append((result, errors))
    return found


def average(comm: Communicator, x: Any, feedback: Any, **options: Any) -> Any:
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
    assert bits(ours.worker) == bits(expected.worker)
    assert bits(ours.server) == bits(expected.server)


# ---- T7: bits ----


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
    """T6: and changes no error, those of the padding neither. 3e38 is too large to be squared."""
    count = 45
    expected = reference(count, n, 3)

    def body(comm: Communicator) -> None:
        feedback = ErrorFeedback()
        for step, (result, errors) in enumerate(expected):
            x = values(count, comm.rank, 99)
            if comm.rank == n - 1:
                x[17] = bad
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
            owner[2] = 1e30
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
        return original(comm, tensor, **options)

    def body(comm: Communicator) -> None:
        feedback = ErrorFeedback()
        average(comm, values(100, comm.rank, 0), feedback)
        before = errors_of(feedback)
        comm.barrier()
        broken.set()
        x = values(100, comm.rank, 1)
        seconds = 30.0 if ends is AbortedError else 0.3
        if comm.rank == 1:
            with pytest.raises(InterruptedError):
                average(comm, x, feedback, timeout=seconds)
        else:
            with pytest.raises(ends, match=r"allreduce\(f32\[100\]\) #\d+ failed"):
                average(comm, x, feedback, timeout=seconds)
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


# ---- T4, T10, T11, T12: nothing is lost ----


def lacking(comm: Communicator, feedback: ErrorFeedback) -> Array:
    state = feedback.state_dict(comm)
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
        return feedback.state_dict(comm), lacks

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
        state = feedback.state_dict(comm)
        assert state["parts"] == "deepspeed"
        restored = ErrorFeedback()
        restored.load_state_dict(state, comm)
        assert bits(restored.owner) == bits(owner)
        assert bits(restored.worker) == bits(np.asarray(state["worker"]))
        assert restored.state_dict(comm)["parts"] == "deepspeed"
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
    (lambda c: average(c, ones(dtype=np.int32), False), TensorError, "not i32"),
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
