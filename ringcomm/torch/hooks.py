"""The DDP communication hook: gradient buckets reduced by ringcomm while backward goes on.

DDP calls the hook for a bucket as soon as its gradients are there. The hook submits an average
over all ranks and returns a Future, which a thread of ringcomm completes; DDP waits for the Futures
at the end of backward. So every bucket but the last ones travels while backward computes.

Invariants: DDP does not divide when a hook is set, so the result is the mean, made once. A bucket's
memory is DDP's own and is reduced in place. Works carry no state from step to step.
"""

# No "from __future__ import annotations": DDP compares the hook's annotation with the class itself.
import threading
import time
from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from ..api import default_communicator
from ..calls import CODECS
from ..communicator import Communicator
from ..errors import ConfigError, RingcommError
from ..work import Work

_COMPRESSIBLE = (torch.float32, torch.float64)


class HookState:
    """What the hook needs to know, and what it has measured.

    Args:
        compression: None or "none", "bf16" or "fp16": how float32 and float64 gradients travel.
            Gradients of 16-bit models travel as they are.
        comm: the communicator; None: the default one at the time of the first bucket.

    Attributes:
        error: the first failure of a collective, None so far. DDP turns exceptions of Futures
            into RuntimeError; this one keeps its class.
    """

    def __init__(self, compression: str | None = None, comm: Communicator | None = None) -> None:
        self.compression = "none" if compression is None else compression
        if not isinstance(self.compression, str) or self.compression not in CODECS:
            raise ConfigError(
                f"compression={compression!r} is unknown; give one of {', '.join(CODECS)}"
            )
        self._comm = comm
        self.error: RingcommError | None = None
        self._lock = threading.Lock()
        self._wire_before = 0
        self._zero()

    @property
    def comm(self) -> Communicator:
        """The communicator in use."""
        if self._comm is None:
            self._comm = default_communicator()
        return self._comm

    def _zero(self) -> None:
        self._buckets = 0
        self._gradient_bytes = 0
        self._works: list[tuple[float, float]] = []

    def reset(self) -> None:
        """Starts a new report."""
        with self._lock:
            self._zero()
            self._wire_before = self.comm.stats()["payload_bytes"]

    def report(self) -> dict[str, Any]:
        """What happened since the last reset.

        Returns:
            buckets; payload_bytes (gradient bytes reduced, before compression); wire_bytes
            (payload bytes that this rank sent, after compression); comm_s (seconds from submission
            to completion, summed over buckets); works (a pair of time.perf_counter() values,
            submitted and done, per bucket).
        """
        with self._lock:
            return {
                "buckets": self._buckets,
                "payload_bytes": self._gradient_bytes,
                "wire_bytes": self.comm.stats()["payload_bytes"] - self._wire_before,
                "comm_s": sum(done - submitted for submitted, done in self._works),
                "works": list(self._works),
            }

    def _count(self, nbytes: int, submitted: float, done: float) -> None:
        with self._lock:
            self._buckets += 1
            self._gradient_bytes += nbytes
            self._works.append((submitted, done))

    def __getstate__(self) -> dict[str, Any]:
        return {"compression": self.compression}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["compression"])  # type: ignore[misc]


def allreduce_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a gradient bucket over all ranks of ``state.comm``.

    Register with ``ddp.register_comm_hook(HookState(...), allreduce_hook)``. A failure raises in
    backward: as the ringcomm error itself if a later bucket meets it, else, for want of a way
    through DDP, as a RuntimeError with its text. ``state.error`` is the error itself either way.
    """
    if state.error is not None:
        raise state.error
    gradients = bucket.buffer()
    compression = state.compression if gradients.dtype in _COMPRESSIBLE else None
    # Typed as Any: the generic alias cannot be called on every supported torch.
    future: Any = torch.futures.Future()
    submitted = time.perf_counter()

    def over(work: Work) -> None:
        state._count(gradients.nbytes, submitted, time.perf_counter())
        future.set_result(work)

    def result(finished: Any) -> torch.Tensor:
        error = finished.value().exception()
        if error is not None:
            if state.error is None:
                state.error = error
            raise error
        return gradients

    state.comm.allreduce(gradients, "avg", compression=compression, async_op=True, on_done=over)
    return future.then(result)  # type: ignore[no-any-return]
