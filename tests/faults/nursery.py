"""A process that forks ranks: each a process of its own, without the seconds that imports take.

    test  --(order, 3 descriptors)-->  nursery  --fork-->  rank: runs one function, then exits
          <--(pid), (exit code)------

The nursery imports what it is told to and starts no thread, so what it forks is as good as a fresh
interpreter: a rank leaves through the interpreter's own exit, with its atexit handlers and its
uncaught exceptions. Where PyTorch is imported, the exit ends with those handlers, unless the rank's
environment has WHOLE_EXIT: taking PyTorch apart makes copies of all pages that the ranks share,
which takes each of them a second and more. Run as a script:  nursery.py FD MODULE...

Invariants: a rank inherits nothing but its three descriptors; the nursery ends, and kills what it
forked, when the test's end of the control socket closes.
"""

from __future__ import annotations

import atexit
import dataclasses
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from typing import Any

_MAX_ORDER = 1 << 16


@dataclasses.dataclass
class Order:
    """What a forked rank shall do: function of module, called with a Rank and these arguments."""

    module: str
    function: str
    arguments: dict[str, Any]
    environment: dict[str, str]
    commands: int
    events: int
    output: int


def serve(control: socket.socket) -> Order | None:
    """Forks on request. Returns in every rank, with its order, and in the nursery at the end."""
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    ranks: dict[int, int] = {}  # pidfd -> pid
    while True:
        for key, _ in selector.select():
            if key.fileobj is not control:
                _bury(control, selector, ranks, key.fd)
                continue
            data, fds, _, _ = socket.recv_fds(control, _MAX_ORDER, 3)
            if not data:
                for pid in ranks.values():
                    os.kill(pid, signal.SIGKILL)
                return None
            assert len(os.listdir("/proc/self/task")) == 1, "a module has started a thread"
            pid = os.fork()
            if pid == 0:
                _forget(control, selector, ranks)
                commands, events, output = fds
                return Order(**json.loads(data), commands=commands, events=events, output=output)
            for fd in fds:
                os.close(fd)
            pidfd = os.pidfd_open(pid)
            ranks[pidfd] = pid
            selector.register(pidfd, selectors.EVENT_READ)
            control.send(json.dumps({"pid": pid}).encode())


def _bury(
    control: socket.socket, selector: selectors.BaseSelector, ranks: dict[int, int], pidfd: int
) -> None:
    selector.unregister(pidfd)
    os.close(pidfd)
    pid, status = os.waitpid(ranks.pop(pidfd), 0)
    message = {"pid": pid, "code": os.waitstatus_to_exitcode(status), "at": time.monotonic()}
    control.send(json.dumps(message).encode())


def _forget(
    control: socket.socket, selector: selectors.BaseSelector, ranks: dict[int, int]
) -> None:
    selector.close()
    control.close()
    for pidfd in ranks:
        os.close(pidfd)


def obey(order: Order) -> None:
    """Turns this fork into the rank and runs its function."""
    for fd, place in ((order.commands, 0), (order.output, 1), (order.output, 2)):
        os.dup2(fd, place)
    os.close(order.commands)
    os.close(order.output)
    os.environ.update(order.environment)
    from faults.rank import Rank

    function = getattr(importlib.import_module(order.module), order.function)
    function(Rank(order.events), **order.arguments)


def leave() -> None:
    """Ends this process as the interpreter does, but takes nothing apart."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for those that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start some jobs deaf to it
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()  # collections in the ranks shall not copy what they share
    with socket.socket(fileno=int(sys.argv[1])) as control:
        order = serve(control)
    if order is not None:
        obey(order)
        if "torch" in sys.modules and "WHOLE_EXIT" not in os.environ:
            leave()


if __name__ == "__main__":
    main()
