"""The module-level functions: one default communicator, and its collectives by name.

Invariants: init makes the default communicator, shutdown or the end of the process closes it; where
there is none, that of torch.distributed's default process group is used, if its backend is
"ringcomm" (ringcomm.torch registers it by ``set_fallback``). Every collective takes ``comm=`` to
use another one, and does the same as the method of its name; see Communicator for the arguments,
results and errors.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, overload

from .calls import Feedback, Op
from .codecs import Compression
from .collectives import T
from .communicator import Communicator
from .config import Config, names_arguments
from .errors import ConfigError, NotInitializedError, RingcommError
from .fusion import Works
from .residuals import Residuals
from .work import Work

_default: Communicator | None = None
_lock = threading.Lock()
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
        RingcommError: init was called before.
    """
    global _default
    with _lock:
        if _default is not None and not _default.is_inherited:
            raise RingcommError(
                "ringcomm.init was called before; call ringcomm.shutdown() first, or use "
                "Communicator.split for another group"
            )
        _default = Communicator.create(
            rank,
            world_size,
            init_method=init_method,
            config=config,
            timeout=timeout,
            mpi=mpi,
            store=store,
        )
        return _default


def shutdown() -> None:
    """Closes the default communicator, if there is one."""
    global _default
    with _lock:
        comm, _default = _default, None
    if comm is not None:
        comm.close()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)


def set_fallback(ask: Callable[[], Communicator | None]) -> None:
    """Registers a function that returns the default communicator where init has made none."""
    global _fallback
    _fallback = ask


def is_initialized() -> bool:
    """True between init and shutdown, and while the default process group of torch.distributed has
    the backend "ringcomm"; False in a forked child that has called neither itself."""
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


def _find() -> Communicator | None:
    return _default or (_fallback and _fallback())


def _use(comm: Communicator | None) -> Communicator:
    if comm is None:
        return _default or default_communicator()
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


@overload
def allreduce(
    tensor: T,
    op: Op = ...,
    *,
    compression: Compression | None = ...,
    feedback: Feedback = ...,
    out: T | None = ...,
    async_op: Literal[False] = ...,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> T: ...


@overload
def allreduce(
    tensor: T,
    op: Op = ...,
    *,
    compression: Compression | None = ...,
    feedback: Feedback = ...,
    out: T | None = ...,
    async_op: Literal[True],
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Work: ...


@overload
def allreduce(
    tensor: T,
    op: Op = ...,
    *,
    compression: Compression | None = ...,
    feedback: Feedback = ...,
    out: T | None = ...,
    async_op: bool,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> T | Work: ...


def allreduce(
    tensor: Any,
    op: Op = "sum",
    *,
    compression: Compression | None = None,
    feedback: Feedback = None,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
    comm: Communicator | None = None,
) -> Any:
    """Communicator.allreduce."""
    return _use(comm).allreduce(
        tensor,
        op,
        compression=compression,
        feedback=feedback,
        out=out,
        async_op=async_op,
        timeout=timeout,
    )


@overload
def allreduce_many(
    tensors: Iterable[T],
    op: Op = ...,
    *,
    compression: Compression | None = ...,
    feedback: Sequence[Residuals] | Literal[False] | None = ...,
    async_op: Literal[False] = ...,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> list[T]: ...


@overload
def allreduce_many(
    tensors: Iterable[T],
    op: Op = ...,
    *,
    compression: Compression | None = ...,
    feedback: Sequence[Residuals] | Literal[False] | None = ...,
    async_op: Literal[True],
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Works: ...


@overload
def allreduce_many(
    tensors: Iterable[T],
    op: Op = ...,
    *,
    compression: Compression | None = ...,
    feedback: Sequence[Residuals] | Literal[False] | None = ...,
    async_op: bool,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> list[T] | Works: ...


def allreduce_many(
    tensors: Iterable[Any],
    op: Op = "sum",
    *,
    compression: Compression | None = None,
    feedback: Sequence[Residuals] | Literal[False] | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    comm: Communicator | None = None,
) -> Any:
    """Communicator.allreduce_many."""
    return _use(comm).allreduce_many(
        tensors, op, compression=compression, feedback=feedback, async_op=async_op, timeout=timeout
    )


@overload
def broadcast(
    tensor: T,
    root: int = ...,
    *,
    async_op: Literal[False] = ...,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> T: ...


@overload
def broadcast(
    tensor: T,
    root: int = ...,
    *,
    async_op: Literal[True],
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Work: ...


@overload
def broadcast(
    tensor: T,
    root: int = ...,
    *,
    async_op: bool,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> T | Work: ...


def broadcast(
    tensor: Any,
    root: int = 0,
    *,
    async_op: bool = False,
    timeout: float | None = None,
    comm: Communicator | None = None,
) -> Any:
    """Communicator.broadcast."""
    return _use(comm).broadcast(tensor, root, async_op=async_op, timeout=timeout)


@overload
def reduce(
    tensor: T,
    root: int = ...,
    op: Op = ...,
    *,
    out: T | None = ...,
    async_op: Literal[False] = ...,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> T: ...


@overload
def reduce(
    tensor: T,
    root: int = ...,
    op: Op = ...,
    *,
    out: T | None = ...,
    async_op: Literal[True],
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Work: ...


@overload
def reduce(
    tensor: T,
    root: int = ...,
    op: Op = ...,
    *,
    out: T | None = ...,
    async_op: bool,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> T | Work: ...


def reduce(
    tensor: Any,
    root: int = 0,
    op: Op = "sum",
    *,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
    comm: Communicator | None = None,
) -> Any:
    """Communicator.reduce."""
    return _use(comm).reduce(tensor, root, op, out=out, async_op=async_op, timeout=timeout)


@overload
def allgather(
    tensor: Any,
    *,
    compression: Compression | None = ...,
    feedback: Feedback = ...,
    out: Any = ...,
    async_op: Literal[True],
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Work: ...


@overload
def allgather(
    tensor: Any,
    *,
    compression: Compression | None = ...,
    feedback: Feedback = ...,
    out: Any = ...,
    async_op: bool = ...,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Any: ...


def allgather(
    tensor: Any,
    *,
    compression: Compression | None = None,
    feedback: Feedback = None,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
    comm: Communicator | None = None,
) -> Any:
    """Communicator.allgather."""
    return _use(comm).allgather(
        tensor,
        compression=compression,
        feedback=feedback,
        out=out,
        async_op=async_op,
        timeout=timeout,
    )


@overload
def gather(
    tensor: Any,
    root: int = ...,
    *,
    out: Any = ...,
    async_op: Literal[True],
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Work: ...


@overload
def gather(
    tensor: Any,
    root: int = ...,
    *,
    out: Any = ...,
    async_op: bool = ...,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Any: ...


def gather(
    tensor: Any,
    root: int = 0,
    *,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
    comm: Communicator | None = None,
) -> Any:
    """Communicator.gather."""
    return _use(comm).gather(tensor, root, out=out, async_op=async_op, timeout=timeout)


@overload
def scatter(
    tensor: Any,
    root: int = ...,
    *,
    out: Any = ...,
    async_op: Literal[True],
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Work: ...


@overload
def scatter(
    tensor: Any,
    root: int = ...,
    *,
    out: Any = ...,
    async_op: bool = ...,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Any: ...


def scatter(
    tensor: Any,
    root: int = 0,
    *,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
    comm: Communicator | None = None,
) -> Any:
    """Communicator.scatter."""
    return _use(comm).scatter(tensor, root, out=out, async_op=async_op, timeout=timeout)


@overload
def reduce_scatter(
    tensor: Any,
    op: Op = ...,
    *,
    compression: Compression | None = ...,
    feedback: Feedback = ...,
    out: Any = ...,
    async_op: Literal[True],
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Work: ...


@overload
def reduce_scatter(
    tensor: Any,
    op: Op = ...,
    *,
    compression: Compression | None = ...,
    feedback: Feedback = ...,
    out: Any = ...,
    async_op: bool = ...,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Any: ...


def reduce_scatter(
    tensor: Any,
    op: Op = "sum",
    *,
    compression: Compression | None = None,
    feedback: Feedback = None,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
    comm: Communicator | None = None,
) -> Any:
    """Communicator.reduce_scatter."""
    return _use(comm).reduce_scatter(
        tensor,
        op,
        compression=compression,
        feedback=feedback,
        out=out,
        async_op=async_op,
        timeout=timeout,
    )


@overload
def alltoall(
    tensor: Any,
    *,
    out: Any = ...,
    async_op: Literal[True],
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Work: ...


@overload
def alltoall(
    tensor: Any,
    *,
    out: Any = ...,
    async_op: bool = ...,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Any: ...


def alltoall(
    tensor: Any,
    *,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
    comm: Communicator | None = None,
) -> Any:
    """Communicator.alltoall."""
    return _use(comm).alltoall(tensor, out=out, async_op=async_op, timeout=timeout)


@overload
def barrier(
    *,
    async_op: Literal[False] = ...,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> None: ...


@overload
def barrier(
    *,
    async_op: Literal[True],
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Work: ...


@overload
def barrier(
    *,
    async_op: bool,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Work | None: ...


def barrier(
    *, async_op: bool = False, timeout: float | None = None, comm: Communicator | None = None
) -> Any:
    """Communicator.barrier."""
    return _use(comm).barrier(async_op=async_op, timeout=timeout)


@overload
def send(
    tensor: T,
    dst: int,
    *,
    tag: int = ...,
    async_op: Literal[False] = ...,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> T: ...


@overload
def send(
    tensor: T,
    dst: int,
    *,
    tag: int = ...,
    async_op: Literal[True],
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Work: ...


@overload
def send(
    tensor: T,
    dst: int,
    *,
    tag: int = ...,
    async_op: bool,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> T | Work: ...


def send(
    tensor: Any,
    dst: int,
    *,
    tag: int = 0,
    async_op: bool = False,
    timeout: float | None = None,
    comm: Communicator | None = None,
) -> Any:
    """Communicator.send."""
    return _use(comm).send(tensor, dst, tag=tag, async_op=async_op, timeout=timeout)


@overload
def recv(
    tensor: T,
    src: int | None,
    *,
    tag: int = ...,
    async_op: Literal[False] = ...,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> T: ...


@overload
def recv(
    tensor: T,
    src: int | None,
    *,
    tag: int = ...,
    async_op: Literal[True],
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Work: ...


@overload
def recv(
    tensor: T,
    src: int | None,
    *,
    tag: int = ...,
    async_op: bool,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> T | Work: ...


def recv(
    tensor: Any,
    src: int | None,
    *,
    tag: int = 0,
    async_op: bool = False,
    timeout: float | None = None,
    comm: Communicator | None = None,
) -> Any:
    """Communicator.recv."""
    return _use(comm).recv(tensor, src, tag=tag, async_op=async_op, timeout=timeout)


for _name in (
    "allreduce",
    "allreduce_many",
    "broadcast",
    "reduce",
    "allgather",
    "gather",
    "scatter",
    "reduce_scatter",
    "alltoall",
    "barrier",
    "send",
    "recv",
):
    _about = inspect.getdoc(getattr(Communicator, _name))
    globals()[_name].__doc__ = f"{_about}\n\nOn the default communicator, or on ``comm``."
