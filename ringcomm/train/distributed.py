"""The ranks of a run: process group, communicator and control messages.

Methods (methods.py) are built on a process group, ringcomm's or gloo's. By the method "gradients"
these are exchanged by ringcomm's DDP hook, or by DDP itself over the group.

    --backend   --hook    gradients by              control messages between ranks by
    ringcomm    yes       ringcomm's hook, over the group's communicator       the same
    ringcomm    no        the group                                            the same
    gloo        yes       ringcomm's hook           ringcomm; the group has DDP's first copy only
    gloo        no        the group                 the group

Under torchrun the group meets at the launcher's store. Under mpirun ringcomm's ranks find each
other by themselves, and for gloo rank 0 opens a store on a free port, which ringcomm broadcasts.

Invariants: a world of one uses neither DDP nor a group. Collective methods say so and must be
called by all ranks in the same order.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ..api import default_communicator
from ..bootstrap.launch import Identity, identify
from ..codecs import Compression
from ..communicator import Communicator
from ..config import Config
from ..core.calls import Op
from ..errors import ConfigError
from ..torch import Options as GroupOptions
from . import launcher
from .command_line import Options
from .launcher import SharedError

Made = TypeVar("Made")


class World:
    """Ranks of the run, seen from this process. ``World()`` has one; ``join`` makes larger ones.

    Attributes:
        comm: ringcomm's communicator of these ranks; None where gloo does everything.
    """

    def __init__(self, rank: int = 0, size: int = 1, comm: Communicator | None = None) -> None:
        self.rank = rank
        self.size = size
        self.comm = comm
        self._control = RingcommControl(comm) if comm else GlooControl()

    def sum(self, values: list[float]) -> list[float]:
        """Sum element-wise over all ranks, in float64. Collective."""
        if self.size == 1:
            return values
        total = np.array(values, dtype=np.float64)
        self._control.all_reduce(total, "sum")
        return [float(value) for value in total]

    def require_same(self, what: str, value: int, fix: str) -> None:
        """Raise SharedError on every rank if ``value`` differs between any. Collective."""
        if self.size == 1:
            return
        bounds = np.array([value, -value], dtype=np.int64)
        self._control.all_reduce(bounds, "max")
        if bounds[0] != -bounds[1]:
            raise SharedError(f"{what} differs between ranks; {fix}")

    def agree(self, make: Callable[[], Made]) -> Made:
        """Return the result of ``make``, if it returns on every rank. Collective.

        If it raises ConfigError on any, raise SharedError with the first such rank's text on all.
        """
        if self.size == 1:
            return make()
        text, result = "", None
        try:
            result = make()
        except ConfigError as error:
            text = str(error)
        failed = np.array([self.rank if text else self.size], dtype=np.int64)
        self._control.all_reduce(failed, "min")
        root = int(failed[0])
        if root == self.size:
            return cast(Made, result)
        text = self._spread(text.encode(), root).decode()
        raise SharedError(f"on rank {root}: {text}" if root else text, rank=root)

    def from_root(self, make: Callable[[], bytes]) -> bytes:
        """Return, on every rank, the bytes that ``make`` returns on rank 0. Collective.

        If it raises ConfigError there, raise SharedError on all.
        """
        content = self.agree(lambda: make() if self.rank == 0 else b"")
        return content if self.size == 1 else self._spread(content, 0)

    def _spread(self, content: bytes, root: int) -> bytes:
        length = np.array([len(content)], dtype=np.int64)
        self._control.broadcast(length, root)
        body = np.zeros(int(length[0]), dtype=np.uint8)
        if self.rank == root:
            body[:] = np.frombuffer(content, dtype=np.uint8)
        if len(body):
            self._control.broadcast(body, root)
        return body.tobytes()


class RingcommControl:
    """Control messages over ringcomm, whose errors name the lost rank."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def all_reduce(self, values: Any, op: Op) -> None:
        """Reduce a numpy array in place; op as in ringcomm."""
        self._comm.allreduce(values, op)

    def broadcast(self, values: Any, root: int) -> None:
        """Give every rank the array of ``root``, in place."""
        self._comm.broadcast(values, root)


class GlooControl:
    """Control messages over gloo."""

    _ops: ClassVar[dict[str, Any]] = {
        "sum": dist.ReduceOp.SUM,
        "min": dist.ReduceOp.MIN,
        "max": dist.ReduceOp.MAX,
    }

    def all_reduce(self, values: Any, op: Op) -> None:
        """Reduce a numpy array in place."""
        dist.all_reduce(torch.from_numpy(values), op=self._ops[op])

    def broadcast(self, values: Any, root: int) -> None:
        """Give every rank the array of ``root``, in place."""
        dist.broadcast(torch.from_numpy(values), root)


@contextlib.contextmanager
def join(options: Options) -> Iterator[World]:
    """Join the world that the launcher made; leave it at the end.

    Raises what ringcomm.init raises if the ranks do not find each other.
    """
    identity = identify()
    if identity.world_size == 1:
        yield World()
    elif options.backend == "ringcomm":
        with _ringcomm_group(identity, options) as world:
            yield world
    else:
        with _gloo_group(identity, options.hook) as world:
            yield world


@contextlib.contextmanager
def _ringcomm_group(identity: Identity, options: Options) -> Iterator[World]:
    group = GroupOptions("none" if options.hook else cast(Compression, options.codec))
    by = None if launcher.by_torchrun() else "ringcomm://"
    dist.init_process_group("ringcomm", init_method=by, pg_options=group)
    try:
        comm = dist.group.WORLD.comm  # type: ignore[union-attr]
        yield World(identity.rank, identity.world_size, comm)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _gloo_group(identity: Identity, hook: bool) -> Iterator[World]:
    torchrun = launcher.by_torchrun()
    native = hook or not torchrun
    if native:
        import ringcomm

        ringcomm.init()
    try:
        store = None if torchrun else _shared_store(identity)
        _open_gloo(identity, store)
        comm = default_communicator() if hook else None
        yield World(identity.rank, identity.world_size, comm)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if native:
            ringcomm.shutdown()


def _open_gloo(identity: Identity, store: Any) -> None:
    """Open the gloo group at a store; None: at torchrun's."""
    ports = Config.from_env().interfaces
    if ports:
        # gloo looks for an address by the host's name, which is often the loopback.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", ports[0])
    if store is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group(
            "gloo", store=store, rank=identity.rank, world_size=identity.world_size
        )


def _shared_store(identity: Identity) -> Any:
    """Open a store on a free port of rank 0's host, which ringcomm broadcasts to the others."""
    import ringcomm

    host, size = identity.master_addr, identity.world_size
    wait = datetime.timedelta(seconds=Config.from_env().connect_timeout)
    port = np.zeros(1, dtype=np.int64)
    store = None
    if identity.rank == 0:
        store = TCPStore(host, 0, size, is_master=True, timeout=wait, wait_for_workers=False)
        port[0] = store.port
    ringcomm.broadcast(port, root=0)
    return store or TCPStore(host, int(port[0]), size, is_master=False, timeout=wait)
