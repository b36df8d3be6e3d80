"""Ranks that meet the death of another, or are the one that dies."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from faults.rank import Rank

import ringcomm

LARGE = 1 << 22
"""Elements that keep an allreduce busy for a while."""


def reduce_until_failure(rank: Rank, count: int = LARGE, **settings: Any) -> None:
    """Calls allreduce on and on; reports "busy" once, then the failure, then a later call's."""
    comm = rank.open(**settings)
    tensor = np.ones(count, dtype=np.float32)

    def loop() -> None:
        comm.allreduce(tensor, "max")
        rank.emit("busy")
        while True:
            comm.allreduce(tensor, "max")

    rank.attempt("failed", loop)
    _after(rank, comm)


def idle_until_told(rank: Rank, **settings: Any) -> None:
    """Calls nothing until the test says so, then allreduce."""
    comm = rank.open(**settings)
    rank.wait_for_go()
    rank.attempt("failed", lambda: comm.allreduce(np.ones(8)))
    _after(rank, comm)


def pending_works(rank: Rank, absent: int, count: int = LARGE) -> None:
    """Submits works that cannot end, as one rank takes no part, and waits for each of them."""
    comm = rank.open()
    if rank.number == absent:
        rank.wait_for_go()
        return
    tensors = [np.ones(count, dtype=np.float32) for _ in range(4)]
    works = [comm.allreduce(t, async_op=True) for t in tensors]
    rank.emit("pending", done=[w.done() for w in works])
    for work in works:
        rank.attempt("failed", work.wait)
    rank.emit("settled", errors=[type(w.exception()).__name__ for w in works])
    _after(rank, comm)


def _after(rank: Rank, comm: ringcomm.Communicator) -> None:
    """Later calls fail with the same words; closing takes no time."""
    rank.attempt("later", lambda: comm.barrier())
    rank.attempt("closed", ringcomm.shutdown)


def leave(rank: Rank, how: str, leaver: int) -> None:
    """One rank leaves in this manner while the others call a collective."""
    comm = rank.open()
    if rank.number == leaver:
        rank.wait_for_go()
        rank.emit("leaving")
        WAYS[how](comm)
        return
    rank.attempt("failed", lambda: comm.allreduce(np.ones(LARGE, dtype=np.float32)))
    _after(rank, comm)


def _raise(_: ringcomm.Communicator) -> None:
    raise ValueError("the data set is broken")


def _in_flight(comm: ringcomm.Communicator) -> None:
    comm.recv(np.ones(8), 0, async_op=True)  # which rank 0 never sends
    sys.exit(3)


WAYS: dict[str, Callable[[ringcomm.Communicator], Any]] = {
    "raise": _raise,
    "sys.exit": lambda _: sys.exit(3),
    "sys.exit with a work in flight": _in_flight,
    "os._exit": lambda _: os._exit(3),
    "return": lambda _: None,
    "close": lambda comm: (comm.close(), time.sleep(0.2)),
    "with block": lambda comm: _leave_block(comm),
}


def _leave_block(comm: ringcomm.Communicator) -> None:
    with comm:
        raise KeyError("batch 7")


def stop_and_go(rank: Rank, **settings: Any) -> None:
    """Calls small collectives until told to end, or until they fail."""
    comm = rank.open(**settings)
    tensor = np.ones(1024, dtype=np.float32)

    def loop() -> None:
        told = np.zeros(1, dtype=np.int64)
        while not told[0]:
            tensor[:] = rank.number
            comm.allreduce(tensor, timeout=60)
            expected = rank.world_size * (rank.world_size - 1) / 2
            assert (tensor == expected).all(), tensor
            told[0] = rank.was_told()
            comm.allreduce(told, "max", timeout=60)
            time.sleep(0.002)

    rank.attempt("failed", loop)
    _after(rank, comm)
