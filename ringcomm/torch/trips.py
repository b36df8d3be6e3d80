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
from .account import Account
from .buckets import GradientBucket, Parts
from .exchange import CommExchange, GridExchange
from .grid import Grid
from .named_feedback import NamedFeedback
from .shares import Shares, place_in
from .streams import NonFiniteFlag, future_on, on_stream
from .sync.pending import Pending
from .transport import GradientFuture
from .worker import Worker

# Names since torch 2.13, or those before.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_PATIENCE = 1.0  # seconds to wait for a watch message, or for the courier's last job


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
    def place(self) -> Place:
        """Host, and place there."""
        return place_in(self.grid)

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

    def launch(self, bucket: GradientBucket, codec: Codec) -> GradientFuture:
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

    def remove(self, trip: Trip) -> None:
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


class Rows:
    """A bucket's parts, cut into one row for each rank of a host.

    Args:
        parts: tensors of one dimension.

    Attributes:
        table: a row for each place; at first the parts' values divided by the number of places.
        spans: start and end of each part in a row.
    """

    def __init__(self, parts: list[torch.Tensor], places: int) -> None:
        widths = [-(-part.numel() // places) for part in parts]
        ends = np.cumsum(widths).tolist()
        self.spans = [(end - width, end) for width, end in zip(widths, ends, strict=True)]
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
        for part, (start, end) in zip(self._parts, self.spans, strict=True):
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


class Trip:
    """A bucket on its way, and the Future of its gradients.

    Attributes:
        last: whether it is the last bucket of its step.
        is_over: whether the Future is completed.
    """

    def __init__(
        self, transport: HierarchicalTransport, bucket: GradientBucket, codec: Codec
    ) -> None:
        self._transport = transport
        self._grid = transport.grid
        self._buffer = bucket.buffer
        self.last = bucket.last
        self.is_over = False
        self._pending: list[Pending] = []
        self._count = transport.account.submit(self._buffer.nbytes, bucket.last)
        device = self._buffer.device
        self._cuda = device if device.type == "cuda" else None
        self._over = future_on([device])
        self.future = self._over.then(self._result)
        self._end_lock = threading.Lock()
        self._parts = Parts(bucket, codec, transport.residuals)
        self._rows = Rows([part.tensor for part in self._parts.travelling], self._grid.places)
        self._shard = self._rows.table.new_empty(self._rows.table.shape[1])
        self._arrival = _reduce_scatter(
            self._shard, self._rows.table.view(-1), group=self._grid.group, async_op=True
        )

    # ---- in the courier's thread ----

    def reduce_across_hosts(self, stream: Any) -> None:
        """Waits for the host's sum, and sends this rank's shard to the other hosts."""
        if stream is not None:  # the allocator must know it: they were made on another stream
            self._shard.record_stream(stream)
            self._rows.table.record_stream(stream)
        with on_stream(stream):
            self._arrival.wait()
            for (start, end), part in zip(self._rows.spans, self._parts.travelling, strict=True):
                shard = self._shard[start:end]
                pending = Pending(self._grid.column, shard, part.codec, part.feedback)
                self._transport.residuals.add(pending)
                self._pending.append(pending)

    def gather_on_host(self, stream: Any) -> None:
        """Waits for the mean of the shard, gathers all shards of the host, and unpacks them."""
        with on_stream(stream):
            for pending in self._pending:
                pending.wait()
            table = self._rows.table.view(-1)
            _all_gather(table, self._shard, group=self._grid.group, async_op=True).wait()
            self._rows.unpack()
            self._parts.unpack()
            if self._parts.is_checked:
                self._transport.residuals.add_nonfinite_flag(self._nonfinite_flag())

    def _nonfinite_flag(self) -> NonFiniteFlag:
        """Returns a flag that is set if a result is not finite. A codec of few bits then makes a
        whole share NaN, so its first value is enough."""
        looked_at = [
            (start, min(start + 1, end) if part.codec.quantises else end)
            for (start, end), part in zip(self._rows.spans, self._parts.travelling, strict=True)
        ]
        return NonFiniteFlag([self._rows.table[:, start:end] for start, end in looked_at])

    # ---- its end ----

    def end(self, stream: Any = None) -> None:
        """Completes the Future, once; the transport knows whether the step has failed."""
        with self._end_lock:
            if self.is_over:
                return
            self.is_over = True
        self._count(pending.work.stats() for pending in self._pending)
        with on_stream(stream):  # a Future of a GPU's tensor records the current stream
            self._over.set_result(None if stream is None else self._buffer)
        self._transport.remove(self)

    def stream(self) -> Any:
        """Returns a new stream on the bucket's GPU; None on a CPU."""
        return None if self._cuda is None else torch.cuda.Stream(self._cuda)  # type: ignore[no-untyped-call]

    def _result(self, _: Any) -> torch.Tensor:
        if self._transport.error is not None:
            raise self._transport.error
        return self._buffer

    def fail(self, error: BaseException) -> None:
        """Ends the trip, and the step on all ranks, with an error."""
        if not isinstance(error, RingcommError):
            self._transport.failed_within(_PATIENCE)  # the watch may name the failed rank
            error = RingcommError(f"the local group failed: {type(error).__name__}: {error}")
        self._transport.fail(self._grid.named(self._grid.column, error))
        self.end()

    def pass_on(self) -> None:
        """Tells the row that this rank has finished the step."""
        self._grid.pass_on()


class Courier:
    """Thread that does the waiting for trips, so that backward need not."""

    def __init__(self) -> None:
        self._worker = Worker("ringcomm courier")
        self._step: list[Trip] = []
        self._stream: Any = None

    def take(self, trip: Trip) -> None:
        """Queues a trip that has begun, in the order of buckets."""
        self._worker.submit(functools.partial(self._process, trip))

    def end(self) -> None:
        """Ends the thread; no more trips will come."""
        self._worker.close(_PATIENCE)

    def _process(self, trip: Trip) -> None:
        """Sends a bucket's shard as soon as its sum is ready; after the last bucket of a step,
        gathers all in the same order."""
        if self._stream is None:
            self._stream = trip.stream()
        self._step.append(trip)
        try:
            if not trip.is_over:
                trip.reduce_across_hosts(self._stream)
            if trip.last:
                self._finish_step()
        except BaseException as error:
            trip.fail(error)
        if trip.last:
            self._step = []

    def _finish_step(self) -> None:
        for trip in self._step:
            if trip.is_over:  # the step has failed
                return
            trip.gather_on_host(self._stream)
            if trip.last:
                trip.pass_on()
            trip.end(self._stream)
