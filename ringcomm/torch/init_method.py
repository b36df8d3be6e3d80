"""``init_method="ringcomm://"``: torch's store under launchers that torch does not know.

torch's own env:// needs RANK, WORLD_SIZE and MASTER_*, which mpirun and srun do not set. This
scheme finds the rank's number, and rank 0, as ringcomm.init does (bootstrap/launch.py). Where
env://, torch's default, fails under such a launcher, the error names this scheme.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_handlers, register_rendezvous_handler

from ..bootstrap.launch import LOOPBACK, detect, identify
from ..errors import ConfigError

SCHEME = "ringcomm"
_PATIENCE = datetime.timedelta(minutes=5)


def register() -> None:
    """Registers the scheme with torch, once."""
    if SCHEME not in _rendezvous_handlers:
        register_rendezvous_handler(SCHEME, _meet)  # type: ignore[no-untyped-call]
        _rendezvous_handlers["env"] = _naming_scheme(_rendezvous_handlers["env"])


def _naming_scheme(handler: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Wraps torch's handler of env://: its error names this scheme under a launcher that torch does
    not know."""

    def meet(url: str, *args: Any, **settings: Any) -> Iterator[Any]:
        try:
            yield from handler(url, *args, **settings)
        except ValueError as error:
            with contextlib.suppress(ConfigError):
                me = detect(os.environ)
                if me is not None and me.launcher not in ("env", "torchrun"):
                    error.args = (
                        f"{error}. {me.launcher} has started this process, and sets other "
                        "variables: give init_process_group(..., "
                        f'init_method="{SCHEME}://"), which reads them',
                    )
            raise

    return meet


def _meet(url: str, timeout: Any = _PATIENCE, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Handles the scheme for torch: yields one store, this rank and the number of ranks.

    Raises ConfigError where no launcher gives the rank's number.
    """
    me = identify()
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            me.master_addr or LOOPBACK,
            me.master_port,
            me.world_size,
            is_master=me.rank == 0,
            timeout=timeout,
        )
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            error.args = (
                f"port {me.master_port} of rank 0's host is taken: set MASTER_PORT to a free one, "
                f"the same on all ranks. {error}",
            )
        raise
    yield store, me.rank, me.world_size
    raise RuntimeError("ringcomm:// gives each process one store, and no second")
