"""Ranges of torch.profiler for the hook's buckets.

    ringcomm:bucket 2 bf16, 1.20 MB             from the hook's call to the bucket's Future: it is
                                                in flight, over ports or through shared memory
    ringcomm:bucket 2 sent 0.60 MB over eth0    a moment behind backward, when it is known
      61 %, eth1 39 %

Invariant: where nobody profiles nothing here runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.autograd.profiler import record_function

from .account import Account, Moved
from .backward import after_backward
from .table import bytes_text

_Future = torch.futures.Future[torch.Tensor]


def in_flight(
    account: Account, codec: str, nbytes: int, rails: Callable[[], Sequence[str]], last: bool,
    launch: Callable[[], _Future],
) -> _Future:  # fmt: skip
    """Launches a bucket within its range, which ends with its Future.

    Args:
        codec, nbytes: of the bucket, before compression.
        rails: names of the ports.
        last: of its step, after which is told what became of all.
    """
    number = account.position
    with record_function(f"ringcomm:bucket {number} {codec}, {bytes_text(nbytes)}") as record:
        future: _Future = record._call_end_callbacks_on_future(launch())
    if last:
        _when_all_is_over(lambda: _tell(account.latest_buckets(), rails()))
    return future


def _when_all_is_over(tell: Callable[[], None]) -> None:
    """Behind what DDP queues after the last bucket."""

    def again() -> None:
        after_backward(tell)

    after_backward(again)


def _tell(buckets: Sequence[tuple[int, Moved]], rails: Sequence[str]) -> None:
    for number, moved in buckets:
        with record_function(f"ringcomm:bucket {number} sent {sent_text(moved, rails)}"):
            pass


def sent_text(moved: Moved, rails: Sequence[str]) -> str:
    """How much, and by which ways."""
    total = sum(moved.rails)
    shares = [
        f"{name} {100 * sent / total:.0f} %"
        for name, sent in zip(rails, moved.rails, strict=False) if sent
    ]  # fmt: skip
    ways = [f"{bytes_text(moved.wire)} over {', '.join(shares)}"] if moved.wire else []
    if moved.shared:
        ways.append(f"{bytes_text(moved.shared)} through shared memory")
    return ", ".join(ways) or "nothing"
