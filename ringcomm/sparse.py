"""SparseExchange: the largest elements of each chunk of a tensor, summed over all ranks.

    exchange = SparseExchange(comm, count=anchor.size, density=1 / 64)
    handle = exchange.submit(delta)          # e = decay * e + delta; the largest of e are sent
    mean = handle.wait()                     # Entries: the same bits on every rank
    mean.add_to(anchor, -1.0)

Elements that are not sent stay in the residual e and are added to the next delta. So with decay 1
nothing is lost: the sum of all means is that of all deltas' means, less the residuals. A
smaller decay forgets old deltas (SparseLoCo: .95 for rounds of 30 steps, and no outer momentum).

Two ways to exchange, of payloads whose size follows from the count alone:

    gather   every rank sends its payload to all. One trip; (N-1) payloads of bytes.
    owner    every rank sums a range of chunks for all, with a residual of its own, and sends the
             largest of the sums (by default twice k of a chunk) to all.
             Two trips, the second of which begins in ``wait``; 3 payloads of bytes for any N.

Invariants: residuals change only when a round has succeeded with finite values, so a round that
failed is repeated by another ``submit`` of the same delta. One round at a time is in flight. Ranks
that have the same bytes compute the same sums, in order of rank.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from .api import given_or_default
from .communicator import Communicator, require_same
from .core.chunks import Bytes, Entries, Floats, Format, as_view, join, select
from .core.work import Work, WorkStats
from .errors import ConfigError, RingcommError
from .exact import (
    Checkpointed,
    as_callers,
    is_exact,
    is_own,
    place_of,
    require_format,
    residuals_of,
)

_FORMAT = 1
_MOST_GATHERED = 4  # most ranks for which "auto" sends every payload to all
AGGREGATES = ("mean", "senders")
EXCHANGES = ("auto", "gather", "owner")

__all__ = ["Entries", "SparseExchange", "SparseRound"]


class SparseExchange(Checkpointed):
    """Exchanges one tensor's largest elements, round after round, with error feedback.

    Args:
        comm: communicator whose ranks take part; None: the default one. All ranks give the same
            arguments.
        count: elements of the tensor.
        density: share of the elements that each rank sends.
        k: elements that each rank sends of a chunk, instead of the density.
        chunk: elements among which the largest are chosen.
        block: 1, or 16 to choose and send whole cache lines, by the sum of their magnitudes.
        decay: factor of the residual before each delta is added, 0 to 1.
        values: "bf16" or "fp32" on the wire; rounding errors of bf16 stay in the residual.
        aggregate: "mean" over all ranks, or for each block over those that sent it: "senders".
        exchange: "gather", "owner", or "auto": gather up to 4 ranks.
        owner_k: elements of a chunk that an owner sends; None: twice k.

    Memory: the residual and the next one, 8 bytes for each element; for an owner
    2 x 8 bytes more for each element of its range; and all payloads.

    Raises:
        ConfigError: an argument that cannot work. It is a ValueError.
    """

    def __init__(
        self,
        comm: Communicator | None,
        count: int,
        *,
        density: float = 1 / 64,
        k: int | None = None,
        chunk: int = 4096,
        block: int = 1,
        decay: float = 0.95,
        values: str = "bf16",
        aggregate: str = "mean",
        exchange: str = "auto",
        owner_k: int | None = None,
    ) -> None:
        _require(isinstance(count, int) and count >= 0, "count", count, "the elements of a tensor")
        _require(_is_share(decay), "decay", decay, "0 to 1")
        _require(aggregate in AGGREGATES, "aggregate", aggregate, " or ".join(AGGREGATES))
        _require(exchange in EXCHANGES, "exchange", exchange, ", ".join(EXCHANGES))
        self.comm = given_or_default(comm)
        self.count = count
        self.decay = float(decay)
        self.aggregate = aggregate
        self.format = Format(chunk, block, _kept(density, k, chunk, block), values)
        self._residual = np.zeros(count, np.float32)
        self._next = np.zeros(count, np.float32)
        most = chunk // block
        kept = min(2 * self.format.kept, most) if owner_k is None else _units(owner_k, block)
        self._owner_format = Format(chunk, block, kept, values)
        self._exchange = exchange
        self._way = self._make_way()
        self._round: SparseRound | None = None
        self._undoable: SparseRound | None = None  # round whose old residuals are in _next

    @property
    def exchange(self) -> str:
        """Way of the exchange: "gather" or "owner"."""
        return self._way.name

    @property
    def residual(self) -> Floats:
        """Residual of this rank's deltas after the last successful round: float32[count]. Read
        only, and valid until the next round."""
        return self._residual

    @property
    def sent_bytes(self) -> int:
        """Bytes of payloads that this rank sends in a round; headers add less than 1 % to large
        ones."""
        return self._way.sent_bytes

    def submit(self, delta: Any, *, timeout: float | None = None) -> SparseRound:
        """Chooses the largest of residual * decay + delta, and begins to send them. All ranks
        submit in the same order among their collectives.

        Args:
            delta: float32[count] in host memory; not used any more when this returns.
            timeout: seconds until the collective fails, as for ``allreduce``.

        Raises:
            ConfigError: the round before has not been waited for.
            TensorError: delta is of another dtype, size or device.
            RingcommError: as ``allgather``.
        """
        if self._round is not None:
            raise ConfigError(
                "a SparseExchange has one round in flight: wait for that, or make one exchange for "
                "each tensor"
            )
        seen = as_view(delta, self.count, writable=False)
        kernels = self.comm.kernel_set
        self._undoable = None
        select(self.format, kernels, self._way.wire, self._next, self._residual, seen, self.decay)
        self._round = SparseRound(self, self._way.begin(timeout), timeout)
        return self._round

    def use(self, comm: Communicator) -> None:
        """Changes to another communicator, as one of the remaining ranks. The residual stays; an
        owner adds the residual of its range to it, so that it is sent again. Rank and world size
        being the same, no residual changes.

        Raises ConfigError while a round is in flight.
        """
        self._require_idle()
        before, self.comm = self.comm, comm
        self._undoable = None
        start, owner = self._way.owner_residual()
        self._way = self._make_way()
        if (before.rank, before.world_size) == (comm.rank, comm.world_size):
            self._way.load_exact(self._residual, owner, start)
            return
        whole = comm.world_size if self.aggregate == "mean" else 1
        self._residual[start : start + len(owner)] += owner * np.float32(whole)

    def _make_way(self) -> _Gather | _Owner:
        most = 1 if self._exchange == "owner" else _MOST_GATHERED
        gathers = self._exchange == "gather" or self.comm.world_size <= most
        return _Gather(self) if gathers else _Owner(self)

    def _over(self, ended: SparseRound, entries: Entries | None) -> None:
        """Ends a round: with its result, or None if it failed."""
        self._round = None
        if entries is not None and not entries.poisoned:
            self._swap()
            self._undoable = ended

    def _swap(self) -> None:
        self._residual, self._next = self._next, self._residual
        self._way.swap()

    def _factor(self) -> float:
        return 1 / self.comm.world_size if self.aggregate == "mean" else 0.0

    # ---- states ----

    def saved(self, *, own: bool) -> dict[str, Any]:
        """Returns ``format``, ``count`` and residuals: this rank's own, ``worker``, float32[count],
        and ``owner``, float32, for the elements from ``owner_start`` on, with the rank in
        ``exact``. Or, by an all-reduce of two float32 per element, those of all ranks: the mean of
        the residuals of the deltas, and those of the sums, float32[count] each.

        Raises as ``gather_state_dict``; ConfigError while a round is in flight.
        """
        self._require_idle()
        start, owner = self._way.owner_residual()
        state: dict[str, Any] = {"format": _FORMAT, "count": self.count}
        if own:
            residuals = {"worker": self._residual.copy(), "owner": owner.copy()}
            state |= {"owner_start": start, "exact": place_of(self.comm)}
        else:
            whole = np.zeros(self.count, np.float32)
            whole[start : start + len(owner)] = owner
            require_same(self.comm, [self.count], "tensors, whose elements count")
            residuals = {
                "worker": self.comm.allreduce(self._residual.copy(), "avg"),
                "owner": self.comm.allreduce(whole),
            }
            state["owner_start"] = 0
        return state | {name: as_callers(one) for name, one in residuals.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state of ``state_dict`` or ``gather_state_dict``. Nothing is sent; each
        rank loads its own, or all load the same.

        Raises:
            ConfigError: a round is in flight; the state is invalid, of another size, or a rank's
                own in a world of another size. Nothing was changed then. (Another rank's own, of a
                world of this size, is taken as zero, with a warning.)
        """
        self._require_idle()
        worker, owner, start = self._read(state)
        is_others = is_exact(state) and not is_own(
            state, place_of(self.comm), "the sparse exchange"
        )
        self._undoable = None
        if is_others:
            self._way.load(np.zeros_like(worker), np.zeros_like(worker))
        elif start is None:
            self._way.load(worker, owner)
        else:
            self._way.load_exact(worker, owner, start)

    def _read(self, state: Mapping[str, Any]) -> tuple[Floats, Floats, int | None]:
        if not isinstance(state, Mapping) or "count" not in state:
            raise ConfigError("this is no state of a SparseExchange")
        require_format(state, _FORMAT, "the sparse exchange")
        residuals = residuals_of(state, "the sparse exchange")
        for count in (state["count"], len(residuals[0])):
            if count != self.count:
                raise ConfigError(
                    f"the state is of {count} elements, and this exchange of {self.count}"
                )
        return residuals

    def _require_idle(self) -> None:
        if self._round is not None:
            raise ConfigError("a round of the sparse exchange is in flight: wait for it first")


class SparseRound:
    """A round in flight, as ``SparseExchange.submit`` returns it.

    Attributes:
        elapsed: seconds of its trips and their sums, known after ``wait``; 0.0 before.
        stats: counters of its collectives, known after ``wait``.
    """

    def __init__(self, exchange: SparseExchange, work: Work, timeout: float | None) -> None:
        self._exchange = exchange
        self._work = work
        self._timeout = timeout
        self.elapsed = 0.0
        self.stats: list[WorkStats] = []
        self._result: Entries | None = None
        self._error: RingcommError | None = None

    def done(self) -> bool:
        """True once the (first) trip is over. Never waits."""
        return self._result is not None or self._error is not None or self._work.done()

    def wait(self) -> Entries:
        """Waits; returns the aggregate, the same on all ranks. Later calls return the same object.

        Raises:
            RingcommError: the round failed; nothing was changed, and its delta can be submitted
                again if the communicator still works.
        """
        if self._error is not None:
            raise self._error
        if self._result is None:
            try:
                self._work.wait()
                began = time.perf_counter()
                result, second = self._exchange._way.end(self._timeout)
                self.stats = [work.stats() for work in (self._work, *second)]
                self.elapsed = self._work.elapsed + time.perf_counter() - began
            except RingcommError as error:
                self._error = error
                self._exchange._over(self, None)
                raise
            self._result = result
            self._exchange._over(self, result)
        return self._result

    def undo(self) -> None:
        """Restores the residuals from before the round, for callers that drop its result. All ranks
        call it, after ``wait``. Does nothing after the next ``submit`` or a failed round."""
        if self._exchange._undoable is self:
            self._exchange._swap()
            self._exchange._undoable = None

    @property
    def sent_bytes(self) -> int:
        """Bytes of payloads, as the exchange's sent_bytes."""
        return self._exchange.sent_bytes


class _Gather:
    """Way "gather": sends every payload to every rank."""

    name = "gather"

    def __init__(self, exchange: SparseExchange) -> None:
        self._exchange = exchange
        size = exchange.format.payload_bytes(exchange.count)
        self.wire: Bytes = np.zeros(size, np.uint8)
        self._received: Bytes = np.zeros((exchange.comm.world_size, size), np.uint8)
        self.sent_bytes = (exchange.comm.world_size - 1) * size

    def begin(self, timeout: float | None) -> Work:
        return self._exchange.comm.allgather(
            self.wire, out=self._received, async_op=True, timeout=timeout
        )

    def end(self, _timeout: float | None) -> tuple[Entries, list[Work]]:
        one, received = self._exchange, self._received
        return join(one.format, one.comm.kernel_set, received, one._factor(), one.count, 0), []

    def swap(self) -> None:
        """Does nothing: there are no owner residuals."""

    def owner_residual(self) -> tuple[int, Floats]:
        return 0, np.zeros(0, np.float32)

    def load(self, worker: Floats, owner: Floats) -> None:
        """Adds owner residuals to the worker's, which is right as all ranks load the same."""
        self._exchange._residual[:] = worker + owner

    def load_exact(self, worker: Floats, owner: Floats, _start: int) -> None:
        if len(owner):
            raise ConfigError('the state is exact, of exchange="owner", and this one gathers')
        self._exchange._residual[:] = worker


class _Owner:
    """Way "owner": sends every range to its owner, which sums it and sends the largest to all."""

    name = "owner"

    def __init__(self, exchange: SparseExchange) -> None:
        self._exchange = exchange
        self._format = format = exchange._owner_format
        comm, sent = exchange.comm, exchange.format
        chunks = -(-sent.chunks(exchange.count) // comm.world_size)  # chunks of a range
        self._elems = chunks * sent.chunk
        self._start, self._own = self._range(comm.rank)
        part, result = chunks * sent.record_bytes(), chunks * format.record_bytes()
        self.wire: Bytes = np.zeros(part * comm.world_size, np.uint8)
        self._parts: Bytes = np.zeros((comm.world_size, part), np.uint8)
        self._sums: Bytes = np.zeros(result, np.uint8)
        self._results: Bytes = np.zeros((comm.world_size, result), np.uint8)
        self._residual = np.zeros(self._own, np.float32)
        self._next = np.zeros(self._own, np.float32)
        self.sent_bytes = (comm.world_size - 1) * (part + result)

    def _range(self, rank: int) -> tuple[int, int]:
        start = min(rank * self._elems, self._exchange.count)
        return start, min(self._elems, self._exchange.count - start)

    def begin(self, timeout: float | None) -> Work:
        parts = self.wire.reshape(self._parts.shape)
        return self._exchange.comm.alltoall(parts, out=self._parts, async_op=True, timeout=timeout)

    def end(self, timeout: float | None) -> tuple[Entries, list[Work]]:
        one = self._exchange
        kernels = one.comm.kernel_set
        mean = join(one.format, kernels, self._parts, one._factor(), self._own, 0).scatter()
        seen = as_view(mean, self._own, writable=False)
        select(self._format, kernels, self._sums, self._next, self._residual, seen, one.decay)
        work = one.comm.allgather(self._sums, out=self._results, async_op=True, timeout=timeout)
        work.wait()
        return self._joined(), [work]

    def _joined(self) -> Entries:
        """Concatenates the entries that all owners sent, one range after the other."""
        one = self._exchange
        ranges = [
            join(self._format, one.comm.kernel_set, [payload], 1.0, self._range(rank)[1], rank)
            for rank, payload in enumerate(self._results)
        ]
        whole = Entries(self._format, one.count, 0)
        whole.poisoned = any(part.poisoned for part in ranges)
        if not whole.poisoned:
            whole.counts = np.concatenate([part.counts for part in ranges])
            whole.index = np.concatenate([part.index for part in ranges])
            whole.values = np.concatenate([part.values for part in ranges])
        return whole

    def swap(self) -> None:
        """Swaps the owner's residuals of before and after a round."""
        self._residual, self._next = self._next, self._residual

    def owner_residual(self) -> tuple[int, Floats]:
        return self._start, self._residual

    def load(self, worker: Floats, owner: Floats) -> None:
        self._exchange._residual[:] = worker
        self._residual[:] = owner[self._start : self._start + self._own]

    def load_exact(self, worker: Floats, owner: Floats, start: int) -> None:
        if start != self._start or len(owner) != self._own:
            raise ConfigError("the state is exact, of other ranges of owners than this exchange's")
        self.load(worker, np.pad(owner, (start, 0)))


def _kept(density: float, k: int | None, chunk: int, block: int) -> int:
    """Returns the number of blocks of a chunk to send."""
    if k is not None:
        return _units(k, block)
    _require(_is_share(density) and density > 0, "density", density, "more than 0, at most 1")
    return max(1, round(density * chunk / block))


def _units(k: object, block: int) -> int:
    whole = isinstance(k, int) and not isinstance(k, bool) and k > 0 and k % block == 0
    _require(whole, "k", k, f"elements of a chunk, a multiple of the block of {block}")
    return int(k) // block  # type: ignore[call-overload, no-any-return]


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value <= 1


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"Invalid {name}: {value!r}: give {wanted}")
