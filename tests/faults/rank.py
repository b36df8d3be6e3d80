"""What a test's rank sees: a way to report, a way to be told to go on, and its communicator."""

from __future__ import annotations

import importlib
import json
import os
import select
import sys
import time
from collections.abc import Callable
from typing import Any

import ringcomm


class Rank:
    """Handed to the function that a rank runs (see `run`).

    Attributes:
        number, world_size: from the environment.
        events: the descriptor by which it tells the test.
    """

    def __init__(self, events: int) -> None:
        self.events = events
        self.number = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))

    def emit(self, event: str, **fields: Any) -> None:
        """Tells the test. Every event carries the time; all processes share one clock."""
        line = json.dumps({"event": event, "at": time.monotonic(), **fields}) + "\n"
        os.write(self.events, line.encode())  # one write, so that threads do not interleave

    def wait_for_go(self) -> None:
        """Waits until the test says so (Job.go)."""
        if not os.read(0, 1):
            raise RuntimeError("the test is gone")

    def was_told(self) -> bool:
        """Whether the test has said so by now. Never waits."""
        ready, _, _ = select.select([0], [], [], 0)
        return bool(ready) and bool(os.read(0, 1))

    def open(self, **settings: Any) -> ringcomm.Communicator:
        """ringcomm.init with these settings; says "ready" when all ranks are in."""
        comm = ringcomm.init(config=ringcomm.Config.from_env(**settings))
        comm.barrier()
        self.emit("ready")
        return comm

    def attempt(self, event: str, call: Callable[[], Any]) -> BaseException | None:
        """Runs the call and reports how it ended, with what its exception says."""
        began = time.monotonic()
        error: BaseException | None = None
        try:
            call()
        except BaseException as caught:  # KeyboardInterrupt and SystemExit are among the findings
            error = caught
        self.emit(event, took=time.monotonic() - began, **describe(error))
        return error


def run() -> None:
    """The program of a rank, `-c CODE MODULE FUNCTION ARGUMENTS`: calls the function with a Rank
    and these arguments, which are JSON. The test is at the other end of stdin, which is a socket;
    children of multiprocessing, which close stdin, still have the descriptor for events."""
    module, function, arguments = sys.argv[1:]
    called = getattr(importlib.import_module(module), function)
    called(Rank(os.dup(0)), **json.loads(arguments))


def describe(error: BaseException | None) -> dict[str, Any]:
    """An exception as JSON: kind, kinds (its ringcomm and builtin bases), text, rank, host, seq."""
    if error is None:
        return {"kind": None}
    return {
        "kind": type(error).__name__,
        "kinds": [base.__name__ for base in type(error).__mro__],
        "text": str(error),
        "rank": getattr(error, "rank", None),
        "host": getattr(error, "host", None),
        "seq": getattr(error, "seq", None),
        "elapsed": getattr(error, "elapsed", None),
    }
