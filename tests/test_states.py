"""One contract for the state of every object: state_dict() is this rank's own and exchanges
nothing, gather_state_dict() is the same on all ranks, and load_state_dict() takes either."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import itertools
import pickle
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from patience import PATIENCE

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from outer_training import net, train
from ranks import World, run_ranks
from sparse_training import import_late
from state_jobs import MATRICES, THRESHOLD, Apart, Exchange, Feedback, Hooked, Job, Trained
from tensors import stored
from torch import nn

from ringcomm import Communicator, ConfigError, ErrorFeedback, FeedbackStore
from ringcomm.communicator import works_of_process
from ringcomm.errors import RingcommError
from ringcomm.sparse import SparseExchange
from ringcomm.torch import HookState, OuterStep, Stale1, optim, sparse
from ringcomm.torch.outer import Sparse

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]


@pytest.fixture(scope="module", autouse=True)
def what_torch_imports_late() -> None:
    import_late()


# ---- the objects, each with something to do ----


def trained(kind: Any, **settings: Any) -> Callable[[Communicator], Job]:
    return lambda comm: Trained(comm, kind, **settings)


def wired(kind: Any, **settings: Any) -> Callable[[Communicator], Job]:
    return trained(kind, lr=1e-3, threshold=THRESHOLD, **settings)


OBJECTS: dict[str, Callable[[Communicator], Job]] = {
    "ErrorFeedback": lambda comm: Feedback(comm, ErrorFeedback()),
    "FeedbackStore": lambda comm: Feedback(comm, FeedbackStore()),
    "SparseExchange": lambda comm: Exchange(comm, "gather"),
    "SparseExchange, owners": lambda comm: Exchange(comm, "owner"),
    "HookState, int4": lambda comm: Hooked(comm, "int4", warmup_steps=1),
    "HookState, int8": lambda comm: Hooked(comm, "int8", feedback=True, pace=Stale1(3)),
    "HookState, auto": lambda comm: Hooked(comm, "auto", feedback=True),
    "SGD": wired(optim.SGD, momentum=0.9),
    "Lion": wired(optim.Lion),
    "OneBitAdam": wired(optim.OneBitAdam, freeze=2),
    "OneBitAdam, frozen": wired(optim.OneBitAdam, freeze=2, refresh=None),
    "OneBitLamb": wired(optim.OneBitLamb, freeze=2),
    "ZeroOneAdam": wired(
        optim.ZeroOneAdam, var_freeze_step=2, local_step_scaler=2, local_step_clipper=4
    ),
    "Muon": trained(optim.Muon, lr=0.01, shapes=MATRICES),
    "Muon, int4": trained(optim.Muon, lr=0.01, shapes=MATRICES, gradients="int4"),
    "sparse.SGD": trained(sparse.SGD, lr=0.01, momentum=0.9, density=0.1),
    "sparse.Adam": trained(
        sparse.Adam, lr=0.01, density=0.1, staleness=1, exchange="owner", overlap=False
    ),
    "OuterStep": lambda comm: Apart(comm, every=2),
    "OuterStep, delayed": lambda comm: Apart(comm, every=4, fragments=2, delay=1),
    "OuterStep, sparse": lambda comm: Apart(comm, every=2, outer=Sparse(density=0.1)),
}
MEASURE = {"HookState, auto"}  # and so do otherwise each time
STEPS = 5  # made before a state is saved
MORE = 8
PHASES = (1, 4, 7, 10)  # in the warm-up, behind it, between exchanges that are rare; the end
every_object = pytest.mark.parametrize("name", OBJECTS)


@contextlib.contextmanager
def job_of(name: str, comm: Communicator) -> Iterator[Job]:
    job = OBJECTS[name](comm)
    try:
        yield job
    finally:
        job.close()


def same(one: Any, other: Any) -> bool:
    """To the bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# ---- the contract ----


@dataclasses.dataclass(frozen=True)
class Used:
    """What a rank has of an object that two ranks have used.

    Attributes:
        own, beside: its own state, and what a checkpoint has beside it.
        works: of the process, before and after a state_dict() of rank 0 alone.
        told: what a gather_state_dict() of rank 0 alone raises.
    """

    own: Any
    beside: Any
    works: tuple[int, int]
    told: str


@functools.cache
def used(name: str) -> list[Used]:
    meeting = threading.Barrier(2, timeout=PATIENCE)

    def rank(comm: Communicator) -> Used:
        with job_of(name, comm) as job:
            job.run(0, STEPS)
            own, beside = job.state_dict(), stored(job.beside())  # what is on its way has come
            meeting.wait()
            before = works_of_process()
            meeting.wait()
            if comm.rank == 0:
                assert job.state_dict()
            meeting.wait()  # rank 1 waits for nothing of ringcomm's
            after = works_of_process()
            meeting.wait()
            call = job.comm.barrier if comm.rank else job.gather_state_dict
            with pytest.raises(RingcommError) as caught:
                call()
        return Used(own, beside, (before, after), str(caught.value))

    return run_ranks(2, rank)


@every_object
def test_state_dict_exchanges_nothing(name: str) -> None:
    for one in used(name):
        assert one.works[0] == one.works[1]


@every_object
def test_gather_state_dict_of_one_rank_alone_names_itself(name: str) -> None:
    text = used(name)[0].told
    assert "ranks differ in collective" in text
    kind = name.partition(",")[0].removeprefix("sparse.")
    assert f"gather_state_dict() of {kind} (all ranks must take part): " in text


@pytest.mark.parametrize("name", sorted(OBJECTS.keys() - MEASURE))
def test_each_ranks_own_goes_on_to_the_bit(name: str) -> None:
    """From each of the PHASES, what remains of the run has the bits of the unbroken one."""
    parts = list(itertools.pairwise((0, *PHASES)))

    def unbroken(comm: Communicator) -> list[Any]:
        with job_of(name, comm) as job:
            return [(job.run(*part), job.state_dict(), stored(job.beside())) for part in parts]

    found = run_ranks(2, unbroken)

    def again(comm: Communicator) -> list[tuple[int, int, int]]:
        unlike = []
        for at, (_, state, beside) in enumerate(found[comm.rank][:-1], 1):
            with job_of(name, comm) as job:
                job.load_beside(beside)
                job.load_state_dict(state)
                for part, (result, _, _) in zip(parts[at:], found[comm.rank][at:], strict=True):
                    wrong = int((job.run(*part) != result).sum())
                    job.state_dict()  # as there: with staleness it shows what is on its way
                    if wrong:
                        unlike.append((parts[at][0], part[1], wrong))
        return unlike

    assert run_ranks(2, again) == [[], []]


@every_object
def test_gather_state_dict_is_the_same_on_all_ranks_and_for_any_number(name: str) -> None:
    def save(comm: Communicator) -> Any:
        with job_of(name, comm) as job:
            job.run(0, STEPS)
            return job.gather_state_dict(), stored(job.beside())

    (first, beside), (second, _), _ = run_ranks(3, save)
    assert first
    assert same(first, second)

    def load(comm: Communicator) -> torch.Tensor:
        with job_of(name, comm) as job:
            job.load_beside(beside)
            job.load_state_dict(first)
            return job.run(STEPS, MORE)

    for ranks in (1, 2):
        for result in run_ranks(ranks, load):
            assert bool(torch.isfinite(result).all())


@every_object
def test_an_own_state_elsewhere(name: str) -> None:
    """Another rank of as many goes on without what was that rank's alone, as where only rank 0 has
    saved, and says so once; in a world of another size it is refused."""

    state, beside = used(name)[0].own, used(name)[0].beside

    def load(comm: Communicator) -> torch.Tensor:
        with job_of(name, comm) as job:
            job.load_beside(beside)
            job.load_state_dict(state)
            return job.run(STEPS, MORE)

    with warnings.catch_warnings(record=True) as caught, World(2) as world:
        warnings.simplefilter("always")
        for result in world.run(load):
            assert bool(torch.isfinite(result).all())
    (text,) = [str(one.message) for one in caught if "starts from zero" in str(one.message)]
    assert "belongs to rank 0 of 2 alone, and this is rank 1 of 2" in text
    assert "gather_state_dict()" in text

    def refused(comm: Communicator) -> None:
        with job_of(name, comm) as job:
            job.run(0, 1)
            kept = job.state_dict()
            before = stored(job.beside())
            with pytest.raises(ConfigError, match=r"belongs to rank 0 of 2 .* gather_state_dict"):
                job.load_state_dict(state)
            assert same(stored(job.beside()), before)
            assert same(job.state_dict(), kept)

    run_ranks(3, refused)


@pytest.mark.parametrize(
    "kind", [ErrorFeedback, FeedbackStore, SparseExchange, HookState, OuterStep]
)
def test_the_argument_of_before_is_answered(kind: type[Any]) -> None:
    assert "exact" not in inspect.signature(kind.state_dict).parameters
    with pytest.raises(ConfigError, match=r"exact= is gone: .* gather_state_dict\(\), which all"):
        kind.state_dict(object(), exact=True)


# ---- other calls that are made of collectives ----


def optimizer_on(comm: Communicator) -> Any:
    return wired(optim.SGD, momentum=0.9)(comm).obj


def attached(comm: Communicator) -> tuple[nn.Module, Any, OuterStep]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, optimizer, OuterStep(model, optimizer, every=1, comm=comm).attach()


def round_of(comm: Communicator) -> Callable[[], Any]:
    model, optimizer, _ = attached(comm)
    return lambda: train(model, optimizer, 0, range(1))


def step_of(comm: Communicator) -> Callable[[], Any]:
    job = wired(optim.SGD, momentum=0.9)(comm)
    return lambda: job.run(0, 1)


def group_of(comm: Communicator) -> Callable[[], Any]:
    optimizer, more = optimizer_on(comm), {"params": [nn.Parameter(torch.zeros(3))]}
    return lambda: optimizer.add_param_group(more)


def join_of(comm: Communicator) -> Callable[[], Any]:
    model = net()
    return OuterStep(model, torch.optim.SGD(model.parameters(), 0.1), every=1, comm=comm).attach


CALLS: dict[str, Callable[[Communicator], Callable[[], Any]]] = {
    "split() of Communicator": lambda comm: lambda: comm.split(0),
    "SGD()": lambda comm: lambda: optimizer_on(comm),
    "add_param_group() of SGD": group_of,
    "step() of SGD": step_of,
    "attach() of OuterStep": join_of,
    "flush() of OuterStep": lambda comm: attached(comm)[2].flush,
    "a round of OuterStep": round_of,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_one_rank_alone_names_itself(name: str) -> None:
    def rank(comm: Communicator) -> str:
        call = CALLS[name](comm)
        with pytest.raises(RingcommError) as caught:
            (comm.barrier if comm.rank else call)()
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again)) == (type(caught.value), str(caught.value))
        return str(caught.value)

    text, others = run_ranks(2, rank)
    assert re.search(r"rank 0 called \w+\(.*\) in (?!another)", others)  # call of ringcomm
    assert text.startswith(f"{name} (all ranks must take part): ")
    assert text.count("must take part") == 1
    assert "ranks differ in collective" in text
