"""TORCH_DISTRIBUTED_DEBUG=DETAIL: before each collective, all ranks compare what they call.

The core compares collective, op, dtype and number of elements with every frame in any case; here
shapes are compared too, and a difference is found before anything is changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist

from ..communicator import Communicator
from ..errors import MismatchError

_BYTES = 400
#: Where all ranks' tensors have one shape.
_ALIKE = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "barrier")
_PAIRWISE = ("send", "recv", "recvAnySource")


def is_on() -> bool:
    """Whether the user asked for it."""
    torch_says: Any = dist
    return bool(torch_says.get_debug_level() == torch_says.DebugLevel.DETAIL)


def compare(comm: Communicator, name: str, tensors: Any) -> None:
    """Compares this collective with those of the other ranks.

    Raises:
        MismatchError: (a RuntimeError) naming two ranks that differ, and what each calls.
    """
    if name in _PAIRWISE:
        return
    call = name
    if name in _ALIKE:
        shapes = ", ".join(f"{str(t.dtype)[6:]}{list(t.shape)}" for t in tensors)
        call = f"{name}({shapes})"
    mine = np.frombuffer(call.encode()[:_BYTES].ljust(_BYTES, b"\0"), np.uint8)
    calls = [bytes(row).rstrip(b"\0") for row in comm.allgather(mine)]
    for rank, other in enumerate(calls):
        if other != calls[0]:
            raise MismatchError(
                "Detected mismatch between collectives on ranks. Rank 0 is running "
                f"{calls[0].decode('utf-8', 'replace')}, but rank {rank} is running "
                f"{other.decode('utf-8', 'replace')}",
                rank=rank,
            )
