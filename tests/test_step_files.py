"""How many files of the package a step enters in the thread that calls it, which a reader opens to
follow it. Counted in a process of its own, in which no other test has started a thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

Step = Callable[[int], object]
_STEPS = 6  # before the one that counts: moments are frozen, memory is made

#: Most files. (One of the hook's only where its bucket is in flight when it registers a callback.)
MOST = {"OneBitAdam": 18, "a round of OuterStep": 18, "an int8 hook": 14}


def test_a_step_enters_few_files() -> None:
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, check=True, timeout=120
    )
    print(done.stdout)  # pytest -s shows the figures
    entered = json.loads(done.stdout)
    assert entered.keys() == MOST.keys()
    for name, files in entered.items():
        assert 10 < len(files) <= MOST[name], f"{name}: {files}"


def onebit(comm: Any, model: Any) -> Step:
    from ringcomm.torch.optim import OneBitAdam

    optimizer = OneBitAdam(model.parameters(), freeze=3, threshold=64, comm=comm)

    def step(_: int) -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 200)).square().sum().backward()
        optimizer.step()

    return step


def outer(comm: Any, model: Any) -> Step:
    from ringcomm.torch import OuterStep

    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    OuterStep(model, optimizer, every=1, comm=comm).attach()

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(torch.full((4, 200), float(comm.rank + number))).sum().backward()
        optimizer.step()

    return step


def hook(comm: Any, _: Any) -> Step:
    from ddp_buckets import Net, gradients_of, reduce

    from ringcomm.torch import HookState

    model = Net()
    state = HookState("int8", comm, model=model)
    return lambda number: reduce(state, model, gradients_of(model, comm.rank, number))


def files_of(make: Callable[[Any, Any], Step]) -> list[str]:
    from ranks import run_ranks

    import ringcomm

    root, seen = str(Path(ringcomm.__file__).parent) + os.sep, set[str]()

    def look(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            seen.add(frame.f_code.co_filename.removeprefix(root))

    def body(comm: Any) -> None:
        step = make(comm, torch.nn.Linear(200, 50))
        for number in range(_STEPS):
            step(number)
        comm.barrier()
        sys.setprofile(look if comm.rank == 0 else None)
        step(_STEPS)
        sys.setprofile(None)
        comm.barrier()

    run_ranks(2, body)
    return sorted(seen)


if __name__ == "__main__":
    made = dict(zip(MOST, (onebit, outer, hook), strict=True))
    print(json.dumps({name: files_of(make) for name, make in made.items()}))
