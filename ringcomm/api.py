"""The default communicator of a process: init, shutdown, and the questions about it.

Invariants: init makes the default communicator; shutdown, its own close() or the end of the process
closes it; where there is no open one, that of torch.distributed's default process group is used, if
its backend is "ringcomm" (ringcomm.torch registers it by ``set_fallback``).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from .communicator import Communicator
from .config import Config, names_arguments
from .errors import ConfigError, NotInitializedError, RingcommError

_default: Communicator | None = None
_lock = threading.RLock()  # a signal handler may call shutdown within init
_is_joining = False  # init waits for other ranks, and shutdown has not been called meanwhile
_fallback: Callable[[], Communicator | None] | None = None


@names_arguments
def init(
    rank: int | None = None,
    world_size: int | None = None,
    *,
    init_method: str | None = None,
    config: Config | None = None,
    timeout: float | None = None,
    mpi: Any = None,
    store: Any = None,
) -> Communicator:
    """Joins the ranks of this job and makes the default communicator.

    Args:
        rank, world_size: this rank and the number of ranks. None: from the environment of torchrun,
            Open MPI, MPICH or Slurm; without any of these, a world of one.
        init_method: ``"tcp://host:port"`` of rank 0, where explicit values are given.
        config: settings; None: ``Config()``. Fields that it was not given follow the environment.
        timeout: seconds within which all ranks must have found each other; None:
            ``config.connect_timeout``. (Collectives have ``config.timeout``.)
        mpi: an mpi4py communicator, over which the ranks find each other.
        store: a torch.distributed Store, over which the ranks find each other.

    Raises:
        ConfigError: a setting, the environment or the secret cannot work.
        BootstrapError: a rank did not arrive, or could not be reached; its text is a table of them.
        RingcommError: init was called before; or shutdown, by a signal handler, meanwhile.
    """
    global _default, _is_joining
    with _lock:
        comm = _open_default()
        if _is_joining or (comm is not None and not comm.is_inherited):
            raise RingcommError(
                "ringcomm.init was called before; call ringcomm.shutdown() first, or use "
                "Communicator.split for another group"
            )
        _is_joining = True
        try:
            made = _default = Communicator.create(
                rank,
                world_size,
                init_method=init_method,
                config=config,
                timeout=timeout,
                mpi=mpi,
                store=store,
            )
            if not _is_joining:
                shutdown()
                raise RingcommError("ringcomm.shutdown was called while ringcomm.init waited")
        finally:
            _is_joining = False
        return made


def shutdown() -> None:
    """Closes the default communicator, if there is one."""
    global _default, _is_joining
    with _lock:
        comm, _default, _is_joining = _default, None, False
    if comm is not None:
        comm.close()


def _after_fork() -> None:
    global _lock, _is_joining
    _lock, _is_joining = threading.RLock(), False  # another thread of the parent may be in init


os.register_at_fork(after_in_child=_after_fork)


def set_fallback(ask: Callable[[], Communicator | None]) -> None:
    """Registers a function that returns the default communicator where init has made none."""
    global _fallback
    _fallback = ask


def is_initialized() -> bool:
    """True from init until shutdown, or its communicator's close(), and while the default process
    group of torch.distributed has the backend "ringcomm"; False in a forked child that has called
    neither itself."""
    comm = _find()
    return comm is not None and not comm.is_inherited


def default_communicator() -> Communicator:
    """Returns the communicator made by init; without one, that of torch.distributed's default
    process group, if its backend is "ringcomm". Raises NotInitializedError."""
    comm = _find()
    if comm is None:
        raise NotInitializedError(
            'call ringcomm.init() first, or torch.distributed.init_process_group("ringcomm")'
        )
    return comm


def _open_default() -> Communicator | None:
    return None if _default is None or _default.is_closed else _default


def _find() -> Communicator | None:
    return _open_default() or (_fallback and _fallback())


def given_or_default(comm: Communicator | None) -> Communicator:
    """Returns the communicator, for None the default one. Raises ConfigError for anything else, and
    NotInitializedError."""
    if comm is None:
        return default_communicator()
    if not isinstance(comm, Communicator):
        raise ConfigError(
            f"comm={comm!r}: give a ringcomm.Communicator; Communicator.create(mpi=...) makes one "
            "of an mpi4py communicator, and split() one of some of its ranks"
        )
    return comm


def rank() -> int:
    """Returns this rank's number in the default communicator. Raises NotInitializedError."""
    return default_communicator().rank


def world_size() -> int:
    """Returns the number of ranks in the default communicator. Raises NotInitializedError."""
    return default_communicator().world_size
