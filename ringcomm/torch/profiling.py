"""Ranges of torch.profiler for a process group's collectives and for the hook's buckets.

    ringcomm:all_reduce                         from the call to the completion; every collective
    ringcomm:bucket 2 bf16, 1.20 MB             from the hook's call to the bucket's Future: it is
                                                in flight, over ports or through shared memory
    ringcomm:bucket 2 sent 0.60 MB over eth0    an instant after backward, when it is known
      61 %, eth1 39 %

Invariant: without a profiler nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.autograd.profiler import record_function

from .buckets import GradientBucket
from .steps import after_backward
from .sync.account import Account, Moved
from .sync.exchange_report import bytes_text
from .works import RingWork

_Future = torch.futures.Future[torch.Tensor]
#: Returns whether a profiler is recording.
is_on: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def recorded(name: str, submit: Callable[[], RingWork]) -> RingWork:
    """Runs ``submit`` in a range of this name, which ends with the work."""
    with record_function(f"ringcomm:{name}") as record:
        work = submit()
        if not work.is_settled:
            work.record(record._call_end_callbacks_on_future)
    return work


def bucket_range(
    account: Account,
    bucket: GradientBucket,
    codec: str,
    rails: Callable[[], Sequence[str]],
    launch: Callable[[], _Future],
) -> _Future:
    """Runs ``launch`` in the bucket's range, which ends with its Future.

    Args:
        codec: name of the bucket's codec.
        rails: returns the names of the ports.
    """
    size = bytes_text(bucket.buffer.nbytes)
    with record_function(f"ringcomm:bucket {account.position} {codec}, {size}") as record:
        future: _Future = record._call_end_callbacks_on_future(launch())
    if bucket.last:

        def record_sent() -> None:
            for number, moved in account.latest_buckets():
                with record_function(f"ringcomm:bucket {number} sent {sent_text(moved, rails())}"):
                    pass

        # Queued twice: so it runs after the callbacks that DDP queues after the last bucket.
        after_backward(lambda: after_backward(record_sent))
    return future


def sent_text(moved: Moved, rails: Sequence[str]) -> str:
    """Writes how many bytes were sent, and over which ports or through shared memory."""
    total = sum(moved.rails)
    shares = [
        f"{name} {100 * sent / total:.0f} %"
        for name, sent in zip(rails, moved.rails, strict=False)
        if sent
    ]
    ways = [f"{bytes_text(moved.wire)} over {', '.join(shares)}"] if moved.wire else []
    if moved.shared:
        ways.append(f"{bytes_text(moved.shared)} through shared memory")
    return ", ".join(ways) or "nothing"
