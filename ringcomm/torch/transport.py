"""The way of a bucket to the other ranks and back: the interface, and the flat all-reduce.

    Transport                the interface
    BucketInFlight           base of what a transport has on its way: exchanges, and a Future
    FlatTransport            bucket ─ parts ─ all-reduce of each over all ranks        this module
    HierarchicalTransport    through the host first: trips.py

Invariants: a bucket's memory is reduced in place, to the mean. A Future is completed once, after
the last of the bucket's works. On a GPU that is when the copies of all results are queued, and the
Future's stream waits for them: the host waits for the network, never for a copy.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ..codecs import Codec
from ..communicator import Communicator
from ..core import cuda
from ..core.calls import naming
from ..core.work import Work, when_all_over
from ..errors import ConfigError, RingcommError
from ..exact import Place, place_of
from .buckets import GradientBucket, Parts
from .exchange import CommExchange
from .group import default_comm
from .named_feedback import NamedFeedback
from .streams import NonFiniteFlag, future_on, on_stream
from .sync.account import Account
from .sync.pending import Pending, Wire
from .wrapped import wrappers_of

_EXCHANGE = "the exchange of gradients of HookState"
GradientFuture = torch.futures.Future[torch.Tensor]


class Transport(Protocol):
    """Computes the mean of a bucket over all ranks. The methods with a body suit a transport whose
    residuals are those of whole parameters, and whose communicator connects all ranks.

    Attributes:
        error: the first failure of a collective; None so far.
        account: counts each bucket.
        residuals: the hook's.
    """

    error: RingcommError | None = None
    account: Account
    residuals: NamedFeedback

    def bind(self, account: Account, residuals: NamedFeedback) -> None:
        """Sets the account and the residuals. Called before all else."""
        self.account, self.residuals = account, residuals

    @property
    def comm(self) -> Communicator:
        """Communicator that carries the compressed gradients."""

    @property
    def place(self) -> Place:
        """Name of this rank in its own state (exact.py)."""
        return place_of(self.comm)

    @functools.cached_property
    def exchange(self) -> CommExchange:
        """Control messages among the ranks."""
        return CommExchange(self.comm)

    def begin(self, bucket: GradientBucket) -> None:
        """Called before the first bucket of a step is sent."""

    def finish_step(self) -> None:
        """Called before the Futures of a step are waited for: its last bucket may never come, as
        backward has raised."""

    def launch(self, bucket: GradientBucket, codec: Codec) -> GradientFuture:
        """Submits a bucket, in the thread of backward. Returns a Future of its buffer, which then
        holds the means, or of ``error``."""

    def kept_of(self, parameter: torch.Tensor) -> int:
        """Returns how many residual elements of a parameter this rank keeps."""
        return parameter.numel()

    def joined(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Returns a FeedbackStore's state with whole parameters, for a checkpoint. A collective,
        except for a rank's own state."""
        return saved

    def divided(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns this rank's share of a checkpoint's state; the inverse of ``joined``."""
        return saved


class BucketInFlight:
    """A bucket on its way: its exchanges, and the Future of its mean. By itself it is a bucket that
    is not sent."""

    def __init__(self, transport: Transport, bucket: GradientBucket) -> None:
        self._transport = transport
        self._buffer = bucket.buffer
        self._pending: list[Pending] = []
        self._last, self._began = bucket.last, time.perf_counter()
        self._over = future_on([self._buffer.device])

    def start(self, comm: Communicator, tensor: torch.Tensor, wire: Wire) -> None:
        """Starts the mean of a tensor."""
        pending = wire.submit(comm, tensor)
        self._transport.residuals.add(pending)
        self._pending.append(pending)

    def future(self) -> GradientFuture:
        """Counts the bucket as in flight until ``complete``, and returns the Future of its
        gradients, or of the transport's error. Call it once, after all that can raise."""
        account, nbytes = self._transport.account, self._buffer.nbytes
        self._count = account.submit(nbytes, self._last, self._began)
        return self._over.then(self._result)  # type: ignore[no-any-return]

    def complete(self, stream: Any = None) -> None:
        """Completes the Future, after the last exchange; whoever waits for it follows the stream of
        a GPU."""
        self._count(one.work.stats() for one in self._pending)
        with on_stream(stream):  # a Future of a GPU's tensor records the current stream
            self._over.set_result(None if stream is None else self._buffer)

    def _result(self, _: Any) -> torch.Tensor:
        if self._transport.error is not None:
            raise self._transport.error
        return self._buffer


class FlatTransport(Transport):
    """Reduces each part of a bucket by an all-reduce over all ranks.

    Args:
        comm: as HookState's.
    """

    def __init__(self, comm: Communicator | None = None) -> None:
        self._comm = comm
        self._is_checked = comm is not None

    @property
    def comm(self) -> Communicator:
        """Communicator in use."""
        if self._comm is None:
            self._comm = default_comm()
        return self._comm

    def begin(self, bucket: GradientBucket) -> None:
        """Raises ConfigError, once, if no communicator was given, and the default one connects
        other ranks than DDP's process group."""
        if self._is_checked:
            return
        groups = {one.process_group for one in wrappers_of({id(s.tensor) for s in bucket.slices})}
        if any(group.size() != self.comm.world_size for group in groups):
            raise ConfigError(
                f"the default communicator connects {self.comm.world_size} ranks, and the process "
                "group of the model's DistributedDataParallel another number: give HookState(..., "
                "comm=) the communicator of its ranks, as Communicator.split makes it"
            )
        self._is_checked = bool(bucket.slices)

    def finish_step(self) -> None:
        """Does nothing: each bucket goes its way alone."""

    def launch(self, bucket: GradientBucket, codec: Codec) -> GradientFuture:
        means = _Means(self, bucket, codec)
        future = means.future()
        when_all_over(means.works, means.complete)
        return future


class _Means(BucketInFlight):
    """Means of a bucket's parts over all ranks, each by an all-reduce."""

    def __init__(self, transport: FlatTransport, bucket: GradientBucket, codec: Codec) -> None:
        super().__init__(transport, bucket)
        self._parts = Parts(bucket, codec, transport.residuals)
        with naming(_EXCHANGE):
            for part in self._parts.travelling:
                self.start(transport.comm, part.tensor, part.wire)

    @property
    def works(self) -> list[Work]:
        """The all-reduces."""
        return [one.work for one in self._pending]

    @naming(_EXCHANGE)
    def _result(self, over: Any) -> torch.Tensor:
        for one in self._pending:
            if self._transport.error is None:
                self._transport.error = one.work.exception()
        buffer = super()._result(over)
        # On a GPU the stream of the Future's callbacks waits for the results.
        with cuda.current_stream() if buffer.is_cuda else contextlib.nullcontext():
            for one in self._pending:
                one.wait()
        self._parts.unpack()
        if self._parts.is_checked:
            probes = [one.probe for one in self._pending]
            self._transport.residuals.add_nonfinite_flag(NonFiniteFlag(probes))
        return buffer
