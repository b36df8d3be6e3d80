"""A DDP bucket on its way: the parts that travel by themselves, and one Future for all of them.

Invariants: a part is a view of the bucket's memory, except what is left of small tensors, which is
packed and brought back. A Flight's Future is completed once, after the last of its works. On a GPU
that is when all results are on their way there, and the Future's stream goes on behind them: the
host waits for the network, never for a copy.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Literal

import torch

from .. import cuda
from .._native import lib
from ..codecs import Codec
from ..communicator import Communicator
from ..feedback import ErrorFeedback
from ..work import Work
from .streams import Poison
from .tensors import memory_of

if TYPE_CHECKING:
    from torch.distributed import GradBucket  # type: ignore[attr-defined]

    from .hooks import HookState

COMPRESSIBLE = (torch.float32, torch.float64)


def average(
    comm: Communicator, tensor: torch.Tensor, compression: str | None,
    feedback: ErrorFeedback | Literal[False],
) -> Work:  # fmt: skip
    """Starts the mean over all ranks, in place. A GPU's tensor goes by the pipe, where it can."""
    found = memory_of(tensor, writable=True)
    work: Work = comm._run(
        lib.RC_ALLREDUCE, found, found, found.count, op="avg", compression=compression,
        feedback=feedback, async_op=True,
    )  # fmt: skip
    return work


class Parts:
    """A bucket cut into what travels by itself, by a codec."""

    def __init__(self, state: HookState, bucket: GradBucket, codec: Codec) -> None:
        self._buffer = bucket.buffer()
        self.large: list[tuple[torch.Tensor, ErrorFeedback | Literal[False]]] = []
        self._small: list[torch.Tensor] = []
        end = 0
        for parameter, start, stop in self._spans(bucket):
            if state._is_large(parameter):
                self._leave(end, start)
                self.large.append((self._buffer[start:stop], state.feedback_of(parameter)))
                end = stop
        self._leave(end, self._buffer.numel())
        self.rest = self._pack()
        if codec.quantises:  # others deliver what is left, or leave it as it was
            state._step.used += [feedback for _, feedback in self.large if feedback is not False]

    def _spans(self, bucket: GradBucket) -> list[tuple[torch.Tensor, int, int]]:
        """(parameter, start, stop) in the buffer, in order of place."""
        base, item = self._buffer.data_ptr(), self._buffer.element_size()
        spans = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if gradient.numel():
                start = (gradient.data_ptr() - base) // item
                spans.append((parameter, start, start + gradient.numel()))
        return sorted(spans, key=lambda span: span[1])

    def _leave(self, start: int, stop: int) -> None:
        if start < stop:
            self._small.append(self._buffer[start:stop])

    def _pack(self) -> torch.Tensor | None:
        if len(self._small) > 1:
            return torch.cat(self._small)
        return self._small[0] if self._small else None

    def poison(self) -> Poison:
        """Whether a result is not finite: of codecs with few bits it is NaN then, everywhere."""
        rest = [] if self.rest is None else [self.rest]
        return Poison(rest + [tensor[:1] for tensor, _ in self.large])

    def unpack(self) -> None:
        """Brings the result of ``rest`` to its place."""
        if self.rest is not None and len(self._small) > 1:
            start = 0
            for part in self._small:
                part.copy_(self.rest[start : start + part.numel()])
                start += part.numel()
            if self.rest.device.type == "cuda":  # it was made on another stream than this one
                self.rest.record_stream(torch.cuda.current_stream(self.rest.device))


class Flight:
    """The works of a bucket, and a Future of all of them."""

    def __init__(self, state: HookState, gradients: torch.Tensor, last: bool) -> None:
        self._state = state
        self._gradients = gradients
        self._lock = threading.Lock()
        self._works: list[Work] = []
        self._open = 1
        device = gradients.device
        # Typed as Any: the generic alias cannot be called on every supported torch.
        make: Any = torch.futures.Future
        self._future = make(devices=[device]) if device.type == "cuda" else make()
        self._count = state.account.submit(gradients.nbytes, last)

    def submit(
        self, tensor: torch.Tensor, compression: str | None,
        feedback: ErrorFeedback | Literal[False],
    ) -> None:  # fmt: skip
        """Averages a part of the bucket."""
        with self._lock:
            self._open += 1
        average(self._state.comm, tensor, compression, feedback).call_back(self._over)

    def _over(self, work: Work | None) -> None:
        with self._lock:
            if work is not None:
                self._works.append(work)
            self._open -= 1
            last = self._open == 0
        if last:
            self._count(one.stats() for one in self._works)
            self._future.set_result(None)

    def future(self, parts: Parts | None) -> torch.futures.Future[torch.Tensor]:
        """After the last submit: the bucket's gradients, once all its works are over."""

        def result(_: Any) -> torch.Tensor:
            for work in self._works:
                if self._state.error is None:
                    self._state.error = work.exception()
            if self._state.error is not None:
                raise self._state.error
            with cuda.current_stream():  # that of the Future's callbacks goes on behind the results
                for work in self._works:
                    work.wait()
            if parts is not None:
                parts.unpack()
                self._state._step.poison.append(parts.poison())
            return self._gradients

        future = self._future.then(result)
        self._over(None)
        return future  # type: ignore[no-any-return]
