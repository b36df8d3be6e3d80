"""What two ranks get wrong between them with ringcomm.torch, in rows as test_mistakes_apart.py has
them. Calls of one rank alone: test_states.py."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import ddp_buckets
import torch
from ddp_buckets import gradients_of, reduce
from optim_steps import Net
from sparse_training import import_late
from test_mistakes_apart import (
    Body,
    Row,
    allreduce,
    both,
    differ,
    outcomes,
    require_told,
)

from ringcomm import Communicator, MismatchError
from ringcomm.core.calls import naming
from ringcomm.torch import HookState, Options, optim, sparse
from ringcomm.torch.exchange import CommExchange
from ringcomm.torch.group import RingcommGroup

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.filterwarnings("ignore::ringcomm.torch.SilenceWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def what_torch_imports_late() -> None:
    import_late()


# ---- hooks ----


def hooked(codec: Any, steps: int = 1) -> Body:
    """Steps by the hook; of a pair of codecs each rank has its own."""

    def body(comm: Communicator) -> HookState:
        mine = codec[comm.rank] if isinstance(codec, tuple) else codec
        model = ddp_buckets.Net()
        state = HookState(mine, comm, model=model)
        for step in range(steps):
            reduce(state, model, gradients_of(model, comm.rank, step))
        return state

    return body


def by_torch(row: Row) -> Row:
    """A row whose errors torch's Futures have made RuntimeErrors of the same text."""
    first, second = row.told
    assert first is not None
    assert second is not None
    return row._replace(told=((RuntimeError, first[1]), (RuntimeError, second[1])))


EXCHANGE = r".* in the exchange of gradients"
AGREEMENT = r".* in the agreement of HookState"


def spreads(comm: Communicator) -> None:
    with naming("the agreement of HookState('auto')"):
        assert CommExchange(comm).spread("int8" if comm.rank == 0 else "")() == "int8"


HOOKS = [
    differ(
        "what auto agrees on, on one rank",
        spreads,
        allreduce,
        ".* in the agreement of HookState",
        r"allreduce\(f32\[4\]",
    ),
    by_torch(
        both(
            "codecs of hooks",
            hooked(("bf16", "fp16")),
            MismatchError,
            "compression is bf16 on rank 0 and fp16 on rank 1",
        )
    ),
    by_torch(
        differ("a hook on one rank", hooked("none"), allreduce, AGREEMENT, r"allreduce\(f32\[4\]")
    ),
    by_torch(
        differ(
            "a step that a rank leaves out", hooked("none", 2), hooked("none"), EXCHANGE, "barrier"
        )
    ),
]

# ---- optimizers ----


def densities(comm: Communicator) -> None:
    sparse.SGD(Net().parameters(), lr=0.1, comm=comm, density=(0.1, 0.2)[comm.rank])


def frozen_on_one(comm: Communicator) -> None:
    model = Net()
    if comm.rank:
        next(model.parameters()).requires_grad_(False)
    optim.SGD(model.parameters(), lr=0.1, comm=comm)


OPTIMIZERS = [
    both("what is frozen", frozen_on_one, MismatchError, "different parameters"),
    both(
        "densities of sparse optimizers",
        densities,
        MismatchError,
        "density is 0.1 on rank 0 and 0.2 on rank 1",
    ),
]

# ---- torch's collectives ----


def all_reduce(is_sparse: bool) -> Body:
    def body(comm: Communicator) -> None:
        tensor = torch.ones(4)
        group = RingcommGroup(None, comm, Options())
        group.allreduce([tensor.to_sparse() if is_sparse else tensor]).wait()

    return body


COLLECTIVES = [
    differ(
        "a sparse tensor on one rank",
        all_reduce(True),
        all_reduce(False),
        r".* in all_reduce\(\) of a sparse tensor",
        r"allreduce\(f32\[4\]",
    ),
]

ROWS = [*HOOKS, *OPTIMIZERS, *COLLECTIVES]


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_a_mistake_of_two_ranks(row: Row) -> None:
    require_told(row, outcomes(row))
