"""Files that users have of an earlier version: each loads, and training goes on from it.

What is loaded is compared to the bit. What follows from it depends on how a CPU adds up: there most
elements are as they were, and the few that a codec rounds the other way may differ.
"""

from __future__ import annotations

import importlib.util
import pickle
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import golden_checkpoints as golden
import torch
from ddp_buckets import gradients_of, reduce
from ranks import run_ranks
from sparse_training import import_late
from tensors import stored

from ringcomm import Communicator, ConfigError
from ringcomm.torch import HookState
from ringcomm.torch.transport import FlatTransport

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]


#: Of "auto": critical phases and patience. Of OuterStep: weights by tokens.
REMOVED_KEYS = {
    "padding",
    "parts",
    "units",
    "was_gentler",
    "dwell",
    "norm",
    "guard_until",
    "guard_reason",
    "reference",
}


@pytest.fixture(scope="module", autouse=True)
def what_torch_imports_late() -> None:
    import_late()


def goes_on(comm: Communicator, name: str, beside: Any, state: Any) -> tuple[Any, torch.Tensor]:
    """This rank's own state right after loading, and what further steps come to."""
    with golden.resumed(comm, name, beside, state) as job:
        return job.state_dict(), golden.sample(job.run(golden.SAVED_AT, golden.END))


def assert_has(new: Any, old: Any, where: str = "state") -> None:
    """All that is in the old state is in the new one, to the bit, but for what has been removed. It
    may have more."""
    if isinstance(old, dict):
        counts = old.keys() & {"since"} if where.endswith("['exact']") else set()
        for key in counts:  # of iterations, and of tokens
            assert new["iterations"] == [iterations for iterations, _ in old[key]], where
        for key in old.keys() - REMOVED_KEYS - counts:
            assert key in new, f"{where} lacks {key!r}"
            assert_has(new[key], old[key], f"{where}[{key!r}]")
    elif isinstance(old, (list, tuple)):
        assert len(new) == len(old), where
        for index, (here, there) in enumerate(zip(new, old, strict=True)):
            assert_has(here, there, f"{where}[{index}]")
    elif isinstance(old, torch.Tensor):
        assert new.dtype == old.dtype, where
        assert torch.equal(new, old), where
    else:
        assert new == old, where


def assert_like(name: str, result: torch.Tensor, expected: torch.Tensor) -> None:
    assert bool(torch.isfinite(result).all())
    if name not in golden.MEASURED:
        count = len(expected) // (golden.END - golden.SAVED_AT if name in golden.FIRST_ONLY else 1)
        result, expected = result[:count], expected[:count]
        far = (result - expected).abs() > 1e-4 * expected.abs().clamp(min=1e-2)
        assert int(far.sum()) <= count // 10, (result, expected)


@pytest.mark.parametrize("name", golden.JOBS)
def test_each_ranks_own(name: str) -> None:
    record = golden.read(name)

    def rank(comm: Communicator) -> tuple[Any, torch.Tensor]:
        return goes_on(comm, name, record["beside"][comm.rank], record["own"][comm.rank])

    for number, (state, result) in enumerate(run_ranks(golden.RANKS, rank)):
        assert_has(state, record["own"][number])
        assert_like(name, result, record["results"][number])


@pytest.mark.parametrize("name", golden.JOBS)
def test_what_was_gathered(name: str) -> None:
    record = golden.read(name)

    def rank(comm: Communicator) -> torch.Tensor:
        return goes_on(comm, name, record["beside"][0], record["gathered"])[1]

    assert_like(name, run_ranks(1, rank)[0], record["alone"])
    for result in run_ranks(3, rank):
        assert bool(torch.isfinite(result).all())


@pytest.mark.parametrize("name", golden.PICKLED)
def test_a_pickled_hook(name: str) -> None:
    """It has settings and steps, and takes a model's names and its state."""
    record, pickled = golden.read(name), (golden.FOLDER / f"{name}.pickle").read_bytes()

    def rank(comm: Communicator) -> None:
        found = pickle.loads(pickled)
        assert type(found) is HookState
        assert found.steps == golden.SAVED_AT
        assert found.compression == ("auto" if name == "hook-auto" else "int4")
        found.restore(found.__getstate__(), FlatTransport(comm))
        model = golden.Small()
        found.name_parameters(model)
        found.load_state_dict(record["own"][comm.rank])
        assert_has(stored(found.state_dict()), record["own"][comm.rank])
        for step in range(golden.SAVED_AT, golden.END):
            got = reduce(found, model, gradients_of(model, comm.rank, step))
            assert all(bool(torch.isfinite(one).all()) for one in got.values())

    run_ranks(golden.RANKS, rank)


@pytest.mark.parametrize("name", golden.REMOVED)
def test_what_was_removed_is_refused_by_name(name: str) -> None:
    record = golden.read(name)

    def rank(comm: Communicator) -> None:
        job = golden.REMOVED[name](comm)
        with pytest.raises(ConfigError, match="has been removed"):
            job.load_state_dict(record["own"][comm.rank])
        job.close()

    run_ranks(golden.RANKS, rank)


def test_every_file_is_read() -> None:
    names = [*golden.JOBS, *golden.REMOVED]
    assert {path.name for path in golden.FOLDER.iterdir()} == {
        *(f"{name}.pt.xz" for name in names),
        *(f"{name}.pickle" for name in golden.PICKLED),
    }
