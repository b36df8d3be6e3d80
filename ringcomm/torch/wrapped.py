"""The DistributedDataParallel around a model, wherever a framework keeps it.

Lightning, Accelerate and transformers wrap the model themselves and hand out the inner one. What is
looked for here is found by the parameters: a module that has one of them.

Invariant: nothing is kept alive.
"""

from __future__ import annotations

import gc
from collections.abc import Container
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


def wrappers_of(ids: Container[int]) -> list[DistributedDataParallel]:
    """All live DDP modules of the process that have one of these parameters, given by id()."""
    found = [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]
    return [one for one in found if any(id(p) in ids for p in one.parameters())]


def stop_exchange(wrappers: list[DistributedDataParallel]) -> None:
    """Gradients stay on their rank from now on, as within no_sync()."""
    for wrapper in wrappers:
        wrapper.require_backward_grad_sync = False


def bare_optimizer(optimizer: Any) -> Any:
    """The optimizer in Accelerate's or Lightning's wrapper of it; itself where there is none."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer
