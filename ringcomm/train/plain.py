"""What ``--no-hook`` trains with: DDP's own exchange of gradients over its process group.

The hook here is DDP's own all-reduce: without a hook DDP does the same, divide by the number of
ranks and then sum over the group. As a hook it can be timed bucket by bucket, and so is accounted
for exactly as ringcomm's is.

This file does without ``from __future__ import annotations``: DDP compares a hook's annotations
with the types themselves and refuses strings.
"""

import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from ..calls import Op
from ..intervals import Interval
from .timing import Traffic


class PlainState:
    """The account of ``plain_hook``, in the terms of ringcomm's HookState."""

    def __init__(self, size: int, sent: Callable[[], tuple[int, int]] | None = None) -> None:
        """``size``: ranks that share the sum. ``sent``: counts payload bytes, over ports and
        through shared memory; gloo does not."""
        self.size = size
        self._sent = sent
        self._sent_before = (0, 0)
        self.payload_bytes = 0
        self.works: list[Interval] = []

    def reset(self) -> None:
        """Start a new account."""
        self.payload_bytes = 0
        self.works = []
        self._sent_before = self._sent() if self._sent else (0, 0)

    def report(self) -> Traffic:
        """The account so far. Bytes that nobody counts are by the ring's formula."""
        wire, shared = 2 * (self.size - 1) * self.payload_bytes // self.size, 0
        if self._sent:
            wire, shared = (
                now - before for now, before in zip(self._sent(), self._sent_before, strict=True)
            )
        return Traffic(
            buckets=len(self.works),
            payload_bytes=self.payload_bytes,
            wire_bytes=wire,
            shared_bytes=shared,
            comm_s=sum(done - submitted for submitted, done in self.works),
            works=list(self.works),
        )


class GlooControl:
    """The few numbers beside the gradients, over gloo."""

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

    def barrier(self) -> None:
        """Return when all ranks are here."""
        dist.barrier()


def plain_hook(state: PlainState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average one bucket over all ranks."""
    submitted = time.perf_counter()
    buffer = bucket.buffer()
    state.payload_bytes += buffer.numel() * buffer.element_size()
    work = dist.all_reduce(buffer.div_(state.size), async_op=True)

    def finish(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        state.works.append((submitted, time.perf_counter()))
        return future.value()[0]

    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(finish)
    return averaged
