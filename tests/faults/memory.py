"""Ranks of one host that share memory, or may not, and what waiting there costs them."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable

import numpy as np
from faults.endings import mapped_regions
from faults.rank import Rank

import ringcomm

_PR_SET_DUMPABLE = 4
_CAPABILITIES_3 = 0x20080522
_SYS_PTRACE = 1 << 19


def _sum_is_right(comm: ringcomm.Communicator, count: int = 300_007) -> bool:
    tensor = np.full(count, comm.rank + 1, dtype=np.float32)
    comm.allreduce(tensor)
    return bool((tensor == comm.world_size * (comm.world_size + 1) / 2).all())


def _report(rank: Rank, event: str, comm: ringcomm.Communicator) -> None:
    right = _sum_is_right(comm)
    rank.emit(event, right=right, shared=comm.stats()["shared_bytes"], maps=mapped_regions())


def share(rank: Rank) -> None:
    """An all-reduce; then one in each half of the ranks, and what is mapped at every stage."""
    comm = rank.open()
    _report(rank, "whole", comm)
    half = comm.split(rank.number % 2)
    assert half is not None
    _report(rank, "half", half)
    alone = comm.split(rank.number)
    assert alone is not None
    _report(rank, "alone", alone)
    for one in (alone, half):
        one.close()
    rank.emit("after", maps=mapped_regions())
    ringcomm.shutdown()
    rank.emit("closed", maps=mapped_regions())


def share_unless_unwilling(rank: Rank, unwilling: int) -> None:
    """One rank wants no shared memory."""
    _report(rank, "whole", rank.open(shared_memory=rank.number != unwilling))


def share_out_of_reach(rank: Rank) -> None:
    """Processes whose descriptors nobody else may open, not even the same user; who may look into
    any process gives that up first."""
    libc = ctypes.CDLL(None)
    assert libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) == 0
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, twice
    assert libc.capget(header, sets) == 0
    for low_words in range(3):
        sets[low_words] &= ~_SYS_PTRACE
    assert libc.capset(header, sets) == 0
    _report(rank, "whole", rank.open())


def _least_share(look: Callable[[], object], seconds: float, enough: float) -> float:
    """Of a core, over looks of so many seconds until it is enough: who is asleep is so in each, but
    a busy machine may charge for more than there was; who polls uses what it can get, always."""
    shares: list[float] = []
    while len(shares) < 5 and min(shares, default=1.0) >= enough:
        before = time.process_time()
        look()
        shares.append((time.process_time() - before) / seconds)
    return min(shares)


def wait_for_the_late(rank: Rank, spin_us: int, seconds: float) -> None:
    """Rank 0 comes when it is told; the others say how much of a core they use in the seconds
    before, and then all how much when they are idle."""
    comm = rank.open(spin_us=spin_us)
    tensor = np.ones(1 << 20, dtype=np.float32)
    comm.allreduce(tensor)
    comm.barrier()
    if rank.number == 0:
        rank.wait_for_go()
    else:
        works = [comm.allreduce(tensor, async_op=True) for _ in range(2)]

        def wait() -> None:
            with contextlib.suppress(ringcomm.CommTimeoutError):
                works[0].wait(timeout=seconds)

        rank.emit("waited", share=_least_share(wait, seconds, 0.05))
        works[1].wait()
    if rank.number == 0:
        for _ in range(2):
            comm.allreduce(tensor)
    comm.barrier()
    time.sleep(0.1)
    rank.emit("idle", share=_least_share(lambda: time.sleep(0.6), 0.6, 0.02))
    comm.barrier()
