"""Sends, receives and barriers of a process group."""

from __future__ import annotations

import functools
import re
from typing import Any

from ..core.calls import check_tag
from ..core.native import lib
from ..errors import CommTimeoutError, RingcommError
from .submit import Call, Submitter, moving_call, one
from .works import RingWork, seconds_of, together, wait_for_all


class Messaging(Submitter):
    """Point-to-point messages with tags, and barriers."""

    def send(self, tensors: Any, dst: int, tag: int = 0) -> RingWork:
        """Sends to a rank of this group, for a receive of the same tag."""
        call = moving_call(lib.RC_SEND, one(tensors, "send"), None, self._peer(dst), check_tag(tag))
        return self._start("send", [call], list(tensors))

    def recv(self, tensors: Any, src: int, tag: int = 0) -> RingWork:
        """Receives what a rank of this group sends with this tag."""
        call = moving_call(lib.RC_RECV, None, one(tensors, "recv"), self._peer(src), check_tag(tag))
        return self._start("recv", [call], list(tensors))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> RingWork:
        """Receives the next message of any rank with this tag; the Work names the rank."""
        call = moving_call(lib.RC_RECV, None, one(tensors, "recv"), None, check_tag(tag))
        return self._start("recvAnySource", [call], list(tensors))

    def _peer(self, rank: int) -> int:
        if rank == self.comm.rank:
            raise ValueError("ringcomm: a rank cannot send to or receive from itself")
        if not 0 <= rank < self.comm.world_size:
            raise ValueError(f"rank {rank} is not in a group of {self.comm.world_size}")
        return rank

    def _start_coalescing(self, _device: Any) -> None:
        self._coalescing = []

    def _end_coalescing(self, _device: Any) -> RingWork:
        works, self._coalescing = self._coalescing or [], None
        return together(works)

    def barrier(self, opts: Any = None) -> RingWork:
        """Completes when every rank has called it, and this rank's earlier collectives are over."""
        earlier = [work for work in self.comm.works_in_flight() if not work.is_message]
        undelivered = list(self._undelivered)
        deliver = functools.partial(wait_for_all, undelivered) if undelivered else None
        return self._start(
            "barrier", [Call(lib.RC_BARRIER, None, None, 0)], [], opts, deliver, earlier
        )

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Waits for all ranks; its error names the ranks that have not called it: on rank 0 all of
        them, with wait_all_ranks or without. (``dist.monitored_barrier`` is for gloo only: call
        this method of the group.)"""
        rank, seconds = self.comm.rank, seconds_of(timeout)
        if timeout is not None and seconds is None:
            raise CommTimeoutError(f"Rank {rank} timed out in monitoredBarrier: no time was given")
        try:
            self.comm.barrier(timeout=seconds)
        except RingcommError as error:
            text = (
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while "
                "waiting for send/recv from rank 0"
            )
            missing = re.search(r"rank ([\d, ]+) has not called", str(error))
            if rank == 0 and missing:
                ranks = "Ranks" if "," in missing[1] else "Rank"
                text = f"{ranks} {missing[1]} failed to pass monitoredBarrier"
            raise type(error)(f"{text}: {error}", rank=error.rank, host=error.host) from error
