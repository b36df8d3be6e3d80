"""``init_method="ringcomm://"``: torch's store under launchers that torch does not know.

torch's own env:// wants RANK, WORLD_SIZE and MASTER_*, which mpirun and srun do not set. Here the
ranks are told apart, and rank 0 is found, as by ringcomm.init: see bootstrap/launch.py.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler

from ..bootstrap.launch import LOOPBACK, identify

SCHEME = "ringcomm"
_PATIENCE = datetime.timedelta(minutes=5)


def register() -> None:
    """Makes the scheme known to torch. Harmless the second time."""
    try:
        register_rendezvous_handler(SCHEME, _meet)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return  # it is


def _meet(url: str, timeout: Any = _PATIENCE, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """What torch calls: one store, this rank and the number of ranks.

    Raises ConfigError where no launcher says who is who.
    """
    me = identify()
    store = dist.TCPStore(  # type: ignore[attr-defined]
        me.master_addr or LOOPBACK, me.master_port, me.world_size, is_master=me.rank == 0,
        timeout=timeout,
    )  # fmt: skip
    yield store, me.rank, me.world_size
    raise RuntimeError("ringcomm:// gives each process one store, and no second")
