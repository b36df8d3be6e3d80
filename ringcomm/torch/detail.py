"""Checks before each collective that torch's debug variables turn on.

TORCH_DISTRIBUTED_DEBUG=DETAIL    all ranks compare their calls. The core always compares
                                  collective, op, dtype and number of elements with every frame;
                                  here shapes are compared, too, before anything is changed.
TORCH_DIST_NAN_CHECK=1            a rank does not send a tensor with a NaN.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch.distributed as dist

from ..communicator import Communicator
from ..core.calls import naming
from ..core.views import View
from ..errors import MismatchError, TensorError

_BYTES = 400
#: Collectives in which all ranks' tensors have the same shape.
_ALIKE = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "barrier")
_PAIRWISE = ("send", "recv", "recvAnySource")


def is_on() -> bool:
    """Returns whether TORCH_DISTRIBUTED_DEBUG is DETAIL."""
    return bool(dist.get_debug_level() == dist.DebugLevel.DETAIL)  # type: ignore[attr-defined]


def is_recorded() -> bool:
    """Returns whether torch's flight recorder, from 2.15 on, records the collectives of groups that
    do not do so themselves: unless TORCH_FR_BUFFER_SIZE, or its older name, is 0."""
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    size = next(filter(None, map(os.environ.get, names)), "2000")
    return hasattr(dist.distributed_c10d, "_maybe_attach_flight_recorder") and int(size) > 0


def checks_nan() -> bool:
    """Returns whether TORCH_DIST_NAN_CHECK is 1."""
    return os.environ.get("TORCH_DIST_NAN_CHECK") == "1"


def require_no_nan(name: str, sources: Iterable[View]) -> None:
    """Raises TensorError (a RuntimeError) if a tensor that a collective is about to send has a
    NaN."""
    for tensor in [source.owner for source in sources]:
        if tensor.is_floating_point() and tensor.isnan().any():
            raise TensorError(
                f"{name}: the tensor {tensor.dtype}{list(tensor.shape)} has a NaN, and "
                "TORCH_DIST_NAN_CHECK=1 is set; nothing was sent"
            )


def compare(comm: Communicator, name: str, tensors: Any) -> None:
    """Compares this collective with those of the other ranks.

    Raises:
        MismatchError: (a RuntimeError) naming two ranks that differ, and what each calls.
    """
    if name in _PAIRWISE:
        return
    shapes = ", ".join(f"{str(t.dtype)[6:]}{list(t.shape)}" for t in tensors)
    call = f"{name}({shapes})" if name in _ALIKE else name
    mine = np.frombuffer(call.encode()[:_BYTES].ljust(_BYTES, b"\0"), np.uint8)
    with naming(f"the comparison of shapes before {call}"):
        calls = [bytes(row).rstrip(b"\0") for row in comm.allgather(mine)]
    for rank, other in enumerate(calls):
        if other != calls[0]:
            raise MismatchError(
                "Detected mismatch between collectives on ranks. Rank 0 is running "
                f"{calls[0].decode('utf-8', 'replace')}, but rank {rank} is running "
                f"{other.decode('utf-8', 'replace')}",
                rank=rank,
            )
