"""What two ranks get wrong between them with ringcomm.torch, in rows as test_mistakes_apart.py has
them: hooks, optimizers, outer steps, their states, and torch's collectives on a process group."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import ddp_buckets
import torch
import torch.distributed as dist
from ddp_buckets import gradients_of, reduce
from optim_steps import Net, set_gradients
from outer_training import net, train
from sparse_training import import_late
from test_mistakes_apart import (
    Body,
    Row,
    allreduce,
    alone,
    both,
    differ,
    outcomes,
    require_told,
)
from torch import nn

from ringcomm import Communicator, ConfigError, MismatchError, TensorError
from ringcomm.errors import naming
from ringcomm.torch import HookState, Options, OuterStep, optim, sparse
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


def hooked(codec: Any = "bf16", steps: int = 1, **settings: Any) -> Body:
    """Steps by the hook; of a setting that is a pair each rank has its own."""

    def body(comm: Communicator) -> HookState:
        own = {k: v[comm.rank] if isinstance(v, tuple) else v for k, v in settings.items()}
        mine = codec[comm.rank] if isinstance(codec, tuple) else codec
        model = ddp_buckets.Net()
        state = HookState(mine, comm, model=model, **own)
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
    differ(
        "a gathered state of one hook",
        lambda c: hooked("int4")(c).gather_state_dict(),
        hooked("int4"),
        r".* in gather_state_dict\(\)",
        "barrier",
    ),
    alone("a codec that there is not", hooked("int3"), ConfigError, "is unknown; give one of"),
    alone("a pace that there is not", hooked("int4", pace="fast"), ConfigError, "pace"),
    alone("no communicator", lambda _: HookState("int4", 3), ConfigError, "Communicator"),
]

# ---- optimizers ----


def made(kind: Any, comm: Communicator, **settings: Any) -> tuple[nn.Module, Any]:
    model = Net()
    settings = {"lr": 0.1, **settings}
    return model, kind(model.parameters(), comm=comm, **settings)


def stepped(kind: Any = optim.SGD, **settings: Any) -> Body:
    def body(comm: Communicator) -> Any:
        own = {k: v[comm.rank] if isinstance(v, tuple) else v for k, v in settings.items()}
        model, optimizer = made(kind, comm, **own)
        set_gradients(model, comm.rank, 0)
        optimizer.step()
        return optimizer

    return body


def other_rates(comm: Communicator) -> None:
    model, optimizer = made(optim.SGD, comm)
    set_gradients(model, 0, 0)
    optimizer.param_groups[0]["lr"] = 0.1 + comm.rank
    optimizer.step()


def frozen_on_one(comm: Communicator) -> None:
    model = Net()
    if comm.rank:
        next(model.parameters()).requires_grad_(False)
    optim.SGD(model.parameters(), lr=0.1, comm=comm)


def one_more(comm: Communicator) -> None:
    optim.SGD(list(Net().parameters())[: 3 + comm.rank], lr=0.1, comm=comm)


def made_only(comm: Communicator) -> Any:
    return made(optim.SGD, comm)


OPTIMIZERS = [
    both(
        "settings of optimizers",
        stepped(compression=("int4", "int8")),
        MismatchError,
        "compression is int4 on rank 0 and int8 on rank 1",
    ),
    both("hyperparameters", other_rates, MismatchError, r"\['lr'\] is 0.1 on rank 0 and 1.1"),
    both("what is frozen", frozen_on_one, MismatchError, "different parameters"),
    both("how many parameters", one_more, MismatchError, "different parameters"),
    both(
        "methods",
        lambda c: made((optim.SGD, optim.Lion)[c.rank], c),
        MismatchError,
        "optimizer is .* on rank 0 and .* on rank 1",
    ),
    differ(
        "an optimizer on one rank",
        made_only,
        allreduce,
        ".* in an optimizer's constructor",
        r"allreduce\(f32\[4\]",
    ),
    differ("a step of one optimizer", stepped(), made_only, r".* in step\(\)", "barrier"),
    differ(
        "a gathered state of one optimizer",
        lambda c: stepped()(c).gather_state_dict(),
        stepped(),
        r".* in gather_state_dict\(\)",
        "barrier",
    ),
    differ(
        "a group more on one rank",
        lambda c: made_only(c)[1].add_param_group({"params": [nn.Parameter(torch.zeros(3))]}),
        made_only,
        r".* in add_param_group\(\)",
        "barrier",
    ),
    both(
        "densities of sparse optimizers",
        stepped(sparse.SGD, density=(0.1, 0.2)),
        MismatchError,
        "density is 0.1 on rank 0 and 0.2 on rank 1",
    ),
    alone(
        "a state of another method",
        lambda c: made_only(c)[1].load_state_dict(made(optim.Lion, c)[1].state_dict()),
        ConfigError,
        "Lion",
        lambda c: (made_only(c), made(optim.Lion, c), allreduce(c)),
    ),
]

# ---- outer steps ----


def outer(comm: Communicator, model: nn.Module, **settings: Any) -> tuple[Any, OuterStep]:
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    return sgd, OuterStep(model, sgd, **{"every": 2, "comm": comm, **settings})


def trains(steps: int, **settings: Any) -> Body:
    def body(comm: Communicator) -> None:
        own = {k: v[comm.rank] if isinstance(v, tuple) else v for k, v in settings.items()}
        model = net()
        sgd, step = outer(comm, model, **own)
        with step:
            train(model, sgd, comm.rank, range(steps))

    return body


def gathers(comm: Communicator) -> None:
    with outer(comm, net())[1] as step:
        step.gather_state_dict()


def attaches(comm: Communicator) -> None:
    outer(comm, net())[1].attach()


OUTER = [
    both("settings of outer steps", trains(2, every=(2, 3)), MismatchError, "every|settings"),
    both(
        "codecs of outer steps",
        trains(2, compression=("int8", "int4")),
        MismatchError,
        "compression|settings",
    ),
    differ(
        "an outer step on one rank",
        attaches,
        allreduce,
        ".* in attach\\(\\) of OuterStep",
        r"allreduce\(f32\[4\]",
    ),
    differ(
        "a gathered state of one outer step",
        gathers,
        attaches,
        r".* in gather_state_dict\(\)",
        "barrier",
    ),
    differ("steps of outer steps", trains(2), attaches, ".* in a round of OuterStep", "barrier"),
    alone(
        "an outer step that is not attached",
        lambda c: outer(c, net())[1].flush(),
        ConfigError,
        "not attached",
    ),
    alone(
        "a flush in between, of no model",
        lambda c: outer(c, net(), every=0),
        ConfigError,
        "Invalid every",
    ),
]

# ---- torch's collectives ----


def group(comm: Communicator) -> Any:
    return RingcommGroup(None, comm, Options())


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def all_reduce(*shape: int, op: Any = dist.ReduceOp.SUM, dtype: Any = torch.float32) -> Body:
    def body(comm: Communicator) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        group(comm).allreduce([ones(*shape, dtype=dtype)], options).wait()

    return body


def broadcast(root: int) -> Body:
    def body(comm: Communicator) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        one = group(comm)
        one.broadcast([ones(4)], options).wait()
        one.barrier().wait()

    return body


def all_gather(count: int) -> Body:
    return lambda c: group(c).allgather([[ones(count), ones(count)]], [ones(count)]).wait()


def sparse_tensor(comm: Communicator) -> None:
    group(comm).allreduce([ones(4).to_sparse()]).wait()


META = torch.ones(3, device="meta")


def barrier(comm: Communicator) -> None:
    group(comm).barrier().wait()


COLLECTIVES = [
    differ(
        "sizes in torch",
        all_reduce(4),
        all_reduce(5),
        r"allreduce\(f32\[4\]",
        r"allreduce\(f32\[5\]",
    ),
    differ(
        "dtypes in torch",
        all_reduce(4),
        all_reduce(4, dtype=torch.int64),
        r"allreduce\(f32",
        r"allreduce\(i64",
    ),
    differ(
        "ops in torch", all_reduce(4), all_reduce(4, op=dist.ReduceOp.MAX), ".*op=sum", ".*op=max"
    ),
    differ("roots in torch", broadcast(0), broadcast(1), "broadcast.*root=0", "broadcast.*root=1"),
    differ("the order in torch", all_reduce(4), broadcast(0), "allreduce", "broadcast"),
    differ("a barrier in torch", all_reduce(4), barrier, "allreduce", "barrier"),
    differ("all-gathers in torch", all_gather(4), all_gather(5), r".*f32\[4\]", r".*f32\[5\]"),
    differ(
        "a sparse tensor on one rank",
        sparse_tensor,
        all_reduce(4),
        r".* in all_reduce\(\) of a sparse tensor",
        r"allreduce\(f32\[4\]",
    ),
    alone(
        "a tensor without memory",
        lambda c: HookState("bf16", c).comm.allreduce(META),
        TensorError,
        "has no memory; make it on the CPU or a GPU",
        allreduce,
    ),
]

ROWS = [*HOOKS, *OPTIMIZERS, *OUTER, *COLLECTIVES]


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_a_mistake_of_two_ranks(row: Row) -> None:
    require_told(row, outcomes(row))
