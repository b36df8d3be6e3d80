"""HierarchicalTransport: trips of buckets through a host, to the other hosts and back.

    bucket ─ pack ─ reduce-scatter ─ [all-reduce of a shard by ringcomm] ─ all-gather ─ unpack
             rows    in the host       across hosts, any codec              in the host

A bucket is packed into a row for each rank of the host: every row has an equal share of each part
(buckets.py). So a rank has the same elements of a parameter in whatever bucket DDP puts it.

A GPU's shard takes the device pipeline, like any tensor. Reduce-scatter, shard and all-gather
follow each other on a stream of the courier's, so the host waits for the network only.

Invariants: backward's thread packs and starts the reduce-scatters; the courier's thread does all
the waiting. On a local group all ranks start the same collectives in the same order: all
reduce-scatters of a step, then all all-gathers, both in the order of buckets. A Trip's Future is
completed once, on a GPU by an event on the courier's stream.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..codecs import Codec
from ..communicator import Communicator
from ..errors import ConfigError, RingcommError
from ..exact import Place
from .buckets import GradientBucket, Parts
from .exchange import CommExchange, GridExchange
from .grid import Grid
from .shares import Shares, place_in
from .streams import NonFiniteFlag, on_stream
from .transport import BucketInFlight, GradientFuture, Transport
from .worker import Worker

# Names since torch 2.13, or those before.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_PATIENCE = 1.0  # seconds to wait for a watch message, or for the courier's last job


class HierarchicalTransport(Transport):
    """Transport by way of a grid of ranks.

    Args:
        grid: the ranks' rows and columns; None: of a copy, which cannot carry anything.
    """

    def __init__(self, grid: Grid | None) -> None:
        self._grid = grid
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._trips: list[Trip] = []  # that are not over, in the order of buckets
        self._lacks_last = False  # whether the last bucket of a step has not come
        self._courier = Worker("ringcomm courier")
        self._stream: Any = None  # the courier's, on a GPU

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
    def place(self) -> Place:
        """Name of this rank in its own state: its host, and its place there."""
        return place_in(self.grid)

    @functools.cached_property
    def exchange(self) -> CommExchange:
        """Control messages by way of the grid."""
        return GridExchange(self.grid)

    def close(self) -> None:
        """Closes the communicators of the grid, if there is one."""
        if self._grid is not None:
            self._courier.close(_PATIENCE)
            self._grid.close()

    # ---- a step ----

    def begin(self, bucket: GradientBucket) -> None:
        """Makes this rank's row watch over the step."""
        self.grid.watch(self.fail)

    def launch(self, bucket: GradientBucket, codec: Codec) -> GradientFuture:
        """Starts a bucket's trip. Raises RingcommError, and any error of the local group;
        either fails the step on all ranks."""
        try:
            trip = Trip(self, bucket, codec)
            future = trip.future()
            with self._lock:
                self._trips.append(trip)
            if self.error is not None:  # fail() came before the trip was in the list
                self._end(trip)
            self._courier.submit(functools.partial(self._carry, trip, bucket.last))
            self._lacks_last = not bucket.last
        except RingcommError as error:
            self.fail(error)
            raise
        except Exception as error:  # raised by the local group
            self.fail(RingcommError(f"the local group failed: {error}"))
            raise
        return future

    def finish_step(self) -> None:
        """Has the courier gather what is still in the hosts, with which the Futures complete. After
        a last bucket it does so by itself; doing it again could meet the next step's buckets."""
        if self._lacks_last:
            self._lacks_last = False
            self._courier.submit(functools.partial(self._carry, None, True))

    def _end(self, trip: Trip, stream: Any = None) -> None:
        """Ends a trip, once."""
        with self._lock:
            if trip not in self._trips:
                return
            self._trips.remove(trip)
        trip.complete(stream)

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
            self._end(trip)

    # ---- in the courier's thread ----

    def _carry(self, trip: Trip | None, is_last: bool) -> None:
        """Sends a bucket's shard as soon as its sum is ready; after the last bucket of a step, or
        none, gathers all in the same order."""
        try:
            if trip is not None and self.error is None:
                if self._stream is None and trip.shard.is_cuda:
                    self._stream = torch.cuda.Stream(trip.shard.device)  # type: ignore[no-untyped-call]
                trip.reduce_across_hosts(self._stream)
            if is_last:
                self._finish_step()
        except BaseException as error:
            if not isinstance(error, RingcommError):
                self._failed.wait(_PATIENCE)  # the watch may name the failed rank
                error = RingcommError(f"the local group failed: {type(error).__name__}: {error}")
            self.fail(error)

    def _finish_step(self) -> None:
        trips = list(self._trips)
        for trip in trips:
            if self.error is not None:
                return
            trip.gather_on_host(self._stream)
            if trip is trips[-1]:
                self.grid.pass_on()
            self._end(trip, self._stream)

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


class Rows:
    """A bucket's parts, cut into one row for each rank of a host.

    Args:
        parts: tensors of one dimension.

    Attributes:
        table: a row for each place; at first the parts' values divided by the number of places.
        ranges: start and end of each part in a row.
    """

    def __init__(self, parts: list[torch.Tensor], places: int) -> None:
        widths = [-(-part.numel() // places) for part in parts]
        ends = np.cumsum(widths).tolist()
        self.ranges = [(end - width, end) for width, end in zip(widths, ends, strict=True)]
        self._parts = parts
        if len(parts) == 1 and parts[0].numel() == places * widths[0]:
            self.table = parts[0].view(places, widths[0]).div_(places)
            self._pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
            return
        self.table = parts[0].new_zeros(places, sum(widths))
        self._pieces = list(self._cut(places))
        for there, here in self._pieces:
            torch.div(here, places, out=there)

    def _cut(self, places: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields pairs of equal views, one in the table, one in the bucket, that cover all
        elements."""
        for part, (start, end) in zip(self._parts, self.ranges, strict=True):
            width = end - start
            full = part.numel() // width if width else 0
            left = part.numel() - full * width
            yield self.table[:full, start:end], part[: full * width].view(full, width)
            if left:
                yield self.table[full, start : start + left], part[full * width :]

    def unpack(self) -> None:
        """Copies the table's values back to the parts."""
        for there, here in self._pieces:
            here.copy_(there)


class Trip(BucketInFlight):
    """A bucket on its way through the host.

    Attributes:
        shard: this rank's row of the bucket.
    """

    def __init__(
        self, transport: HierarchicalTransport, bucket: GradientBucket, codec: Codec
    ) -> None:
        super().__init__(transport, bucket)
        self._grid = transport.grid
        self._parts = Parts(bucket, codec, transport.residuals)
        self._rows = Rows([part.tensor for part in self._parts.travelling], self._grid.places)
        table = self._rows.table
        self.shard = table.new_empty(table.shape[1])
        self._arrival = _reduce_scatter(
            self.shard, table.view(-1), group=self._grid.group, async_op=True
        )

    def reduce_across_hosts(self, stream: Any) -> None:
        """Waits for the host's sum, and sends this rank's shard to the other hosts."""
        if stream is not None:  # the allocator must know it: they were made on another stream
            self.shard.record_stream(stream)
            self._rows.table.record_stream(stream)
        with on_stream(stream):
            with self._grid.ranks_named(self._grid.row):
                self._arrival.wait()
            column, parts = self._grid.column, self._parts.travelling
            with self._grid.ranks_named(column):
                for (start, end), part in zip(self._rows.ranges, parts, strict=True):
                    self.start(column, self.shard[start:end], part.wire)

    def gather_on_host(self, stream: Any) -> None:
        """Waits for the mean of the shard, gathers all shards of the host, and unpacks them."""
        with on_stream(stream):
            with self._grid.ranks_named(self._grid.column):
                for pending in self._pending:
                    pending.wait()
            table = self._rows.table.view(-1)
            with self._grid.ranks_named(self._grid.row):
                _all_gather(table, self.shard, group=self._grid.group, async_op=True).wait()
            self._rows.unpack()
            self._parts.unpack()
            if self._parts.is_checked:
                self._transport.residuals.add_nonfinite_flag(self._nonfinite_flag())

    def _nonfinite_flag(self) -> NonFiniteFlag:
        """Returns a flag that is set if a result is not finite. A codec of few bits then makes a
        whole share NaN, so its first value is enough."""
        looked_at = [
            (start, min(start + 1, end) if part.wire.codec.quantises else end)
            for (start, end), part in zip(self._rows.ranges, self._parts.travelling, strict=True)
        ]
        return NonFiniteFlag([self._rows.table[:, start:end] for start, end in looked_at])
