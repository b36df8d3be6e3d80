"""What frameworks wrap around models and optimizers, and what is inside.

Lightning, Accelerate and transformers wrap the model themselves and hand out the inner one. Their
DistributedDataParallel is found by the parameters: a module that has one of them.

Invariant: nothing is kept alive.
"""

from __future__ import annotations

import gc
from collections.abc import Container, Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

_SHARDING = {"FullyShardedDataParallel", "FSDPModule"}


def inner_of(model: nn.Module) -> nn.Module:
    """The module that a DistributedDataParallel wraps, compiled or not; else the model itself."""
    bare = getattr(model, "_orig_mod", model)
    return bare.module if isinstance(bare, (DistributedDataParallel, DataParallel)) else model


def plain_name(name: str) -> str:
    """A parameter's name in its model, without what torch.compile puts into it."""
    return name.replace("_orig_mod.", "")


def is_sharded(kind: type) -> bool:
    """Whether modules of this class have their parameters divided among ranks by FSDP."""
    return not _SHARDING.isdisjoint(base.__name__ for base in kind.__mro__)


def wrappers_of(ids: Container[int]) -> list[DistributedDataParallel]:
    """All live DDP modules of the process that have one of these parameters, given by id(). One
    that was let go of, and waits for the garbage collector, is not among them, and there are none
    without a default process group, which spares the search of all objects."""
    if not dist.is_initialized() or not _wrappers_of(ids):
        return []
    gc.collect()
    return _wrappers_of(ids)


def _wrappers_of(ids: Container[int]) -> list[DistributedDataParallel]:
    objects = gc.get_objects()
    kinds = _kinds_of(objects, DistributedDataParallel)
    found = [one for one in objects if type(one) in kinds] if kinds else []
    return [one for one in found if any(id(p) in ids for p in one.parameters())]


def is_exchanged() -> bool:
    """Whether the process has a module whose gradients a wrapper of torch brings together."""
    kinds = _kinds_of(gc.get_objects(), nn.Module)
    return any(issubclass(kind, DistributedDataParallel) or is_sharded(kind) for kind in kinds)


def _kinds_of(objects: Iterable[object], base: type) -> set[type]:
    """The classes of these objects that are ``base`` or derived from it. There are a thousand times
    as many objects as classes, and each class is asked once."""
    return {kind for kind in set(map(type, objects)) if issubclass(kind, base)}


def stop_exchange(wrappers: list[DistributedDataParallel]) -> None:
    """Gradients stay on their rank from now on, as within no_sync()."""
    for wrapper in wrappers:
        wrapper.require_backward_grad_sync = False


def bare_optimizer(optimizer: Any) -> Any:
    """The optimizer in Accelerate's or Lightning's wrapper of it; itself where there is none."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer
