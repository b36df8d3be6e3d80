"""A default device of torch's, which a program may set, is not that of ringcomm's own tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from optim_steps import Net  # noqa: E402
from ranks import run_ranks  # noqa: E402

from ringcomm import Communicator  # noqa: E402
from ringcomm.torch import Options, OuterStep, sparse  # noqa: E402
from ringcomm.torch.group import RingcommGroup  # noqa: E402
from ringcomm.torch.optim import Muon, OneBitAdam  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", ["allgather", "gather", "scatter", "reduce_scatter", "alltoall"])
def test_results_lie_where_the_tensor_lies(name: str) -> None:
    def body(comm: Communicator) -> None:
        tensor = torch.ones(2, 3)
        with torch.device("meta"):
            result = getattr(comm, name)(tensor)
        assert result is None or result.device.type == "cpu"

    run_ranks(2, body)


def matrices(model: Net) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.dim() == 2]


OPTIMIZERS: dict[str, Callable[[Net, Communicator], Any]] = {
    "OneBitAdam": lambda model, comm: OneBitAdam(
        model.parameters(), freeze=1, threshold=64, comm=comm
    ),
    "Muon": lambda model, comm: Muon(matrices(model), gradients="int4", comm=comm),
    "sparse": lambda model, comm: sparse.Adam(model.parameters(), comm=comm, overlap=False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        held = matrices(model) if name == "Muon" else list(model.parameters())
        with torch.device("meta"):
            optimizer = OPTIMIZERS[name](model, comm)
            for _ in range(3):
                for parameter in held:
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
            states = [optimizer.state_dict(), optimizer.gather_state_dict()]
            for state in states:
                optimizer.load_state_dict(state)
        kept = [
            value for state in states for one in state["state"].values() for value in one.values()
        ]
        assert all(tensor.device.type == "cpu" for tensor in [*held, *kept])

    run_ranks(2, body)


@pytest.mark.parametrize("delay", [0, 1])
def test_outer_steps(delay: int) -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        with torch.device("meta"):
            outer = OuterStep(model, None, every=2, delay=delay, comm=comm)
            with outer:
                for _ in range(5):
                    outer.tick()
                outer.load_state_dict(outer.state_dict())
                outer.gather_state_dict()
        assert outer.report().rounds >= 2

    run_ranks(2, body)


def test_a_sparse_gradient_of_the_backend() -> None:
    def body(comm: Communicator) -> None:
        tensor = torch.eye(3).to_sparse()
        with torch.device("meta"):
            RingcommGroup(None, comm, Options()).allreduce([tensor]).wait()
        assert torch.equal(tensor.to_dense(), 2 * torch.eye(3))

    run_ranks(2, body)
