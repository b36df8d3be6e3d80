"""Ranks that run into a deadline, an abort, a close or Ctrl-C."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
from faults.rank import Rank
from patience import until

import ringcomm


def aborted_by_another(rank: Rank, aborter: int, reason: str) -> None:
    """One rank calls abort, from a thread, while the others (and itself) wait."""
    comm = rank.open()
    if rank.number == aborter:

        def abort() -> None:
            rank.wait_for_go()
            rank.emit("aborting")
            comm.abort(reason)

        threading.Thread(target=abort).start()
        rank.attempt("failed", lambda: comm.recv(np.ones(4), 0))
    else:
        rank.attempt("failed", lambda: comm.allreduce(np.ones(1 << 20)))
    rank.attempt("later", comm.barrier)
    rank.attempt("again", lambda: comm.abort("a second reason"))
    rank.attempt("later", comm.barrier)


def closed_in_flight(rank: Rank) -> None:
    """Rank 1 closes with works in flight: its own and the others' end, and nobody hangs."""
    comm = rank.open()
    tensors = [np.ones(1 << 18, dtype=np.float32) for _ in range(3)]
    if rank.number == 1:
        works = [comm.recv(t, 0, async_op=True) for t in tensors]
        rank.wait_for_go()
        rank.emit("closing")
        rank.attempt("closed", comm.close)
        rank.attempt("closed", comm.close)
        rank.emit("works", errors=[type(w.exception()).__name__ for w in works])
        rank.attempt("failed", works[0].wait)
        rank.attempt("later", comm.barrier)
        return
    works = [comm.allreduce(t, async_op=True) for t in tensors]
    rank.attempt("failed", works[0].wait)
    assert until(lambda: all(work.done() for work in works))  # the core ends one after another
    rank.emit("works", errors=[type(w.exception()).__name__ for w in works])
    rank.attempt("later", comm.barrier)
    rank.attempt("closed", comm.close)


def called_back_on_close(rank: Rank) -> None:
    """Works with a callback end by close: each callback is called once, before close returns."""
    comm = rank.open()
    called: list[Any] = []
    if rank.number == 0:
        for _ in range(20):
            comm.allreduce(np.ones(64), async_op=True, on_done=called.append)
    else:
        rank.wait_for_go()
    rank.attempt("closed", comm.close)
    rank.emit("called", errors=[type(w.exception()).__name__ for w in called])


def interrupted(rank: Rank, call: str) -> None:
    """Rank 0 waits in a call until Ctrl-C and lets that end the process; the others wait for it."""
    comm = rank.open()
    tensor = np.ones(1 << 16, dtype=np.float32)
    if rank.number > 0:
        rank.attempt("failed", lambda: comm.recv(tensor, 0, timeout=60))
        return
    if call == "while another thread drives":

        def drive() -> None:
            rank.attempt("other", lambda: comm.recv(np.ones(4), 1))

        threading.Thread(target=drive, daemon=True).start()
        time.sleep(0.2)
    error = rank.attempt("failed", lambda: _wait_in(rank, comm, call, tensor))
    assert error is not None
    raise error


def _wait_in(
    rank: Rank, comm: ringcomm.Communicator, call: str, tensor: np.ndarray[Any, Any]
) -> None:
    def watch() -> None:
        if until(lambda: comm._calls_in_core or comm._in_flight):
            rank.emit("waiting")

    threading.Thread(target=watch, daemon=True).start()
    if call == "wait":
        comm.allreduce(tensor, async_op=True).wait()
    elif call == "wait with a timeout":
        comm.allreduce(tensor, async_op=True).wait(timeout=60)
    elif call == "barrier":
        comm.barrier()
    else:
        comm.allreduce(tensor)


def interrupted_with_much_to_send(rank: Rank, where: str) -> None:
    """Rank 0 has more under way than sockets hold, to a rank that is stopped, until Ctrl-C, in the
    wait or while it makes the Work to wait with. With a minute for goodbyes."""
    ringcomm.communicator._CLOSE_MS = 60_000
    if where == "making its Work" and rank.number == 0:

        def interrupted(*_: object) -> ringcomm.Work:
            raise KeyboardInterrupt

        ringcomm.core.dispatch.Work = interrupted  # type: ignore[attr-defined]
    comm = rank.open(shared_memory=False)
    comm.barrier()
    tensor = np.ones(30_000_000, dtype=np.float32)

    def reduce() -> None:
        rank.emit("waiting")
        rank.wait_for_go()
        comm.allreduce(tensor)

    error = rank.attempt("failed", reduce)
    if rank.number == 0:
        assert error is not None
        raise error


def survives_an_interrupt(rank: Rank) -> None:
    """Rank 0 gets Ctrl-C in a wait, catches it, and waits again: nothing is lost."""
    comm = rank.open()
    tensor = np.full(4096, rank.number + 1.0)
    if rank.number == 1:
        rank.wait_for_go()
        comm.allreduce(tensor)
        comm.barrier()
        return
    work = comm.allreduce(tensor, async_op=True)
    rank.attempt("failed", lambda: (rank.emit("waiting"), work.wait()))
    rank.attempt("over", work.wait)
    rank.emit("right", right=bool((tensor == 3).all()))
    comm.barrier()


def closed_under_threads(rank: Rank, rounds: int) -> None:
    """Again and again: threads that call collectives all the time, and a close in the midst."""
    for _ in range(rounds):
        comm = ringcomm.init()
        comm.barrier()
        threads = [threading.Thread(target=_call_on_and_on, args=(comm,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.02)
        if rank.number == 0:
            ringcomm.shutdown()
        for thread in threads:
            thread.join()
        ringcomm.shutdown()
    rank.emit("survived")


def _call_on_and_on(comm: ringcomm.Communicator) -> None:
    tensor = np.ones(64, dtype=np.float32)
    try:
        while True:
            comm.allreduce(tensor, "max", async_op=True).wait(timeout=60)
            comm.stats()
    except ringcomm.RingcommError:
        return
