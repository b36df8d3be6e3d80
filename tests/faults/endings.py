"""Ranks that come and go: what they leave behind, and how long their leaving takes."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from faults.rank import Rank
from patience import PATIENCE

import ringcomm


def _holdings() -> dict[str, Any]:
    """What this process has open, by kind."""
    gc.collect()
    links = []
    deadline = time.monotonic() + PATIENCE  # threads that were joined are a moment yet in leaving
    while len(os.listdir("/proc/self/task")) > threading.active_count():
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}").split(":")[0])
        except OSError:  # the descriptor of the listing itself
            continue
    shared = [name for name in os.listdir("/dev/shm") if "ring" in name]
    threads = len(os.listdir("/proc/self/task"))
    return {"fds": sorted(links), "shm": shared, "maps": mapped_regions(), "threads": threads}


def mapped_regions() -> int:
    """Mappings of memory that ranks share."""
    with open("/proc/self/maps") as file:
        return sum("memfd:ringcomm" in line for line in file)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def again_and_again(rank: Rank, ending: str, rounds: int) -> None:
    """Many lives of a communicator, with the same ending each; "before" and "after" tell what the
    process holds."""
    live = ENDINGS[ending]
    for _ in range(3):
        live(rank)
    before = _resident_bytes()
    rank.emit("before", **_holdings())
    for _ in range(rounds):
        live(rank)
    rank.emit("after", grown=_resident_bytes() - before, **_holdings())


def _in_order(rank: Rank) -> None:
    comm = ringcomm.init()
    tensor = np.full(1000, rank.number + 1, dtype=np.float32)
    comm.allreduce(tensor, compression="bf16")
    assert (tensor == comm.world_size * (comm.world_size + 1) / 2).all()
    ringcomm.shutdown()


def _by_callback(rank: Rank) -> None:
    comm = ringcomm.init()
    over = threading.Event()
    comm.allreduce(np.ones(1000), async_op=True, on_done=lambda _: over.set())
    over.wait(PATIENCE)
    ringcomm.shutdown()


def _closed_by_callback(rank: Rank) -> None:
    comm = ringcomm.init()
    over = threading.Event()

    def close(_: ringcomm.Work) -> None:
        ringcomm.shutdown()
        over.set()

    comm.allreduce(np.ones(1000), async_op=True, on_done=close)
    over.wait(PATIENCE)
    for thread in threading.enumerate():  # the one that called back frees the engine as it ends
        if thread.name == "ringcomm-done":
            thread.join()


def _mismatch(rank: Rank) -> None:
    with _failing("MismatchError") as comm:
        comm.allreduce(np.ones((1 << 18) + rank.number))
        comm.barrier()


def _abort(rank: Rank) -> None:
    with _failing("AbortedError") as comm:
        works = [comm.allreduce(np.ones(1 << 18), async_op=True) for _ in range(4)]
        if rank.number == 0:
            comm.abort("enough")
        for work in works:
            work.wait()
        comm.barrier()


def _timeout(rank: Rank) -> None:
    with _failing("CommTimeoutError") as comm:
        if rank.number == 0:
            comm.allreduce(np.ones(8), timeout=0.02)
        comm.recv(np.ones(8), 1 - rank.number)


def _no_bring_up(rank: Rank) -> None:
    try:
        ringcomm.init(rank.number, 3, timeout=0.15)  # there are two
    except ringcomm.BootstrapError:
        return
    raise AssertionError("a world of three was found")


def _splits(rank: Rank) -> None:
    comm = ringcomm.init()
    for _ in range(2):
        part = comm.split(0, -rank.number)
        assert part is not None
        part.barrier()
        part.close()
    ringcomm.shutdown()


class _failing:  # noqa: N801 - used like a function
    """A ``with`` block in which a collective must fail in this way; closes the communicator."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __enter__(self) -> ringcomm.Communicator:
        return ringcomm.init()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        ringcomm.shutdown()
        return kind is not None and kind.__name__ == self._kind


ENDINGS: dict[str, Callable[[Rank], None]] = {
    "in order": _in_order,
    "after a callback": _by_callback,
    "in a callback": _closed_by_callback,
    "after a mismatch": _mismatch,
    "after an abort": _abort,
    "after a timeout": _timeout,
    "without a world": _no_bring_up,
    "with splits": _splits,
}


def exit_at_once(rank: Rank, how: str) -> None:
    """Leaves the interpreter with works in flight, without shutdown, as "leaving" says."""
    comm = rank.open()
    if rank.number == 1:
        rank.wait_for_go()
        return
    if how == "with callbacks":
        for _ in range(8):
            comm.allreduce(np.ones(1 << 16), async_op=True, on_done=lambda _: None)
    elif how == "to a peer that does not read":
        rank.emit("waiting")
        rank.wait_for_go()
        for _ in range(4):
            comm.send(np.ones(1 << 22), 1, async_op=True)
    elif how == "with a thread that waits":
        threading.Thread(target=_wait_quietly, args=(comm,), daemon=True).start()
        time.sleep(0.1)
    else:
        for _ in range(8):
            comm.allreduce(np.ones(1 << 16), async_op=True)
    rank.emit("leaving")


class _Interrupter(logging.Handler):
    """Ctrl-C in the line that says that a communicator closes."""

    def emit(self, record: logging.LogRecord) -> None:
        if "closes after" in record.getMessage():
            raise KeyboardInterrupt


def interrupted_exit(rank: Rank) -> None:
    """Rank 0 leaves the interpreter with works in flight on two communicators, and is interrupted
    as each closes."""
    comms = [rank.open()]
    comms.append(comms[0].split(0))
    works = [comm.recv(np.ones(1 << 16), 1 - comm.rank, async_op=True) for comm in comms]
    if rank.number == 0:
        logging.getLogger("ringcomm").addHandler(_Interrupter())
        logging.getLogger("ringcomm").setLevel(logging.INFO)
    else:
        for work in works:
            rank.attempt("failed", work.wait)


def interrupted_in_close(rank: Rank) -> None:
    """Rank 0 closes with more under way than sockets hold, to a rank that is stopped, until Ctrl-C.
    With a minute for goodbyes."""
    ringcomm.communicator._CLOSE_MS = 60_000
    comm = rank.open(shared_memory=False)
    comm.barrier()
    rank.emit("waiting")
    rank.wait_for_go()
    if rank.number == 1:
        return
    for _ in range(4):
        comm.send(np.ones(1 << 22), 1, async_op=True)
    rank.emit("closing")
    rank.attempt("failed", comm.close)
    rank.emit("state", text=repr(comm))
    comm.close()  # a second time is harmless


def descriptors_closed_under_it(rank: Rank, reused: bool) -> None:
    """Something in rank 0 closes all descriptors but the test's, as a daemon does at its start, and
    opens files at their numbers. Reports the CPU that the second after that takes, what the next
    call says, and whether something was written to a file. Then the two meet again."""
    comm = rank.open(shared_memory=False)
    if rank.number == 1:
        rank.attempt("failed", comm.barrier)
        ringcomm.shutdown()
        rank.open(shared_memory=False).barrier()
        return
    theirs = [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and fd != rank.events]
    for fd in theirs:
        with contextlib.suppress(OSError):  # that of the listing itself
            os.close(fd)
    files = []
    if reused:
        for _fd in theirs:
            with contextlib.suppress(OSError):
                file = os.memfd_create("another's")
                files.append(file)
    used = time.process_time()
    time.sleep(1.0)
    used = time.process_time() - used
    rank.attempt("failed", comm.barrier)
    ringcomm.shutdown()
    rank.open(shared_memory=False).barrier()
    sizes = [os.fstat(file).st_size for file in files]  # all still open, and empty
    rank.emit("over", used=used, sizes=sizes)


def _wait_quietly(comm: ringcomm.Communicator) -> None:
    try:
        comm.barrier()
    except ringcomm.AbortedError:
        return


def sum_on_and_on(rank: Rank) -> None:
    """Sums until told to end (rank 0); reports whether all sums were right."""
    comm = rank.open()
    more, rounds, right = np.ones(1, dtype=np.int64), 0, True
    while more[0]:
        tensor = np.full(100_003, rank.number + 1, dtype=np.float32)
        comm.allreduce(tensor)
        right = right and bool((tensor == comm.world_size * (comm.world_size + 1) / 2).all())
        rounds += 1
        more[0] = rank.number == 0 and not rank.was_told()
        comm.broadcast(more)
    rank.emit("over", right=right, rounds=rounds)
    ringcomm.shutdown()
