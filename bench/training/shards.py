"""FSDP2 in a run of four processes: what is sharded over which ranks, and whole for a judgement.

Invariant: ``gathered`` is entered and left by all ranks; forwards in it send nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard


@functools.cache
def meshes() -> tuple[Any, Any]:
    """All ranks, joined by ringcomm, and the two of this rank's host, by gloo."""
    hosts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "ranks"))
    return DeviceMesh.from_group(dist.new_group(backend="ringcomm"), "cpu"), hosts["ranks"]


def shard(model: Any, hosts: bool) -> Sequence[Any]:
    """Shards a model over all ranks, or over the two of a host; returns its parts."""
    parts = [*model.blocks, model]
    for part in parts:
        fully_shard(part, mesh=meshes()[hosts])
    return parts


@contextlib.contextmanager
def gathered(parts: Sequence[Any]) -> Iterator[None]:
    """The model is whole."""
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    yield
    for part in parts:
        part.reshard()
        part.set_reshard_after_forward(part is not parts[-1], recurse=False)
