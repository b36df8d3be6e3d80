"""The ranks of a run: process group, communicator and control messages.

The classes of methods.py use a process group, ringcomm's or gloo's. With --method gradients
ringcomm's DDP hook exchanges the gradients, or DDP itself does over the group.

    --backend   --hook    gradients by              control messages between ranks by
    ringcomm    yes       ringcomm's hook, over the group's communicator       the same
    ringcomm    no        the group                                            the same
    gloo        yes       ringcomm's hook           ringcomm; the group has DDP's first copy only
    gloo        no        the group                 the group

Under torchrun the group meets at the launcher's store. Under mpirun ringcomm's ranks find each
other by themselves, and for gloo rank 0 opens a store on a free port, which ringcomm broadcasts.

Invariants: a world of one uses neither DDP nor a group. Functions that are collective say so; all
ranks call them in the same order.
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

from ..api import init, shutdown
from ..bootstrap.launch import Identity, identify
from ..codecs import Compression
from ..communicator import Communicator
from ..config import Config
from ..core.calls import Op
from ..errors import ConfigError
from ..torch import Options as GroupOptions
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
        self._control = comm or GlooControl()

    def sum(self, values: list[float]) -> list[float]:
        """Sum element-wise over all ranks, in float64. Collective."""
        if self.size == 1:
            return values
        total = np.array(values, dtype=np.float64)
        self._control.allreduce(total, "sum")
        return cast(list[float], total.tolist())

    def require_same(self, what: str, value: int, fix: str) -> None:
        """Raise SharedError on every rank if ``value`` differs between any. Collective."""
        if self.size == 1:
            return
        bounds = np.array([value, -value], dtype=np.int64)
        self._control.allreduce(bounds, "max")
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
        self._control.allreduce(failed, "min")
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


class GlooControl:
    """Control messages over gloo, where there is no communicator: two methods as Communicator's."""

    _ops: ClassVar[dict[str, Any]] = {
        "sum": dist.ReduceOp.SUM,
        "min": dist.ReduceOp.MIN,
        "max": dist.ReduceOp.MAX,
    }

    def allreduce(self, values: Any, op: Op) -> None:
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
        return
    meet = _meet_over_ringcomm if options.backend == "ringcomm" else _meet_over_gloo
    with contextlib.ExitStack() as leaving:
        comm = meet(identity, options, leaving)
        yield World(identity.rank, identity.world_size, comm)


def _meet_over_ringcomm(
    identity: Identity, options: Options, leaving: contextlib.ExitStack
) -> Communicator:
    group = GroupOptions("none" if options.hook else cast(Compression, options.codec))
    by = None if identity.launcher == "torchrun" else "ringcomm://"
    dist.init_process_group("ringcomm", init_method=by, pg_options=group)
    leaving.callback(dist.destroy_process_group)
    return cast(Communicator, dist.group.WORLD.comm)  # type: ignore[union-attr]


def _meet_over_gloo(
    identity: Identity, options: Options, leaving: contextlib.ExitStack
) -> Communicator | None:
    """Open the gloo group at torchrun's store, or at one of our own; return the hook's
    communicator."""
    comm = store = None
    by_torchrun = identity.launcher == "torchrun"
    if options.hook or not by_torchrun:
        comm = init()
        leaving.callback(shutdown)
        store = None if by_torchrun else _shared_store(identity, comm)
    ports = Config.from_env().interfaces
    if ports:
        # gloo looks for an address by the host's name, which is often the loopback.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", ports[0])
    dist.init_process_group("gloo", store=store, rank=identity.rank, world_size=identity.world_size)
    leaving.callback(dist.destroy_process_group)
    return comm if options.hook else None


def _shared_store(identity: Identity, comm: Communicator) -> Any:
    """Open a store on a free port of rank 0's host, which ringcomm broadcasts to the others."""
    host, size = identity.master_addr, identity.world_size
    wait = datetime.timedelta(seconds=Config.from_env().connect_timeout)
    port = np.zeros(1, dtype=np.int64)
    store = None
    if identity.rank == 0:
        store = TCPStore(host, 0, size, is_master=True, timeout=wait, wait_for_workers=False)
        port[0] = store.port
    comm.broadcast(port, root=0)
    return store or TCPStore(host, int(port[0]), size, is_master=False, timeout=wait)
