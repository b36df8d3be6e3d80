"""Ranks that fork: what the child can do with the parent's communicator, which is nothing."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time

import numpy as np
from faults.endings import mapped_regions
from faults.rank import Rank

import ringcomm


def _sum_is_right(rank: Rank, comm: ringcomm.Communicator) -> bool:
    tensor = np.full(100_003, rank.number + 1, dtype=np.float32)
    comm.allreduce(tensor)
    return bool((tensor == comm.world_size * (comm.world_size + 1) / 2).all())


def use_in_child(rank: Rank) -> None:
    """Rank 0 forks with a work in flight; the child tries everything, and leaves in order."""
    comm = rank.open()
    if rank.number == 1:
        rank.wait_for_go()
    work = comm.allreduce(np.full(8, 1.0), async_op=True)
    if rank.number == 0:
        pid = os.fork()
        if pid == 0:
            _try_everything(rank, comm, work)
            sys.exit(0)
        rank.emit("child", code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    result = work.wait()
    rank.emit("parent", right=bool((result == 2).all()) and _sum_is_right(rank, comm))


def _try_everything(rank: Rank, comm: ringcomm.Communicator, work: ringcomm.Work) -> None:
    rank.emit(
        "inherited",
        initialized=ringcomm.is_initialized(),
        world_size=comm.world_size,
        maps=mapped_regions(),
    )
    for name, call in {
        "allreduce": lambda: ringcomm.allreduce(np.ones(8)),
        "async": lambda: comm.allreduce(np.ones(8), async_op=True),
        "barrier": ringcomm.barrier,
        "recv": lambda: comm.recv(np.ones(8), 1),
        "split": lambda: comm.split(0),
        "stats": comm.stats,
        "abort": lambda: comm.abort("a child has no say"),
        "wait": work.wait,
        "done": work.done,
        "exception": work.exception,
    }.items():
        rank.attempt(name, call)
    rank.attempt("close", comm.close)
    rank.attempt("shutdown", ringcomm.shutdown)


def own_world_of_children(rank: Rank, port: int) -> None:
    """Both ranks fork, and their children make a world of their own."""
    comm = rank.open()
    pid = os.fork()
    if pid == 0:
        address = f"tcp://127.0.0.1:{port}"
        own = ringcomm.init(rank.number, rank.world_size, init_method=address)
        rank.emit("child", right=_sum_is_right(rank, own))
        sys.exit(0)
    rights = [_sum_is_right(rank, comm) for _ in range(10)]
    rank.emit("parent", right=all(rights), code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def many_children(rank: Rank) -> None:
    """Children of several kinds come and go while the parents work."""
    comm = rank.open()
    context = multiprocessing.get_context("fork")
    rights = []
    for _ in range(3):
        children = [context.Process(target=_use_and_report, args=(rank,)) for _ in range(2)]
        for child in children:
            child.start()
        rights.append(_sum_is_right(rank, comm))
        pid = os.fork()
        if pid == 0:
            if os.fork() == 0:  # a grandchild, which nobody waits for
                os._exit(0)
            os._exit(0)
        rights.append(_sum_is_right(rank, comm))
        for child in children:
            child.join()
        os.waitpid(pid, 0)
        rights.append(_sum_is_right(rank, comm))
        rank.emit("codes", codes=[child.exitcode for child in children])
    rank.emit("parent", right=all(rights))


def _use_and_report(rank: Rank) -> None:
    rank.attempt("allreduce", lambda: ringcomm.allreduce(np.ones(8)))


def outlived_by_child(rank: Rank, how: str) -> None:
    """Rank 1 leaves a child behind that sleeps; the others wait in a collective."""
    comm = rank.open()
    if rank.number != 1:
        rank.attempt("failed", lambda: comm.recv(np.ones(8), 1, timeout=60))
        return
    if how == "fork":
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    else:
        child = subprocess.Popen(["sleep", "30"], close_fds=False).pid
    rank.emit("left behind", child=child)
    rank.wait_for_go()
