"""The hook for hosts with several ranks: a torch process group in a host, ringcomm between hosts.

With L ranks on each host, NCCL sums their gradients and leaves each rank an L-th of the bucket;
ringcomm averages this share among the ranks of equal place, so that a host's gradients cross once;
NCCL gathers the shares again (trips.py).

Invariants: a rank keeps the residuals of its own share of a parameter, under the parameter's name;
a checkpoint has them joined. A step that fails on one rank fails on all (grid.py), wherever they
wait.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Literal

import torch

from ..codecs import Codec, Compression
from ..communicator import Communicator
from ..errors import ConfigError, RingcommError
from ..feedback import FeedbackStore
from .account import Account
from .buckets import Bucket
from .codec_policy import CodecPolicy
from .exchange import CommExchange, GridExchange
from .grid import Grid
from .group import default_comm
from .hooks import REMOVED, HookState
from .named_feedback import NamedFeedback
from .settings import require_able, takes
from .shares import Shares
from .stale import Stale1
from .transport import GradientFuture
from .trips import Courier, Trip


class HierarchicalTransport:
    """Transport by way of a grid of ranks.

    Args:
        grid: the ranks' rows and columns; None: of a copy, which cannot carry anything.
    """

    account: Account
    residuals: NamedFeedback

    def __init__(self, grid: Grid | None) -> None:
        self.error: RingcommError | None = None
        self._grid = grid
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._trips: list[Trip] = []
        self._courier = Courier()

    def bind(self, account: Account, residuals: NamedFeedback) -> None:
        self.account, self.residuals = account, residuals

    @property
    def grid(self) -> Grid:
        """This rank's row and column. Raises ConfigError in a copy, which has none."""
        if self._grid is None:
            raise ConfigError("a copy of a HierarchicalState has no connections; make a new one")
        return self._grid

    @property
    def comm(self) -> Communicator:
        """Communicator of the ranks of equal place, one on each host."""
        return self.grid.column

    @property
    def exchange(self) -> CommExchange:
        """Control messages by way of the grid."""
        return GridExchange(self.grid)

    def close(self) -> None:
        """Closes the communicators of the grid, if there is one."""
        if self._grid is not None:
            self._courier.end()
            self._grid.close()

    # ---- a step ----

    def begin(self) -> None:
        """Makes this rank's row watch over the step."""
        self.grid.watch(self.fail)

    def launch(self, bucket: Bucket, codec: Codec) -> GradientFuture:
        """Starts a bucket's trip. Raises RingcommError, and any error of the local group, which
        fails the step on all ranks."""
        try:
            trip = Trip(self, bucket, codec)
        except RingcommError:
            raise
        except Exception as error:  # raised by the local group
            self.fail(RingcommError(f"the local group failed: {error}"))
            raise
        with self._lock:
            self._trips.append(trip)
        if self.error is not None:  # fail() came before the trip was in the list
            trip.end()
        self._courier.take(trip)
        future: GradientFuture = trip.future
        return future

    def forget(self, trip: Trip) -> None:
        """Removes a trip that is over."""
        with self._lock:
            if trip in self._trips:
                self._trips.remove(trip)

    def fail(self, error: RingcommError) -> None:
        """Ends the step here and on all other ranks. May be called from any thread, any number of
        times."""
        with self._lock:
            first = self.error is None
            if first:
                self.error = error
            trips = list(self._trips)
        self._failed.set()
        if first:
            self.grid.fail(error)
        for trip in trips:
            trip.end()

    def failed_within(self, seconds: float) -> bool:
        """Waits for a failure, at most that long. Returns whether there is one."""
        return self._failed.wait(seconds)

    # ---- residuals ----

    def kept_of(self, parameter: torch.Tensor) -> int:
        """Returns the number of the parameter's elements in this rank's share."""
        return -(-parameter.numel() // self.grid.places)

    def joined(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Joins the residuals of the row's shares."""
        return Shares(self.grid, self.residuals.count_of).joined(saved)

    def divided(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """Cuts this rank's share out of joined residuals."""
        return Shares(self.grid, self.residuals.count_of).divided(saved)


class HierarchicalState(HookState):
    """A HookState for several ranks per host, joined inside it by a process group of torch.

        local, _ = dist.new_subgroups(8, backend="nccl")           # the ranks of this host
        state = HierarchicalState("int8", local_group=local, model=model)
        ddp.register_comm_hook(state, allreduce_hook)

    Making it is a collective of all ranks: they join in communicators of their own, which
    ``close()`` leaves.

    Args:
        compression, model, feedback, threshold, warmup_steps, scaler, force, pace: as in
            HookState. Transfers between hosts are compressed; inside a host gradients are summed
            in their dtype.
        comm: the communicator of all ranks; None: that of the default process group if its backend
            is "ringcomm", else ringcomm's default one.
        local_group: the process group of this host's ranks, of any backend that has reduce-scatter
            and all-gather for the gradients' device. All hosts have equally many ranks. Nothing
            else should use it during backward.

    ``gather_state_dict`` has the form of HookState's, so a checkpoint fits either class, and any
    number of hosts and ranks.

    Attributes:
        comm: the communicator of the ranks of equal place, one on each host; ``report()`` counts
            its bytes.

    Raises ConfigError on all ranks for local groups that do not divide them into equal hosts, and
    MismatchError for settings that differ between them.
    """

    transport: HierarchicalTransport

    @takes(removed=REMOVED)
    def __init__(
        self,
        compression: Compression | Literal["auto"] | CodecPolicy | None = None,
        comm: Communicator | None = None,
        *,
        local_group: Any,
        model: torch.nn.Module | None = None,
        feedback: FeedbackStore | bool | None = None,
        threshold: int = 32 << 10,
        warmup_steps: int = 0,
        scaler: Any = None,
        force: bool = False,
        pace: Literal["every", "stale1"] | Stale1 = "every",
    ) -> None:
        require_able("comm", comm)
        require_able("model", model)
        comm = default_comm() if comm is None else comm
        grid = Grid(comm, local_group)
        super().__init__(
            compression,
            model=model,
            feedback=feedback,
            threshold=threshold,
            warmup_steps=warmup_steps,
            scaler=scaler,
            force=force,
            pace=pace,
            transport=HierarchicalTransport(grid),
        )
        self._require_alike(comm)

    @property
    def grid(self) -> Grid:
        """This rank's row and column. Raises ConfigError in a copy, which has none."""
        return self.transport.grid

    def close(self) -> None:
        """Closes the communicators that it made. The other ranks must have finished their steps,
        too."""
        self.transport.close()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.restore(state, HierarchicalTransport(None))
