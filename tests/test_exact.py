"""Each rank's own state of error feedback: a job of the same size goes on from it to the bit, which
one that goes on from a gathered state does not. (What other ranks make of it: test_states.py.)"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensors
from quantised_reference import CODECS
from ranks import run_ranks

from ringcomm import Communicator, ConfigError, ErrorFeedback, FeedbackStore

pytestmark = pytest.mark.usefixtures("nothing_left")

COUNT = 5000
HAS_TORCH = importlib.util.find_spec("torch") is not None
if HAS_TORCH:
    import torch  # before any rank does, whose states are torch's from then on
stored = tensors.stored if HAS_TORCH else copy.deepcopy


def steps(comm: Communicator, store: FeedbackStore, codec: str, first: int, last: int) -> list[Any]:
    """Results of some steps, whose inputs follow from rank and step."""
    out = []
    for step in range(first, last):
        store.loss_scale = 2.0 ** (step // 2)
        x = np.random.default_rng(100 * step + comm.rank).standard_normal(COUNT)
        x = (x * store.loss_scale).astype(np.float32)
        comm.allreduce(x, "avg", compression=codec, feedback=store["w"])
        out.append(x)
    return out


@pytest.mark.parametrize(("codec", "world"), [*zip(CODECS, (2, 3, 3, 2, 3), strict=True)])
def test_an_exact_state_goes_on_to_the_bit(codec: str, world: int) -> None:
    saved: dict[int, dict[bool, Any]] = {rank: {} for rank in range(world)}
    whole: dict[int, list[Any]] = {}

    def unbroken(comm: Communicator) -> None:
        store = FeedbackStore()
        steps(comm, store, codec, 0, 5)
        saved[comm.rank] = {
            True: stored(store.state_dict(comm)),
            False: stored(store.gather_state_dict(comm)),
        }
        whole[comm.rank] = steps(comm, store, codec, 5, 9)

    def resumed(comm: Communicator, exact: bool) -> bool:
        store = FeedbackStore()
        store.load_state_dict(saved[comm.rank][exact], comm)
        again = steps(comm, store, codec, 5, 9)
        return all(a.tobytes() == b.tobytes() for a, b in zip(again, whole[comm.rank], strict=True))

    run_ranks(world, unbroken)
    assert run_ranks(world, lambda comm: resumed(comm, True)) == [True] * world
    assert run_ranks(world, lambda comm: resumed(comm, False)) == [False] * world


def test_one_feedback_and_all_gathers_too() -> None:
    def body(comm: Communicator) -> None:
        x = np.random.default_rng(comm.rank).standard_normal(999).astype(np.float32)
        feedback, again = ErrorFeedback(), ErrorFeedback()
        comm.allgather(x, compression="int4", feedback=feedback)
        with pytest.raises(ConfigError, match=r"save state_dict\(\) on each"):
            feedback.gather_state_dict(comm)
        again.load_state_dict(stored(feedback.state_dict(comm)), comm)
        assert again.worker.tobytes() == feedback.worker.tobytes()
        one = comm.allgather(x, compression="int4", feedback=feedback)
        other = comm.allgather(x, compression="int4", feedback=again)
        assert one.tobytes() == other.tobytes()

    run_ranks(3, body)


DAMAGE: list[Callable[[dict[str, Any]], object]] = [
    lambda one: one.update(exact={}),
    lambda one: one.update(exact=None),
    lambda one: one.update(worker=np.zeros(3, np.float64)),
    lambda one: one.update(owner_start=4990),
    lambda one: one.update(owner_start="0"),
    lambda one: one.pop("owner"),
    lambda one: one.update(op="max"),
    lambda one: one.update(loss_scale=float("inf")),
    lambda one: one.update(format=0),
]


def test_what_is_none_is_refused() -> None:
    def body(comm: Communicator) -> None:
        store = FeedbackStore()
        steps(comm, store, "int4", 0, 1)
        saved = store.state_dict(comm)["tensors"]["w"]
        for damage in DAMAGE:
            state = copy.deepcopy(saved)
            damage(state)
            with pytest.raises(ConfigError):
                store["w"].load_state_dict(state, comm)

    run_ranks(3, body)


@pytest.mark.torch
@pytest.mark.parametrize("codec", ["int4", "onebit"])
def test_the_hook_goes_on_to_the_bit(codec: str) -> None:
    pytest.importorskip("torch")
    from ddp_buckets import LARGE, THRESHOLD, Net, gradients_of, reduce

    from ringcomm.torch import HookState

    def body(comm: Communicator) -> None:
        model = Net()

        def fresh() -> HookState:
            return HookState(codec, comm, model=model, threshold=THRESHOLD, warmup_steps=1)

        def run(state: HookState, first: int, last: int) -> list[dict[str, torch.Tensor]]:
            every = range(first, last)
            return [reduce(state, model, gradients_of(model, comm.rank, s), 2) for s in every]

        def same(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
            pairs = zip(one, other, strict=True)
            return all(torch.equal(a[name], b[name]) for a, b in pairs for name in LARGE)

        state = fresh()
        run(state, 0, 4)
        exact, any_world = state.state_dict(), state.gather_state_dict()
        whole = run(state, 4, 7)
        for saved, expected in ((exact, True), (any_world, False)):
            state = fresh()
            state.load_state_dict(stored(saved))
            assert state.steps == 4
            assert same(run(state, 4, 7), whole) is expected

    run_ranks(3, body)
