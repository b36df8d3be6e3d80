"""States of every object that has one, in files that an earlier version wrote: golden/checkpoints.

    python tests/golden_checkpoints.py FOLDER       in an environment that has that version

Those of the project were written by commit dfadde5: there state_dict(exact=True) was what
state_dict() is now, and state_dict() what gather_state_dict() is. They stay as they are, since
users have such files; where a method or a setting is removed, its file tests what is said of it.

NAME.pt.xz is a Record as torch.save writes it, compressed; NAME.pickle a pickled HookState.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import lzma
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypedDict

import torch
from ranks import run_ranks
from state_jobs import Apart, Exchange, Feedback, Hooked, Job, Trained
from tensors import stored
from torch import nn

from ringcomm import Communicator, ErrorFeedback, FeedbackStore
from ringcomm.torch import optim, sparse
from ringcomm.torch.outer import Sparse
from ringcomm.torch.stale import Stale1

FOLDER = Path(__file__).resolve().parent / "golden" / "checkpoints"
RANKS = 2
SAVED_AT, END = 5, 8  # steps
COUNT, SHAPES, THRESHOLD = 512, ((16, 32), (5,), ()), 1024


class Small(nn.Module):
    """One tensor that a codec takes, and two that are too small."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in zip(("weight", "bias", "scale"), SHAPES, strict=True):
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))


def hooked(codec: str, **settings: Any) -> Callable[[Communicator], Job]:
    return lambda comm: Hooked(comm, codec, Small(), THRESHOLD, feedback=True, **settings)


def wired(kind: Any, **settings: Any) -> Callable[[Communicator], Job]:
    settings = {"lr": 1e-2, "threshold": THRESHOLD, **settings}
    return lambda comm: Trained(comm, kind, SHAPES, **settings)


def spread(kind: Any, **settings: Any) -> Callable[[Communicator], Job]:
    return lambda comm: Trained(comm, kind, SHAPES, lr=1e-2, density=0.1, **settings)


def apart(**settings: Any) -> Callable[[Communicator], Job]:
    return lambda comm: Apart(comm, (5, 16, 3), **settings)


JOBS: dict[str, Callable[[Communicator], Job]] = {
    "feedback": lambda comm: Feedback(comm, ErrorFeedback(), COUNT),
    "feedback-store": lambda comm: Feedback(comm, FeedbackStore(), COUNT),
    "exchange-gather": lambda comm: Exchange(comm, "gather", COUNT),
    "exchange-owner": lambda comm: Exchange(comm, "owner", COUNT),
    "hook-int4": hooked("int4", warmup_steps=1),
    "hook-stale1": hooked("int4", pace=Stale1(dense_steps=2, correction=False)),
    "hook-auto": hooked("auto"),
    "sgd-int4": wired(optim.SGD, compression="int4", momentum=0.9),
    "sgd-onebit": wired(optim.SGD, momentum=0.9),
    "onebit-adam": wired(optim.OneBitAdam, freeze=2),
    "onebit-lamb": wired(optim.OneBitLamb, freeze=2),
    "zero-one-adam": wired(optim.ZeroOneAdam, var_freeze_step=2, local_step_scaler=1),
    "sparse-sgd": spread(sparse.SGD, momentum=0.9),
    "sparse-adam": spread(sparse.Adam, staleness=1),
    "outer": apart(every=2),
    "outer-delayed": apart(every=5, delay=2),
    "outer-sparse": apart(every=2, outer=Sparse(density=0.1)),
}
#: Files of what has been removed, with the job that a user makes instead.
REMOVED: dict[str, Callable[[Communicator], Job]] = {
    "onebit-adam-published": wired(optim.OneBitAdam, freeze=2),
    "lion-vote": wired(optim.Lion),
    "lion-average": wired(optim.Lion),
}
PICKLED = ("hook-int4", "hook-stale1", "hook-auto")
MEASURED = {"hook-auto"}  # its steps follow from measured times
#: Of the steps that follow only the first is compared: no backward had made the gradients, which
#: counted as unused then, and came once more with those of the next step.
FIRST_ONLY = {"hook-stale1"}


class Record(TypedDict):
    """A job's states after SAVED_AT steps, and what its next steps came to.

    Attributes:
        own: each rank's own state.
        gathered: the state of all.
        beside: what a checkpoint of each rank has beside it, such as weights.
        results: of each rank, a sample of what Job.run returned of the steps up to END.
        alone: the same of one rank that went on from ``gathered`` in a world of its own.
    """

    own: list[Any]
    gathered: Any
    beside: list[Any]
    results: list[torch.Tensor]
    alone: torch.Tensor


def read(name: str) -> Record:
    file = io.BytesIO(lzma.decompress((FOLDER / f"{name}.pt.xz").read_bytes()))
    record: Record = torch.load(file, weights_only=True)
    return record


def sample(result: torch.Tensor) -> torch.Tensor:
    """Some of its elements; a copy."""
    return result.flatten()[::7].clone()


@contextlib.contextmanager
def job_of(comm: Communicator, name: str) -> Iterator[Job]:
    job = JOBS[name](comm)
    try:
        yield job
    finally:
        job.close()


@contextlib.contextmanager
def resumed(comm: Communicator, name: str, beside: Any, state: Any) -> Iterator[Job]:
    """The job as a restart makes it, of copies, as optimizers write into what they load."""
    with job_of(comm, name) as job:
        job.load_beside(stored(beside))
        job.load_state_dict(stored(state))
        yield job


def _saved(comm: Communicator, name: str) -> tuple[Any, Any, Any, torch.Tensor, bytes]:
    with job_of(comm, name) as job:
        job.run(0, SAVED_AT)
        if hasattr(job.obj, "gather_state_dict"):
            gathered, own = job.gather_state_dict(), job.state_dict()
        else:
            assert "exact" in inspect.signature(job.obj.state_dict).parameters
            gathered, own = job.state_dict(), stored(job.obj.state_dict(*job.known, exact=True))
        beside = stored(job.beside())
        pickled = pickle.dumps(job.obj) if name in PICKLED else b""
        return own, gathered, beside, sample(job.run(SAVED_AT, END)), pickled


def _alone(comm: Communicator, name: str, beside: Any, state: Any) -> torch.Tensor:
    with resumed(comm, name, beside, state) as job:
        return sample(job.run(SAVED_AT, END))


def write(folder: Path) -> None:
    """Writes all of them, by the ringcomm that is installed."""
    for name in JOBS:
        own, gathered, beside, results, pickled = zip(
            *run_ranks(RANKS, functools.partial(_saved, name=name)), strict=True
        )
        alone = functools.partial(_alone, name=name, beside=beside[0], state=gathered[0])
        record = Record(
            own=list(own),
            gathered=gathered[0],
            beside=list(beside),
            results=list(results),
            alone=run_ranks(1, alone)[0],
        )
        file = io.BytesIO()
        torch.save(record, file)
        packed = lzma.compress(file.getvalue(), preset=9 | lzma.PRESET_EXTREME)
        (folder / f"{name}.pt.xz").write_bytes(packed)
        if pickled[0]:
            (folder / f"{name}.pickle").write_bytes(pickled[0])


if __name__ == "__main__":
    write(Path(sys.argv[1]))
