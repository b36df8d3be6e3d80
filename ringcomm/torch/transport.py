"""The way of a bucket to the other ranks and back: the interface, and the flat all-reduce.

    FlatTransport            bucket ─ parts ─ all-reduce of each over all ranks        this module
    HierarchicalTransport    through the host first: trips.py

Invariants: a bucket's memory is reduced in place, to the mean. A Future is completed once, after
the last of the bucket's works. On a GPU that is when the copies of all results are queued, and the
Future's stream waits for them: the host waits for the network, never for a copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from ..codecs import Codec
from ..communicator import Communicator
from ..core import cuda
from ..core.work import Work
from ..errors import RingcommError, naming
from ..exact import Place, place_of
from .account import Account
from .buckets import GradientBucket, Part, Parts
from .exchange import CommExchange
from .group import default_comm
from .named_feedback import NamedFeedback
from .streams import NonFiniteFlag, future_on
from .sync.pending import Pending

_EXCHANGE = "the exchange of gradients of HookState"
GradientFuture = torch.futures.Future[torch.Tensor]


class Transport(Protocol):
    """Computes the mean of a bucket over all ranks.

    Attributes:
        error: the first failure of a collective; None so far.
    """

    error: RingcommError | None

    def bind(self, account: Account, residuals: NamedFeedback) -> None:
        """Sets the account that counts each bucket, and the residuals. Called before all else."""

    @property
    def comm(self) -> Communicator:
        """Communicator that carries the compressed gradients."""

    @property
    def place(self) -> Place:
        """Name of this rank in its own state (exact.py)."""

    @property
    def exchange(self) -> CommExchange:
        """Control messages among the ranks."""

    def begin(self) -> None:
        """Called before the first bucket of a step."""

    def launch(self, bucket: GradientBucket, codec: Codec) -> GradientFuture:
        """Submits a bucket, in the thread of backward. Returns a Future of its buffer, which then
        holds the means, or of ``error``."""

    def kept_of(self, parameter: torch.Tensor) -> int:
        """Returns how many residual elements of a parameter this rank keeps."""

    def joined(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Returns a FeedbackStore's state with whole parameters, for a checkpoint. A collective,
        except for a rank's own state."""

    def divided(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns this rank's share of a checkpoint's state; the inverse of ``joined``."""


def failed_future(bucket: GradientBucket, account: Account, error: RingcommError) -> GradientFuture:
    """Returns a Future of the error, for a bucket of a step that has failed already."""

    def fail(_: Any) -> torch.Tensor:
        raise error

    over = future_on([bucket.buffer.device])
    count = account.submit(bucket.buffer.nbytes, bucket.last)
    future: GradientFuture = over.then(fail)
    count(())
    over.set_result(None)
    return future


class FlatTransport:
    """Reduces each part of a bucket by an all-reduce over all ranks.

    Args:
        comm: None: at the time of the first bucket, that of the default process group if its
            backend is "ringcomm", else ringcomm's default one.
    """

    def __init__(self, comm: Communicator | None = None) -> None:
        self.error: RingcommError | None = None
        self._comm = comm

    def bind(self, account: Account, residuals: NamedFeedback) -> None:
        self._account, self.residuals = account, residuals

    @property
    def comm(self) -> Communicator:
        """Communicator in use."""
        if self._comm is None:
            self._comm = default_comm()
        return self._comm

    @property
    def place(self) -> Place:
        """Rank and world size."""
        return place_of(self.comm)

    @property
    def exchange(self) -> CommExchange:
        """Control messages over the communicator."""
        return CommExchange(self.comm)

    def begin(self) -> None:
        """Does nothing."""

    def launch(self, bucket: GradientBucket, codec: Codec) -> GradientFuture:
        means = _BucketFuture(self, bucket, self._account)
        parts = Parts(bucket, codec, self.residuals)
        with naming(_EXCHANGE):
            for part in parts.travelling:
                means.submit(self.comm, part)

        def arrived() -> None:
            parts.unpack()
            if parts.is_checked:
                self.residuals.add_nonfinite_flag(NonFiniteFlag(means.probes))

        return means.future(arrived)

    def kept_of(self, parameter: torch.Tensor) -> int:
        """Returns the number of all elements."""
        return parameter.numel()

    def joined(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Returns the state unchanged."""
        return saved

    def divided(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the state unchanged."""
        return saved


class _BucketFuture:
    """Means of a bucket's parts, and a Future of all of them."""

    def __init__(self, transport: FlatTransport, bucket: GradientBucket, account: Account) -> None:
        self._transport = transport
        self._buffer = bucket.buffer
        self._lock = threading.Lock()
        self._pending: list[Pending] = []
        self._open = 1
        self._future = future_on([self._buffer.device])
        self._count = account.submit(self._buffer.nbytes, bucket.last)

    @property
    def probes(self) -> list[torch.Tensor]:
        """Elements that are finite only if all means are."""
        return [one.probe for one in self._pending]

    def submit(self, comm: Communicator, part: Part) -> None:
        """Starts the mean of a part of the bucket."""
        with self._lock:
            self._open += 1
        pending = Pending(comm, part.tensor, part.codec, part.feedback)
        self._transport.residuals.add(pending)
        self._pending.append(pending)
        pending.work.call_back(self._over)

    def _over(self, _: Work | None) -> None:
        with self._lock:
            self._open -= 1
            last = self._open == 0
        if last:
            self._count(one.work.stats() for one in self._pending)
            self._future.set_result(None)

    def future(self, arrived: Callable[[], None]) -> GradientFuture:
        """Returns, after the last submit, a Future of the bucket's gradients. It is completed when
        all works have succeeded and ``arrived`` has been called."""

        @naming(_EXCHANGE)
        def result(_: Any) -> torch.Tensor:
            for one in self._pending:
                if self._transport.error is None:
                    self._transport.error = one.work.exception()
            if self._transport.error is not None:
                raise self._transport.error
            with cuda.current_stream():  # the stream of the Future's callbacks waits for results
                for one in self._pending:
                    one.wait()
            arrived()
            return self._buffer

        future = self._future.then(result)
        self._over(None)
        return future  # type: ignore[no-any-return]
