"""One rank of faults.py: a process on a host of the lab, with a fork of its own for each trial.

    faults.py  --(order)-->  worker  --fork-->  rank: opens a communicator, works, until it fails
               <--------------- (events) ----------------'

Events and orders are JSON, one a message, over a Unix socket whose path is the only argument. A
fork saves each trial the time that imports take; the worker starts no thread, so that a fork is as
good as a fresh interpreter.

Invariants: at most one rank lives at a time; none outlives its worker by more than a moment.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import ringcomm
from ringcomm import Communicator, Config
from ringcomm.core.native import OK, ffi, lib

SMALL = 1 << 10  # float32 elements: 4 KiB
LARGE = 16_000_000  # 64 MB
PAUSE_S = 0.002
_GOING_S = 0.5
_STRIDE = 4096  # of a large result, one element in so many is looked at
_PR_SET_PDEATHSIG = 1
_CLONE_NEWUTS = 0x04000000


class Rank:
    """A forked rank: what it says, and what ringcomm's log said in it."""

    def __init__(self, events: socket.socket) -> None:
        self._events = events
        self._logged: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self._logged.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("ringcomm").addHandler(handler)

    def tell(self, event: str, **fields: Any) -> None:
        """An event with its time; all processes of the machine share one clock."""
        message = {"event": event, "at": time.monotonic(), "logged": self._logged, **fields}
        self._events.send(json.dumps(message).encode())

    def run(self, phase: str, settings: dict[str, Any]) -> None:
        """Works in this phase until something fails."""
        comm = None
        try:
            self.tell("starting")
            comm = ringcomm.init(config=Config.from_env(**settings))
            self.tell(
                "opened", lanes=[(lane["peer"], lane["rail"]) for lane in comm.stats()["lanes"]]
            )
            PHASES[phase](comm, self)
        except BaseException as error:  # a KeyboardInterrupt would be a finding as well
            self.tell("failed", **describe(error))
        if comm is not None:
            comm.close()


def describe(error: BaseException) -> dict[str, Any]:
    """What an exception says, as JSON."""
    fields = {name: getattr(error, name, None) for name in ("rank", "host", "rail", "lane")}
    typed = isinstance(error, ringcomm.RingcommError)
    return {"kind": type(error).__name__, "typed": typed, "text": str(error), **fields}


# ---- what is going on when the fault comes, once all are "ready" ----


def _idle(comm: Communicator, rank: Rank) -> None:
    """No call is made until the communicator has failed; then one is, for its exception."""
    error = ffi.new("rc_error *")
    error.code = OK
    comm.barrier()
    rank.tell("ready")
    while error.code == OK:
        time.sleep(0.01)
        lib.rc_comm_error(comm._handle, error)
    comm.barrier()


def _loop(
    comm: Communicator, rank: Rank, count: int, pause: float = 0.0, going: bool = False
) -> None:
    """All-reduces, each checked; says "going" after a while of them if asked to."""
    tensor = np.empty(count, dtype=np.float32)
    total = comm.world_size * (comm.world_size + 1) / 2
    began = time.monotonic()
    for number in itertools.count():
        tensor.fill(comm.rank + 1)
        comm.allreduce(tensor)
        if (tensor[::_STRIDE] != total).any():
            rank.tell("wrong")
        if number == 0:  # and no page of the tensor is touched for the first time after it
            rank.tell("ready")
        if going and time.monotonic() - began > _GOING_S:
            rank.tell("going")
            going = False
        time.sleep(pause)


def _split(comm: Communicator, rank: Rank) -> None:
    for number in itertools.count():
        part = comm.split(0)
        assert part is not None
        part.close()
        if number == 0:
            rank.tell("ready")


PHASES: dict[str, Callable[[Communicator, Rank], None]] = {
    "idle": _idle,
    "small": functools.partial(_loop, count=SMALL, pause=PAUSE_S),
    "64 MB": functools.partial(_loop, count=LARGE),
    "split": _split,
    "bring-up": functools.partial(_loop, count=SMALL, pause=PAUSE_S, going=True),
}


# ---- the worker ----


def serve(orders: socket.socket) -> None:
    """Forks a rank for each order to run one, and ends it when told; until the orders end."""
    child = 0
    while data := orders.recv(1 << 16):
        order = json.loads(data)
        if order["do"] == "run":
            worker = os.getpid()
            child = os.fork()
            if child == 0:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() == worker:
                    os.environ.update(order["environment"])
                    Rank(orders).run(order["phase"], order["settings"])
                return
        else:
            code = _end(child)
            child = 0
            orders.send(json.dumps({"event": "ended", "code": code}).encode())


def _end(child: int) -> int:
    """Ends the rank; its exit code, minus the signal that it died of before, or 0 if it lived."""
    if not child:
        return 0
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return 0
    return os.waitstatus_to_exitcode(status)


def main() -> None:
    """Gives this host a name of its own, connects to faults.py and says which rank this is."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(f"host{os.environ['RANK']}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as orders:
        orders.connect(sys.argv[1])
        orders.send(json.dumps({"event": "hello", "rank": int(os.environ["RANK"])}).encode())
        serve(orders)


if __name__ == "__main__":
    main()
