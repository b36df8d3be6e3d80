"""Frameworks' wrappers of models and optimizers, and the objects inside.

Lightning, Accelerate and transformers wrap the model themselves and give users the inner one. Their
DistributedDataParallel is found by the parameters: a module that has one of them.

Invariant: this module keeps no object alive.
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
    """Returns the module that a DistributedDataParallel wraps, compiled or not; else the model
    itself."""
    bare = getattr(model, "_orig_mod", model)
    return bare.module if isinstance(bare, (DistributedDataParallel, DataParallel)) else model


def plain_name(name: str) -> str:
    """Returns a parameter's name in its model, without torch.compile's prefix."""
    return name.replace("_orig_mod.", "")


def is_sharded(kind: type) -> bool:
    """Returns whether FSDP divides the parameters of modules of this class among ranks."""
    return not _SHARDING.isdisjoint(base.__name__ for base in kind.__mro__)


def wrappers_of(ids: Container[int]) -> list[DistributedDataParallel]:
    """Returns all live DDP modules of the process that have one of these parameters, given by id().
    Modules that only wait for the garbage collector are left out. Without a default process group
    there can be none, and no search is made."""
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
    """Returns whether the process has a DDP or FSDP module, which exchanges gradients."""
    kinds = _kinds_of(gc.get_objects(), nn.Module)
    return any(issubclass(kind, DistributedDataParallel) or is_sharded(kind) for kind in kinds)


def _kinds_of(objects: Iterable[object], base: type) -> set[type]:
    """Returns the classes of these objects that are ``base`` or derived from it. Each class is
    checked once: objects are a thousand times as many."""
    return {kind for kind in set(map(type, objects)) if issubclass(kind, base)}


def stop_exchange(wrappers: list[DistributedDataParallel]) -> None:
    """Keeps gradients on their rank from now on, as within no_sync()."""
    for wrapper in wrappers:
        wrapper.require_backward_grad_sync = False


def bare_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer inside Accelerate's or Lightning's wrapper; or the argument, if it is
    no wrapper."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer
